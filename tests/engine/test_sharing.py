"""Rows of one step share blocks: what is scheduled may be found by the next one in line (engine_cases 10)."""

from __future__ import annotations

import numpy as np
import pytest

from nanoengine.engine.scheduler import TokenBudgetScheduler
from nanoengine.sim import SlotRunner

from .helpers import VOCAB, add, check_cached_kv, done, engine

both_policies = pytest.mark.parametrize("policy", ["token_budget", "prefill_first"])
any_depth = pytest.mark.parametrize(("overlap", "hold_back"), [(0, False), (0, True), (1, False), (1, True)])
SYSTEM = [(7 * i) % VOCAB for i in range(100)]


class Reversed(TokenBudgetScheduler):
    """Who shares blocks of the same step stands before who computes them."""

    def schedule(self):
        plan = super().schedule()
        plan.seqs.reverse()
        return plan


class RowByRow(SlotRunner):
    """Breaks the contract of Runner: each row attends before the KV of those behind it is stored."""

    def _run(self, batch):
        ids, starts, tokens = batch.input_ids, batch.query_starts, [[] for _ in batch.seqs]
        for row, table in enumerate(batch.block_tables):
            self._write(batch, row, table, ids[starts[row] : starts[row + 1]], starts[row])
            if row in batch.sample_rows:
                tokens[row].append(self._sample(table, int(batch.context_lens[row])))
        return tokens


class FailsOnce(SlotRunner):
    """Its first launch fails, and leaves garbage in all slots."""

    failed = False

    def launch(self, batch):
        if not self.failed:
            self.failed, self.slots[:] = True, np.uint64(12345)
            raise ArithmeticError("on purpose")
        return super().launch(batch)


def computed(seqs) -> list[int]:
    return [seq.num_prompt_tokens - seq.num_cached_tokens for seq in seqs]


@both_policies
@any_depth
def test_of_equal_prompts_added_together_only_the_first_is_computed(policy, overlap, hold_back):
    eng = engine(64, 16, policy=policy, overlap=overlap, hold_back=hold_back)
    seqs = [add(eng, SYSTEM) for _ in range(4)]
    eng.step()
    assert computed(seqs) == [100, 4, 4, 4]
    tables = [seq.block_table for seq in seqs]
    assert all(table[:6] == tables[0][:6] for table in tables) and len({table[6] for table in tables}) == 4
    assert eng.block_manager.num_free_blocks == 64 - 6 - 4
    done(eng, seqs)


@both_policies
@any_depth
def test_nested_prompts_of_one_step_share_as_far_as_they_agree(policy, overlap, hold_back):
    eng = engine(64, 4, policy=policy, overlap=overlap, hold_back=hold_back)
    seqs = [add(eng, p) for p in (SYSTEM[:9], SYSTEM[:20], SYSTEM[:8] + [1] * 6, SYSTEM[:21], SYSTEM[4:12])]
    eng.step()
    assert computed(seqs) == [9, 12, 6, 1, 8]
    done(eng, seqs)


@both_policies
def test_the_last_block_of_a_prompt_that_fills_it_is_computed_by_each(policy):
    eng = engine(64, 4, policy=policy)
    seqs = [add(eng, SYSTEM[:8]) for _ in range(3)]
    eng.step()
    assert computed(seqs) == [8, 4, 4]
    done(eng, seqs)


@both_policies
@any_depth
def test_blocks_of_a_later_chunk_are_not_found_before_it_is_scheduled(policy, overlap, hold_back):
    """The first gets 10 of its 20 tokens: two full blocks, and half a block that nobody may share."""
    eng = engine(64, 4, policy=policy, overlap=overlap, hold_back=hold_back, max_num_batched_tokens=10)
    first = add(eng, SYSTEM[:20])
    eng.step()
    assert first.num_computed_tokens == 10 and first.num_committed_blocks == 2
    second = add(eng, SYSTEM[:20])
    eng.step()  # 10 more of the first: the budget is spent
    assert first.num_committed_blocks == 5 and not second.block_table
    eng.step()
    assert computed([first, second]) == [20, 4]
    done(eng, [first, second])


@any_depth
def test_a_chunk_beside_a_newcomer_is_shared_as_far_as_it_is_scheduled(overlap, hold_back):
    eng = engine(64, 4, overlap=overlap, hold_back=hold_back, max_num_batched_tokens=14)
    first = add(eng, SYSTEM[:20])
    eng.step()
    second = add(eng, SYSTEM[:20])
    eng.step()  # the last 6 of the first, and what is left of the budget for the second
    assert computed([first, second]) == [20, 4]
    done(eng, [first, second])


@both_policies
@any_depth
def test_who_computes_may_be_aborted_while_others_share_its_blocks(policy, overlap, hold_back):
    eng = engine(16, 4, policy=policy, overlap=overlap, hold_back=hold_back)
    seqs = [add(eng, SYSTEM[:13]) for _ in range(3)]
    eng.step()
    eng.abort(seqs[0])
    other = add(eng, [9] * 12)
    done(eng, [*seqs[1:], other])


def test_who_computes_may_be_aborted_between_two_chunks():
    eng = engine(8, 4, max_num_batched_tokens=10)
    first, second = add(eng, SYSTEM[:20]), add(eng, SYSTEM[:20])
    eng.step()
    eng.abort(first)
    check_cached_kv(eng.block_manager, eng.runner)
    eng.step()
    assert computed([second]) == [12]
    done(eng, [second])


@both_policies
@any_depth
def test_small_pools_and_equal_prompts_preempt_and_stay_right(policy, overlap, hold_back):
    eng = engine(9, 2, policy=policy, overlap=overlap, hold_back=hold_back, max_num_batched_tokens=7, watermark=0)
    seqs = [add(eng, SYSTEM[: 3 + i % 5], max_tokens=9) for i in range(12)]
    done(eng, seqs)
    assert eng.scheduler.num_preemptions > 0
    check_cached_kv(eng.block_manager, eng.runner)


def test_shared_blocks_are_counted_once_by_admission():
    """Room for 8 blocks: 6 of the first, and one more for each of the others, not six."""
    eng = engine(8, 16, watermark=0)
    seqs = [add(eng, SYSTEM[:96] + [i], max_tokens=1) for i in range(3)]
    eng.step()
    assert [seq.num_cached_tokens for seq in seqs] == [0, 96, 0] and not seqs[2].token_ids[97:]
    done(eng, seqs)


@both_policies
@pytest.mark.parametrize("overlap", [0, 1])
def test_a_launch_that_fails_leaves_nothing_registered(policy, overlap):
    eng = engine(runner=FailsOnce(64, 4, VOCAB), policy=policy, overlap=overlap)
    seqs = [add(eng, SYSTEM[:20]) for _ in range(4)]
    with pytest.raises(ArithmeticError):
        eng.step()
    manager = eng.block_manager
    assert not any(manager.is_cached(block) for block in range(64)) and not manager.lookup(seqs[0])
    assert [seq.num_committed_blocks for seq in seqs] == [0] * 4
    eng.step()
    check_cached_kv(manager, eng.runner)
    done(eng, seqs)


@pytest.mark.parametrize("overlap", [0, 1])
def test_who_shares_may_stand_before_who_computes(overlap):
    eng = engine(64, 4, scheduler=Reversed, overlap=overlap)
    seqs = [add(eng, SYSTEM[: 20 + i]) for i in range(4)]
    eng.step()
    assert computed(seqs) == [20, 1, 2, 3]
    done(eng, seqs)


def test_a_runner_that_attends_row_by_row_is_found_out():
    eng = engine(runner=RowByRow(64, 4, VOCAB), scheduler=Reversed)
    seqs = [add(eng, SYSTEM[:20]) for _ in range(2)]
    with pytest.raises(AssertionError):
        done(eng, seqs)


@pytest.mark.parametrize("cut", ["tokens", "row"])
def test_a_policy_that_takes_back_what_it_scheduled_is_told(cut):
    """What it took back may be shared by a row of the same step: that would be a false hit."""

    class Cuts(TokenBudgetScheduler):
        def schedule(self):
            plan = super().schedule()
            if cut == "row":
                plan.seqs.pop(0)
            else:
                plan.seqs[0].num_scheduled_tokens = 3
            return plan

    eng = engine(64, 4, scheduler=Cuts)
    add(eng, SYSTEM[:20]), add(eng, SYSTEM[:20])
    with pytest.raises(RuntimeError, match="may not take back tokens that were scheduled"):
        eng.step()
    eng = engine(64, 4, scheduler=Cuts, enable_prefix_caching=False)
    add(eng, SYSTEM[:20]), add(eng, SYSTEM[:20])
    eng.step()
