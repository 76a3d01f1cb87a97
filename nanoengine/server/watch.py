"""``nanoengine trace watch URL``: the engine player, fed from a running server.

    server's /trace  --polled-->  Watched (here, in a thread)  --/state, /frame-->  a page on 127.0.0.1

The pictures are drawn here and not by the server: watching costs it a JSON answer now and then.
"""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

from nanoengine.server.watch_page import page
from nanoengine.trace import FIELDS, SCHEMA
from nanoengine.trace_record import from_json
from nanoengine.viz.picture import render
from nanoengine.viz.state import History, letter

POLL_S = 0.5
TIMEOUT_S = 10.0


class Watched:
    """The last ``size`` steps of the server at ``url``; its thread polls until ``close``.

    error: why the last poll failed, in words, or None.
    """

    def __init__(self, url: str, *, api_key: str | None = None, size: int = 200, lang: str = "en"):
        base = url.rstrip("/").removesuffix("/v1")
        if not base.startswith(("http://", "https://")):
            raise ValueError(f"{url}: give the server's address, as http://127.0.0.1:8000")
        self.address, self.size, self.lang = f"{base}/trace", size, lang
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._lock = threading.Lock()  # guards steps and what is made of them
        self._steps: list[dict] = []
        self._history: History | None = None
        self.error: str | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._closed.set()

    def poll(self) -> None:
        """Fetch what is new. Errors: ValueError if the server cannot be watched, in words that help."""
        last = self._steps[-1]["step"] if self._steps else -1
        answer = self._fetch(last)
        if answer["last"] < last:  # the server was started anew
            with self._lock:
                self._steps, self._history = [], None
            answer = self._fetch(-1)
        steps = [_checked(step) for step in answer["steps"]]
        if steps:
            with self._lock:
                self._steps = (self._steps + steps)[-self.size :]
                self._history = None

    def state(self) -> dict:
        """Numbers of the first and the last step at hand (null before there is one), and the error."""
        with self._lock:
            first, last = (self._steps[0]["step"], self._steps[-1]["step"]) if self._steps else (None, None)
        return {"first": first, "last": last, "error": self.error}

    def frame(self, step: int) -> str | None:
        """The picture of a step as SVG, or of the nearest that is at hand; None if there is none."""
        with self._lock:
            if not self._steps:
                return None
            if self._history is None:
                self._history = History(self._steps)
                # by id: letters by order of arrival would move as old steps drop out
                self._history.letters = {seq: letter(seq) for seq in self._history.letters}
            index = min(max(step - self._steps[0]["step"], 0), len(self._steps) - 1)
            return render(self._history.at(index), self.lang)

    def _run(self) -> None:
        while not self._closed.wait(POLL_S):
            try:
                self.poll()
                self.error = None
            except ValueError as error:
                self.error = str(error)

    def _fetch(self, after: int) -> dict:
        request = urllib.request.Request(f"{self.address}?after={after}", headers=self._headers)
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
                answer = json.load(response)
            if not isinstance(answer["last"], int) or not isinstance(answer["steps"], list):
                raise TypeError
        except urllib.error.HTTPError as error:
            raise ValueError(_said(error, self.address)) from None
        except (OSError, TimeoutError) as error:
            raise ValueError(f"{self.address} does not answer: {getattr(error, 'reason', error)}") from None
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{self.address} is no trace of this program's schema {SCHEMA}") from None
        return answer


def _said(error: urllib.error.HTTPError, address: str) -> str:
    """The server's own words, if they are in OpenAI's shape."""
    try:
        return f"{address}: {json.load(error)['error']['message']}"
    except (ValueError, KeyError, TypeError):
        return f"{address} answers {error.code}"


def _checked(step: dict) -> dict:
    """A record as ``Trace`` has it: JSON made strings of its ids. ValueError if it is none, or damaged."""
    if not isinstance(step, dict) or step.get("schema") != SCHEMA or any(name not in step for name in FIELDS):
        raise ValueError(f"the server's trace is not of schema {SCHEMA}: client and server differ in version")
    return from_json(step)


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    timeout = 30

    def do_GET(self) -> None:
        # a page of another site, opened in the same browser, shall not read this one under a name of its own
        if (self.headers.get("Host") or "").rsplit(":", 1)[0] not in ("127.0.0.1", "localhost"):
            self.send_error(403)
            return
        url, watched = urlsplit(self.path), self.server.watched
        if url.path == "/":
            self._answer(page(watched.lang, watched.address), "text/html; charset=utf-8")
        elif url.path == "/state":
            self._answer(json.dumps(watched.state()), "application/json")
        elif url.path == "/frame":
            number = parse_qs(url.query).get("step", ["0"])[0]
            svg = watched.frame(int(number)) if number.isdecimal() and len(number) < 18 else None
            self._answer(svg or "", "image/svg+xml")
        else:
            self.send_error(404)

    def _answer(self, text: str, kind: str) -> None:
        data = text.encode()
        self.send_response(200)
        for name, value in (("Content-Type", kind), ("Content-Length", str(len(data))), ("Cache-Control", "no-store")):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_) -> None:
        """No line for each picture."""


class PageServer(ThreadingHTTPServer):
    """The page on 127.0.0.1; port 0 takes any free one."""

    daemon_threads = True

    def __init__(self, watched: Watched, port: int = 0):
        super().__init__(("127.0.0.1", port), _Handler)
        self.watched = watched

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/"


def watch(watched: Watched, *, port: int = 0, ready=lambda url: None) -> None:
    """Serve the page until Ctrl-C. ``ready`` is called with its address."""
    watched.poll()  # a wrong address or key is said here, before a browser opens
    watched.start()
    with PageServer(watched, port) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        ready(server.url)
        try:
            while True:
                time.sleep(3600)
        finally:
            watched.close()
            server.shutdown()
