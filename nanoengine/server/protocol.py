"""What may stand in a request, as pydantic models. A field that is not here is refused by name, and so is one that
is here but not supported, unless it asks for nothing.

Source: OpenAI's API reference of chat completions and completions; top_k, min_p, repetition_penalty, min_tokens,
stop_token_ids, ignore_eos, skip_special_tokens, cache_salt, include_stop_str_in_output, allowed_token_ids, bad_words
and prompt_logprobs are named as in vLLM's server.
"""

from __future__ import annotations

from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from nanoengine.sampling_params import MAX_N

# name -> the values that ask for nothing
NEUTRAL: dict[str, tuple] = {
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),  # without tools it says nothing
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
    "store": (False,),
    "service_tier": ("auto", "default"),
}
# Labels of the caller's own, with no effect on the answer in OpenAI's API either.
LABELS = ("user", "metadata", "safety_identifier", "prompt_cache_key")

Count = Annotated[int, Field(ge=0)]
# A list is given up at its first bad item: half a million complaints would cost seconds and gigabytes, and only the
# first is told.
FAIL_FAST = Field(fail_fast=True)
Ids, Texts = Annotated[list[int], FAIL_FAST], Annotated[list[str], FAIL_FAST]


class Strict(BaseModel):
    """No field but these, no value but of its own type: "5" is not 5."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(Strict):
    include_usage: bool = False


class Common(Strict):
    """What both kinds of request share. None stands for the default, as in OpenAI's API."""

    model: str = Field(description="the name that /v1/models gives")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(None, ge=0, le=2, description="0 is greedy; default 1")
    top_p: float | None = Field(None, gt=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    seed: int | None = None
    stop: str | Texts | None = Field(None, description="at most 16 texts, each of at most 256 characters")
    top_k: int | None = Field(None, ge=-1, lt=2**31)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=1e4)
    min_tokens: Count | None = None
    stop_token_ids: Ids | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    n: int | None = Field(None, ge=1, le=MAX_N, description="choices of each prompt, default 1")
    cache_salt: str | None = Field(None, min_length=1, description="only requests of the same salt share cached KV")
    include_stop_str_in_output: bool | None = Field(
        None, description="the text ends with the stop string, or an end token that is not special"
    )
    logit_bias: dict[str, float] | None = Field(
        None, description="token id (a string of digits) -> what is added to its logit, -100 to 100"
    )
    allowed_token_ids: Ids | None = Field(None, description="only these tokens can be sampled; not empty")
    bad_words: Texts | None = Field(
        None,
        description="texts that the answer must not hold; at most 1000, each of at most 256 characters",
    )
    prompt_logprobs: int | None = Field(
        None,
        ge=0,
        le=20,
        description="likeliest tokens to report for each prompt token; not with stream=true",
    )

    # labels: taken, without effect
    user: str | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    # not supported: see NEUTRAL
    store: bool | None = None
    service_tier: str | None = None


class CompletionRequest(Common):
    """POST /v1/completions"""

    prompt: str | Ids | Texts | Annotated[list[Ids], FAIL_FAST] = Field(
        description="text or token ids, one or several; a control token in a text counts as that token"
    )
    max_tokens: int | None = Field(None, ge=1, description="default 16")
    logprobs: int | None = Field(None, ge=0, le=20)
    best_of: int | None = None
    echo: bool | None = None
    suffix: str | None = None


class TextPart(Strict):
    type: Literal["text"]
    text: str


class Message(Strict):
    """One message. The fields that an assistant's own message may carry along must be empty.

    Its content may be null or missing: it counts as "". A control token in a text (<|im_end|>) is
    taken as that token, as transformers does.
    """

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], FAIL_FAST] | None = Field(None, validate_default=True)
    name: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    tool_calls: Annotated[list[Any], Field(max_length=0)] | None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    reasoning: Literal[""] | None = None
    reasoning_content: Literal[""] | None = None

    @field_validator("content", mode="after")
    @classmethod
    def _only_an_assistant_may_say_nothing(cls, content, info: ValidationInfo):
        if content is None and info.data.get("role") not in ("assistant", None):
            raise PydanticCustomError("no_content", "must be a string or a list of text parts, got null")
        return content


class ChatRequest(Common):
    """POST /v1/chat/completions"""

    messages: Annotated[list[Message], FAIL_FAST] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1, description="default: what the model has room for")
    max_tokens: int | None = Field(None, ge=1, description="the older name of max_completion_tokens")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    functions: list[Any] | None = None
    function_call: Any = None
    response_format: dict[str, Any] | None = None
    modalities: list[str] | None = None
    audio: Any = None
    prediction: Any = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    web_search_options: Any = None


def _is_union(annotation) -> bool:
    kinds = set(get_args(annotation)) - {type(None)}
    return get_origin(annotation) in (Union, UnionType) and len(kinds) > 1


# Fields that take values of several types. Behind them in an error's place stands the type tried.
UNIONS = frozenset(
    name
    for kind in (CompletionRequest, ChatRequest, Message)
    for name, field in kind.model_fields.items()
    if _is_union(field.annotation)
)
