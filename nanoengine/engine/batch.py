"""From scheduled sequences to the arrays that one forward pass needs. Pure functions."""

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
    rows: int64 [B]: the request row of each sequence (RowTable): what the device keeps of a sequence
        between steps lies there.
    new_rows: bool [B]: True where this step is the first that uses the row.
    token_rows: int64 [T] or None if the host knows every input id: where >= 0, it is the last token
        that was sampled in that request row (of several the first), and the host has not seen it yet.
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
    rows: np.ndarray
    new_rows: np.ndarray
    token_rows: np.ndarray | None = None
    prompt: PromptRows | None = None

    @property
    def is_decode(self) -> bool:
        """True if every row computes exactly one token."""
        return len(self.input_ids) == len(self.seqs)

    @property
    def query_starts(self) -> np.ndarray:
        """int32 [B + 1]: where each row's tokens start (the cu_seqlens of FlashAttention)."""
        return np.concatenate(([0], np.cumsum(self.query_lens))).astype(np.int32)


def build_batch(seqs: list[Sequence], block_size: int, new_rows: list[bool] | None = None) -> Batch:
    """Lay out the scheduled tokens of ``seqs``.

    new_rows: which of them got their row for this step (RowTable.assign), empty for none. None: the
        batch stands alone, with the rows 0..B-1, all of them new.
    Errors: ValueError if a token is neither known nor about to be sampled in a row.
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
    ids, token_rows = _input_ids(seqs, starts, counts, one_each)
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
        rows=np.arange(len(seqs)) if new_rows is None else np.array([s.row for s in seqs], np.int64),
        new_rows=np.array(new_rows, bool) if new_rows else np.full(len(seqs), new_rows is None),
        token_rows=token_rows,
        prompt=None if is_plain_decode else prompt_rows(seqs, starts, counts),
    )


def span_slots(block_table: list[int], start: int, end: int, block_size: int) -> np.ndarray:
    """int64 slots of the tokens at positions start..end-1: block_table[p // size] * size + p % size."""
    low = start // block_size
    blocks = np.array(block_table[low : -(-end // block_size)], np.int64)
    slots = blocks[:, None] * block_size + np.arange(block_size)
    return slots.reshape(-1)[start - low * block_size : end - low * block_size]


def _input_ids(seqs, starts, counts, one_each) -> tuple[np.ndarray, np.ndarray | None]:
    """Ids of the scheduled tokens, and the rows of those that are not known yet (Batch.token_rows)."""
    if one_each:  # no span to slice: this is the hot path
        try:
            return np.array([seq.token_ids[p] for seq, p in zip(seqs, starts, strict=True)], np.int64), None
        except IndexError:  # a step in flight samples at least one of them
            pairs = list(zip(seqs, starts, strict=True))
            ids = [seq.token_ids[p] if p < len(seq.token_ids) else 0 for seq, p in pairs]
            token_rows = [-1 if p < len(seq.token_ids) else _row(seq, p) for seq, p in pairs]
            return np.array(ids, np.int64), np.array(token_rows, np.int64)
    ids, token_rows, all_known = [], [], True
    for seq, start, count in zip(seqs, starts, counts, strict=True):
        known = seq.token_ids[start : start + count]
        ids += known
        token_rows += [-1] * len(known)
        if len(known) < count:
            ids.append(0)
            token_rows.append(_row(seq, start + count - 1))
            all_known = False
    return np.array(ids, np.int64), None if all_known else np.array(token_rows, np.int64)


def _row(seq: Sequence, position: int) -> int:
    """Where the token at ``position`` will be: only the newest one can be in flight."""
    if seq.row < 0 or position != len(seq.token_ids):
        raise ValueError(f"sequence {seq.seq_id}: nobody samples its token at position {position}")
    return seq.row
