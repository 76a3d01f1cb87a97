"""What is decided before a request reaches the application: API key, size and time of the body."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import Callable

from nanoengine.server.errors import ApiError

LINGER_S = 2.0  # that a refused client gets to finish sending
PROTECTED = ("/v1/", "/trace")  # /health and /metrics say nothing about what was asked


class Limits:
    """ASGI middleware. api_key: None lets everyone in. max_body_bytes; body_timeout_s: until the body must be there.
    count: is told the status of each refusal.

    The body is read here, whole: the application gets it in one piece, and everything after it is "disconnect".
    """

    def __init__(self, app, *, api_key: str | None, max_body_bytes: int, body_timeout_s: float,
                 count: Callable[[int], None]):  # fmt: skip
        self.app, self.max_body_bytes, self.body_timeout_s, self.count = app, max_body_bytes, body_timeout_s, count
        self._key = None if api_key is None else hashlib.sha256(api_key.encode()).digest()

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            self._authorise(scope)
            body = await asyncio.wait_for(self._read(scope, receive), self.body_timeout_s)
        except ApiError as error:
            await self._refuse(error, scope, receive, send)
            return
        except TimeoutError:
            error = ApiError(408, f"the request's body was not there after {self.body_timeout_s:g} s")
            await self._refuse(error, scope, receive, send)
            return
        if body is None:  # the client has gone
            return
        unread = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay():
            return unread.pop() if unread else await receive()

        await self.app(scope, replay, send)

    def _authorise(self, scope) -> None:
        if self._key is None or not scope["path"].startswith(PROTECTED):
            return
        if scope["method"] == "OPTIONS":  # a browser's preflight has no key, and its answer no secret
            return
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, key = given.partition(b" ")
        # digests have one length, and compare_digest takes the same time wherever they differ
        if scheme.lower() != b"bearer" or not hmac.compare_digest(hashlib.sha256(key.strip()).digest(), self._key):
            raise ApiError(401, "wrong or missing API key: send the header 'Authorization: Bearer KEY'",
                           headers={"WWW-Authenticate": "Bearer"})  # fmt: skip

    async def _read(self, scope, receive) -> bytes | None:
        length = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        if length.isdigit() and int(length[:20]) > self.max_body_bytes:
            raise self._too_large()
        parts, size, more = [], 0, True
        while more:
            message = await receive()
            if message["type"] != "http.request":
                return None
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self.max_body_bytes:
                raise self._too_large()
            more = message.get("more_body", False)
        return b"".join(parts)

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the request's body is larger than {self.max_body_bytes} bytes")

    async def _refuse(self, error: ApiError, scope, receive, send) -> None:
        self.count(error.status)
        response = error.response()
        response.headers["Connection"] = "close"
        await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
        await send({"type": "http.response.body", "body": response.body, "more_body": True})
        if error.status != 408:  # there it is the client that sends nothing
            await self._let_finish(receive)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _let_finish(self, receive) -> None:
        """Throw away what the client still sends, for a moment. A connection that is closed before is reset, and
        the system of a client that reads only once it has sent everything then throws our answer away."""
        try:
            async with asyncio.timeout(LINGER_S):
                while (message := await receive())["type"] == "http.request" and message.get("more_body", False):
                    pass
        except TimeoutError:
            pass
