"""Order, budget and phases of both policies; what a step may cost, counted rather than timed."""

from __future__ import annotations

import random

import pytest

from nanoengine.engine.block_manager import BlockManager
from nanoengine.trace import Trace

from .helpers import Counting, add, done, engine, finish, recorded

both = pytest.mark.parametrize("policy", ["token_budget", "prefill_first"])
overlapped = pytest.mark.parametrize("overlap", [0, 1])


# order and fairness


def test_victims_are_taken_from_the_end_and_come_back_first():
    eng = engine(9, 2, max_num_seqs=4, watermark=0, observer=Trace())
    seqs = [add(eng, [k] * 4, max_tokens=8) for k in range(6)]
    order = []
    while eng.has_unfinished():
        eng.step()
        waiting = [seq.seq_id for seq in eng.scheduler.waiting]
        assert waiting == sorted(waiting), "a preempted sequence goes before all that came later"
    for step in eng.observer:
        order += [(e["kind"], e["seq"]) for e in step["events"] if e["kind"] in ("admit", "preempt")]
        assert step["running"] == sorted(step["running"])
    running: list[int] = []
    for kind, seq_id in order:
        if kind == "admit":
            running.append(seq_id)
        else:
            assert seq_id == max(r for r in running if r in running), "the last admitted goes first"
            running.remove(seq_id)
    assert ("preempt", 0) not in order
    done(eng, seqs)


@both
def test_waiting_is_first_come_first_served_without_overtaking(policy):
    eng = engine(8, 4, policy=policy, max_num_seqs=8, watermark=0)
    big, huge, small = add(eng, [1] * 20, 2), add(eng, [2] * 20, 2), add(eng, [3], 2)
    eng.step()
    assert eng.scheduler.running == [big] and list(eng.scheduler.waiting) == [huge, small]
    done(eng, [big, huge, small])


def test_the_watermark_stays_free_while_others_run_but_not_for_the_first():
    eng = engine(10, 4, watermark=0.3)
    first, second = add(eng, [1] * 20), add(eng, [2] * 12)  # 5 blocks, then 3 of the 5 left
    eng.step()
    assert eng.scheduler.running == [first]
    done(eng, [first, second])
    eng = engine(10, 4, watermark=0.5)
    done(eng, [add(eng, [1] * 40)])  # with nothing running all blocks may be used


def test_watermark_boundary():
    for tokens, runs in ((8, 2), (9, 1)):  # 2 blocks leave 3 free, 3 blocks leave 2
        eng = engine(10, 4, watermark=0.3)
        add(eng, [1] * 20), add(eng, [2] * tokens)
        eng.step()
        assert len(eng.scheduler.running) == runs


# budget and phases


@both
@overlapped
@pytest.mark.parametrize("budget", [1, 3, 8, 64])
def test_the_budget_is_never_exceeded_and_used_where_there_is_work(policy, overlap, budget):
    eng = recorded(100, 4, policy=policy, overlap=overlap, max_num_batched_tokens=budget, max_num_seqs=5)
    seqs = [add(eng, [k] * (3 + 7 * k)) for k in range(6)]
    done(eng, seqs)
    sums = [sum(n for _, n, _ in step) for step in eng.runner.steps]
    assert max(sums) == budget or budget == 64
    assert max(sums) <= budget


def test_token_budget_mixes_decode_and_chunks():
    eng = recorded(100, 4, max_num_batched_tokens=8)
    first = add(eng, [1, 2])
    eng.step()
    second = add(eng, [3] * 20)
    for _ in range(3):
        eng.step()
    assert eng.runner.steps[1:] == [[(0, 1, True), (1, 7, False)], [(0, 1, True), (1, 7, False)],
                                    [(0, 1, True), (1, 6, True)]]  # fmt: skip
    done(eng, [first, second])


@overlapped
@pytest.mark.parametrize("seed", range(20))
def test_prefill_first_never_mixes_kinds(overlap, seed):
    rng = random.Random(seed)
    eng = engine(
        rng.randint(8, 40), 4, policy="prefill_first", overlap=overlap, max_num_batched_tokens=9, max_num_seqs=4,
        observer=Trace(),
    )  # fmt: skip
    seqs = []
    for _ in range(60):
        if rng.random() < 0.3:
            seqs.append(add(eng, [rng.randint(0, 1) for _ in range(rng.randint(1, 30))]))
        eng.step()
    done(eng, seqs)
    decoding: set[int] = set()  # has sampled since it was admitted
    for step in eng.observer:
        decoding -= {event["seq"] for event in step["events"] if event["kind"] == "admit"}
        decodes = [row["seq"] in decoding for row in step["rows"]]
        assert not any(decodes) or all(row["tokens"] == 1 for row in step["rows"]), step["rows"]
        decoding |= {row["seq"] for row in step["rows"] if row["new"]}
    assert any(len(step["rows"]) > 1 for step in eng.observer)


def test_a_chunked_prefill_computes_each_token_once_and_samples_once():
    eng = recorded(100, 4, max_num_batched_tokens=7, enable_prefix_caching=False)
    seq = add(eng, list(range(30)), max_tokens=1)
    done(eng, [seq])
    assert [n for step in eng.runner.steps for _, n, _ in step] == [7, 7, 7, 7, 2]
    assert [sampled for step in eng.runner.steps for _, _, sampled in step] == [False] * 4 + [True]


def test_chunks_cannot_thrash_a_prompt_starts_only_if_all_of_it_fits():
    eng = recorded(8, 4, max_num_batched_tokens=4, watermark=0)
    first, second = add(eng, [1] * 20, 1), add(eng, [2] * 20, 1)  # 5 + 5 blocks of 8
    eng.step()
    assert eng.scheduler.running == [first]
    done(eng, [first, second])
    assert eng.scheduler.num_preemptions == 0


@overlapped
@pytest.mark.parametrize("policy", ["token_budget", "prefill_first"])
def test_no_row_is_computed_after_the_last_token_is_on_its_way(policy, overlap):
    eng = recorded(100, 4, policy=policy, overlap=overlap)
    seqs = [add(eng, [k, k], max_tokens=k + 1) for k in range(5)]
    done(eng, seqs)
    rows = [seq_id for step in eng.runner.steps for seq_id, _, _ in step]
    assert [rows.count(k) for k in range(5)] == [1, 2, 3, 4, 5]


# no step costs more than its tokens: counted, not timed


def counted(num_blocks, size, **kwargs):
    count = Counting()
    return count, engine(num_blocks, size, block_manager=BlockManager(num_blocks, size, hash_function=count), **kwargs)


def test_a_decode_step_hashes_only_the_block_it_fills():
    count, eng = counted(64, 4, max_model_len=1000)
    seq = add(eng, [1] * 99, max_tokens=40)
    eng.step()
    for _ in range(30):
        count.calls = 0
        written = seq.num_computed_tokens + 1
        eng.step()
        assert count.calls == (written % 4 == 0)


def test_a_blocked_head_is_not_hashed_again():
    count, eng = counted(32, 4, watermark=0)
    add(eng, [1] * 100, max_tokens=20)
    eng.step()
    add(eng, [1] * 100, max_tokens=2)  # the same prompt: 24 blocks hit, and still it does not fit
    add(eng, [2] * 100, max_tokens=2)
    filler = add(eng, [3] * 40, max_tokens=2)
    eng.step()
    count.calls = 0
    for _ in range(3):
        eng.step()
    assert count.calls <= 1 and filler in eng.scheduler.waiting
    finish(eng)


def test_with_all_slots_taken_nobody_is_looked_up():
    eng = engine(64, 4, max_num_seqs=1)
    add(eng, [1] * 10)
    eng.step()
    add(eng, [1] * 10)
    eng.block_manager.lookup = None  # would raise
    for _ in range(5):
        eng.step()


def test_a_decode_step_touches_neither_pool_nor_context():
    eng = engine(4096, 1, max_model_len=4000, enable_prefix_caching=False)
    seq = add(eng, [1] * 3000, max_tokens=50)
    eng.step()
    reads = 0

    class Watched(list):
        def __getitem__(self, index):
            nonlocal reads
            reads += len(range(*index.indices(len(self)))) if isinstance(index, slice) else 1
            return super().__getitem__(index)

        def __iter__(self):
            nonlocal reads
            reads += len(self)
            return super().__iter__()

    eng.runner._run = lambda batch: [[7] for _ in batch.seqs]
    seq.token_ids, seq.block_table = Watched(seq.token_ids), Watched(seq.block_table)
    eng.block_manager.ref_counts = Watched(eng.block_manager.ref_counts)
    for _ in range(20):
        eng.step()
    assert 0 < reads <= 20 * 4
