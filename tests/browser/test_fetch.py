"""A page of another origin asks the server with fetch, as a chat client in the browser does."""

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from tests.browser.lab import browser_page
from tests.server.conftest import make_engine, running

ASK = """async ([url, body, key, credentials]) => {
    try {
        const answer = await fetch(url, {method: "POST", credentials, body: JSON.stringify(body),
            headers: {"Content-Type": "application/json", "Authorization": "Bearer " + key}});
        return [answer.status, await answer.text()];
    } catch (error) { return [0, String(error)]; }
}"""
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "max_tokens": 3}


class Page(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(b"<title>page</title>")

    def log_message(self, *_):
        pass


@pytest.fixture
def origin():
    with HTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize(
    ("named", "credentials", "allowed"),
    [("self", "omit", True), ("self", "include", True), ("*", "omit", True), ("*", "include", False)]
    + [("https://other.example.org", "omit", False), (None, "omit", False)],
)
def test_a_page_may_read_answers_streams_and_errors_if_its_origin_is_named(
    origin, named, credentials, allowed
):
    origins = () if named is None else (origin if named == "self" else named,)
    with running(make_engine(), api_key="secret", cors_origins=origins) as server, browser_page(800) as page:
        page.goto(origin)
        url = f"{server.url}/v1/chat/completions"
        whole, stream, wrong = (
            page.evaluate(ASK, [url, BODY | more, key, credentials])
            for more, key in (({}, "secret"), ({"stream": True}, "secret"), ({}, "wrong"))
        )
    if not allowed:
        assert [answer[0] for answer in (whole, stream, wrong)] == [0, 0, 0]
        return
    assert (whole[0], stream[0], wrong[0]) == (200, 200, 401)
    assert '"finish_reason":"length"' in whole[1]
    assert stream[1].endswith("data: [DONE]\n\n")
    assert "invalid_api_key" in wrong[1]
