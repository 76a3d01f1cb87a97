"""From scheduled sequences to the arrays that one forward pass needs. Pure functions, no torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nanoengine.engine.sequence import Sequence


@dataclass(slots=True)
class Batch:
    """One ragged batch: the new tokens of all rows laid end to end, no padding.

    B rows (sequences), T tokens, S rows that sample.
    input_ids, positions, slot_mapping: int64 [T]; a slot is block id * block_size + offset.
    query_lens, context_lens: int64 [B]: tokens computed now, and tokens with KV afterwards.
    block_tables: B lists of block ids; row i needs the first ceil(context_lens[i] / block_size).
    sample_rows: int64 [S]: rows whose last token brings a new one (an unfinished chunk does not).
    sample_positions: int64 [S]: index of the token to be sampled; with the seed it fixes the
        random numbers.
    in_flight: int64 [T] or None: where >= 0, the input id is not known on the host yet: it is the
        token that row in_flight[t] of the step before samples.
    """

    seqs: list[Sequence]
    input_ids: np.ndarray
    positions: np.ndarray
    slot_mapping: np.ndarray
    query_lens: np.ndarray
    context_lens: np.ndarray
    block_tables: list[list[int]]
    sample_rows: np.ndarray
    sample_positions: np.ndarray
    in_flight: np.ndarray | None = None

    @property
    def is_decode(self) -> bool:
        """True if every row computes exactly one token."""
        return len(self.input_ids) == len(self.seqs)

    @property
    def query_starts(self) -> np.ndarray:
        """int32 [B + 1]: where each row's tokens start (the cu_seqlens of FlashAttention)."""
        return np.concatenate(([0], np.cumsum(self.query_lens))).astype(np.int32)


def build_batch(seqs: list[Sequence], block_size: int, rows_in_flight: dict[int, int] | None = None) -> Batch:
    """Lay out the scheduled tokens of ``seqs``.

    rows_in_flight: seq_id -> row in the launched step that has not landed, for rows whose last
    token that step samples; None or empty if every input id is known.
    """
    starts = [seq.num_computed_tokens for seq in seqs]
    counts = [seq.num_scheduled_tokens for seq in seqs]
    tables = [seq.block_table for seq in seqs]
    last = [start + count for start, count in zip(starts, counts, strict=True)]
    totals = [seq.num_tokens for seq in seqs]
    num_tokens = sum(counts)
    if num_tokens == len(seqs):
        positions = starts
        slots = [t[p // block_size] * block_size + p % block_size for t, p in zip(tables, starts, strict=True)]
    else:
        positions, slots = [], []
        for start, end, table in zip(starts, last, tables, strict=True):
            positions.extend(range(start, end))
            slots.extend(span_slots(table, start, end, block_size))
    in_flight = None
    if rows_in_flight:
        ids, in_flight = _ids_in_flight(seqs, starts, last, rows_in_flight)
    elif num_tokens == len(seqs):
        ids = [seq.token_ids[p] for seq, p in zip(seqs, starts, strict=True)]
    else:
        ids = [i for seq, a, b in zip(seqs, starts, last, strict=True) for i in seq.token_ids[a:b]]
    context_lens, sampled = np.array(last, np.int64), np.array(totals, np.int64)
    sample_rows = np.flatnonzero(context_lens == sampled)
    return Batch(
        seqs=seqs,
        input_ids=np.array(ids, np.int64),
        positions=np.array(positions, np.int64),
        slot_mapping=np.array(slots, np.int64),
        query_lens=np.array(counts, np.int64),
        context_lens=context_lens,
        block_tables=tables,
        sample_rows=sample_rows,
        sample_positions=sampled[sample_rows],
        in_flight=in_flight,
    )


def span_slots(block_table: list[int], start: int, end: int, block_size: int) -> list[int]:
    """Slots of the tokens at positions start..end-1: block_table[p // size] * size + p % size."""
    slots = []
    for index in range(start // block_size, -(-end // block_size)):
        first = block_table[index] * block_size
        low, high = max(start - index * block_size, 0), min(end - index * block_size, block_size)
        slots.extend(range(first + low, first + high))
    return slots


def _ids_in_flight(seqs, starts, ends, rows_in_flight) -> tuple[list[int], np.ndarray]:
    ids, sources = [], []
    for seq, start, end in zip(seqs, starts, ends, strict=True):
        known = seq.token_ids[start:end]
        missing = end - start - len(known)
        ids += known + [0] * missing
        sources += [-1] * len(known)
        if missing:
            sources += [rows_in_flight[seq.seq_id]] * missing
    return ids, np.array(sources, np.int64)
