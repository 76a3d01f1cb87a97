"""One request to an OpenAI-compatible server, streamed and timed."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import httpx


@dataclass
class Timing:
    """One request. Times are seconds after the run's start; errors is None or a short reason.

    due: when it was to be sent; sent: when it was; chunks: when each piece of text came; ended: the last byte.
    num_prompt, num_output: tokens as the server's usage says (has_usage), else as asked and as chunks were counted.
    num_cached: prompt tokens that the server's prefix cache had, None where usage does not say.
    said: the server's own words about the error.
    """

    due: float
    sent: float = 0.0
    chunks: list[float] = field(default_factory=list)
    ended: float = 0.0
    num_prompt: int = 0
    num_output: int = 0
    num_cached: int | None = None
    has_usage: bool = False
    error: str | None = None
    said: str | None = None

    @property
    def ttft(self) -> float:
        """From when it was due: a client that falls behind does not flatter the server."""
        return self.chunks[0] - self.due

    @property
    def itls(self) -> list[float]:
        return [b - a for a, b in zip(self.chunks, self.chunks[1:], strict=False)]

    @property
    def tpot(self) -> float | None:
        """Mean time of an output token after the first; None where there is no second."""
        return (self.chunks[-1] - self.chunks[0]) / (self.num_output - 1) if self.num_output > 1 else None

    @property
    def e2e(self) -> float:
        return self.ended - self.due


@dataclass(frozen=True)
class Target:
    """Where and how to ask. chat: /v1/chat/completions, else /v1/completions. extra: further fields of each body.

    limit_name: what the server calls the limit of an answer. max_tokens is what each compatible server knows; OpenAI's
    own newer models want max_completion_tokens.
    """

    url: str
    model: str
    chat: bool = False
    extra: dict = field(default_factory=dict)
    limit_name: str = "max_tokens"

    @property
    def endpoint(self) -> str:
        return self.url.rstrip("/") + ("/chat/completions" if self.chat else "/completions")

    def body(self, prompt: str | list[int], max_tokens: int) -> dict:
        asked = {"messages": [{"role": "user", "content": prompt}]} if self.chat else {"prompt": prompt}
        limit = {self.limit_name: max_tokens}
        return {"model": self.model, "stream": True, "stream_options": {"include_usage": True},
                "temperature": 0} | asked | limit | self.extra  # fmt: skip


async def ask(client: httpx.AsyncClient, target: Target, prompt, max_tokens: int, timing: Timing, began: float) -> None:
    """Send one request and fill ``timing``; what goes wrong is written there, not raised."""
    timing.sent = time.perf_counter() - began
    try:
        async with client.stream("POST", target.endpoint, json=target.body(prompt, max_tokens)) as response:
            if response.status_code != 200:
                timing.error, timing.said = f"HTTP {response.status_code}", _said(await response.aread())
                return
            await _read(response, timing, began)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        timing.error, timing.said = type(error).__name__, str(error)[:300] or None
    finally:
        timing.ended = time.perf_counter() - began
    if timing.error is None and not timing.chunks:
        timing.error = "no text"


async def _read(response: httpx.Response, timing: Timing, began: float) -> None:
    # A finish_reason says that the answer is whole. [DONE] does not: transformers' server never sends it, and
    # llama-cpp-python's sends it after an answer that it cut short for the next request.
    usage, whole = None, False
    async for line in _lines(response):
        if not line.startswith("data:"):
            continue
        now, data = time.perf_counter() - began, line[5:].strip()
        if data == "[DONE]":
            break
        try:
            event = json.loads(data)
            if event.get("error"):
                found = event["error"]
                code = found.get("code") if isinstance(found, dict) else None
                words = " ".join(str(code or found).split())
                timing.error, timing.said = f"error event: {words[:60]}", _said(data.encode())
                return
            usage, choices = event.get("usage") or usage, event.get("choices") or ()
            if any(_text(choice) for choice in choices):
                timing.chunks.append(now)
            whole = whole or any(choice.get("finish_reason") for choice in choices)
        except (ValueError, AttributeError, TypeError, RecursionError):
            timing.error = "an event that is not an object of OpenAI's API"
            return
    if not whole:
        timing.error = "the answer was cut: no finish_reason came"
    counts = [usage.get(name) for name in ("prompt_tokens", "completion_tokens")] if isinstance(usage, dict) else [None]
    timing.has_usage = all(type(count) is int and count >= 0 for count in counts)
    details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    timing.num_cached = cached if type(cached) is int and cached >= 0 else None
    timing.num_prompt, timing.num_output = counts if timing.has_usage else (timing.num_prompt, len(timing.chunks))


async def _lines(response: httpx.Response) -> AsyncIterator[str]:
    """Lines as server-sent events have them, which end with LF, CR or both.

    httpx's own also end at U+2028 and others, which may stand inside an event.
    """
    rest = b""
    async for data in response.aiter_bytes():
        *whole, rest = (rest + data).replace(b"\r", b"\n").split(b"\n")
        for line in whole:
            yield line.decode(errors="replace")
    yield rest.decode(errors="replace")


def _said(body: bytes) -> str:
    """The message of an error's body, whatever its shape, in one line."""
    text = body.decode(errors="replace")
    try:
        found = json.loads(text)
        found = found.get("error") or found.get("detail") or found.get("message") or found
        text = str(found.get("message", found) if isinstance(found, dict) else found)
    except (ValueError, AttributeError):
        pass
    return " ".join(text.split())[:300]


def _text(choice: dict) -> str | None:
    delta = choice.get("delta")
    if delta is None:
        return choice.get("text")
    return delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning")
