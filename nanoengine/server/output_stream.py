"""What tasks and the engine's thread hand to each other: a Request there, Updates back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from nanoengine.engine.sequence import Sequence
from nanoengine.sampling_params import SamplingParams

log = logging.getLogger(__name__)


class Overloaded(Exception):
    """As many requests are open as may be. retry_after: seconds after which it is worth trying again."""

    def __init__(self, waiting: int, retry_after: int):
        super().__init__(f"{waiting} requests are waiting already: try again in {retry_after} s")
        self.retry_after = retry_after


class EngineStopped(Exception):
    """The engine takes no requests: it is shutting down, or its thread has died."""


@dataclass(slots=True)
class Request:
    """What one sample asks: token ids, how to draw, and (where text is wanted) a detokenizer of its own.

    cache_salt: its prompt shares cached KV only with prompts of the same salt.
    """

    prompt_token_ids: Iterable[int]
    params: SamplingParams
    prompt: str | None = None
    detokenizer: Any = None
    cache_salt: str | None = None

    @classmethod
    def samples(cls, prompt_token_ids: list[int], params: SamplingParams, *, new_detokenizer: Callable | None = None,
                **more) -> list[Request]:  # fmt: skip
        """One Request a sample, params.n of them. new_detokenizer: (params) -> a detokenizer."""
        make = new_detokenizer or (lambda params: None)
        return [cls(prompt_token_ids, each, detokenizer=make(each), **more) for each in params.samples()]


@dataclass(slots=True)
class Update:
    """What one request has gained since its last update.

    index: which Request of its Generation; with n samples a prompt, sample j of prompt i is i * n + j.
    text: safe to show; the texts join to the whole. logprobs: one dict a token, or None.
    prompt_logprobs: the whole list, with the last update.
    finish_reason: None while it runs; "stop", "length", "abort" or "error", and with the last
    ``error`` says why. failed: it was given up because steps kept raising, or because its own text
    could not be made.
    arrival, at, before: seconds on the monotonic clock: when it was asked, when the newest token was
    there, and the same of the update before (None for the first).
    """

    index: int
    token_ids: list[int]
    text: str
    logprobs: list[dict[int, float]] | None
    finish_reason: str | None
    stop_reason: str | int | None
    num_prompt_tokens: int
    num_cached_tokens: int
    arrival: float
    at: float
    before: float | None = None
    failed: bool = False
    error: str | None = None
    prompt_logprobs: list[dict[int, float] | None] | None = None

    def merge(self, newer: Update) -> None:
        """Take in the update that follows this one."""
        self.token_ids += newer.token_ids
        self.text += newer.text
        if self.logprobs is not None:
            self.logprobs += newer.logprobs or []
        self.finish_reason, self.stop_reason = newer.finish_reason, newer.stop_reason
        self.at, self.failed, self.error = newer.at, newer.failed, newer.error
        self.prompt_logprobs = newer.prompt_logprobs


class Generation:
    """The answers to the requests of one add(): an async iterator of Updates, until all have ended.

    Belongs to the event loop. A reader that is slow costs the engine nothing, and memory only for the
    answer itself: what it has not read is merged into one Update a request.
    """

    def __init__(self, count: int, on_abort: Callable[[Generation], None]):
        self.count, self.left = count, count
        self._on_abort = on_abort
        self._pending: dict[int, Update] = {}
        self._changed = asyncio.Event()

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> Update:
        while not self._pending:
            if not self.left:
                raise StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()
        return self._pending.pop(next(iter(self._pending)))

    def abort(self) -> None:
        """End what has not ended, before the engine's next step. May be called again and again."""
        if self.left:
            self._on_abort(self)

    def put(self, update: Update) -> None:
        if update.finish_reason is not None:
            self.left -= 1
        kept = self._pending.get(update.index)
        if kept is None:
            self._pending[update.index] = update
        else:
            kept.merge(update)
        self._changed.set()


class Guarded:
    """A detokenizer whose errors stay with its own request.

    Raised inside a step, after the token was appended, they would end the step for all: the others would start
    over, and this one go on with a hole in its text. So the error is kept here, and ends this request alone.
    """

    def __init__(self, inner: Any):
        self.inner, self.broken = inner, False

    def push(self, token_id: int) -> str | None:
        return self._safe(self.inner.push, token_id)

    def finish(self) -> None:
        self._safe(self.inner.finish)

    def take(self) -> str:
        return self._safe(self.inner.take) or ""

    def _safe(self, function: Callable, *arguments):
        if self.broken:
            return None
        try:
            return function(*arguments)
        except Exception:
            log.exception("the text of a request cannot be made; it ends with an error")
            self.broken = True
            return None


@dataclass(slots=True, eq=False)
class Open:
    """The loop thread's record of a request: how much of it has been reported, and when."""

    seq: Sequence
    generation: Generation
    index: int
    arrival: float
    num_tokens: int = 0
    at: float | None = None
    failed: bool = False

    @property
    def is_broken(self) -> bool:
        """True if its text or its logprobs have fallen out of step with its tokens: then it cannot go on."""
        seq = self.seq
        text_broken = seq.detokenizer is not None and seq.detokenizer.broken
        # a runner without logprobs (the simulated ones) leaves them empty
        return text_broken or (bool(seq.logprobs) and len(seq.logprobs) != seq.num_output_tokens)

    @property
    def has_news(self) -> bool:
        return self.seq.num_output_tokens > self.num_tokens or self.seq.finish_reason is not None

    def update(self, now: float) -> Update:
        """What is new since the last call."""
        seq, known = self.seq, self.num_tokens
        token_ids = seq.token_ids[seq.num_prompt_tokens + known :]
        update = Update(
            index=self.index,
            token_ids=token_ids,
            text=seq.detokenizer.take() if seq.detokenizer is not None else "",
            logprobs=None if seq.logprobs is None else seq.logprobs[known:],
            finish_reason=seq.finish_reason,
            stop_reason=seq.stop_reason,
            num_prompt_tokens=seq.num_prompt_tokens,
            num_cached_tokens=seq.num_cached_tokens,
            arrival=self.arrival,
            at=now,
            before=self.at,
            failed=self.failed,
            error=seq.error,
            prompt_logprobs=seq.prompt_logprobs if seq.finish_reason is not None else None,
        )
        self.num_tokens += len(token_ids)
        self.at = now
        return update
