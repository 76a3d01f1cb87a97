"""A learner's own scheduler, block manager, runner and observer in the unmodified engine."""

from __future__ import annotations

import subprocess
import sys

import pytest

from nanoengine.config import EngineConfig
from nanoengine.engine.block_manager import BlockManager
from nanoengine.engine.llm_engine import LLMEngine
from nanoengine.engine.protocols import BlockManagerLike, Pending, Runner, SchedulerLike
from nanoengine.engine.scheduler import Plan, Scheduler, TokenBudgetScheduler
from nanoengine.sampling_params import SamplingParams
from nanoengine.sim import Done, SlotRunner
from nanoengine.trace import Trace

from .helpers import assert_empty, assert_right, engine, finish


class ShortestFirst(TokenBudgetScheduler):
    """Of all that wait, the shortest prompt starts first."""

    def schedule(self) -> Plan:
        self.waiting = type(self.waiting)(sorted(self.waiting, key=lambda seq: len(seq.token_ids)))
        return super().schedule()

    def __len__(self) -> int:  # false when nothing waits: the engine must take it all the same
        return len(self.waiting)


class ListOfBlocks:
    """The simplest block manager: a list, no cache. All of BlockManagerLike and nothing else."""

    def __init__(self, num_blocks: int, block_size: int):
        self.num_blocks, self.block_size = num_blocks, block_size
        self.reset()

    def reset(self):
        self.free_list = list(range(self.num_blocks))

    @property
    def num_free_blocks(self):
        return len(self.free_list)

    def __len__(self):
        return 0

    def lookup(self, seq):
        return []

    def can_allocate(self, seq, cached, reserve=0):
        return -(-len(seq.token_ids) // self.block_size) + reserve <= len(self.free_list)

    def allocate(self, seq, cached):
        seq.num_computed_tokens = 0
        assert self.grow(seq, len(seq.token_ids))

    def grow(self, seq, num_tokens):
        missing = -(-(seq.num_computed_tokens + num_tokens) // self.block_size) - len(seq.block_table)
        if missing > len(self.free_list):
            return False
        seq.block_table = seq.block_table + [self.free_list.pop() for _ in range(missing)]
        seq.capacity = len(seq.block_table) * self.block_size
        return True

    def commit(self, seq, num_written):
        pass

    def free(self, seq):
        self.free_list += seq.block_table
        seq.block_table, seq.capacity = [], 0


class CountingRunner(Runner):
    """Says 1, 2, 3, ... to everyone; keeps nothing."""

    num_blocks, block_size = 16, 4

    def launch(self, batch):
        tokens = [[] for _ in batch.seqs]
        for row, position in zip(batch.sample_rows, batch.sample_positions, strict=True):
            tokens[row] = [position - batch.seqs[row].num_prompt_tokens + 1]  # NumPy integers, as a learner's may be
        return Done(tokens)

    def close(self):
        pass


def run_all(eng, prompts):
    seqs = [eng.add_request(p, SamplingParams(max_tokens=10)) for p in prompts]
    order = []
    while eng.has_unfinished():
        order += [seq.seq_id for seq in eng.step().finished]
    return seqs, order


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("form", ["class", "object", "object and manager"])
def test_own_scheduler(form, overlap):
    config = EngineConfig(max_num_seqs=1, vocab_size=50, overlap=overlap)
    runner, manager = SlotRunner(16, 4, 50), BlockManager(16, 4)
    parts = {
        "class": {"scheduler": ShortestFirst},
        "object": {"scheduler": ShortestFirst(config, manager)},
        "object and manager": {"scheduler": ShortestFirst(config, manager), "block_manager": manager},
    }[form]
    eng = LLMEngine(config, runner=runner, **parts)
    assert isinstance(eng.scheduler, ShortestFirst)
    assert eng.scheduler.block_manager is eng.block_manager
    seqs, order = run_all(eng, [[1] * 9, [2] * 5, [3] * 2, [4] * 7])
    assert order == [2, 1, 3, 0]
    for seq in seqs:
        assert_right(eng, seq)
    assert_empty(eng)


@pytest.mark.parametrize("policy", ["token_budget", "prefill_first"])
@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("manager", [ListOfBlocks, ListOfBlocks(6, 4)], ids=["class", "object"])
def test_own_block_manager_even_under_a_trace(policy, overlap, manager):
    trace = Trace()
    eng = engine(6, 4, block_manager=manager, policy=policy, overlap=overlap, max_num_seqs=4, observer=trace)
    assert isinstance(eng.block_manager, ListOfBlocks)
    seqs, _ = run_all(eng, [[1] * 5, [2, 3], [1] * 5, [4] * 11])
    for seq in seqs:
        assert_right(eng, seq)
    assert eng.scheduler.num_preemptions > 0
    assert sorted(eng.block_manager.free_list) == list(range(6))
    for step in trace:
        held = [block for table in step["block_tables"].values() for block in table]
        assert sorted(held + step["free"]) == list(range(6))
        assert step["ref_counts"] == [held.count(block) for block in range(6)]
        assert step["cached_free"] == []


def test_own_runner_whose_tokens_are_numpy_integers(tmp_path):
    eng = engine(runner=CountingRunner(), observer=Trace())
    seqs, _ = run_all(eng, [[1] * 5, [2]])
    assert [seq.output_ids for seq in seqs] == [list(range(1, 11))] * 2
    assert len(Trace.load(eng.observer.save(tmp_path / "run.jsonl"))) == len(eng.observer)


def test_everything_that_is_ours_fits_the_protocols():
    eng = engine()
    assert isinstance(eng.runner, Runner) and isinstance(eng.block_manager, BlockManagerLike)
    assert isinstance(eng.scheduler, SchedulerLike) and isinstance(Done([]), Pending)
    assert isinstance(ListOfBlocks(4, 4), BlockManagerLike) and isinstance(CountingRunner(), Runner)


class Lazy(Scheduler):
    def schedule(self) -> Plan:
        return Plan()


def test_a_scheduler_that_runs_nothing_is_named():
    eng = engine(scheduler=Lazy)
    seq = eng.add_request([1, 2])
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the scheduler runs nothing, with 1 requests unfinished"):
            eng.step()
    eng.abort(seq)
    assert_empty(eng)


def test_a_scheduler_without_a_policy_says_what_to_do():
    eng = engine(scheduler=Scheduler)
    eng.add_request([1])
    with pytest.raises(NotImplementedError, match="write your own"):
        eng.step()


class NewestFirst(TokenBudgetScheduler):
    """Wrong on purpose: gives out tokens from the end, so that it preempts what it has just scheduled."""

    def schedule(self) -> Plan:
        plan = Plan()
        self.schedule_running(plan, self.running[::-1])
        self.admit_waiting(plan)
        return plan


def test_preempting_what_is_in_the_plan_is_named_and_nothing_is_lost():
    eng = engine(4, 2, scheduler=NewestFirst, max_num_seqs=2)
    seqs = [eng.add_request(prompt) for prompt in ([1, 1, 1], [2, 2])]
    with pytest.raises(RuntimeError, match="already in this plan: schedule in order of admission"):
        finish(eng)
    assert list(eng.sequences.values()) == seqs == list(eng.scheduler.waiting)
    assert eng.block_manager.num_free_blocks == 4


@pytest.mark.parametrize(("blocks", "size"), [(16, 8), (17, 4)])
def test_a_block_manager_of_another_size_than_the_pool_is_refused(blocks, size):
    with pytest.raises(ValueError, match=f"block_manager has {blocks} blocks of {size} tokens.*pool 16 of 4"):
        engine(16, 4, block_manager=BlockManager(blocks, size))


def test_a_block_manager_may_use_less_than_the_pool():
    eng = engine(16, 4, block_manager=BlockManager(3, 4))
    with pytest.raises(ValueError, match="the whole KV pool holds 12"):
        eng.add_request([1] * 13)


def test_scheduler_and_engine_on_two_block_managers_are_refused():
    config = EngineConfig()
    with pytest.raises(ValueError, match="another block_manager than the engine"):
        engine(16, 4, scheduler=TokenBudgetScheduler(config, BlockManager(16, 4)), block_manager=BlockManager(16, 4))


class TooFewRows(SlotRunner):
    def _run(self, batch):
        return super()._run(batch)[:-1]


class Silent(SlotRunner):
    """Forgets the last row's token."""

    def _run(self, batch):
        return [*super()._run(batch)[:-1], []]


@pytest.mark.parametrize(
    ("runner", "message"),
    [(TooFewRows, "returned 0 rows for a batch of 1"), (Silent, r"tokens for rows \[\], but rows \[0\] sample")],
)
@pytest.mark.parametrize("overlap", [0, 1])
def test_a_runner_with_wrong_results_is_named_and_nothing_is_lost(runner, message, overlap):
    eng = engine(runner=runner(8, 4, 50), overlap=overlap)
    seq = eng.add_request([1, 2])
    with pytest.raises(RuntimeError, match=message):
        finish(eng, 5)
    assert list(eng.scheduler.waiting) == [seq] and not eng.in_flight
    eng.runner = SlotRunner(8, 4, 50)
    finish(eng)
    assert_right(eng, seq)


def test_abort_of_another_engines_request_changes_nothing():
    mine, other = engine(), engine()
    seq, foreign = mine.add_request([1]), other.add_request([2])
    mine.abort(foreign)
    assert foreign.finish_reason is None
    finish(mine)
    assert_right(mine, seq)


WITHOUT_TORCH = """
import importlib.abc, pkgutil, sys
class Block(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers", "safetensors", "tokenizers"):
            raise ImportError(f"{name} is not installed here")
sys.meta_path.insert(0, Block())
import nanoengine.course, nanoengine.sim, nanoengine.trace, nanoengine.viz
from nanoengine.engine import batch, block_manager, llm_engine, protocols, scheduler, sequence
for package in (nanoengine.sim, nanoengine.viz, nanoengine.course):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if module.name not in SKIP:
            importlib.import_module(module.name)
from nanoengine import EngineConfig, LLMEngine, SamplingParams, Trace, record
from nanoengine.sim import SlotRunner, expected_output
engine = LLMEngine(EngineConfig(), runner=SlotRunner(8, 4))
seq = engine.add_request([1, 2, 3], SamplingParams(max_tokens=9))
with record(engine) as trace:
    list(engine.run())
assert seq.output_ids == expected_output([1, 2, 3], 9), seq
assert len(trace) == 9 and "torch" not in sys.modules
try:
    import nanoengine.worker.model_runner
except ImportError as error:
    assert "torch" in str(error)
else:
    raise SystemExit("the block does not work")
print("ok")
"""


def test_the_control_plane_runs_where_torch_is_not_installed():
    run = subprocess.run(
        [sys.executable, "-c", "SKIP = ()\n" + WITHOUT_TORCH], capture_output=True, text=True, timeout=400
    )
    assert run.stdout.strip() == "ok", run.stderr
