"""Errors in OpenAI's shape: {"error": {"message", "type", "param", "code"}}. Never a stack trace."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from nanoengine.server.browsers import allowed_methods

# status -> (type, code where nothing more special is known)
KINDS = {
    400: ("invalid_request_error", "invalid_value"),
    401: ("authentication_error", "invalid_api_key"),
    404: ("invalid_request_error", "not_found"),
    405: ("invalid_request_error", "method_not_allowed"),
    408: ("invalid_request_error", "request_timeout"),
    413: ("invalid_request_error", "request_too_large"),
    429: ("rate_limit_error", "server_overloaded"),
    500: ("server_error", "internal_error"),
    503: ("server_error", "service_unavailable"),
}


class ApiError(Exception):
    """One of the statuses above, with a message that tells the client what to do.

    param: the name of the argument that is to blame, if one is.
    """

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None,
                 headers: dict[str, str] | None = None):  # fmt: skip
        super().__init__(message)
        self.status, self.message, self.param, self.headers = status, message, param, headers
        self.code = code or KINDS[status][1]

    def body(self) -> dict:
        kind = KINDS[self.status][0]
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), self.status, headers=self.headers)


def install(app: FastAPI, count: Callable[[int], None]) -> None:
    """Make every error that leaves ``app`` look like OpenAI's; ``count`` is told each status."""

    def answer(error: ApiError) -> JSONResponse:
        count(error.status)
        return error.response()

    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError):
        return answer(error)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException):  # Starlette's own: 404, 405
        status = error.status_code if error.status_code in KINDS else 400
        message, headers = str(error.detail), dict(error.headers or {})
        if status == 404:
            message = f"there is no {request.url.path}"
        elif status == 405:
            message = f"{request.url.path} does not take {request.method}"
            headers["Allow"] = allowed_methods(app, request.scope)
        return answer(ApiError(status, message, headers=headers))

    @app.exception_handler(Exception)
    async def bug(request: Request, error: Exception):  # the server's log gets the traceback
        return answer(ApiError(500, "the server made a mistake; its log says more"))
