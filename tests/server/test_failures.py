"""What happens when a step, a text or the server itself fails: who is told, and who goes on."""

import asyncio
import threading
from types import SimpleNamespace

import pytest

from nanoengine.sampling_params import SamplingParams
from nanoengine.server.async_engine import MAX_FAILURES, EngineStopped
from nanoengine.server.output_stream import Request
from nanoengine.server.replies import CompletionReplies
from nanoengine.sim import expected_output
from tests.server.conftest import VOCAB, PacedRunner, ask, events, make_engine, until
from tests.server.test_async_engine import read, request, serve
from tests.server.test_refusals import assert_error


@pytest.mark.parametrize("failures", [1, MAX_FAILURES - 1])
def test_steps_that_fail_now_and_then_change_no_answer(failures):
    engine = make_engine()
    prompts = [[i, i + 1] for i in range(5)]
    launch = engine.runner.launch

    def fails_later(batch):
        if len(engine.runner.launches) == 7:
            engine.runner.failures = failures
        return launch(batch)

    engine.runner.launch = fails_later

    async def main(served):
        generations = [await served.add([request(prompt, 30)]) for prompt in prompts]
        readers = [asyncio.create_task(read(generation)) for generation in generations]
        answers = await asyncio.gather(*readers)
        assert served.stats.failures == failures
        return answers

    assert serve(engine, main) == [[(expected_output(prompt, 30, VOCAB), "length")] for prompt in prompts]


def test_steps_that_always_fail_end_their_requests_and_the_engine_goes_on():
    engine = make_engine()

    async def main(served):
        engine.runner.failures = MAX_FAILURES
        generation = await served.add([request([1]), request([2])])
        updates = [update async for update in generation]
        assert [(update.failed, update.finish_reason) for update in updates] == [(True, "abort")] * 2
        assert served.is_running
        return await read(await served.add([request([3], 5)]))

    assert serve(engine, main) == [(expected_output([3], 5, VOCAB), "length")]


def test_a_runner_that_is_lost_for_ever_ends_the_engine_at_its_first_failure(slots):
    """So that /health says it, and whoever looks after the server starts a new one."""
    runner = slots.engine.runner
    with slots.client() as client:
        runner.failure, runner.failures = "rank 1 was killed", 2
        assert assert_error(ask(client), 503)["code"] == "engine_failed"
        until(lambda: client.get("/health").status_code == 503)
        assert_error(ask(client), 503)
    assert runner.failures == 1, "a step was tried again"


def test_a_request_that_ends_in_a_failing_step_has_ended():
    class Observer:
        """Raises in the step in which the first request ends: after its end was written, before it is reported."""

        raised = False

        def before(self, engine, plan, batch):
            return {}

        def after(self, engine, step, output):
            if output.finished and not self.raised:
                self.raised = True
                raise RuntimeError("no record today")

    observer = Observer()

    async def main(served):
        return await read(await served.add([request([1], 4), request([2], 9)]))

    answers = serve(make_engine(observer=observer), main)
    assert observer.raised
    assert answers == [(expected_output([1], 4, VOCAB), "length"), (expected_output([2], 9, VOCAB), "length")]


class Words:
    """A detokenizer, "<id>" for each token, that raises at token number ``bad``; or a text held back to the end."""

    def __init__(self, bad: int | None = None, at_end: bool = False):
        self.bad, self.at_end, self.count, self.new = bad, at_end, 0, ""

    def push(self, token_id):
        self.count += 1
        if self.count == self.bad:
            raise KeyError(f"no token {token_id}")
        self.new += f"<{token_id}>"

    def finish(self):
        if self.at_end:
            raise UnicodeError("half a character")

    def take(self):
        new, self.new = self.new, ""
        return new


@pytest.mark.parametrize("overlap", [0, 1])
def test_a_text_that_cannot_be_made_ends_its_own_request_alone(overlap):
    engine = make_engine(overlap=overlap)
    texts = [Words(), Words(bad=3), Words(bad=9), Words(at_end=True)]  # the third at its very last token

    async def main(served):
        generations = []
        for i, words in enumerate(texts):
            one = Request([i], SamplingParams(max_tokens=9), detokenizer=words)
            generations.append(await served.add([one]))
        ended = []
        for generation in generations:
            updates = [update async for update in generation]
            ended.append((updates[-1].failed, "".join(update.text for update in updates)))
        assert served.stats.failures == 0  # no step had to be started over
        return ended

    right = ["".join(f"<{token}>" for token in expected_output([i], 9, VOCAB)) for i in range(4)]
    ended = serve(engine, main)
    assert ended[0] == (False, right[0])
    for i in (1, 2, 3):
        assert ended[i][0], "its reader must be told"
        assert right[i].startswith(ended[i][1])  # what was told before holds


def test_logprobs_out_of_step_end_the_request():
    class Logprobs(PacedRunner):
        """The logprobs of one step cannot be had: the token was appended already."""

        steps = 0

        def launch(self, batch):
            pending = super().launch(batch)
            self.steps += 1
            entry = [] if self.steps == 3 else [[{1: -1.0}] for _ in batch.seqs]
            pending.logprobs = entry
            return pending

    async def main(served):
        updates = [update async for update in await served.add([request([1], 8, logprobs=1)])]
        assert served.stats.failures == 1
        other = [update async for update in await served.add([request([2], 4, logprobs=1)])]
        return updates, other

    updates, other = serve(make_engine(runner=Logprobs()), main)
    assert updates[-1].failed
    assert sum(len(update.logprobs) for update in updates) == 2
    assert not other[-1].failed
    assert sum(len(update.logprobs) for update in other) == 4


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_nobody_waits_for_a_thread_that_has_died():
    engine = make_engine()

    async def main(served):
        engine.runner.error, engine.runner.failures = SystemExit("killed"), 1
        generation = await served.add([request([1])])
        assert await read(generation) == [([], "abort")]
        assert not served.is_running
        with pytest.raises(EngineStopped):
            await served.add([request([1])])

    serve(engine, main)


def test_an_engine_that_keeps_failing_is_503_and_no_trace_of_python(slots):
    with slots.client() as client:
        slots.engine.runner.failures = 3
        assert assert_error(ask(client), 503)["code"] == "engine_failed"
        assert ask(client).is_success
        assert "nanoengine_failed_steps_total 3.0" in client.get("/metrics").text


def stream(client, *, at_line=lambda: None, **body) -> list[dict]:
    asked = {"model": "tiny", "prompt": "a", "max_tokens": 9, "stream": True} | body
    with client.stream("POST", "/v1/completions", json=asked) as response:
        assert response.status_code == 200
        lines = [(line, at_line())[0] for line in response.iter_lines()]
        return events(SimpleNamespace(iter_lines=lambda: lines))


def test_a_stream_on_a_failing_engine_ends_with_an_event(slots):
    runner = slots.engine.runner
    with slots.client() as client:
        runner.failures = 2  # then it works again: nothing is lost, nothing said
        whole = stream(client, max_tokens=9)
        assert "".join(event["choices"][0]["text"] for event in whole) == ask(client, prompt="a", max_tokens=9).json()[
            "choices"][0]["text"]  # fmt: skip
        launch = runner.launch

        def fails_later(batch):
            if len(batch.seqs) and batch.seqs[0].num_output_tokens == 4:
                read.wait(20)  # else it may happen before the stream's first look, and there is nothing but an error
                runner.failures = 1
            return launch(batch)

        read, runner.launch = threading.Event(), fails_later
        found = stream(client, at_line=read.set)
        runner.launch = launch
        assert found[-1]["error"] == {"message": "the engine failed on this request; its log says more",
                                      "type": "server_error", "param": None, "code": "engine_failed"}  # fmt: skip
        assert len(found) > 1
        assert not [event for event in found[:-1] if event["choices"][0]["finish_reason"]]
        assert stream(client)[-1]["choices"][0]["finish_reason"] == "length"
        metrics = client.get("/metrics").text
    assert "nanoengine_failed_steps_total 5.0" in metrics
    assert 'nanoengine_requests_total{reason="error"} 1.0' in metrics


def test_a_text_that_cannot_be_made_ends_its_stream_with_an_event(slots, monkeypatch):
    real = slots.service.new_detokenizer

    def broken(params):
        made = real(params)
        if params.seed == 13:
            made.push = lambda token: 1 / 0
        return made

    monkeypatch.setattr(slots.service, "new_detokenizer", broken)
    with slots.client() as client:
        assert stream(client, seed=13)[-1]["error"]["code"] == "engine_failed"
        assert assert_error(ask(client, seed=13), 503)["code"] == "engine_failed"
        assert stream(client, seed=14)[-1]["choices"][0]["finish_reason"] == "length"
    assert slots.stats.failures == 0


def test_a_bug_in_a_stream_is_an_event_without_its_traceback(slots, monkeypatch):
    def broken(*_):
        raise ZeroDivisionError("secret detail")

    with slots.client() as client:
        with monkeypatch.context() as patch:
            patch.setattr(CompletionReplies, "chunk", broken)
            [event] = stream(client)
        assert event["error"]["code"] == "internal_error"
        assert "secret" not in str(event)
        until(lambda: slots.is_idle)
        assert ask(client).is_success


def test_a_bug_is_a_500_without_its_traceback(slots, monkeypatch):
    async def broken(*_):
        raise ZeroDivisionError("secret detail")

    monkeypatch.setattr(slots.service, "add", broken)
    with slots.client() as client:
        response = ask(client)
    assert_error(response, 500)
    assert "secret" not in response.text
