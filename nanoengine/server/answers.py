"""From a running Generation to an HTTP answer, whole or as server-sent events; a client that leaves ends it."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

from starlette.responses import JSONResponse, Response

from nanoengine.jsonl import json_line
from nanoengine.server.errors import ApiError
from nanoengine.server.output_stream import Generation, Update
from nanoengine.server.replies import Replies

log = logging.getLogger(__name__)

LAST_WORD_S = 1.0  # how long a reader that has stopped reading is waited for, to be told why its stream ends
CLIENT_LEFT = 499  # as in nginx: a status for the log
DONE = b"data: [DONE]\n\n"


async def whole(receive, generation: Generation, replies: Replies, timeout_s: float) -> Response:
    """Wait for all of it. ApiError 503 if it was aborted or too slow, 500 if it ended with an error."""
    watcher = asyncio.create_task(_abort_when_gone(receive, generation))
    try:
        async with asyncio.timeout(timeout_s):
            async for update in generation:
                replies.answers[update.index].add(update)
                if watcher.done() and update.finish_reason == "abort":
                    return Response(status_code=CLIENT_LEFT)  # nobody reads it
                _check(update)
    except TimeoutError:
        raise _too_slow(timeout_s) from None
    finally:
        watcher.cancel()
        generation.abort()
    # logprobs can make an answer of many megabytes: other requests go on meanwhile
    return await asyncio.to_thread(lambda: JSONResponse(replies.body()))


class EventStream(Response):
    """Server-sent events: a chunk an update, then [DONE]; what goes wrong on the way is an event with "error"."""

    media_type = "text/event-stream"

    def __init__(self, generation: Generation, replies: Replies, timeout_s: float):
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self.generation, self.replies, self.timeout_s = generation, replies, timeout_s

    async def __call__(self, scope, receive, send) -> None:
        watcher = asyncio.create_task(_abort_when_gone(receive, self.generation))
        try:
            async with asyncio.timeout(self.timeout_s):
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                await self._send_all(send)
        except (ApiError, TimeoutError) as error:
            known = error if isinstance(error, ApiError) else _too_slow(self.timeout_s)
            await self._last_word(known, scope, send)
        except Exception:
            log.exception("a stream was ended by a mistake of the server")
            await self._last_word(ApiError(500, "the server made a mistake; its log says more"), scope, send)
        finally:
            watcher.cancel()
            self.generation.abort()

    async def _send_all(self, send) -> None:
        for chunk in self.replies.first_chunks():
            await _send(send, _event(chunk))
        async for update in self.generation:
            _check(update)
            chunk = self.replies.chunk(update)
            if chunk is not None:
                await _send(send, _event(chunk))
        for chunk in self.replies.last_chunks():
            await _send(send, _event(chunk))
        await _send(send, DONE, more=False)

    async def _last_word(self, error: ApiError, scope, send) -> None:
        self.generation.abort()
        try:
            async with asyncio.timeout(LAST_WORD_S):
                await _send(send, _event(error.body()) + DONE, more=False)
        except TimeoutError:  # nobody reads: closing would wait for them, so the connection is cut
            with suppress(KeyError):
                scope["state"]["cut_connection"]()


async def _send(send, data: bytes, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": more})


def _event(data: dict) -> bytes:
    return b"data: " + json_line(data).encode() + b"\n\n"


async def _abort_when_gone(receive, generation: Generation) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    generation.abort()


def _check(update: Update) -> None:
    """ApiError if this is no proper end."""
    if update.failed:
        raise ApiError(503, "the engine failed on this request; its log says more", code="engine_failed")
    if update.finish_reason == "error":  # of a call with several prompts, one ends it for all
        text = f"the request ended with an error: {update.error}"
        raise ApiError(500, text, code="generation_failed")
    if update.finish_reason == "abort":
        raise ApiError(503, "the server is shutting down and has ended this request", code="shutting_down")


def _too_slow(timeout_s: float) -> ApiError:
    return ApiError(503, f"the request was ended: it took longer than {timeout_s:g} s", code="timeout")
