"""What browsers, proxies and probes need beside the requests: HEAD, OPTIONS, CORS, connections that are kept."""

import time

import pytest

from nanoengine.server.browsers import check_origin
from tests.server.conftest import make_engine, running, until

PAGE, OTHER = "https://chat.example.org", "https://evil.example.org"
ROUTES = {
    "/health": "GET",
    "/metrics": "GET",
    "/trace": "GET",
    "/v1/models": "GET",
    "/v1/models/tiny": "GET",
    "/openapi.json": "GET",
    "/v1/completions": "POST",
    "/v1/chat/completions": "POST",
}
BODY = {"model": "tiny", "prompt": "a", "max_tokens": 3}


def preflight(client, path="/v1/chat/completions", origin=PAGE, method="POST"):
    return client.options(
        path,
        headers={
            "Origin": origin,
            "Access-Control-Request-Method": method,
            "Access-Control-Request-Headers": "authorization,content-type,x-any",
        },
    )


@pytest.mark.parametrize("key", [None, "secret"])
def test_options_says_what_each_route_takes_and_needs_no_key(key):
    with running(make_engine(), api_key=key) as server, server.client() as client:
        for path, method in ROUTES.items():
            for answer in (client.options(path), preflight(client, path)):
                assert (answer.status_code, answer.content) == (204, b"")
                both = {"GET", "HEAD"} if method == "GET" else {"POST"}
                assert set(answer.headers["allow"].split(", ")) == both | {"OPTIONS"}
                assert (
                    "access-control-allow-origin" not in answer.headers
                )  # the default: no page of another origin
        assert client.options("/v1/none").status_code == 404
        assert (
            client.get("/health", headers={"Origin": PAGE}).headers.get(
                "access-control-allow-origin"
            )
            is None
        )


def test_head_is_get_without_a_body():
    with (
        running(make_engine(), api_key="secret", trace_steps=5) as server,
        server.client() as client,
    ):
        for path, method in ROUTES.items():
            headers = {"Authorization": "Bearer secret"}
            head, get = (client.request(name, path, headers=headers) for name in ("HEAD", "GET"))
            assert head.content == b""
            assert head.status_code == get.status_code == (200 if method == "GET" else 405)
            assert head.headers["content-type"] == get.headers["content-type"]
        assert client.head("/v1/models").status_code == 401
        assert client.head("/none").status_code == 404
        assert client.get("/health").json() == {"status": "ok"}  # the connection is in order


def test_a_named_origin_may_read_every_answer():
    engine = make_engine()
    with running(engine, api_key="secret", cors_origins=(PAGE, "http://localhost:3000")) as server:

        def broken(request):
            raise RuntimeError("a mistake")

        server.app.add_route("/broken", broken)
        with server.client(headers={"Origin": PAGE}) as client:
            allowed = preflight(client)
            assert allowed.is_success
            assert (
                allowed.headers["access-control-allow-headers"]
                == "authorization,content-type,x-any"
            )
            assert "POST" in allowed.headers["access-control-allow-methods"]
            key = {"Authorization": "Bearer secret"}
            answers = {
                200: client.post("/v1/completions", json=BODY, headers=key),
                401: client.post("/v1/completions", json=BODY),
                400: client.post("/v1/completions", json=BODY | {"n": "x"}, headers=key),
                404: client.get("/none"),
                405: client.put("/health"),
                500: client.get("/broken"),
                413: client.post("/v1/completions", content=b"x" * 5_000_000, headers=key),
            }
            stream = client.post("/v1/completions", json=BODY | {"stream": True}, headers=key)
            assert stream.headers["content-type"].startswith("text/event-stream")
            for status, answer in [*answers.items(), (200, stream)]:
                assert answer.status_code == status
                assert answer.headers["access-control-allow-origin"] == PAGE
                assert answer.headers["access-control-allow-credentials"] == "true"
                assert "Origin" in answer.headers["vary"]
                assert "Retry-After" in answer.headers["access-control-expose-headers"]
        with server.client() as client:
            assert not preflight(client, origin=OTHER).is_success
            for origin in (OTHER, "null", PAGE + ".evil.org", PAGE.replace("https", "http")):
                assert "access-control-allow-origin" not in preflight(client, origin=origin).headers
                assert (
                    "access-control-allow-origin"
                    not in client.get("/health", headers={"Origin": origin}).headers
                )


def test_with_a_star_every_page_may_read_but_not_with_credentials():
    with running(make_engine(), cors_origins=("*",)) as server, server.client() as client:
        for answer in (
            preflight(client),
            client.get("/health", headers={"Origin": OTHER, "Cookie": "a=b"}),
        ):
            assert answer.headers["access-control-allow-origin"] == "*"
            assert "access-control-allow-credentials" not in answer.headers


@pytest.mark.parametrize(
    ("given", "origin"),
    [
        ("*", "*"),
        ("null", "null"),
        ("HTTPS://App.Example.org/", "https://app.example.org"),
        ("http://localhost:3000", "http://localhost:3000"),
        ("https://a.org:443", "https://a.org"),
        ("http://[::1]:80", "http://[::1]"),
        ("chrome-extension://abc", "chrome-extension://abc"),
        ("https://Bücher.example:8443", "https://xn--bcher-kva.example:8443"),
    ],
)
def test_an_origin_is_written_as_browsers_send_it(given, origin):
    assert check_origin(given) == origin


def test_an_idle_connection_is_kept_as_long_as_asked():
    with running(make_engine(), keep_alive_s=1.0) as server, server.client() as client:
        assert client.get("/health").is_success
        connections = server.server.server_state.connections
        assert len(connections) == 1
        began = time.monotonic()
        until(lambda: not connections)
        assert 0.5 < time.monotonic() - began < 5
    with running(make_engine()) as server:  # the default is more than what proxies keep
        assert server.server.config.timeout_keep_alive > 90
