"""A server on a free port, in a thread of the test's own process: with slots for a model, or a tiny one."""

import json
import re
import threading
import time
from contextlib import contextmanager

import httpx
import pytest

from nanoengine.config import EngineConfig
from nanoengine.engine.llm_engine import LLMEngine
from nanoengine.server.app import Settings, make_app
from nanoengine.server.run import listen, make_server
from nanoengine.sim import Done, SlotRunner
from nanoengine.tokenizer.tokenizer import byte_tokenizer

VOCAB = 256  # every token is a byte


class PacedRunner(SlotRunner):
    """SlotRunner that takes ``delay`` seconds a step, and fails as often as ``failures`` says.

    launches: for each step, the ids of its sequences. gate: cleared, it holds the next step in the middle.
    """

    def __init__(self, num_blocks: int = 256, block_size: int = 4, vocab_size: int = VOCAB, **options):
        super().__init__(num_blocks, block_size, vocab_size, **options)
        self.delay, self.failures = 0.0, 0
        self.error: BaseException = RuntimeError("the runner was told to fail")
        self.launches: list[list[int]] = []
        self.gate = threading.Event()
        self.gate.set()

    def launch(self, batch):
        self.launches.append([seq.seq_id for seq in batch.seqs])
        assert self.gate.wait(60)
        time.sleep(self.delay)
        if self.failures:
            self.failures -= 1
            raise self.error
        return super().launch(batch)


class Saying(PacedRunner):
    """Says ``text``, byte by byte."""

    def __init__(self, text: str, **options):
        super().__init__(**options)
        self.said = text.encode()

    def launch(self, batch):
        pending, said = super().launch(batch), [[self.said[seq.num_output_tokens]] for seq in batch.seqs]
        return Done(lambda: [tokens and new for tokens, new in zip(pending.result(), said, strict=True)])



def make_engine(**settings) -> LLMEngine:
    runner = settings.pop("runner", None) or PacedRunner(settings.pop("num_blocks", 256))
    observer = settings.pop("observer", None)
    defaults = {"max_num_seqs": 8, "max_model_len": 512, "vocab_size": VOCAB}
    return LLMEngine(EngineConfig(**defaults | settings), runner=runner, observer=observer)


class Running:
    """A server that runs. ``service.engine.stats`` may be read; the engine itself only when nothing is open."""

    def __init__(self, app):
        self.app, self.service = app, app.state.service
        self.sock = listen("127.0.0.1", 0)
        self.port = self.sock.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.server = make_server(app, log_level="critical")
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.sock]}, daemon=True)
        self.thread.start()
        until(lambda: self.server.started)

    @property
    def stats(self):
        return self.service.engine.stats

    @property
    def is_idle(self) -> bool:
        """Nothing is open and every block is free."""
        return not self.service.engine.num_open and self.stats.free_blocks == self.stats.num_blocks

    def client(self, **options) -> httpx.Client:
        # verify=False: without TLS, and reading the certificates would take longer than most tests
        return httpx.Client(base_url=self.url, timeout=30, verify=False, **options)

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(30)
        assert not self.thread.is_alive()


def until(condition, seconds: float = 20.0) -> None:
    """Wait until it is true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.002)


@contextmanager
def running(engine: LLMEngine, tokenizer=None, **settings):
    defaults = {"model_name": "tiny", "grace_s": 5.0}
    server = Running(make_app(engine, tokenizer or byte_tokenizer(engine.config.vocab_size),
                              Settings(**defaults | settings)))  # fmt: skip
    try:
        yield server
    finally:
        go_on(engine.runner)
        server.stop()


def go_on(runner) -> None:
    """At the end of a test, also of one that failed while it held a step."""
    runner.delay = 0.0
    if isinstance(runner, PacedRunner):
        runner.gate.set()


def hold(runner: PacedRunner) -> None:
    """Wait until a step has been launched that will not go on before ``runner.gate`` is set."""
    runner.gate.clear()
    begun = len(runner.launches)
    until(lambda: len(runner.launches) > begun)


def aborted(client) -> dict[str, float]:
    """What /metrics says of requests aborted: {steps begun before their blocks were free: requests}."""
    lines = client.get("/metrics").text.splitlines()
    found = (re.fullmatch(r'nanoengine_requests_aborted_total{steps="(\d+)"} (\S+)', line) for line in lines)
    return {match[1]: float(match[2]) for match in found if match}


@pytest.fixture
def slots():
    """A server over slots, with its engine: ``slots.engine.runner.delay`` slows it down."""
    engine = make_engine()
    with running(engine) as server:
        server.engine = engine
        yield server
    engine.block_manager.check_invariants([])
    assert engine.block_manager.num_free_blocks == engine.block_manager.num_blocks


def events(response) -> list:
    """The data of each server-sent event; [DONE] must be the last."""
    lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def ask(client, path="/v1/completions", **body):
    defaults = {"model": "tiny"} | ({"prompt": "hello"} if path == "/v1/completions" else {})
    return client.post(path, json=defaults | body)
