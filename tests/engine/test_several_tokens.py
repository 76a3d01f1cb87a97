"""A runner may bring several ids a row (accepted drafts): tokens, KV, blocks, ends add up."""

from __future__ import annotations

import random

import pytest

from nanoengine.engine.scheduler import TokenBudgetScheduler
from nanoengine.sampling_params import SamplingParams
from nanoengine.sim import SlotRunner, expected_output
from nanoengine.trace import Trace

from .helpers import Drafting, add, assert_empty, assert_right, done, engine, finish


class Always(Drafting):
    """As many extra ids as ``wanted`` says, by the prompt's first token. asked: query_len by row."""

    def __init__(self, *args, wanted: dict[int, int], **kwargs):
        super().__init__(*args, most=2, **kwargs)
        self.wanted, self.asked = wanted, []

    def launch(self, batch):
        ids = [seq.seq_id for seq in batch.seqs]
        self.asked.append(list(zip(ids, batch.query_lens.tolist(), strict=True)))
        return super().launch(batch)

    def _run(self, batch):
        rows = [batch.seqs[row] for row in batch.sample_rows.tolist()]
        self.extras = iter([self.wanted.get(seq.token_ids[0], 0) for seq in rows])
        return super()._run(batch)

    def extra(self) -> int:
        return next(self.extras)


class TwoOnce(SlotRunner):
    def _run(self, batch):
        results = super()._run(batch)
        if len(batch.input_ids) == 5:
            results[0].append(266)
        return results


@pytest.mark.parametrize("overlap", [0, 1])
def test_two_ids_in_the_first_step_count_as_two(overlap):
    eng = engine(runner=TwoOnce(8, 4, 1000), vocab_size=1000, overlap=overlap)
    seq = add(eng, [1, 2, 3, 4, 5], max_tokens=4)
    done(eng, [seq])
    assert seq.output_ids == [58, 266, 895, 49]


def test_the_next_step_computes_all_that_were_brought():
    runner = Always(16, 4, 50, wanted={1: 2})
    eng = engine(runner=runner, overlap=0)
    done(eng, [add(eng, [1] * 5, max_tokens=7)])
    assert runner.asked == [[(0, 5)], [(0, 3)], [(0, 3)]]


def test_with_a_step_in_flight_what_it_samples_for_that_row_is_dropped_and_its_kv_stays():
    runner = Always(16, 4, 50, wanted={1: 2})
    eng = engine(runner=runner, overlap=1)
    done(eng, [add(eng, [1] * 5, max_tokens=7)])
    assert runner.asked[:4] == [[(0, 5)], [(0, 1)], [(0, 2)], [(0, 1)]]


@pytest.mark.parametrize("policy", ["token_budget", "prefill_first"])
@pytest.mark.parametrize("overlap", [0, 1])
def test_rows_with_one_id_are_not_starved_by_rows_with_several(policy, overlap):
    eng = engine(runner=Always(64, 4, 50, wanted={1: 3}), policy=policy, overlap=overlap)
    many, one = add(eng, [1] * 5, max_tokens=100), add(eng, [2] * 5, max_tokens=100)
    for _ in range(12):
        eng.step()
    assert many.num_output_tokens > 20 and one.num_output_tokens >= 10
    done(eng, [many, one])


@pytest.mark.parametrize("policy", ["token_budget", "prefill_first"])
@pytest.mark.parametrize("hold_back", [False, True])
def test_a_row_that_needs_many_blocks_at_once_waits_for_the_step_in_flight(policy, hold_back):
    """Blocks of one token: four ids need four blocks, and preempting needs every step landed."""
    runner = Always(40, 1, 50, wanted={1: 3, 2: 3, 3: 0}, hold_back=hold_back)
    eng = engine(runner=runner, policy=policy, overlap=1, watermark=0, enable_prefix_caching=False)
    seqs = [add(eng, [i] * 3, max_tokens=30) for i in (1, 2, 3)]
    done(eng, seqs)
    assert eng.scheduler.num_preemptions > 0


class LandFirst(TokenBudgetScheduler):
    plans = ()

    def schedule(self):
        plan = super().schedule()
        self.plans += (plan,)
        return plan


def test_a_plan_that_would_preempt_with_a_step_in_flight_is_empty_and_changes_nothing():
    runner = Always(12, 1, 50, wanted={1: 7})
    eng = engine(runner=runner, scheduler=LandFirst, overlap=1, watermark=0)
    seqs = [add(eng, [1, 1], max_tokens=9), add(eng, [2, 2], max_tokens=9)]
    done(eng, seqs)
    held = [plan for plan in eng.scheduler.plans if plan.land_first]
    assert held and not any(plan.seqs or plan.events for plan in held)


@pytest.mark.parametrize("overlap", [0, 1])
def test_an_end_token_among_them_drops_those_after_it(overlap):
    want = expected_output([1, 2, 3], 10, 50)
    eng = engine(runner=Always(16, 4, 50, wanted={1: 4}), overlap=overlap)
    seq = add(eng, [1, 2, 3], max_tokens=10, stop_token_ids=[want[2]])
    outputs = finish(eng)
    assert (seq.output_ids, seq.finish_reason, seq.stop_reason) == (want[:3], "stop", want[2])
    assert sum((new for out in outputs for new in out.new_tokens), []) == want[:3]
    assert_empty(eng)


@pytest.mark.parametrize("overlap", [0, 1])
def test_max_tokens_and_the_model_length_cut_them(overlap):
    eng = engine(runner=Always(64, 4, 50, wanted={1: 4, 2: 4}), overlap=overlap, max_model_len=20)
    done(eng, [add(eng, [1, 2, 3], max_tokens=6), add(eng, [2] * 11, max_tokens=None)])


class WithLogprobs(Always):
    def launch(self, batch):
        pending = super().launch(batch)
        rows = pending.result()
        pending.logprobs = [[{token: -1.0} for token in row] for row in rows]
        return pending


@pytest.mark.parametrize("overlap", [0, 1])
def test_logprobs_are_one_a_token(overlap):
    eng = engine(runner=WithLogprobs(16, 4, 50, wanted={1: 2}), overlap=overlap)
    seq = eng.add_request([1, 2, 3], SamplingParams(max_tokens=8, logprobs=0))
    done(eng, [seq])
    assert [list(entry) for entry in seq.logprobs] == [[token] for token in seq.output_ids]


@pytest.mark.parametrize("overlap", [0, 1])
def test_only_blocks_whose_kv_is_written_can_be_found(overlap):
    """Six ids reach over a block's end; who comes next may share the computed blocks and no others."""
    eng = engine(runner=Always(64, 4, 50, wanted={1: 5}), overlap=overlap)
    first = add(eng, [1, 2, 3], max_tokens=30)
    followers = []
    while not first.is_finished:
        eng.step()
        assert first.num_committed_blocks * 4 <= first.num_computed_tokens or first.is_finished
        if len(followers) < 6:
            followers.append(add(eng, first.token_ids[:], max_tokens=5))
    done(eng, [first, *followers])
    assert eng.block_manager.num_hit_tokens > 0


def test_they_count_as_decode_in_step_outputs_and_traces():
    eng = engine(runner=Always(16, 4, 50, wanted={1: 2}), overlap=0, observer=Trace())
    seq = add(eng, [1, 2, 3], max_tokens=7)
    counts = [(out.num_prefill_tokens, out.num_decode_tokens) for out in finish(eng)]
    assert counts == [(3, 0), (0, 3), (0, 3)]
    rows = [step["rows"][0] for step in eng.observer]
    assert [(row["kind"], row["tokens"], len(row["new"])) for row in rows] == [
        ("prefill", 3, 3), ("decode", 3, 3), ("decode", 3, 1),
    ]  # fmt: skip
    assert_right(eng, seq)


@pytest.mark.parametrize("seed", range(40))
def test_random_numbers_of_ids_under_pressure(seed):
    rng = random.Random(seed)
    size = rng.choice([1, 2, 4, 16])
    blocks, caching = 4 + 60 // size, rng.random() < 0.7
    hold_back, most = rng.random() < 0.5, rng.randint(2, 9)
    runner = Drafting(blocks, size, 50, hold_back=hold_back, rng=rng, most=most)
    eng = engine(
        runner=runner, policy=rng.choice(["token_budget", "prefill_first"]), watermark=0,
        overlap=rng.randint(0, 1), enable_prefix_caching=caching, max_num_seqs=rng.randint(1, 6),
        max_num_batched_tokens=rng.choice([3, 8, 100]), max_model_len=50, eos_token_ids=(4,),
        max_mixed_prefill_tokens=rng.choice([None, 1, 5]),
    )  # fmt: skip
    seqs = []
    for _ in range(12):
        prompt = [rng.randint(0, 1) for _ in range(rng.randint(1, 30))]
        max_tokens = rng.randint(1, 40)
        min_tokens = rng.randint(0, max_tokens)
        ends = dict(min_tokens=min_tokens, ignore_eos=rng.random() < 0.5)
        seqs.append(add(eng, prompt, max_tokens, **ends))
        for _ in range(rng.randint(0, 3)):
            eng.step()
        if rng.random() < 0.2:
            eng.abort(rng.choice(seqs))
    finish(eng)
    assert_empty(eng)
    assert runner.num_extra > 0
    for seq in seqs:
        if seq.finish_reason != "abort":
            assert_right(eng, seq)
