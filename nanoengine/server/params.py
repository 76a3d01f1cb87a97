"""From a request's body to prompts and SamplingParams; whatever is wrong is an ApiError that names it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from pydantic import ValidationError

from nanoengine.engine.generation import Request
from nanoengine.sampling_params import SamplingParams, with_bad_words_ids
from nanoengine.server.errors import ApiError
from nanoengine.server.protocol import NEUTRAL, ChatRequest, Common, CompletionRequest

Body = TypeVar("Body", bound=Common)
MAX_STOPS, MAX_STOP_LENGTH = 16, 256  # the search for stop texts costs their sum at each character
MAX_BAD_WORDS = 1000  # each is encoded twice
MAX_ERRORS = 1000
DEFAULT_COMPLETION_TOKENS = 16  # as in OpenAI's API
SAME = ("top_p", "presence_penalty", "frequency_penalty", "seed", "top_k", "min_p", "repetition_penalty", "min_tokens",
        "stop_token_ids", "ignore_eos", "skip_special_tokens", "temperature",
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
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not valid JSON: {first['msg'].removeprefix('Invalid JSON: ')}")
    path = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in first["loc"]).removeprefix(".")
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"unknown parameter {path!r}"[:300], param=path[:100], code="unknown_parameter")
    if first["type"] == "missing":
        return ApiError(400, f"missing parameter {path!r}", param=path, code="missing_required_parameter")
    return ApiError(400, f"{path or 'the body'}: {first['msg']}"[:300], param=path[:100] or None)


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


def blame(error: ValueError) -> ApiError:
    """The engine's refusal as a 400; its message begins with the name of the argument."""
    message = str(error)
    name = message.split("[")[0].split(" ")[0].split("=")[0]
    known = {"prompt_token_ids": "prompt", "bad_words_ids": "bad_words"}.get(name, name)
    return ApiError(400, message[:500], param=known if known.isidentifier() else None)


def completion_requests(body: CompletionRequest, text_model) -> list[Request]:
    """One Request a prompt. text_model: has encode, new_detokenizer(params) and max_prompts."""
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
    params, requests = _with_words(params, text_model), []
    for item in prompts:
        text = item if isinstance(item, str) else None
        ids = _encoded(item, text_model.encode)
        requests.append(Request(ids, params, prompt=text, detokenizer=text_model.new_detokenizer(params)))
    return requests


def chat_request(body: ChatRequest, text_model) -> Request:
    """The conversation as one Request, written out by the model's own template."""
    params, tokenizer = _with_words(sampling_params(body), text_model), text_model.tokenizer
    messages = [message.model_dump(include={"role", "content", "name"}, exclude_none=True) for message in body.messages]
    for message in messages:
        if message["role"] == "developer":  # OpenAI's newer name of the system's role; templates know the older one
            message["role"] = "system"
    kwargs = body.chat_template_kwargs or {}
    for name in kwargs:
        if name in ("self", "messages", "add_generation_prompt", "tools", "documents", *tokenizer.special_tokens):
            raise ApiError(400, f"chat_template_kwargs may not hold {name}", param="chat_template_kwargs")
    try:
        text = tokenizer.apply_chat_template(messages, **kwargs)
        # the template wrote the special tokens: encoding must not add them again
        ids = text_model.encode(text, add_special_tokens=False)
    except (ValueError, ArithmeticError, LookupError, AttributeError, RecursionError) as error:  # a template is code
        raise ApiError(400, str(error)[:500], param="messages") from None
    return Request(ids, params, prompt=text, detokenizer=text_model.new_detokenizer(params))


def _encoded(prompt: str | list[int], encode: Callable) -> list[int]:
    if not isinstance(prompt, str):
        return prompt
    try:
        return encode(prompt)
    except ValueError as error:
        raise ApiError(400, str(error)[:500], param="prompt") from None
