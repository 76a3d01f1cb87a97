"""max_mixed_prefill_tokens: how much of a prompt a step computes while somebody else decodes."""

from __future__ import annotations

import pytest

from nanoengine.engine.scheduler import TokenBudgetScheduler

from .helpers import Drafting, Recorder, add, assert_right, done, engine, finish, recorded

overlapped = pytest.mark.parametrize("overlap", [0, 1])


def tokens_of(eng, seq) -> list[int]:
    """What each step computed of ``seq``, 0 where it was left out."""
    steps = [{seq_id: n for seq_id, n, _ in step} for step in eng.runner.steps]
    return [step.get(seq.seq_id, 0) for step in steps]


@overlapped
def test_a_prompt_beside_a_decode_comes_in_pieces_of_the_cap(overlap):
    eng = recorded(400, 4, max_mixed_prefill_tokens=16, overlap=overlap)
    stream = add(eng, [1, 2, 3], max_tokens=30)
    eng.step()
    long = add(eng, [7] * 100, max_tokens=3)
    done(eng, [stream, long])
    assert tokens_of(eng, long)[1:8] == [16] * 6 + [4]
    assert tokens_of(eng, stream)[:10] == [3] + [1] * 9


@overlapped
def test_without_a_decode_a_prompt_takes_the_whole_budget(overlap):
    eng = recorded(400, 4, max_num_batched_tokens=64, max_mixed_prefill_tokens=16, overlap=overlap)
    done(eng, [add(eng, [7] * 100, max_tokens=1), add(eng, [8] * 100, max_tokens=1)])
    assert [sum(n for _, n, _ in step) for step in eng.runner.steps[:3]] == [64, 64, 64]


def test_all_prefills_of_a_step_share_the_cap_in_order_of_arrival():
    eng = recorded(400, 4, max_mixed_prefill_tokens=16, enable_prefix_caching=False)
    stream = add(eng, [1, 2, 3], max_tokens=30)
    eng.step()
    seqs = [add(eng, [i] * 10, max_tokens=9) for i in (5, 6, 7)]
    done(eng, [stream, *seqs])
    assert [tokens_of(eng, seq)[1:4] for seq in seqs] == [[10, 1, 1], [6, 4, 1], [0, 10, 1]]


def test_the_cap_holds_for_what_was_preempted_and_counts_no_cached_tokens():
    eng = recorded(400, 4, max_mixed_prefill_tokens=8)
    done(eng, [add(eng, [7] * 41, max_tokens=2)])
    eng.runner.steps.clear()
    stream = add(eng, [1, 2, 3], max_tokens=30)
    eng.step()
    again = add(eng, [7] * 41 + [9] * 11, max_tokens=2)
    done(eng, [stream, again])
    assert again.num_cached_tokens == 40 and tokens_of(eng, again)[1:4] == [8, 4, 1]

    eng = recorded(12, 4, max_mixed_prefill_tokens=2, watermark=0, enable_prefix_caching=False)
    seqs = [add(eng, [i] * 12, max_tokens=20) for i in (1, 2)]
    done(eng, seqs)
    assert seqs[1].num_preemptions == 1
    restarted = tokens_of(eng, seqs[1])
    assert 0 in restarted and max(restarted[restarted.index(0) :]) > 2  # the other one had ended by then


@pytest.mark.parametrize("cap", [1, 3, 8, 10**6])
@overlapped
def test_budget_cap_and_decodes_in_any_proportion_still_end(cap, overlap):
    for budget in (1, 2, 5, 9):
        eng = engine(400, 4, max_num_batched_tokens=budget, max_mixed_prefill_tokens=cap, overlap=overlap)
        done(eng, [add(eng, [i] * (3 * i), max_tokens=12) for i in range(1, 9)])


def test_a_prefill_goes_on_as_long_as_decodes_leave_a_token_of_the_budget():
    eng = recorded(400, 4, max_num_batched_tokens=4, max_mixed_prefill_tokens=64)
    streams = [add(eng, [i], max_tokens=40) for i in (1, 2, 3)]
    eng.step()
    long = add(eng, [7] * 20, max_tokens=2)
    finish(eng)
    assert tokens_of(eng, long)[1:21] == [1] * 20
    for seq in (*streams, long):
        assert_right(eng, seq)


def test_accepted_drafts_are_no_prefill():
    class Both(Recorder, Drafting):
        def __init__(self):
            super().__init__(400, 4, 50, most=2)

        def extra(self):
            return 5

    eng = engine(runner=Both(), max_mixed_prefill_tokens=2)
    seq = add(eng, [1, 2, 3], max_tokens=19)
    done(eng, [seq])
    assert tokens_of(eng, seq) == [3, 6, 6, 6]


def test_prefill_first_never_mixes_and_so_knows_no_cap():
    eng = recorded(400, 4, max_mixed_prefill_tokens=16, policy="prefill_first")
    stream = add(eng, [1, 2, 3], max_tokens=30)
    eng.step()
    long = add(eng, [7] * 100, max_tokens=3)
    done(eng, [stream, long])
    assert tokens_of(eng, long)[1] == 100


class Keeps(TokenBudgetScheduler):
    def __init__(self, config, block_manager):
        super().__init__(config, block_manager)
        self.config = config


@pytest.mark.parametrize(("wish", "given", "want"), [(64, None, 64), (64, 7, 7), (None, None, None), (None, 9, 9)])
def test_the_runners_wish_counts_where_the_config_says_none(wish, given, want):
    runner = Recorder(16, 4, 50)
    runner.max_mixed_prefill_tokens = wish
    eng = engine(runner=runner, scheduler=Keeps, max_mixed_prefill_tokens=given)
    assert eng.scheduler.config.max_mixed_prefill_tokens == want
    assert eng.scheduler.max_mixed_prefill_tokens == (want or 8192)
    assert eng.config.max_mixed_prefill_tokens == given and eng.config.max_num_batched_tokens == 8192


def test_a_cpu_wishes_for_a_cap_and_a_gpu_for_none():
    from nanoengine.worker.gpu_runner import GpuRunner
    from nanoengine.worker.model_runner import ModelRunner

    assert ModelRunner.max_mixed_prefill_tokens == 64 and GpuRunner.max_mixed_prefill_tokens is None
