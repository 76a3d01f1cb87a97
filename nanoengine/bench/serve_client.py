"""One request to an OpenAI-compatible server, streamed and timed."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field

import httpx


@dataclass
class Timing:
    """One request. Times are seconds after the run's start; errors is None or a short reason.

    due: when it was to be sent; sent: when it was; chunks: when each piece of text came; ended: the last byte.
    num_prompt, num_output: tokens as the server's usage says, else as asked and as chunks were counted.
    """

    due: float
    sent: float = 0.0
    chunks: list[float] = field(default_factory=list)
    ended: float = 0.0
    num_prompt: int = 0
    num_output: int = 0
    error: str | None = None

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
    """Where and how to ask. chat: /v1/chat/completions, else /v1/completions. extra: further fields of each body."""

    url: str
    model: str
    chat: bool = False
    extra: dict = field(default_factory=dict)

    @property
    def endpoint(self) -> str:
        return self.url.rstrip("/") + ("/chat/completions" if self.chat else "/completions")

    def body(self, prompt: str | list[int], max_tokens: int) -> dict:
        asked = {"messages": [{"role": "user", "content": prompt}]} if self.chat else {"prompt": prompt}
        limit = {"max_completion_tokens" if self.chat else "max_tokens": max_tokens}
        return {"model": self.model, "stream": True, "stream_options": {"include_usage": True},
                "temperature": 0} | asked | limit | self.extra  # fmt: skip


async def ask(client: httpx.AsyncClient, target: Target, prompt, max_tokens: int, timing: Timing, began: float) -> None:
    """Send one request and fill ``timing``; what goes wrong is written there, not raised."""
    timing.sent = time.perf_counter() - began
    try:
        async with client.stream("POST", target.endpoint, json=target.body(prompt, max_tokens)) as response:
            if response.status_code != 200:
                await response.aread()
                timing.error = f"HTTP {response.status_code}"
                return
            await _read(response, timing, began)
    except httpx.HTTPError as error:
        timing.error = type(error).__name__
    finally:
        timing.ended = time.perf_counter() - began
    if timing.error is None and not timing.chunks:
        timing.error = "no text"


async def _read(response: httpx.Response, timing: Timing, began: float) -> None:
    usage, done = None, False
    async for line in response.aiter_lines():
        if not line.startswith("data:"):
            continue
        now, data = time.perf_counter() - began, line[5:].strip()
        if data == "[DONE]":
            done = True
            break
        try:
            event = json.loads(data)
            if event.get("error"):
                timing.error = f"error event: {str(event['error'].get('code') or event['error'])[:60]}"
                return
            usage = event.get("usage") or usage
            if any(_text(choice) for choice in event.get("choices", ())):
                timing.chunks.append(now)
        except (ValueError, AttributeError):
            timing.error = "an event that is not an object of OpenAI's API"
            return
    if not done:
        timing.error = "the stream ended without [DONE]"
    usage = usage or {}
    timing.num_prompt = usage.get("prompt_tokens", timing.num_prompt)
    timing.num_output = usage.get("completion_tokens", len(timing.chunks))


def _text(choice: dict) -> str | None:
    delta = choice.get("delta")
    if delta is None:
        return choice.get("text")
    return delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning")
