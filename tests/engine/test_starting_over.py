"""A request that found another prompt's NaN in shared blocks computes all of its own, and goes on."""

from __future__ import annotations

import pytest

from nanoengine.engine.protocols import NON_FINITE
from nanoengine.sim import SlotRunner

from .helpers import VOCAB, add, assert_empty, assert_right, engine, finish

BAD = VOCAB - 1


class Spreading(SlotRunner):
    """As attention does: BAD spoils the KV of all tokens computed with it in its row, also before it."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.spoilt = [False] * (self.num_blocks * self.block_size)

    def _run(self, batch):
        results, starts = super()._run(batch), batch.query_starts.tolist()
        rows = range(len(batch.seqs))
        for row in sorted(rows, key=lambda row: batch.context_lens[row] - batch.query_lens[row]):
            ids = batch.input_ids[starts[row] : starts[row + 1]].tolist()
            before = int(batch.context_lens[row]) - len(ids)
            bad = BAD in ids or any(self._of(batch, row, before))
            for slot in batch.slot_mapping[starts[row] : starts[row + 1]].tolist():
                self.spoilt[slot] = bad
        for row in rows:
            if results[row] and any(self._of(batch, row, int(batch.context_lens[row]))):
                results[row] = [NON_FINITE]
        return results

    def _of(self, batch, row, num_tokens):
        table, size = batch.block_tables[row], self.block_size
        return [self.spoilt[table[p // size] * size + p % size] for p in range(num_tokens)]


def spreading(overlap=0, num_blocks=64, hold_back=False, **settings):
    runner = Spreading(num_blocks, 4, VOCAB, hold_back=hold_back)
    return engine(runner=runner, overlap=overlap, eos_token_ids=(BAD,), **settings)


@pytest.mark.parametrize("policy", ["token_budget", "prefill_first"])
@pytest.mark.parametrize("overlap, hold_back", [(0, False), (1, False), (1, True)])
@pytest.mark.parametrize("budget", [10, 24, 200])
def test_an_innocent_prompt_that_shares_blocks_with_a_bad_one_is_computed_again(
    policy, overlap, hold_back, budget
):
    eng = spreading(overlap, hold_back=hold_back, policy=policy, max_num_batched_tokens=budget)
    bad = add(eng, [7] * 8 + [BAD] + [8] * 10)
    mates = [add(eng, [7] * 8 + [i] * 3) for i in (1, 2)]
    also_bad, other = add(eng, [7] * 8 + [3, BAD]), add(eng, [9] * 12)
    finish(eng)
    assert [seq.finish_reason for seq in (bad, also_bad)] == ["error", "error"]
    for seq in (*mates, other):
        assert_right(eng, seq)
        assert seq.error is None
    assert_empty(eng)
    again = add(eng, [7] * 8 + [4])
    finish(eng)
    assert_right(eng, again)


class Counted(Spreading):
    num_tokens = 0

    def launch(self, batch):
        self.num_tokens += len(batch.input_ids)
        return super().launch(batch)


def test_a_bad_prompt_is_computed_twice_only_if_it_found_kv_of_others():
    eng = engine(runner=Counted(64, 4, VOCAB), overlap=0)
    bad = add(eng, [7] * 8 + [BAD])
    finish(eng)
    assert (bad.finish_reason, eng.runner.num_tokens) == ("error", 9)
    good = add(eng, [7] * 9, max_tokens=1)
    finish(eng)
    assert (good.finish_reason, eng.runner.num_tokens) == ("length", 18)
    late = add(eng, [7] * 8 + [BAD])
    finish(eng)
    assert (late.finish_reason, eng.runner.num_tokens) == ("error", 18 + 1 + 9)
    assert late.num_cached_tokens == 0


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("policy", ["token_budget", "prefill_first"])
def test_starting_over_in_a_small_pool_preempts_and_ends(overlap, policy):
    eng = spreading(overlap, num_blocks=9, policy=policy, max_num_batched_tokens=16, watermark=0)
    bad = [add(eng, [7] * 8 + [BAD, i]) for i in range(2)]
    seqs = [add(eng, [7] * 8 + [i], max_tokens=20) for i in range(1, 5)]
    finish(eng)
    assert {seq.finish_reason for seq in bad} == {"error"}
    for seq in seqs:
        assert_right(eng, seq)
    assert_empty(eng)


def test_equal_prompts_of_one_step_fail_together_and_are_not_computed_again():
    eng = spreading()
    seqs = [add(eng, [7] * 8 + [BAD]) for _ in range(4)]
    outputs = finish(eng)
    assert {seq.finish_reason for seq in seqs} == {"error"} and len(outputs) == 1
    assert_empty(eng)


@pytest.mark.parametrize("hold_back", [False, True])
def test_one_that_starts_over_may_be_aborted_before_its_step_in_flight_has_landed(hold_back):
    eng = spreading(1, hold_back=hold_back)
    bad, mate = add(eng, [7] * 8 + [BAD]), add(eng, [7] * 8 + [1])
    while not mate.starts_over:
        eng.step()
    assert mate.num_in_flight == 1
    eng.abort(mate)
    finish(eng)
    assert (bad.finish_reason, mate.finish_reason) == ("error", "abort")
    assert_empty(eng)


def test_a_step_that_fails_meanwhile_changes_nothing():
    eng = spreading(1)
    add(eng, [7] * 8 + [BAD])
    mate = add(eng, [7] * 8 + [1])
    while not mate.starts_over:
        eng.step()
    eng.in_flight[0].pending.result = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        eng.step()
    finish(eng)
    assert_right(eng, mate)
    assert_empty(eng)
