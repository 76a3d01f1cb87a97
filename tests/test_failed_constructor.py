"""A constructor that raises leaves no weights, no KV pool, no process; who made a runner closes it."""

from __future__ import annotations

import psutil
import pytest

import nanoengine.worker.model_runner as model_runner
from nanoengine import LLM, EngineConfig
from nanoengine.engine.block_manager import BlockManager
from nanoengine.engine.llm_engine import LLMEngine
from nanoengine.engine.scheduler import TokenBudgetScheduler
from nanoengine.sim import SlotRunner
from nanoengine.worker.model_runner import ModelRunner

TINY = dict(load_format="dummy", device="cpu", max_model_len=64, block_size=4, num_blocks=16)


class Typo(TokenBudgetScheduler):
    def __init__(self, config, block_manager):
        super().__init__(config, block_manager)
        self.limit = config.max_num_sequences  # there is no such field


class Interrupted(TokenBudgetScheduler):
    def __init__(self, config, block_manager):
        raise KeyboardInterrupt


class NoManager(BlockManager):
    def __init__(self, num_blocks, block_size):
        raise ZeroDivisionError("mine")


class SmallerBlocks(BlockManager):
    def __init__(self, num_blocks, block_size):
        super().__init__(num_blocks, block_size // 2)


FAILING = {
    "a scheduler with a typing mistake": (dict(scheduler=Typo), AttributeError),
    "a scheduler of the wrong signature": (dict(scheduler=SlotRunner), TypeError),
    "Ctrl-C": (dict(scheduler=Interrupted), KeyboardInterrupt),
    "a block manager": (dict(block_manager=NoManager), ZeroDivisionError),
    "a block manager of another size": (dict(block_manager=SmallerBlocks), ValueError),
    "a block manager object of another size": (dict(block_manager=BlockManager(16, 8)), ValueError),
    "two block managers": (
        dict(
            scheduler=TokenBudgetScheduler(EngineConfig(), BlockManager(16, 4)),
            block_manager=BlockManager,
        ),
        ValueError,
    ),
}


@pytest.fixture
def made(monkeypatch) -> list[ModelRunner]:
    """Every ModelRunner whose constructor began."""
    found, make = [], ModelRunner._make

    def noted(self, *args, **kwargs):
        found.append(self)
        make(self, *args, **kwargs)

    monkeypatch.setattr(ModelRunner, "_make", noted)
    return found


def assert_gone(runner: ModelRunner) -> None:
    assert runner.model is None and runner.kv_cache is None and runner.layer_caches is None


@pytest.mark.parametrize("case", FAILING)
def test_a_part_that_raises_closes_the_runner(case, made):
    parts, error = FAILING[case]
    with pytest.raises(error):
        LLM("tiny-llama", **TINY, **parts)
    [runner] = made
    assert_gone(runner)
    with LLM("tiny-llama", **TINY) as llm:
        assert llm.generate([[1, 2]], use_tqdm=False)[0].token_ids


@pytest.mark.parametrize("where", ["zeros", "choose_backend"])
def test_a_runner_that_cannot_be_made_lets_go_of_what_it_has(where, made, monkeypatch):
    def raises(*_, **__):
        raise MemoryError("no room")

    monkeypatch.setattr(model_runner, where, raises)
    with pytest.raises(MemoryError, match="no room"):
        LLM("tiny-llama", **TINY)
    [runner] = made
    assert_gone(runner)


def test_the_parts_may_fail_with_any_runner_of_the_package(monkeypatch):
    closed = []

    class Closing(SlotRunner):
        def close(self):
            closed.append(self)

    monkeypatch.setattr("nanoengine.llm.make_runner", lambda config, **parts: Closing(16, 4))
    with pytest.raises(AttributeError):
        LLM("tiny-llama", **TINY, scheduler=Typo)
    assert len(closed) == 1


@pytest.mark.parametrize("case", FAILING)
def test_a_runner_of_yours_is_yours_until_the_engine_is_made(case):
    class Mine(SlotRunner):
        closed = 0

        def close(self):
            self.closed += 1

    parts, error = FAILING[case]
    runner = Mine(16, 4)
    with pytest.raises(error):
        LLM("tiny-llama", **TINY, runner=runner, **parts)
    with pytest.raises(error):
        LLMEngine(EngineConfig(), runner=runner, **parts)
    assert runner.closed == 0
    LLM("tiny-llama", **TINY, runner=runner).close()
    assert runner.closed == 1


@pytest.mark.parametrize("case", ["a scheduler with a typing mistake", "a block manager", "Ctrl-C"])
def test_no_process_of_another_rank_stays(case):
    before = set(psutil.Process().children(recursive=True))
    parts, error = FAILING[case]
    with pytest.raises(error):
        LLM("tiny-llama", **TINY, tensor_parallel_size=2, **parts)
    assert set(psutil.Process().children(recursive=True)) <= before


def test_no_process_stays_if_the_second_one_cannot_be_started(monkeypatch):
    from nanoengine.parallel.watch import LocalRanks

    start = LocalRanks._start

    def start_one(self, rank, job):
        if rank == 2:
            raise OSError("no more processes")
        return start(self, rank, job)

    monkeypatch.setattr(LocalRanks, "_start", start_one)
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(OSError, match="no more processes"):
        LLM("tiny-llama", **TINY, tensor_parallel_size=4)
    assert set(psutil.Process().children(recursive=True)) <= before


def test_a_server_that_cannot_be_made_closes_the_model(made, monkeypatch):
    import nanoengine.server.app as app
    from nanoengine.cli import main

    def raises(*_, **__):
        raise RuntimeError("no routes")

    monkeypatch.setattr(app, "make_app", raises)
    options = ["--port", "0", "--model", "tiny-llama", "--load-format", "dummy", "--num-blocks", "9"]
    assert main(["serve", *options]) == 1
    [runner] = made
    assert_gone(runner)
