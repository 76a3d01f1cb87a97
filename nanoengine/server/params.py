"""From a request's body to prompts and SamplingParams; whatever is wrong is an ApiError that names it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

from pydantic import ValidationError

from nanoengine.engine.admission import ContextLengthError
from nanoengine.sampling_params import SamplingParams, with_bad_words_ids
from nanoengine.server.errors import ApiError
from nanoengine.server.output_stream import Request
from nanoengine.server.protocol import NEUTRAL, UNIONS, ChatRequest, Common, CompletionRequest

Body = TypeVar("Body", bound=Common)
MAX_STOPS, MAX_STOP_LENGTH = 16, 256  # the search for stop texts costs their sum at each character
MAX_BAD_WORDS = 1000  # each is encoded twice
MAX_ERRORS = 1000
OF_A_TALK = ("messages", "chat_template_kwargs", "continue_final_message", "add_generation_prompt")
DEFAULT_COMPLETION_TOKENS = 16  # as in OpenAI's API
SAME = ("top_p", "presence_penalty", "frequency_penalty", "seed", "top_k", "min_p", "repetition_penalty", "min_tokens",
        "stop_token_ids", "ignore_eos", "skip_special_tokens", "temperature", "n",
        "include_stop_str_in_output", "allowed_token_ids", "bad_words", "prompt_logprobs")  # fmt: skip


def parse(kind: type[Body], data: bytes) -> Body:
    """The body as a checked ``kind``. ApiError 400 naming the field."""
    try:
        body = kind.model_validate_json(data)
    except ValidationError as error:
        raise _explain(error) from None
    for name, neutral in NEUTRAL.items():
        value = getattr(body, name, None)
        if value is not None and not any(value == other and type(value) is type(other) for other in neutral):
            raise ApiError(400, f"{name}={value!r:.100} is not supported by this server", param=name,
                           code="unsupported_parameter")  # fmt: skip
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options is only allowed with stream=true", param="stream_options")
    if body.stream and body.prompt_logprobs is not None:
        message = f"prompt_logprobs={body.prompt_logprobs} is not supported with stream=true"
        raise ApiError(400, message, param="prompt_logprobs")
    return body


def _explain(error: ValidationError) -> ApiError:
    """The first complaint, in OpenAI's words: the path of the field, and what is wrong with it."""
    if error.error_count() > MAX_ERRORS:  # to list them would take a second for a body of a few megabytes
        return ApiError(400, f"the body has {error.error_count()} errors: it is no request of this API")
    errors = error.errors(include_url=False, include_context=False)
    if errors[0]["type"] == "json_invalid":
        return ApiError(400, f"the body is not valid JSON: {errors[0]['msg'].removeprefix('Invalid JSON: ')}")
    first, path, wanted = _fitting(errors)
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"unknown parameter {path!r}"[:300], param=path[:100], code="unknown_parameter")
    if first["type"] == "missing":
        return ApiError(400, f"missing parameter {path!r}", param=path, code="missing_required_parameter")
    return ApiError(400, f"{path or 'the body'}: {wanted}"[:300], param=path[:100] or None)


# types of pydantic's errors -> what was wanted
WANTED = {
    "string_type": "a string",
    "int_type": "an integer",
    "list_type": "a list",
    "bool_type": "a boolean",
    "model_type": "an object",
    "dict_type": "an object",
}
IN_JSON = {
    type(None): "null",
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    str: "a string",
    list: "a list",
    dict: "an object",
}


def _fitting(errors: list[dict]) -> tuple[dict, str, str]:
    """The first error, the path that a client knows of its place, and what was wanted there.

    A value that may be of several types has an error for each: what counts is the type that went
    furthest, and where several went as far, all of them.
    """

    def how_far(place: tuple) -> tuple[int, int]:
        return len(place), place[-1] if isinstance(place[-1], int) else 0

    union = next((i + 1 for i, part in enumerate(errors[0]["loc"]) if part in UNIONS), None)
    if union is not None and union < len(errors[0]["loc"]):
        start = errors[0]["loc"][:union]
        tried = [e for e in errors if e["loc"][:union] == start and len(e["loc"]) > union]
        places = [start + e["loc"][union + 1 :] for e in tried]  # without the name of the type
        place = max(places, key=how_far)
        found = [error for error, other in zip(tried, places, strict=True) if other == place]
    else:
        place, found = errors[0]["loc"], errors[:1]
    first = found[0]
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)
    path = "".join(parts).removeprefix(".")
    names = list(dict.fromkeys(WANTED[error["type"]] for error in found if error["type"] in WANTED))
    if not names:
        return first, path, first["msg"]
    *others, last = names
    wanted = f"{', '.join(others)} or {last}" if others else last
    got = IN_JSON.get(type(first["input"]), "something else")
    return first, path, f"must be {wanted}, got {got}"


def sampling_params(body: CompletionRequest | ChatRequest) -> SamplingParams:
    """What the body asks of sampler and stop rules. ApiError 400 naming the argument."""
    given = {name: getattr(body, name) for name in SAME if getattr(body, name) is not None}
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if len(stops) > MAX_STOPS or any(len(stop) > MAX_STOP_LENGTH for stop in stops):
        raise ApiError(400, f"stop may hold at most {MAX_STOPS} texts of at most {MAX_STOP_LENGTH} characters",
                       param="stop")  # fmt: skip
    words = body.bad_words or []
    if len(words) > MAX_BAD_WORDS or any(len(word) > MAX_STOP_LENGTH for word in words):
        message = f"bad_words may hold at most {MAX_BAD_WORDS} texts of at most {MAX_STOP_LENGTH} characters"
        raise ApiError(400, message, param="bad_words")
    if isinstance(body, ChatRequest):
        max_tokens, logprobs = _chat_limit(body), _chat_logprobs(body)
    else:
        max_tokens = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
        logprobs = body.logprobs
    with_limits = given | {"stop": stops, "max_tokens": max_tokens, "logprobs": logprobs}
    with_limits["logit_bias"] = _bias(body)
    try:
        return SamplingParams(**with_limits)
    except ValueError as error:
        raise blame(error) from None


def _bias(body: Common) -> dict[int, float] | None:
    """JSON's keys are strings: those of logit_bias must be token ids as one writes them."""
    for key in body.logit_bias or ():
        if not (key.isascii() and key.isdecimal() and len(key) < 11 and str(int(key)) == key):
            message = f"logit_bias has the key {key!r:.100}, which is no token id"
            raise ApiError(400, message, param="logit_bias")
    return body.logit_bias and {int(key): bias for key, bias in body.logit_bias.items()}


def _with_words(params: SamplingParams, text_model) -> SamplingParams:
    """Encode bad_words: only for a request that passed all cheaper checks."""
    if not params.bad_words:
        return params
    try:
        return with_bad_words_ids(params, text_model.encode)
    except ValueError as error:
        raise ApiError(400, str(error)[:500], param="bad_words") from None


def _chat_limit(body: ChatRequest) -> int | None:
    if None not in (body.max_completion_tokens, body.max_tokens) and body.max_completion_tokens != body.max_tokens:
        raise ApiError(400, "max_tokens is the older name of max_completion_tokens: give one of them",
                       param="max_tokens")  # fmt: skip
    return body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens


def _chat_logprobs(body: ChatRequest) -> int | None:
    if not body.logprobs:
        if body.top_logprobs:
            raise ApiError(400, "top_logprobs needs logprobs=true", param="top_logprobs")
        return None
    return body.top_logprobs or 0


def blame(error: ValueError, prompt: str = "prompt") -> ApiError:
    """A refusal of engine or template as a 400; its message begins with the path of the argument.

    prompt: the field that the prompt is made of. A prompt that is too long is told in the words,
    and with the code, by which clients of OpenAI's API recognise it, to shorten it and ask again.
    """
    if isinstance(error, ContextLengthError):
        least = "at least " if "at least" in str(error) else ""
        message = (
            f"This model's maximum context length is {error.limit} tokens. However, your prompt is "
            f"too long: {prompt} came to {least}{error.num_tokens} tokens, which leaves no room for "
            "an answer. Please shorten it (context_length_exceeded)."
        )
        return ApiError(400, message, param=prompt, code="context_length_exceeded")
    message = str(error)
    found = re.match(r"[A-Za-z_]\w*(\[\d+\]|\.\w+)*", message)
    path = found[0] if found else None
    path = {"prompt_token_ids": prompt, "bad_words_ids": "bad_words"}.get((path or "").partition("[")[0], path)
    return ApiError(400, message[:500], param=path)


def completion_requests(body: CompletionRequest, text_model) -> list[Request]:
    """One Request a sample: n of the first prompt, then of the next.

    text_model: has encode, new_detokenizer(params) and max_prompts.
    """
    prompt, params = body.prompt, sampling_params(body)
    if isinstance(prompt, str):
        prompts: list = [prompt]
    elif prompt and isinstance(prompt[0], int):
        prompts = [prompt]
    else:
        prompts = list(prompt)
    if not prompts:
        raise ApiError(400, "prompt is empty: it needs at least one token", param="prompt")
    if len(prompts) > text_model.max_prompts:  # before the work of encoding them
        raise ApiError(400, f"prompt may hold at most {text_model.max_prompts} prompts, got {len(prompts)}",
                       param="prompt")  # fmt: skip
    _check_choices(len(prompts) * params.n, text_model)
    params, requests = _with_words(params, text_model), []
    for item in prompts:
        text = item if isinstance(item, str) else None
        ids = _encoded(item, text_model.encode)
        requests += Request.samples(ids, params, new_detokenizer=text_model.new_detokenizer, prompt=text,
                                    cache_salt=body.cache_salt)  # fmt: skip
    return requests


def _check_choices(count: int, text_model) -> None:
    if count > text_model.max_prompts:
        raise ApiError(400, f"n times the number of prompts is {count}, this server takes at most "
                       f"{text_model.max_prompts} at once", param="n")  # fmt: skip


def chat_requests(body: ChatRequest, text_model) -> list[Request]:
    """The conversation, written out by the model's own template: one Request a sample."""
    params, tokenizer = sampling_params(body), text_model.tokenizer
    _check_choices(params.n, text_model)
    params = _with_words(params, text_model)
    messages = [message.model_dump(include={"role", "content", "name"}, exclude_none=True) for message in body.messages]
    for message in messages:
        if message["role"] == "developer":  # OpenAI's newer name of the system's role; templates know the older one
            message["role"] = "system"
    kwargs = body.chat_template_kwargs or {}
    for name in kwargs:
        if name in ("self", "messages", "tools", "documents", *tokenizer.special_tokens):
            raise ApiError(400, f"chat_template_kwargs may not hold {name}", param="chat_template_kwargs")
    try:
        tokenizer.check_template_kwargs(kwargs)
        text = tokenizer.apply_chat_template(messages, **kwargs)
        # the template wrote the special tokens: encoding must not add them again
        ids = text_model.encode(text, add_special_tokens=False)
    except ValueError as error:
        refused = blame(error, "messages")
        refused.param = refused.param if str(refused.param).startswith(OF_A_TALK) else "messages"
        raise refused from None
    return Request.samples(ids, params, new_detokenizer=text_model.new_detokenizer, prompt=text,
                           cache_salt=body.cache_salt)  # fmt: skip


def _encoded(prompt: str | list[int], encode: Callable) -> list[int]:
    if not isinstance(prompt, str):
        return prompt
    try:
        return encode(prompt)
    except ValueError as error:
        refused = blame(error)
        refused.param = "prompt"
        raise refused from None
