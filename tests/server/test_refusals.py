"""What the server refuses, and in which words; each error has OpenAI's shape, and the server goes on."""

import time
from types import SimpleNamespace

import httpx
import openai
import pytest

from nanoengine.server.errors import ApiError
from nanoengine.server.params import completion_requests, parse
from nanoengine.server.protocol import CompletionRequest
from tests.server.conftest import VOCAB, ask, events, make_engine, running, until

BAD = [
    (dict(n=0), "n"),
    (dict(n=129), "n"),
    (dict(n="2"), "n"),
    (dict(n=100, prompt=["a"] * 100), "n"),
    (dict(cache_salt=""), "cache_salt"),
    (dict(cache_salt=5), "cache_salt"),
    (dict(best_of=2), "best_of"),
    (dict(echo=True), "echo"),
    (dict(suffix="x"), "suffix"),
    (dict(logit_bias={"1": 2.0}), "logit_bias"),  # slots have no logits
    (dict(logit_bias={"1": 101}), "logit_bias"),
    (dict(logit_bias={"01": 1, "1": 1}), "logit_bias"),
    (dict(logit_bias={"1" * 5000: 1}), "logit_bias"),
    (dict(allowed_token_ids=[]), "allowed_token_ids"),
    (dict(allowed_token_ids=[1]), "allowed_token_ids"),
    (dict(bad_words=["a"]), "bad_words"),
    (dict(bad_words=[""]), "bad_words"),
    (dict(bad_words=["a"] * 1001), "bad_words"),
    (dict(bad_words=["a" * 257]), "bad_words"),
    (dict(prompt_logprobs=1), "prompt_logprobs"),
    (dict(prompt_logprobs=21), "prompt_logprobs"),
    (dict(prompt_logprobs=0, stream=True), "prompt_logprobs"),
    (dict(include_stop_str_in_output=1), "include_stop_str_in_output"),
    (dict(guided_regex="a"), "guided_regex"),
    (dict(use_beam_search=True), "use_beam_search"),
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
    (dict(prompt=["a"] * 300), "prompt"),  # more than may ever be open
    (dict(prompt="a" * 200_000), "prompt"),
    (dict(prompt=[1, "a"]), "prompt"),
    (dict(stop=["a"] * 100_000), "stop"),
    (dict(stop=["a" * 257]), "stop"),
    (dict(stop=["a", ""]), "stop"),
    (dict(temperature=1e308), "temperature"),
    (dict(repetition_penalty=1e308), "repetition_penalty"),
    (dict(top_k=2**40), "top_k"),
    (dict(logit_bias={"x": 1.0, "-5": 2.0}), "logit_bias"),
    (dict(logit_bias={"1": "2"}), "logit_bias"),
    (dict(best_of=10**30), "best_of"),
    (dict(max_tokens=10**30, min_tokens=10**29, seed=10**30), "seed"),
    (dict(user=5), "user"),
    (dict(metadata={"a": 1}), "metadata"),
]
BAD_CHAT = [
    (dict(messages=[]), "messages"),
    (dict(messages="hi"), "messages"),
    (dict(messages=[{"role": "tool", "content": "x"}]), "messages[0].role"),
    (dict(messages=[{"role": "user", "content": None}]), "messages[0].content"),
    (dict(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]), "messages"),
    (dict(tools=[{"type": "function"}]), "tools"),
    (dict(response_format={"type": "json_object"}), "response_format"),
    (dict(response_format={"type": "json_schema", "json_schema": {}}), "response_format"),
    (dict(response_format={"type": "text", "x": 1}), "response_format"),
    (dict(tools=[{"type": "function", "function": {"name": "f"}}], tool_choice="required"), "tools"),
    (dict(tool_choice={"type": "function"}), "tool_choice"),
    (dict(modalities=["text", "audio"]), "modalities"),
    (dict(reasoning_effort="low"), "reasoning_effort"),
    (dict(max_completion_tokens=0), "max_completion_tokens"),
    (dict(messages=[{"role": "assistant", "content": "a", "tool_calls": [1]}]), "messages[0].tool_calls"),
    (dict(messages=[{"role": "user", "content": "a", "x": 1}]), "messages[0].x"),
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
     b'{"model": "tiny", "prompt": "\x00\x01"}', b'{"model": 5, "prompt": "a"}',
     b'{"model": "tiny", "prompt": "a", "temperature": Infinity}', b'{"model": "tiny", "prompt": "a", "seed": 1.0}',
     b'{"model": "tiny", "prompt": "a", "seed": ' + b"9" * 100_000 + b"}", b"\xef\xbb\xbf{}"],
)  # fmt: skip
def test_a_body_that_is_no_request_is_a_400(slots, data):
    with slots.client() as client:
        assert_error(client.post("/v1/completions", content=data, headers={"Content-Type": "application/json"}), 400)


N = 200_000


@pytest.mark.parametrize(
    "body",
    ['"prompt": [' + "null," * N + "null]", '"prompt": [' + "[null]," * N + "1]", '"prompt": [' + '"a",' * N + '"a"]',
     '"prompt": "a", "stop": [' + "1," * N + "1]", '"prompt": "a", "metadata": {' + '"a":1,' * N + '"a":1}',
     '"prompt": "a", ' + ",".join(f'"a{i}":0' for i in range(N // 2))],
    ids=["nulls", "lists", "prompts", "stops", "one key", "keys"],
)  # fmt: skip
def test_a_large_wrong_body_is_refused_before_it_costs_anything(body):
    """Such bodies cost 10 to 20 s and 2 GB, and the whole server stood still."""
    data = ('{"model": "tiny", ' + body + "}").encode()
    began = time.thread_time()
    with pytest.raises(ApiError) as refused:
        parsed = parse(CompletionRequest, data)
        completion_requests(parsed, SimpleNamespace(max_prompts=64))
    assert refused.value.status == 400
    assert time.thread_time() - began < 3  # of this thread alone: others may keep the machine busy


def test_a_long_prompt_does_not_stop_the_others():
    """The encoder is asked in a way that lets the event loop and the engine go on; its ids are the same."""
    engine = make_engine(max_model_len=20_000, num_blocks=5000)
    with running(engine) as server, server.client() as client:
        service, text = server.service, "1" * 15_000 + "é 汉" * 100
        assert service.encode(text) == service.tokenizer.encode(text)
        assert service.encode(text, False) == service.tokenizer.encode(text, add_special_tokens=False)
        for prompt in (text * 2, text * 9):  # encoded and found too long; too long at first sight
            assert "length is 20000 tokens" in assert_error(ask(client, prompt=prompt), 400, "prompt")["message"]
        assert ask(client, prompt=text, max_tokens=2).is_success


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
        for method, path in (("PUT", "/v1/models"), ("DELETE", "/trace"), ("PATCH", "/metrics"), ("BREW", "/health"),
                             ("POST", "/openapi.json"), ("GET", "/v1/chat/completions")):  # fmt: skip
            wrong = client.request(method, path)
            assert_error(wrong, 405)
            assert set(wrong.headers["allow"].split(", ")) > {"OPTIONS"}
            assert method not in wrong.headers["allow"]
        for path in ("/v1/completions/", "/v1/chat/completions/", "/v1", "/V1/COMPLETIONS", "/" + "a" * 8000,
                     "/%00%ff%2e%2e", "/v1/models/%00", "/v1/models/"):  # fmt: skip
            assert_error(client.post(path, json={}) if "models" not in path else client.get(path), 404)
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
    with running(engine, request_timeout_s=0.8) as server, server.client() as client:
        assert assert_error(ask(client, max_tokens=400), 503)["code"] == "timeout"
        with client.stream("POST", "/v1/completions", json={"model": "tiny", "prompt": "a", "max_tokens": 400,
                                                            "stream": True}) as response:  # fmt: skip
            found = events(response)
        assert found[-1]["error"]["code"] == "timeout"
        assert len(found) > 1
        until(lambda: server.is_idle)


def test_openai_client_knows_each_error(slots):
    client = openai.OpenAI(base_url=f"{slots.url}/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.NotFoundError, match="only 'tiny'"):
        client.completions.create(model="gpt", prompt="a")
    with pytest.raises(openai.BadRequestError, match="store=True is not supported"):
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "a"}], store=True)
    assert httpx.get(f"{slots.url}/v1/models/a/b").status_code == 404
