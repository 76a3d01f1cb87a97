"""What a browser asks beside the request itself: HEAD, OPTIONS, and whether a page of another origin may read us."""

from __future__ import annotations

import re
from collections.abc import Sequence
from urllib.parse import urlsplit

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.routing import Match

DEFAULT_PORTS = {"http": 80, "https": 443}  # browsers leave them out of an origin
METHODS = ("GET", "HEAD", "POST", "OPTIONS")
EXPOSED = ("Retry-After", "WWW-Authenticate", "Allow")


def check_origin(text: str) -> str:
    """An origin as browsers send it. ValueError for what none would send: then nothing would ever match."""
    if text in ("*", "null"):
        return text
    try:
        found = urlsplit(text.strip())
        host, port = found.hostname, found.port
    except ValueError:
        host = port = None
    if (
        not host
        or not found.scheme
        or found.path not in ("", "/")
        or found.query
        or found.fragment
        or "@" in text
        or not (host := _sent(host))
    ):
        raise ValueError(
            "--cors-origin must be *, null, or scheme://host[:port] without a path and without * "
            f"in the host, got {text!r:.200}"
        )
    host = f"[{host}]" if ":" in host else host
    scheme = found.scheme.lower()
    return f"{scheme}://{host}" + ("" if port in (None, DEFAULT_PORTS.get(scheme)) else f":{port}")


def _sent(host: str) -> str:
    """The host as browsers write it (other letters than ASCII's in Punycode); "" if it cannot be one."""
    try:
        host = host if host.isascii() else host.encode("idna").decode("ascii")
    except UnicodeError:
        return ""
    return host if re.fullmatch(r"[a-z0-9._:%-]+", host) else ""


class App(FastAPI):
    """FastAPI whose every answer, a 500 and a stream too, tells pages of ``cors_origins`` that they may read it.

    cors_origins: () for none, ("*",) for all. Pages of an origin that is named may send credentials (cookies of a
    proxy, say); with * they may not, as browsers want it. The API key is none of them: it is a header like any other.
    """

    def __init__(self, *, cors_origins: Sequence[str] = (), **options):
        self.cors_origins = tuple(map(check_origin, cors_origins))
        super().__init__(**options)

    def build_middleware_stack(self):
        inner = (
            super().build_middleware_stack()
        )  # with what answers 500, which no middleware of add_middleware sees
        if not self.cors_origins:
            return inner
        return CORSMiddleware(
            inner,
            allow_origins=self.cors_origins,
            allow_methods=METHODS,
            allow_headers=("*",),
            allow_credentials="*" not in self.cors_origins,
            expose_headers=EXPOSED,
        )


class Methods:
    """ASGI middleware. HEAD is GET without a body, and OPTIONS says what a path takes, on every route."""

    def __init__(self, app, *, routes: FastAPI):
        self.app, self.routes = app, routes

    async def __call__(self, scope, receive, send) -> None:
        method = scope.get("method")
        if method == "OPTIONS" and (allowed := allowed_methods(self.routes, scope)):
            await Response(status_code=204, headers={"Allow": allowed})(scope, receive, send)
        elif method == "HEAD":

            async def send_head(message):
                await send(
                    message | {"body": b""} if message["type"] == "http.response.body" else message
                )

            await self.app({**scope, "method": "GET"}, receive, send_head)
        else:
            await self.app(scope, receive, send)


def allowed_methods(app: FastAPI, scope) -> str:
    """What the path of ``scope`` takes, as the header Allow has it; "" if there is no such path."""
    found: set[str] = set()
    for route in app.routes:
        if route.matches(scope)[0] is not Match.NONE:
            found |= set(getattr(route, "methods", None) or ())
    if not found:
        return ""
    return ", ".join(sorted(found | {"OPTIONS"} | ({"HEAD"} if "GET" in found else set())))
