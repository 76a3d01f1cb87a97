"""Decode attention over paged KV: one new token a row, its keys and values split among programs.

A decode step reads every key and value once and does next to no arithmetic, so all that counts is to
keep the memory busy. One program takes one *piece* of one row's context, for one KV head: it loads
each key once for all query heads of the group. Pieces are about equally long, whatever the rows'
lengths are (Flash-Decoding, Dao et al. 2023, with a work list in place of a fixed grid); a second
small kernel combines rows that were cut into several pieces.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from nanoengine.kernels.common import (
    dot_precision,
    let_next_start,
    load_heads,
    overlapped,
    power_of_two,
    wait_for_last,
)


@dataclass(frozen=True)
class Tuning:
    """tile: keys that a program loads at a time; stages: tiles whose loads are in flight.

    By default what was fastest on an H200 (bench/results/h200_decode_kernel.json); `bench attention` compares others.
    """

    tile: int = 32
    warps: int = 2
    stages: int = 2


def plan_pieces(contexts: np.ndarray, rows: np.ndarray, spare: int, size: int | None = None, tile: int = Tuning.tile):
    """Cut rows into pieces of equal length (the last one of a row is shorter), at most ``spare`` more than rows.

    contexts: int64 [R], >= 1, tokens that each of ``rows`` (int64 [R], row numbers of the batch) sees.
    size: what to take R for in the sizes of the results (a padded batch), at least R. tile: see Tuning.
    Returns work, int64 [4, size + spare]: row (-1: nothing to do), first key, end, and the piece's
    number (-1 if it is its row's only one), the longest first; and split, int64 [3, spare], the rows
    that have several: row, number of its first piece, how many (0: nothing to do).
    """
    # sum(ceil(c / length)) <= sum(c) / length + R, which is R + spare for this length:
    length = -(-int(contexts.sum()) // spare) if spare else int(contexts.max(initial=1))
    length = max(tile, -(-length // tile) * tile)
    counts = -(-contexts // length)
    firsts = np.cumsum(counts) - counts
    owner = np.repeat(np.arange(len(rows)), counts)
    number = np.arange(len(owner))
    start = (number - firsts[owner]) * length
    end = np.minimum(start + length, contexts[owner])
    number[counts[owner] == 1] = -1
    work = np.full((4, (len(rows) if size is None else size) + spare), -1, np.int64)
    order = np.argsort(start - end, kind="stable")  # long pieces first: short ones fill the gaps at the end
    work[:, : len(owner)] = np.stack((rows[owner], start, end, number))[:, order]
    several = np.flatnonzero(counts > 1)  # at most spare: each has a piece more than it has rows
    split = np.zeros((3, spare), np.int64)
    split[:, : len(several)] = rows[several], firsts[several], counts[several]
    return work, split


def paged_decode_reference(q, cache, tables, contexts, scale: float) -> torch.Tensor:
    """q: [R, heads, D]; tables: [R, blocks]; contexts: [R]. Returns [R, heads, D]; float32 arithmetic."""
    out = torch.empty_like(q)
    group = q.shape[1] // cache.shape[3]
    for row, context in enumerate(contexts.tolist()):
        keys, values = (part[tables[row].long()].flatten(0, 1)[:context].float() for part in cache)
        keys, values = (x.repeat_interleave(group, 1) for x in (keys, values))
        scores = torch.einsum("hd,chd->hc", q[row].float(), keys) * scale
        out[row] = torch.einsum("hc,chd->hd", scores.softmax(-1), values).to(q.dtype)
    return out


def paged_decode(q, cache, tables, table_rows, tokens, work, split, out, scale: float, tuning=Tuning()) -> None:
    """Attention of one query token a row, over the first contexts[row] slots of its block table.

    q, out: [T, heads, D], heads and dims dense (a row's token is tokens[row], int64 [B]); out is written
    for these rows alone. cache: [2, blocks, block_size, kv_heads, D]. tables: int32 [*, max_blocks];
    row b of the batch uses line table_rows[b]. work, split: of plan_pieces with the tile of ``tuning``, on
    the device.
    """
    heads, d = q.shape[1:]
    block_size, kv_heads = cache.shape[2:4]
    pieces = work.shape[1]
    partial = torch.empty((pieces if split.shape[1] else 0, heads, d), dtype=torch.float32, device=q.device)
    weight = torch.empty(partial.shape[:2], dtype=torch.float32, device=q.device)
    _decode_pieces[(kv_heads, pieces)](
        q, cache, tables, table_rows, tokens, work, out, partial, weight, scale * 1.4426950408889634,
        q.stride(0), out.stride(0), cache.stride(0), tables.stride(0), pieces,
        KV_HEADS=kv_heads, GROUP=heads // kv_heads, GROUP_PAD=power_of_two(heads // kv_heads, 16),
        D=d, D_PAD=power_of_two(d), BLOCK_SIZE=block_size, TILE=tuning.tile, PRECISION=dot_precision(q.dtype),
        **overlapped(q), num_warps=tuning.warps, num_stages=tuning.stages,
    )  # fmt: skip
    if split.shape[1]:
        _combine_pieces[(split.shape[1], heads)](
            partial, weight, tokens, split, out, out.stride(0), split.shape[1],
            HEADS=heads, D=d, D_PAD=power_of_two(d), MANY=16, **overlapped(q), num_warps=1,
        )  # fmt: skip


@triton.jit(do_not_specialize=["pieces"])
def _decode_pieces(
    q, cache, tables, table_rows, tokens, work, out, partial, weight, scale,
    q_stride, out_stride, values, table_stride, pieces,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program a piece and KV head; the heads of one piece run side by side and share cache lines."""
    let_next_start(OVERLAP)
    head, item = tl.program_id(0), tl.program_id(1)
    row = tl.load(work + item)
    if row < 0:  # nothing to do; but if no program waited, the next kernel could begin before the last one has ended
        wait_for_last(OVERLAP)
        return
    start = tl.multiple_of(tl.load(work + pieces + item).to(tl.int32), TILE)
    end = tl.load(work + 2 * pieces + item).to(tl.int32)
    piece = tl.load(work + 3 * pieces + item)
    token, table = tl.load(tokens + row), tables + tl.load(table_rows + row) * table_stride
    wait_for_last(OVERLAP)  # up to here it read the plan alone, which the host has sent
    # the query heads of the group, padded to the 16 rows that tl.dot needs
    member, dim, key = tl.arange(0, GROUP_PAD), tl.arange(0, D_PAD), tl.arange(0, TILE)
    heads = head * GROUP + member
    real = (member < GROUP)[:, None] & (dim < D)[None, :]
    queries = tl.load(q + token * q_stride + heads[:, None] * D + dim[None, :], mask=real, other=0.0)
    # online softmax (Milakov and Gimelshein 2018), in base 2: exp2 is what the hardware has
    highest = tl.full((GROUP_PAD,), float("-inf"), tl.float32)
    total = tl.zeros((GROUP_PAD,), tl.float32)
    result = tl.zeros((GROUP_PAD, D_PAD), tl.float32)
    # the last tile, which may be shorter, is the first that is read: its registers are free when the others come
    base, full = cache + head * D, start + (end - start - 1) // TILE * TILE
    highest, total, result = _attend(
        queries, highest, total, result, table, base, values, full, end, scale, dim, key,
        KV_HEADS * D, D, D_PAD, BLOCK_SIZE, PRECISION, True,
    )  # fmt: skip
    for first in range(start, full, TILE):
        highest, total, result = _attend(
            queries, highest, total, result, table, base, values, first, end, scale, dim, key,
            KV_HEADS * D, D, D_PAD, BLOCK_SIZE, PRECISION, False,
        )  # fmt: skip
    result = result / total[:, None]
    if piece < 0:
        place = out + token * out_stride + heads[:, None] * D + dim[None, :]
        tl.store(place, result.to(out.dtype.element_ty), mask=real)
    else:
        line = piece * (KV_HEADS * GROUP) + heads
        tl.store(partial + line[:, None] * D + dim[None, :], result, mask=real)
        tl.store(weight + line, highest + tl.log2(total), mask=member < GROUP)


@triton.jit
def _attend(
    queries, highest, total, result, table, base, values, first, end, scale, dim, key,
    STRIDE: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, PRECISION: tl.constexpr,
    LAST: tl.constexpr,
):  # fmt: skip
    """One tile of keys: (highest, total, result) with them. LAST: the tile may reach beyond the piece's end."""
    position = first + key
    # beyond the end the last key is read again, and does not count: loads without a mask are faster
    there = tl.minimum(position, end - 1) if LAST else position
    block = tl.load(table + there // BLOCK_SIZE).to(tl.int64)
    slot = block * BLOCK_SIZE + there % BLOCK_SIZE
    at = base + (slot * STRIDE)[:, None] + dim[None, :]
    keys = load_heads(at, dim, D, D_PAD)
    scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * scale
    if LAST:
        scores = tl.where((position < end)[None, :], scores, float("-inf"))
    new_highest = tl.maximum(highest, tl.max(scores, 1))
    shrink = tl.exp2(highest - new_highest)
    chance = tl.exp2(scores - new_highest[:, None])
    keys_values = load_heads(at + values, dim, D, D_PAD)
    total = total * shrink + tl.sum(chance, 1)
    result = tl.dot(chance.to(keys_values.dtype), keys_values, result * shrink[:, None], input_precision=PRECISION)
    return new_highest, total, result


@triton.jit(do_not_specialize=["num_split"])
def _combine_pieces(
    partial, weight, tokens, split, out, out_stride, num_split,
    HEADS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, MANY: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Weighted mean of a row's pieces, MANY at a time; a piece's weight is 2**weight (its softmax sum)."""
    let_next_start(OVERLAP)
    entry, head = tl.program_id(0), tl.program_id(1)
    count, first = tl.load(split + 2 * num_split + entry).to(tl.int32), tl.load(split + num_split + entry)
    token = tl.load(tokens + tl.load(split + entry))
    wait_for_last(OVERLAP)  # up to here it read the plan alone
    if count == 0:
        return
    dim, some = tl.arange(0, D_PAD), tl.arange(0, MANY)
    highest, total = float("-inf"), 0.0
    result = tl.zeros((D_PAD,), tl.float32)
    for done in range(0, count, MANY):
        live = done + some < count
        line = (first + done + some) * HEADS + head
        weights = tl.load(weight + line, mask=live, other=float("-inf"))
        parts = tl.load(partial + line[:, None] * D + dim[None, :], mask=live[:, None] & (dim < D)[None, :], other=0.0)
        new_highest = tl.maximum(highest, tl.max(weights, 0))
        shares = tl.exp2(weights - new_highest)
        shrink = tl.exp2(highest - new_highest)
        total = total * shrink + tl.sum(shares, 0)
        result = result * shrink + tl.sum(parts * shares[:, None], 0)
        highest = new_highest
    place = out + token * out_stride + head * D + dim
    tl.store(place, (result / total).to(out.dtype.element_ty), mask=dim < D)
