"""KV splits of a decode step: which program reads which keys, and how their results are combined.

A KV split is a range of one row's keys. Rows are cut so that all splits are about equally long,
whatever the rows' lengths are (Flash-Decoding, Dao et al. 2023, with a work list in place of a
fixed grid).
"""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import torch
import triton
import triton.language as tl

from nanoengine.kernels.common import let_next_start, overlapped, power_of_two, wait_for_last
from nanoengine.kernels.contract import Contract, ModelTensors

KEYS_PER_TILE = 32


def plan_kv_splits(
    seq_lens: np.ndarray,
    rows: np.ndarray,
    extra_splits: int,
    size: int | None = None,
    tile: int = KEYS_PER_TILE,
) -> tuple[np.ndarray, np.ndarray]:
    """Cut rows into KV splits of equal length (a row's last one is shorter).

    seq_lens: int64 [R], >= 1, the keys that each of ``rows`` sees; rows: int64 [R], row numbers of
    the batch. extra_splits: how many KV splits there may be beyond one per row. size: what to take
    R for in the sizes of the results (a padded batch), at least R. tile: keys that the decode
    kernel loads at a time; splits start at multiples of it.

    Returns kv_splits, int64 [4, size + extra_splits], the longest first: row (-1: nothing to do),
    first key, end, and the number of its partial result (-1 if it is its row's only split); and
    combined, int64 [3, extra_splits], the rows that have several: row, number of the first partial
    result, how many (0: nothing to do).
    """
    # sum(ceil(s / length)) <= sum(s) / length + R, which is R + extra_splits for this length:
    if extra_splits:
        length = -(-int(seq_lens.sum()) // extra_splits)
    else:
        length = int(seq_lens.max(initial=1))
    length = max(tile, -(-length // tile) * tile)
    counts = -(-seq_lens // length)
    firsts = np.cumsum(counts) - counts
    owner = np.repeat(np.arange(len(rows)), counts)
    number = np.arange(len(owner))
    start = (number - firsts[owner]) * length
    end = np.minimum(start + length, seq_lens[owner])
    number[counts[owner] == 1] = -1
    kv_splits = np.full((4, (len(rows) if size is None else size) + extra_splits), -1, np.int64)
    order = np.argsort(start - end, kind="stable")  # short ones fill the gaps at the end
    kv_splits[:, : len(owner)] = np.stack((rows[owner], start, end, number))[:, order]
    several = np.flatnonzero(counts > 1)  # at most extra_splits: each such row takes one
    combined = np.zeros((3, extra_splits), np.int64)
    combined[:, : len(several)] = rows[several], firsts[several], counts[several]
    return kv_splits, combined


def combine_kv_splits_reference(partial_out, lse, query_start_loc, combined, out) -> None:
    """See combine_kv_splits."""
    for row, first, count in combined.t().tolist():
        if count:
            weights = (lse[first : first + count] * math.log(2)).softmax(0)[:, :, None]
            row_out = (partial_out[first : first + count] * weights).sum(0)
            out[query_start_loc[row]] = row_out.to(out.dtype)


def combine_kv_splits(partial_out, lse, query_start_loc, combined, out) -> None:
    """Combine the partial results of the rows that have several KV splits.

    partial_out: float32 [num_kv_splits, heads, D], attention over one split's keys; lse: float32
    [num_kv_splits, heads], base-2 logarithm of the sum of its exp2 scores. query_start_loc: int64
    [B]; combined: of plan_kv_splits, on the device. out: [T, heads, D]; only these rows' tokens are
    written.
    """
    num_combined, (num_heads, d) = combined.shape[1], out.shape[1:]
    _combine_kv_splits[(num_combined, num_heads)](
        partial_out,
        lse,
        query_start_loc,
        combined,
        out,
        out.stride(0),
        num_combined,
        HEADS=num_heads,
        D=d,
        D_PAD=power_of_two(d),
        BLOCK_S=16,
        **overlapped(out),
        num_warps=1,
    )


def _warmup(m: ModelTensors) -> list:
    out, combined = m.zeros(2, m.num_heads, m.head_dim), m.numbers(0, 0, 0, 0, 0, 0).view(3, 2)
    partial_out = torch.zeros(4, m.num_heads, m.head_dim, device=out.device)
    lse, zeros = partial_out.new_zeros(4, m.num_heads), m.numbers(0, 0)
    return [partial(combine_kv_splits, partial_out, lse, zeros, combined, out)]


CONTRACT = Contract(
    references={combine_kv_splits: combine_kv_splits_reference},
    early_reads={"_combine_kv_splits": {"combined", "query_start_loc"}},
    warmup=_warmup,
)


@triton.jit(do_not_specialize=["num_combined"])
def _combine_kv_splits(
    partial_out,
    lse,
    query_start_loc,
    combined,
    out,
    out_stride,
    num_combined,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK_S: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Mean of a row's partial results, BLOCK_S at a time, weighted by 2**lse: softmax sums."""
    let_next_start(OVERLAP)
    entry, head = tl.program_id(0), tl.program_id(1)
    count = tl.load(combined + 2 * num_combined + entry).to(tl.int32)
    first = tl.load(combined + num_combined + entry)
    token = tl.load(query_start_loc + tl.load(combined + entry))
    wait_for_last(OVERLAP)  # up to here it read the work list alone
    if count == 0:
        return
    dim, offs_s = tl.arange(0, D_PAD), tl.arange(0, BLOCK_S)
    m_i, l_i = float("-inf"), 0.0
    acc = tl.zeros((D_PAD,), tl.float32)
    for start_s in range(0, count, BLOCK_S):
        live = start_s + offs_s < count
        line = (first + start_s + offs_s) * HEADS + head
        lse_s = tl.load(lse + line, mask=live, other=float("-inf"))
        mask = live[:, None] & (dim < D)[None, :]
        out_s = tl.load(partial_out + line[:, None] * D + dim[None, :], mask=mask, other=0.0)
        m_new = tl.maximum(m_i, tl.max(lse_s, 0))
        p = tl.exp2(lse_s - m_new)
        alpha = tl.exp2(m_i - m_new)
        l_i = l_i * alpha + tl.sum(p, 0)
        acc = acc * alpha + tl.sum(out_s * p[:, None], 0)
        m_i = m_new
    pointers = out + token * out_stride + head * D + dim
    tl.store(pointers, (acc / l_i).to(out.dtype.element_ty), mask=dim < D)
