"""What the server refuses, and in which words; each error has OpenAI's shape, and the server goes on."""

import httpx
import openai
import pytest

from tests.server.conftest import VOCAB, ask, events, make_engine, running, until

BAD = [
    (dict(n=2), "n"),
    (dict(best_of=2), "best_of"),
    (dict(echo=True), "echo"),
    (dict(suffix="x"), "suffix"),
    (dict(logit_bias={"1": 2.0}), "logit_bias"),
    (dict(store=True), "store"),
    (dict(no_such_thing=1), "no_such_thing"),
    (dict(max_tokens="5"), "max_tokens"),
    (dict(max_tokens=0), "max_tokens"),
    (dict(max_tokens=True), "max_tokens"),
    (dict(temperature=-0.1), "temperature"),
    (dict(top_p=0), "top_p"),
    (dict(seed=2**70), "seed"),
    (dict(stop=["a"] * 17), "stop"),
    (dict(stop=""), "stop"),
    (dict(stop_token_ids=[VOCAB]), "stop_token_ids"),
    (dict(min_tokens=20), "min_tokens"),
    (dict(prompt=""), "prompt"),
    (dict(prompt=[]), "prompt"),
    (dict(prompt=[[]]), "prompt"),
    (dict(prompt=[VOCAB]), "prompt"),
    (dict(prompt=[-1]), "prompt"),
    (dict(prompt=[1] * 512), "prompt"),
    (dict(stream_options={"include_usage": True}), "stream_options"),
]
BAD_CHAT = [
    (dict(messages=[]), "messages"),
    (dict(messages="hi"), "messages"),
    (dict(messages=[{"role": "tool", "content": "x"}]), "messages[0].role"),
    (dict(messages=[{"role": "user", "content": None}]), "messages[0].content"),
    (dict(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]), "messages"),
    (dict(tools=[{"type": "function"}]), "tools"),
    (dict(response_format={"type": "json_object"}), "response_format"),
    (dict(top_logprobs=2), "top_logprobs"),
    (dict(max_tokens=3, max_completion_tokens=4), "max_tokens"),
    (dict(chat_template_kwargs={"messages": []}), "chat_template_kwargs"),
    (dict(chat_template_kwargs={"self": 1}), "chat_template_kwargs"),
]


def assert_error(response, status: int, param: str | None = None) -> dict:
    error = response.json()["error"]
    assert response.status_code == status, error
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert "Traceback" not in response.text
    if param is not None:
        assert (error["param"] or "").startswith(param), error
        assert param.split("[")[0] in error["message"], error
    return error


def test_what_cannot_be_done_is_refused_by_name(slots):
    with slots.client() as client:
        for body, param in BAD:
            assert_error(ask(client, **body), 400, param)
        for body, param in BAD_CHAT:
            talk = {"messages": [{"role": "user", "content": "a"}]}
            assert_error(ask(client, "/v1/chat/completions", **talk | body), 400, param)
        assert ask(client, max_tokens=2, n=1, logit_bias={}, user="me", metadata={"a": "b"}, echo=False).is_success
    assert slots.is_idle


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[]", b"null", b'"x"', b"[" * 100_000, b'{"a":' * 100_000, b"\xff\xfe", b'{"model":"\\ud800"}',
     b'{"model": "tiny", "prompt": "a", "temperature": NaN}', b'{"model": "tiny", "prompt": "a", "temperature": 1e999}',
     b'{"model": "tiny", "prompt": "\x00\x01"}', b'{"model": 5, "prompt": "a"}'],
)  # fmt: skip
def test_a_body_that_is_no_request_is_a_400(slots, data):
    with slots.client() as client:
        assert_error(client.post("/v1/completions", content=data, headers={"Content-Type": "application/json"}), 400)


def test_other_statuses(slots):
    with slots.client() as client:
        assert_error(ask(client, model="other"), 404, "model")
        assert_error(client.get("/v1/embeddings"), 404)
        assert_error(client.get("/v1/models/other"), 404, "model")
        assert_error(client.get("/v1/completions"), 405)
        assert_error(client.get("/trace"), 404)
        assert "Content-Type" in assert_error(client.post("/v1/completions", content=b"{}"), 400)["message"]
        big = {"model": "tiny", "prompt": "a" * 10_000_000}
        assert_error(client.post("/v1/completions", json=big), 413)
        chunked = (b"x" * 100_000 for _ in range(100))  # no content-length
        assert_error(client.post("/v1/completions", content=chunked, headers={"Content-Type": "application/json"}), 413)
        assert client.get("/v1/models").json()["data"][0]["id"] == "tiny"
        assert client.get("/v1/models/tiny").json()["object"] == "model"
        assert client.get("/health").json() == {"status": "ok"}


def test_api_key():
    with running(make_engine(), api_key="sécret") as server, server.client() as client:
        wrong = ["", "Bearer", "Bearer wrong", "sécret", "Basic sécret", "Bearer sécre"]
        for headers in [{}, *({"Authorization": value.encode()} for value in wrong)]:
            for path in ("/v1/models", "/v1/completions", "/trace"):
                error = assert_error(client.get(path, headers=headers), 401)
                assert error["code"] == "invalid_api_key"
        assert client.get("/v1/models", headers={"Authorization": "Bearer sécret".encode()}).is_success
        assert client.get("/health").is_success
        assert client.get("/metrics").is_success


def test_a_full_queue_is_429_with_retry_after():
    engine = make_engine(max_num_seqs=1)
    engine.runner.delay = 0.01
    with running(engine, max_waiting=0) as server, server.client() as client:
        with client.stream("POST", "/v1/completions", json={"model": "tiny", "prompt": "a", "max_tokens": 300,
                                                            "stream": True}):  # fmt: skip
            refused = ask(client)
            assert_error(refused, 429)
            assert 1 <= int(refused.headers["retry-after"]) <= 60
        until(lambda: server.is_idle)
        assert ask(client, max_tokens=2).is_success
        assert 'nanoengine_requests_refused_total{status="429"} 1.0' in client.get("/metrics").text


def test_a_request_that_takes_too_long_is_ended():
    engine = make_engine()
    engine.runner.delay = 0.02
    with running(engine, request_timeout_s=0.3) as server, server.client() as client:
        assert assert_error(ask(client, max_tokens=400), 503)["code"] == "timeout"
        with client.stream("POST", "/v1/completions", json={"model": "tiny", "prompt": "a", "max_tokens": 400,
                                                            "stream": True}) as response:  # fmt: skip
            found = events(response)
        assert found[-1]["error"]["code"] == "timeout"
        assert len(found) > 1
        until(lambda: server.is_idle)


def test_an_engine_that_keeps_failing_is_503_and_no_trace_of_python(slots):
    with slots.client() as client:
        slots.engine.runner.failures = 3
        assert assert_error(ask(client), 503)["code"] == "engine_failed"
        assert ask(client).is_success
        assert "nanoengine_failed_steps_total 3.0" in client.get("/metrics").text


def test_a_bug_is_a_500_without_its_traceback(slots, monkeypatch):
    async def broken(*_):
        raise ZeroDivisionError("secret detail")

    monkeypatch.setattr(slots.service, "add", broken)
    with slots.client() as client:
        response = ask(client)
    assert_error(response, 500)
    assert "secret" not in response.text


def test_openai_client_knows_each_error(slots):
    client = openai.OpenAI(base_url=f"{slots.url}/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.NotFoundError, match="only 'tiny'"):
        client.completions.create(model="gpt", prompt="a")
    with pytest.raises(openai.BadRequestError, match="n=3 is not supported"):
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "a"}], n=3)
    assert httpx.get(f"{slots.url}/v1/models/a/b").status_code == 404
