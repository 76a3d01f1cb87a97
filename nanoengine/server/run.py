"""The application under uvicorn: time limits of a connection, and an orderly end."""

from __future__ import annotations

import asyncio
import errno
import json
import signal
import socket
import threading
from contextlib import contextmanager

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from nanoengine.server.app import Service
from nanoengine.server.errors import ApiError

HEADER_TIMEOUT_S = 15.0
MAX_BEHIND = 64 * 1024  # bytes that a client may send ahead while it is being answered
BACKLOG = 2048  # connections that wait to be taken; uvicorn's own number
CLEAN_UP_S = 5  # after the grace period: aborted streams get their last event, the step in flight lands


class Protocol(H11Protocol):
    """uvicorn's HTTP/1.1, but a connection that does not bring a whole request line and headers is cut."""

    header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport) -> None:
        super().connection_made(transport)
        # goes into each request's scope: to end an answer that nobody reads
        self.app_state = {**self.app_state, "cut_connection": transport.abort}
        self._time_headers()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._time_headers()
        # uvicorn reads no more while a request waits behind the one being answered, and so would not hear
        # that the client has left
        if self.flow.read_paused and self.conn.their_state is h11.DONE and not self.transport.is_closing():
            if len(self.conn.trailing_data[0]) > MAX_BEHIND:
                self.transport.abort()
            else:
                self.flow.resume_reading()

    def send_400_response(self, msg: str) -> None:
        """What is not HTTP gets an error in OpenAI's shape, too; nothing, where an answer has already begun."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = json.dumps(ApiError(400, msg).body()).encode()
            headers = [("Content-Type", "application/json"), ("Content-Length", str(len(body))),
                       ("Connection", "close")]  # fmt: skip
            for event in (h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
                          h11.Data(data=body), h11.EndOfMessage()):  # fmt: skip
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def _time_headers(self) -> None:
        """The clock runs from the first moment until the headers are there; more bytes do not set it back."""
        waiting = self.conn.their_state is h11.IDLE and self.timeout_keep_alive_task is None
        if not waiting:
            self._stop_timer()
        elif self.header_timer is None:
            self.header_timer = self.loop.call_later(HEADER_TIMEOUT_S, self.transport.abort)

    def _stop_timer(self) -> None:
        if self.header_timer is not None:
            self.header_timer.cancel()
            self.header_timer = None


class Server(uvicorn.Server):
    """On SIGTERM or SIGINT: no new connections, what runs may finish for grace_s, the rest is aborted with an event.

    A second Ctrl-C does not wait.
    """

    def __init__(self, config: uvicorn.Config, service: Service):
        super().__init__(config)
        self.service = service

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # uvicorn waits for its connections first: the engine has to be told before, or nothing would end them
        ending = asyncio.create_task(self.service.engine.shutdown(self.service.settings.grace_s))
        await super().shutdown(sockets)
        await ending

    @contextmanager
    def capture_signals(self):
        """As in uvicorn, without raising the signal again afterwards: this process ends by itself, with code 0."""
        if threading.current_thread() is not threading.main_thread():  # only that one gets signals
            yield
            return
        signals = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, self.handle_exit) for number in signals}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. OSError that names the address, and the option to blame, if it cannot be had.

    It listens at once: a second server that is started while this one loads its model hears that the port is taken.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(BACKLOG)
    except (OSError, UnicodeError) as error:  # UnicodeError: a name that no host can have
        sock.close()
        option = "--port" if getattr(error, "errno", None) in (errno.EADDRINUSE, errno.EACCES) else "--host"
        reason = getattr(error, "strerror", None) or error
        raise OSError(f"cannot listen on {host}:{port} ({reason}): choose another {option}") from None
    return sock


def serve(app: FastAPI, sock: socket.socket, *, log_level: str = "info") -> None:
    """Serve until a signal ends it."""
    make_server(app, log_level=log_level).run(sockets=[sock])


def make_server(app: FastAPI, *, log_level: str = "info") -> Server:
    """The server of ``make_app``'s application, not yet running."""
    service = app.state.service
    config = uvicorn.Config(
        app, http=Protocol, ws="none", loop="asyncio", log_level=log_level, access_log=log_level == "debug",
        server_header=False, timeout_keep_alive=service.settings.keep_alive_s,
        timeout_graceful_shutdown=int(service.settings.grace_s) + CLEAN_UP_S,
    )  # fmt: skip
    return Server(config, service)
