"""Ctrl-C in the middle of generate: the call ends, the next one works, no block is held, the handler is back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from nanoengine import LLM, SamplingParams
from nanoengine.interrupt import interruptible
from nanoengine.sim import SlotRunner

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=10**6, ignore_eos=True)


def tiny(**settings) -> LLM:
    settings = {"max_model_len": 2000, "num_blocks": 600, "block_size": 4, "device": "cpu"} | settings
    return LLM("tiny-llama", load_format="dummy", **settings)


def assert_empty(llm: LLM) -> None:
    engine = llm.engine
    assert not engine.has_unfinished() and not engine.scheduler.waiting and not engine.scheduler.running
    assert engine.block_manager.num_free_blocks == engine.block_manager.num_blocks
    engine.block_manager.check_invariants([])


# real signals, in a process of their own

PROGRAM = """
import os, signal, threading, time
from tests.test_interrupt import GREEDY, LONG, assert_empty, tiny

def press_when(ready, times=1):
    def wait():
        while not ready():
            time.sleep(0.002)
        for _ in range(times):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.005)
    threading.Thread(target=wait, daemon=True).start()

def generated(llm):
    return sum(seq.num_output_tokens for seq in list(llm.engine.sequences.values()))

handler = signal.getsignal(signal.SIGINT)
for overlap in (0, 1):
    llm = tiny(overlap=overlap)
    want = [out.token_ids for out in llm.generate(["a", "b c"], GREEDY, use_tqdm=False)]
    for call in ("generate", "bar", "stream", "chat"):
        press_when(lambda: generated(llm) >= 5)
        seen = 0
        try:
            if call == "stream":
                for item in llm.stream(["a", "b c"], LONG):
                    seen += 1
            elif call == "chat":
                llm.chat("a", LONG, use_tqdm=False)
            else:
                llm.generate(["a", "b c"], LONG, use_tqdm=call == "bar")
            raise SystemExit(f"{call} was not interrupted")
        except KeyboardInterrupt:
            pass
        assert seen < 3000
        assert signal.getsignal(signal.SIGINT) is handler
        assert_empty(llm)
        assert [out.token_ids for out in llm.generate(["a", "b c"], GREEDY, use_tqdm=False)] == want
        print(overlap, call, "ok", flush=True)
"""


def test_sigint_in_the_middle_of_each_call():
    result = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split("\n")[:-1] == [
        f"{overlap} {call} ok" for overlap in (0, 1) for call in ("generate", "bar", "stream", "chat")
    ]


STUCK = """
import os, signal, threading, time
from tests.test_interrupt import GREEDY, LONG, assert_empty, tiny
llm = tiny()
want = llm.generate("a", GREEDY, use_tqdm=False)[0].token_ids
real = llm.engine.runner.launch
def stuck(batch):
    for _ in range(2):
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        time.sleep(0.3)
    time.sleep(30)
llm.engine.runner.launch = stuck
begin = time.monotonic()
try:
    llm.generate(["a", "b"], LONG, use_tqdm=False)
except KeyboardInterrupt:
    print(time.monotonic() - begin < 20)
llm.engine.runner.launch = real
assert_empty(llm)
assert llm.generate("a", GREEDY, use_tqdm=False)[0].token_ids == want
print("ok")
"""


def test_a_second_sigint_ends_a_step_that_hangs():
    result = subprocess.run([sys.executable, "-c", STUCK], capture_output=True, text=True, timeout=120)
    assert result.stdout.split() == ["True", "ok"], result.stderr


# raised at a chosen place


class Raises:
    """Wraps a runner: the n-th launch, or asking for its result, raises."""

    def __init__(self, runner, where: str, n: int, error: type[BaseException]):
        self.runner, self.where, self.left, self.error = runner, where, n, error

    def __getattr__(self, name):
        return getattr(self.runner, name)

    def _count(self, where: str) -> None:
        if where == self.where:
            self.left -= 1
            if self.left == 0:
                raise self.error

    def launch(self, batch):
        self._count("launch")
        pending = self.runner.launch(batch)
        real = pending.result

        def result():
            self._count("result")
            return real()

        pending.result = result
        return pending


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("where", ["launch", "result"])
@pytest.mark.parametrize("n", [1, 2, 3, 7])
def test_raised_inside_a_step(where, n, overlap, error):
    """Also with 20 blocks, where requests are preempted; a request of another call starts over and ends right."""
    prompts = ["some words", "other", "x"]
    with tiny(runner=SlotRunner(20, 4, 1024), overlap=overlap) as llm:
        want = [out.token_ids for out in llm.generate(prompts, GREEDY, use_tqdm=False)]
        bystander = llm.engine.add_request(list(b"other"), GREEDY)
        runner = llm.engine.runner
        llm.engine.runner = Raises(runner, where, n, error)
        with pytest.raises(error):
            llm.generate(prompts, GREEDY, use_tqdm=False)
        assert list(llm.engine.sequences.values()) == ([] if bystander.is_finished else [bystander])
        llm.engine.runner = runner
        assert [out.token_ids for out in llm.generate(prompts, GREEDY, use_tqdm=False)] == want
        for _ in llm.engine.run():
            pass
        assert bystander.output_ids == want[1]
        assert_empty(llm)


# the handler


@pytest.fixture
def handler():
    """A SIGINT handler of the user's own, that notes its calls."""
    calls = []
    before = signal.signal(signal.SIGINT, lambda number, frame: calls.append(number))
    yield calls
    signal.signal(signal.SIGINT, before)


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.01)  # the handler runs at the next bytecode of the main thread


def test_pressed_in_the_last_step_still_counts():
    """A loop over calls of one step each must end at the first Ctrl-C."""
    with pytest.raises(KeyboardInterrupt), interruptible():
        press()


def test_check_raises_once():
    with interruptible() as check:
        press()
        with pytest.raises(KeyboardInterrupt):
            check()
        check()


def test_the_users_own_handler_is_called_in_its_stead(handler):
    mine = signal.getsignal(signal.SIGINT)
    with interruptible() as check:
        press()
        assert handler == [], "not in the middle of a step"
        check()
        assert handler == [signal.SIGINT]
        press()
    assert handler == [signal.SIGINT] * 2
    assert signal.getsignal(signal.SIGINT) is mine


def test_an_ignored_signal_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interruptible() as check:
            press()
            check()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_error_in_the_block_restores_the_handler():
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(ZeroDivisionError), interruptible():
        raise ZeroDivisionError
    assert signal.getsignal(signal.SIGINT) is before


def test_between_items_of_a_stream_the_handler_is_the_users():
    before = signal.getsignal(signal.SIGINT)
    with tiny() as llm:
        for _ in llm.stream("x", GREEDY):
            assert signal.getsignal(signal.SIGINT) is before


def test_from_another_thread():
    """Signals are the main thread's: elsewhere generate and stream work and leave the handler alone."""
    before, results = signal.getsignal(signal.SIGINT), []
    with tiny() as llm:
        want = llm.generate("x", GREEDY, use_tqdm=False)[0].text

        def work():
            results.append(llm.generate("x", GREEDY, use_tqdm=False)[0].text)
            results.append("".join(item.delta for item in llm.stream("x", GREEDY)))

        thread = threading.Thread(target=work)
        thread.start()
        thread.join(60)
        assert_empty(llm)
    assert results == [want, want] and signal.getsignal(signal.SIGINT) is before
