"""A request of which no token can be drawn: an error for its reader, JSON for everyone."""

import functools
import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from nanoengine.engine.protocols import NON_FINITE
from nanoengine.server.replies import Answer, CompletionReplies
from nanoengine.tokenizer.tokenizer import byte_tokenizer
from tests.server.conftest import PacedRunner, ask, events, make_engine, running, until
from tests.server.test_refusals import assert_error


class Poisoned(PacedRunner):
    """A prompt that begins with "!" gets one token, then none that may be drawn; its logprobs are NaN."""

    def launch(self, batch):
        pending = super().launch(batch)
        tokens = pending.result()
        for row, seq in enumerate(batch.seqs):
            if tokens[row] and seq.token_ids[0] == ord("!") and seq.num_output_tokens:
                tokens[row] = [NON_FINITE]
        pending.logprobs = [[{token: float("nan") for token in row}] for row in tokens]
        return pending


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_request_without_a_token_to_draw_is_a_500_or_an_event_and_others_go_on(path):
    engine = make_engine(runner=Poisoned())
    bad, good = ({"prompt": text + "a"} for text in "!?")
    if path.endswith("chat/completions"):  # its template begins all prompts alike
        engine.runner.launch = functools.partial(_with_bad_chat, engine.runner)
        bad, good = ({"messages": [{"role": "user", "content": text}]} for text in ("!!", "??"))
    with running(engine) as server, server.client() as client:
        error = assert_error(ask(client, path, **bad, max_tokens=5), 500)
        assert error["code"] == "generation_failed" and "non-finite logits" in error["message"]
        body = {"model": "tiny", "stream": True, "max_tokens": 5} | bad
        with client.stream("POST", path, json=body) as response:
            assert response.status_code == 200
            found = events(response)
        assert found[-1]["error"]["code"] == "generation_failed"
        assert found[-1]["error"]["type"] == "server_error"
        assert not [event for event in found[:-1] if event["choices"][0]["finish_reason"]]
        assert ask(client, path, **good, max_tokens=5).is_success
        assert 'nanoengine_requests_total{reason="error"} 2.0' in client.get("/metrics").text
        until(lambda: server.is_idle)
    assert server.stats.failures == 0, "no step was started over"


def _with_bad_chat(runner, batch):
    pending = PacedRunner.launch(runner, batch)
    tokens = pending.result()
    for row, seq in enumerate(batch.seqs):
        if tokens[row] and bytes(seq.token_ids[: seq.num_prompt_tokens]).count(b"!!"):
            tokens[row] = [NON_FINITE]
    return pending


def strict(text: str):
    """JSON as it is defined: json.loads takes NaN and Infinity, which are no JSON."""
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


@pytest.mark.parametrize("stream_it", [False, True])
def test_logprobs_that_are_no_numbers_are_json_all_the_same(stream_it):
    """A runner's own fault, of a token that was drawn: -9999.0 as for a probability of 0."""
    with running(make_engine(runner=Poisoned())) as server, server.client() as client:
        response = ask(client, prompt="a", max_tokens=2, logprobs=1, stream=stream_it)
        assert response.is_success
        if stream_it:
            lines = [line[6:] for line in response.text.split("\n") if line.startswith("data: {")]
            choices = [strict(line)["choices"][0] for line in lines]
        else:
            choices = strict(response.text)["choices"]
        values = [x for choice in choices for x in (choice["logprobs"] or {}).get("token_logprobs", ())]
        assert values == [-9999.0] * 2


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), -1e30, -9999.5])
def test_the_least_logprob(value):
    replies = CompletionReplies("tiny", byte_tokenizer(256), num_top=2)
    answer = Answer(text="A", token_ids=[65], logprobs=[{65: value, 66: -0.5}], finish_reason="length")
    found = replies._all_logprobs(answer)
    assert found["token_logprobs"] == [-9999.0]
    strict(json.dumps(found))


def test_of_several_prompts_in_one_call_one_ends_it_for_all():
    with running(make_engine(runner=Poisoned())) as server, server.client() as client:
        assert_error(ask(client, prompt=["ab", "!b", "cd"], max_tokens=50), 500)
        until(lambda: server.is_idle)


def test_others_are_answered_while_a_large_answer_is_made(slots, monkeypatch):
    making, go_on = threading.Event(), threading.Event()

    def slow(self):
        making.set()
        assert go_on.wait(20)
        return body(self)

    body = CompletionReplies.body
    monkeypatch.setattr(CompletionReplies, "body", slow)
    with slots.client() as client, ThreadPoolExecutor() as pool:
        large = pool.submit(ask, client, max_tokens=2)
        try:
            assert making.wait(20)
            assert client.get("/health", timeout=5).is_success
        finally:
            go_on.set()
        assert large.result().is_success
