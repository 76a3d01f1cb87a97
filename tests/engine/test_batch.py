"""build_batch against the sentence that defines each array."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest

from nanoengine.engine.batch import build_batch, span_slots

from .helpers import sequence


def scheduled(tokens, computed, count, table, seq_id=0, in_flight=0):
    """A sequence about to compute ``count`` tokens; ``in_flight`` of its tokens are not known yet."""
    seq = sequence(tokens, seq_id)
    seq.row = 20 - seq_id
    seq.num_tokens += in_flight
    seq.num_computed_tokens, seq.num_scheduled_tokens, seq.block_table = computed, count, table
    return seq


def random_rows(rng, size, decode_only):
    seqs, blocks = [], list(range(500))
    rng.shuffle(blocks)
    for seq_id in range(rng.randint(1, 6)):
        known = rng.randint(1, 40)
        flying = rng.random() < 0.5
        total = known + flying
        if decode_only:
            computed, count = total - 1, 1
        else:
            computed = rng.randint(0, total - 1)
            count = rng.randint(1, total - computed)
        table = [blocks.pop() for _ in range(-(-(computed + count) // size) + rng.randint(0, 2))]
        seqs.append(scheduled(rng.choices(range(100), k=known), computed, count, table, seq_id, flying))
    return seqs, [rng.random() < 0.5 for _ in seqs]


@pytest.mark.parametrize("size", [1, 2, 3, 16, 256])
@pytest.mark.parametrize("decode_only", [True, False])
def test_every_array_is_what_its_definition_says(size, decode_only):
    for seed in range(60):
        seqs, new = random_rows(random.Random(seed), size, decode_only)
        before = copy.deepcopy(seqs)
        batch = build_batch(seqs, size, new)
        ids, positions, slots, sources = [], [], [], []
        for seq in seqs:
            for p in range(seq.num_computed_tokens, seq.num_computed_tokens + seq.num_scheduled_tokens):
                flying = p >= len(seq.token_ids)
                ids.append(None if flying else seq.token_ids[p])
                sources.append(seq.row if flying else -1)
                positions.append(p)
                slots.append(seq.block_table[p // size] * size + p % size)
        assert batch.positions.tolist() == positions
        assert batch.slot_mapping.tolist() == slots
        assert [a for a, b in zip(batch.input_ids.tolist(), ids, strict=True) if b is not None] == [
            b for b in ids if b is not None
        ]
        assert (batch.token_rows.tolist() if batch.token_rows is not None else [-1] * len(ids)) == sources
        assert batch.rows.tolist() == [seq.row for seq in seqs] and batch.new_rows.tolist() == new
        assert batch.query_lens.tolist() == [s.num_scheduled_tokens for s in seqs]
        assert batch.context_lens.tolist() == [s.num_computed_tokens + s.num_scheduled_tokens for s in seqs]
        assert batch.query_starts.tolist() == [
            sum(s.num_scheduled_tokens for s in seqs[:i]) for i in range(len(seqs) + 1)
        ]
        samples = [i for i, s in enumerate(seqs) if s.num_computed_tokens + s.num_scheduled_tokens == s.num_tokens]
        assert batch.sample_rows.tolist() == samples
        assert batch.sample_positions.tolist() == [seqs[i].num_tokens for i in samples]
        assert [list(t) for t in batch.block_tables] == [s.block_table for s in seqs]
        assert batch.is_decode == all(s.num_scheduled_tokens == 1 for s in seqs)
        for was, seq in zip(before, seqs, strict=True):
            for name in seq.__slots__:
                assert getattr(was, name) == getattr(seq, name), "build_batch changes nothing"


def test_types_are_fixed_whatever_the_mix():
    decode = scheduled([1, 2], 1, 1, [3])
    chunk = scheduled([1, 2, 3, 4], 0, 3, [4], 1)
    flying = scheduled([1], 1, 1, [5], 2, in_flight=1)
    for seqs in ([decode], [chunk], [decode, chunk, flying], [flying]):
        batch = build_batch(seqs, 4)
        arrays = (batch.input_ids, batch.positions, batch.slot_mapping, batch.query_lens, batch.context_lens,
                  batch.sample_rows, batch.sample_positions, batch.rows)  # fmt: skip
        assert {a.dtype for a in arrays} == {np.dtype(np.int64)}
        assert batch.query_starts.dtype == np.int32


def test_a_ragged_mix_by_hand():
    chunk = scheduled([10, 11, 12, 13, 14], 1, 3, [7, 2], 0)
    decode = scheduled([20, 21, 22], 2, 1, [5], 1)
    flying = scheduled([30, 31], 2, 1, [9], 2, in_flight=1)
    batch = build_batch([chunk, decode, flying], 4, [False, False, True])
    assert batch.input_ids.tolist()[:4] == [11, 12, 13, 22]
    assert batch.positions.tolist() == [1, 2, 3, 2, 2]
    assert batch.slot_mapping.tolist() == [29, 30, 31, 22, 38]
    assert batch.token_rows.tolist() == [-1, -1, -1, -1, 18] and batch.rows.tolist() == [20, 19, 18]
    assert batch.sample_rows.tolist() == [1, 2] and batch.sample_positions.tolist() == [3, 3]
    assert not batch.is_decode


def test_large_slots_do_not_wrap():
    block = 2**31 // 256 + 5
    batch = build_batch([scheduled([1] * 300, 299, 1, [0, block])], 256)
    assert batch.slot_mapping.tolist() == [block * 256 + 43] and batch.slot_mapping[0] > 2**31


@pytest.mark.parametrize(("start", "end"), [(0, 1), (0, 4), (3, 4), (3, 5), (4, 8), (2, 11), (7, 7)])
def test_span_slots(start, end):
    table = [6, 1, 8]
    assert span_slots(table, start, end, 4).tolist() == [table[p // 4] * 4 + p % 4 for p in range(start, end)]


def test_a_token_that_nobody_samples_is_an_error_not_a_wrong_token():
    rowless = scheduled([1], 1, 1, [5], 2, in_flight=1)
    rowless.row = -1
    beyond = scheduled([1], 2, 1, [5], 2, in_flight=2)
    span = scheduled([1], 0, 3, [5], 2, in_flight=2)
    for seq in (rowless, beyond, span):
        with pytest.raises(ValueError, match="nobody samples"):
            build_batch([seq], 4)


def test_a_batch_that_stands_alone_has_rows_of_its_own():
    batch = build_batch([scheduled([1], 0, 1, [1], 8), scheduled([1, 2], 1, 1, [2], 9)], 4)
    assert batch.rows.tolist() == [0, 1] and batch.new_rows.all()
