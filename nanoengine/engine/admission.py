"""The request contract: what can never be served is refused here, before it is queued."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable

from nanoengine.config import EngineConfig
from nanoengine.engine.sequence import Sequence
from nanoengine.sampling_params import SamplingParams

_GOLDEN = 0x9E3779B97F4A7C15  # odd 64-bit constant: spreads consecutive request ids over all seeds

# Options that change logits or need more of them: a runner without a model, or a sampler of your
# own, may not have them.
RUNNER_OPTIONS = ("logit_bias", "allowed_token_ids", "bad_words", "prompt_logprobs")


class ContextLengthError(ValueError):
    """The prompt alone leaves no room for an answer.

    num_tokens: of the prompt (at least so many, where its end is not known). limit: tokens that
    prompt and answer may have together.
    """

    def __init__(self, message: str, num_tokens: int, limit: int):
        super().__init__(message)
        self.num_tokens, self.limit = num_tokens, limit


def make_sequence(
    config: EngineConfig,
    pool_tokens: int,
    seq_id: int,
    prompt_token_ids: Iterable[int],
    params: SamplingParams | None = None,
    *,
    runner=None,
    prompt: str | None = None,
    detokenizer=None,
    cache_salt: str | None = None,
) -> Sequence:
    """Check one request against the limits of the engine and make its Sequence.

    pool_tokens: tokens that the whole KV pool holds. Whatever outgrows a limit later is not
    refused: it ends with finish_reason "length" at the smallest of prompt + max_tokens,
    max_model_len, and the pool + 1 (the last token's KV is never needed).
    runner: says in ``supports`` which options of RUNNER_OPTIONS it has.
    Errors: ValueError naming the argument, its value and the limit; ContextLengthError, which is
    one, for a prompt that is too long.
    """
    params = SamplingParams() if params is None else params
    if not isinstance(params, SamplingParams):
        raise ValueError(f"sampling_params must be a SamplingParams, got {type(params).__name__}")
    if params.n > 1:
        raise ValueError(f"n must be 1 for one sequence, got {params.n}: add one request for each of params.samples()")
    if cache_salt is not None and (not isinstance(cache_salt, str) or not cache_salt):
        raise ValueError(f"cache_salt must be a non-empty string, got {cache_salt!r}")
    token_ids = check_token_ids(prompt_token_ids, config.vocab_size, config.max_model_len)
    length = len(token_ids)
    if length > pool_tokens:
        raise ContextLengthError(
            f"prompt has {length} tokens, the whole KV pool holds {pool_tokens}: "
            "shorten the prompt or give the engine more num_blocks",
            length,
            pool_tokens,
        )
    _check_options(params, config.vocab_size, runner)
    limits = [config.max_model_len, pool_tokens + 1]
    if params.max_tokens is not None:
        limits.append(length + params.max_tokens)
    model_ends = () if params.ignore_eos else config.eos_token_ids
    seed = params.seed
    if seed is None:
        seed = (config.seed + (seq_id + 1) * _GOLDEN) % 2**63
    return Sequence(
        seq_id=seq_id,
        token_ids=token_ids,
        params=params,
        max_total_tokens=min(limits),
        end_token_ids=frozenset(model_ends) | frozenset(params.stop_token_ids),
        seed=seed,
        prompt=prompt,
        arrival=time.monotonic(),
        detokenizer=detokenizer,
        cache_salt=cache_salt,
    )


def _check_options(params: SamplingParams, vocab_size: int | None, runner) -> None:
    """ValueError for an option that this runner does not have, or an id outside the vocabulary."""
    asked = {name: getattr(params, name) for name in RUNNER_OPTIONS}
    asked["bad_words"] = params.bad_words or params.bad_words_ids
    supports = RUNNER_OPTIONS if runner is None else runner.supports
    for name, value in asked.items():
        if value is not None and value != () and name not in supports:
            raise ValueError(
                f"{name}={value!r:.100} is not supported by {type(runner).__name__} and its "
                "sampler: they name what they support in ``supports`` "
                f"({', '.join(sorted(supports)) or 'nothing'})"
            )
    if params.bad_words and not params.bad_words_ids:
        raise ValueError(
            f"bad_words={list(params.bad_words)!r:.100} needs a tokenizer, which the engine does "
            "not have: give bad_words_ids, or ask through LLM or the server"
        )
    if vocab_size is not None:
        for name in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
            _check_vocabulary(name, getattr(params, name) or (), vocab_size)
        for word in params.bad_words_ids:
            _check_vocabulary("bad_words_ids", word, vocab_size)


def _check_vocabulary(name: str, ids: Iterable[int], vocab_size: int) -> None:
    largest = max(ids, default=0)
    if largest >= vocab_size:
        raise ValueError(f"{name} contains {largest}, vocabulary has {vocab_size} tokens")


def check_token_ids(token_ids: Iterable[int], vocab_size: int | None, max_model_len: float = math.inf) -> list[int]:
    """The ids as a list of plain ints, each in [0, vocab_size), fewer than max_model_len. ValueError otherwise."""
    if isinstance(token_ids, (str, bytes)) or not hasattr(token_ids, "__iter__") or getattr(token_ids, "ndim", 1) == 0:
        raise ValueError(f"prompt_token_ids must be a list of token ids, got {type(token_ids).__name__}")
    limit = 2**31 if vocab_size is None else vocab_size
    if type(token_ids) is list and 0 < len(token_ids) < max_model_len and set(map(type, token_ids)) == {int}:
        if 0 <= min(token_ids) and max(token_ids) < limit:  # the usual case, at the speed of C
            return token_ids.copy()
    ids = []
    for index, token in enumerate(token_ids):
        if index + 1 >= max_model_len:  # at once, so that an endless generator ends here, too
            sized = hasattr(token_ids, "__len__")
            length = len(token_ids) if sized else index + 1
            known = length if sized else f"at least {length}"
            raise ContextLengthError(
                f"prompt has {known} tokens, max_model_len={max_model_len} leaves no room for an "
                "answer: shorten the prompt or raise max_model_len",
                length,
                max_model_len,
            )
        try:
            plain = token.__index__()
        except (AttributeError, TypeError):  # TypeError: an array that is no scalar
            plain = None
        if plain is None or isinstance(token, bool):
            raise ValueError(f"prompt_token_ids[{index}] must be an integer, got {token!r}")
        if not 0 <= plain < limit:
            raise ValueError(f"prompt_token_ids[{index}] is {plain}, outside the vocabulary [0, {limit})")
        ids.append(plain)
    if not ids:
        raise ValueError("prompt is empty: it needs at least one token")
    return ids
