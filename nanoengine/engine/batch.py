"""From scheduled sequences to the arrays that one forward pass needs. Pure functions, no torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nanoengine.engine.prompt_rows import PromptRows, prompt_rows
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
        token that row in_flight[t] of the step before samples (if it brings several, the first).
    prompt: the tokens that bring logprobs of the prompt; None if nobody asks for them.
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
    prompt: PromptRows | None = None

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
    one_each = sum(counts) == len(seqs)  # a decode step, the usual case: no span to lay out
    first = np.array(starts, np.int64)
    query_lens = np.ones(len(seqs), np.int64) if one_each else np.array(counts, np.int64)
    context_lens = first + query_lens
    if one_each:
        positions = first
        blocks = np.array([t[p // block_size] for t, p in zip(tables, starts, strict=True)], np.int64)
        slots = blocks * block_size + positions % block_size
    else:
        ends = context_lens.tolist()
        positions = np.concatenate([np.arange(a, b) for a, b in zip(starts, ends, strict=True)])
        slots = np.concatenate([span_slots(t, a, b, block_size) for t, a, b in zip(tables, starts, ends, strict=True)])
    ids, in_flight = _input_ids(seqs, starts, counts, one_each, rows_in_flight)
    totals = np.array([seq.num_tokens for seq in seqs], np.int64)
    sample_rows = np.flatnonzero(context_lens == totals)
    # where every row has one token and samples, none lies before the last token of its prompt
    is_plain_decode = one_each and len(sample_rows) == len(seqs)
    return Batch(
        seqs=seqs,
        input_ids=ids,
        positions=positions,
        slot_mapping=slots,
        query_lens=query_lens,
        context_lens=context_lens,
        block_tables=tables,
        sample_rows=sample_rows,
        sample_positions=totals[sample_rows],
        in_flight=in_flight,
        prompt=None if is_plain_decode else prompt_rows(seqs, starts, counts),
    )


def span_slots(block_table: list[int], start: int, end: int, block_size: int) -> np.ndarray:
    """int64 slots of the tokens at positions start..end-1: block_table[p // size] * size + p % size."""
    low = start // block_size
    blocks = np.array(block_table[low : -(-end // block_size)], np.int64)
    slots = blocks[:, None] * block_size + np.arange(block_size)
    return slots.reshape(-1)[start - low * block_size : end - low * block_size]


def _input_ids(seqs, starts, counts, one_each, rows_in_flight) -> tuple[np.ndarray, np.ndarray | None]:
    """Ids of the scheduled tokens, and where the missing ones come from (see Batch.in_flight)."""
    if not rows_in_flight:
        if one_each:
            return np.array([seq.token_ids[p] for seq, p in zip(seqs, starts, strict=True)], np.int64), None
        spans = [seq.token_ids[a : a + n] for seq, a, n in zip(seqs, starts, counts, strict=True)]
        return np.array([token for span in spans for token in span], np.int64), None
    if one_each:  # the hot path of the overlapped loop: no span to slice
        sources = [
            -1 if p < len(seq.token_ids) else rows_in_flight[seq.seq_id] for seq, p in zip(seqs, starts, strict=True)
        ]
        ids = [seq.token_ids[p] if row < 0 else 0 for seq, p, row in zip(seqs, starts, sources, strict=True)]
        return np.array(ids, np.int64), np.array(sources, np.int64)
    ids, sources = [], []
    for seq, start, count in zip(seqs, starts, counts, strict=True):
        known = seq.token_ids[start : start + count]
        ids += known
        sources += [-1] * len(known)
        if len(known) < count:  # only the newest token of a row can be in flight
            ids.append(0)
            sources.append(rows_in_flight[seq.seq_id])
    return np.array(ids, np.int64), np.array(sources, np.int64)
