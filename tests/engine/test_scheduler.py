"""Both policies: who runs, who waits, who is preempted (engine_cases 3, 5, 7, 8, 13, 14, 15)."""

from __future__ import annotations

import random

import pytest

from nanoengine.trace import Trace

from .helpers import add, assert_empty, assert_right, done, engine, finish, holders, oracle, recorded

both = pytest.mark.parametrize("policy", ["token_budget", "prefill_first"])
overlapped = pytest.mark.parametrize("overlap", [0, 1])


@both
@overlapped
def test_a_lone_sequence_that_fills_the_pool_ends_with_length(policy, overlap):
    eng = engine(1, 256, policy=policy, overlap=overlap)  # case 3
    seq = add(eng, [1] * 256, max_tokens=4)
    done(eng, [seq])
    assert (seq.finish_reason, seq.num_output_tokens, seq.num_preemptions) == ("length", 1, 0)


@both
@overlapped
def test_never_more_running_than_max_num_seqs(policy, overlap):
    eng = recorded(64, 4, policy=policy, overlap=overlap, max_num_seqs=2)  # case 5
    seqs = [add(eng, [k] * 5) for k in range(10)]
    most = 0
    while eng.has_unfinished():
        eng.step()
        most = max(most, len(eng.scheduler.running))
    assert most == 2 == max(len(step) for step in eng.runner.steps)
    done(eng, seqs)


@both
def test_an_impossible_request_blocks_nobody(policy):
    eng = engine(4, 4, policy=policy)  # case 7
    first = add(eng, [1, 2])
    with pytest.raises(ValueError, match="whole KV pool holds 16"):
        add(eng, [1] * 17)
    done(eng, [first, add(eng, [3, 4])])


def arrivals_each_step(policy, **kwargs):
    """The longest wait, in steps, of an early decode while one prompt arrives before each step."""
    eng = recorded(4000, 4, policy=policy, max_num_batched_tokens=16, max_num_seqs=100, **kwargs)
    early = add(eng, [1, 2, 3], max_tokens=30)
    eng.step()
    last, longest = 0, 0
    for now in range(1, 41):
        add(eng, [now] * 12)
        eng.step()
        if early.seq_id in [seq_id for seq_id, _, _ in eng.runner.steps[-1]]:
            last = now
        elif not early.is_finished:
            longest = max(longest, now - last)
    return longest


@overlapped
def test_decode_does_not_starve_under_token_budget(overlap):
    assert arrivals_each_step("token_budget", overlap=overlap) == 0  # case 8


def test_decode_starves_under_prefill_first():
    assert arrivals_each_step("prefill_first") >= 40  # case 8: the lesson shows this


@both
@overlapped
@pytest.mark.parametrize("hold_back", [False, True])
@pytest.mark.parametrize("steps", range(6))
def test_abort_at_any_moment_leaks_nothing(policy, overlap, hold_back, steps):
    eng = engine(8, 2, policy=policy, overlap=overlap, hold_back=hold_back, max_num_seqs=2)  # case 13
    seqs = [add(eng, [k, k, k]) for k in range(4)]
    for _ in range(steps):
        eng.step()
    victims = [seqs[0], seqs[3]]  # one that runs, with a step in flight if overlap; one that waits
    for victim in victims * 3:
        eng.abort(victim)
        eng.block_manager.check_invariants(holders(eng))
    finish(eng)
    for victim in victims:
        assert victim.finish_reason == "abort" and not victim.block_table
        assert victim.output_ids == oracle(eng, victim.token_ids[:3], victim.params)[0][: victim.num_output_tokens]
    for seq in (seqs[1], seqs[2]):
        assert_right(eng, seq)
    assert_empty(eng)


@overlapped
def test_an_aborted_sequence_keeps_its_blocks_until_its_step_in_flight_lands(overlap):
    eng = engine(8, 2, overlap=overlap, hold_back=True)
    seq, other = add(eng, [1, 1, 1]), add(eng, [2, 2, 2])
    eng.step()
    tokens = list(seq.token_ids)
    eng.abort(seq)
    assert bool(seq.block_table) == bool(overlap), "with a step in flight the blocks are still written"
    assert eng.block_manager.num_free_blocks == (8 - 4 if overlap else 8 - 2)
    finish(eng)
    assert seq.token_ids == tokens and not seq.block_table, "no token after the end"
    assert_right(eng, other)
    assert_empty(eng)


def test_abort_of_all_with_a_step_in_flight_then_idle_steps():
    eng = engine(8, 2, overlap=1, hold_back=True)
    seqs = [add(eng, [k, k, k]) for k in range(2)]
    eng.step()
    for seq in seqs:
        eng.abort(seq)
    assert eng.has_unfinished(), "a step is in flight"
    finish(eng)
    assert_empty(eng)
    assert eng.step().seqs == []


@both
def test_abort_a_thousand_times_in_a_loop(policy):
    eng = engine(4, 2, policy=policy, overlap=1, hold_back=True)
    for k in range(1000):
        seq = add(eng, [k % 3, 1, 2])
        if k % 3:
            eng.step()
        eng.abort(seq)
    finish(eng)
    done(eng, [add(eng, [1, 2, 3])])


@both
@overlapped
def test_counters_after_a_preemption(policy, overlap):
    eng = engine(4, 2, policy=policy, overlap=overlap, observer=Trace())  # case 14
    first, second = add(eng, [1, 1, 1], max_tokens=6), add(eng, [2, 2, 2], max_tokens=6)
    while not second.num_preemptions:
        eng.step()
    assert first.num_preemptions == 0, "the last admitted is the victim"
    assert second.num_computed_tokens == 0 and second.num_tokens == len(second.token_ids) and not second.block_table
    assert list(eng.scheduler.waiting) == [second]
    done(eng, [first, second])
    manager = eng.block_manager
    assert manager.num_queried_tokens == 6 and manager.num_hit_tokens == 0, "recomputing is no query"
    preempt = [e for step in eng.observer for e in step["events"] if e["kind"] == "preempt"]
    for step in eng.observer:
        kinds = [event["kind"] for event in step["events"]]
        assert not ("preempt" in kinds and "admit" in kinds), "what was just freed is not given to a newcomer"
    assert len(preempt) == eng.scheduler.num_preemptions == second.num_preemptions
    assert preempt[0]["seq"] == second.seq_id and preempt[0]["needed_by"] == first.seq_id


@both
@overlapped
@pytest.mark.parametrize(("blocks", "size"), [(30, 16), (100, 16), (200, 16), (2, 256), (480, 1)])
def test_thrash(policy, overlap, blocks, size):
    rng = random.Random(blocks)  # case 15, a quarter of its lengths
    pool = blocks * size
    eng = recorded(blocks, size, policy=policy, overlap=overlap, max_num_seqs=64, max_num_batched_tokens=256)
    seqs = [
        add(eng, [rng.randint(0, 3) for _ in range(rng.randint(50, 200))], max_tokens=rng.randint(50, 200))
        for _ in range(24)
    ]
    done(eng, seqs)
    assert eng.scheduler.num_preemptions == sum(seq.num_preemptions for seq in seqs)
    assert (eng.scheduler.num_preemptions > 0) == (pool < 24 * 150)
    assert max(sum(n for _, n, _ in step) for step in eng.runner.steps) <= 256


def test_case_15_in_full():
    rng = random.Random(15)
    eng = engine(120, 16, max_num_seqs=64, max_num_batched_tokens=2048)
    seqs = [add(eng, [rng.randint(0, 9)] * rng.randint(200, 800), max_tokens=rng.randint(200, 800)) for _ in range(64)]
    done(eng, seqs)
    assert eng.scheduler.num_preemptions > 0
