"""Attention of ragged rows over paged KV: prompts, chunks and whatever else has many new tokens.

The new keys were stored before, so every key lies in the cache and one rule serves all rows: query at
position p sees keys 0..p. One program takes a tile of consecutive queries of one row, all heads of
one KV head's group stacked, and walks the keys with an online softmax (FlashAttention, Dao et al. 2022).
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from nanoengine.kernels.common import begin, dot_precision, load_heads, overlapped, power_of_two

TILE_ROWS = 128  # queries times group in one program


def queries_per_tile(group: int) -> int:
    """How many consecutive queries share a tile: it holds all heads of the group (padded to a power of two)."""
    return max(1, TILE_ROWS // power_of_two(group))


def most_tiles(tokens: int, rows: int, per_tile: int) -> int:
    """Tiles that so many tokens of so many rows need at most: a row has one that is not full."""
    return tokens // per_tile + min(rows, tokens // 2)


def plan_tiles(query_lens: np.ndarray, context_lens: np.ndarray, rows: np.ndarray, per_tile: int,
               size: int | None = None) -> np.ndarray:  # fmt: skip
    """int64 [2, P]: row and first query (within the row) of each tile, those with most keys first.

    size: P, the rest being tiles of row -1, which do nothing; None for as many as there are.
    """
    lens = query_lens[rows]
    counts = -(-lens // per_tile)
    owner = np.repeat(rows, counts)
    first = (np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)) * per_tile
    order = np.argsort(-(context_lens[owner] - query_lens[owner] + first), kind="stable")
    tiles = np.full((2, len(owner) if size is None else size), -1, np.int64)
    tiles[:, : len(owner)] = owner[order], first[order]
    return tiles


def paged_prefill_reference(q, cache, tables, starts, query_lens, context_lens, scale: float) -> torch.Tensor:
    """q: [T, heads, D]; row b's new tokens lie at starts[b]...; tables: [B, blocks]. float32 arithmetic."""
    out = torch.empty_like(q)
    group = q.shape[1] // cache.shape[3]
    for row, (start, n, context) in enumerate(
        zip(starts.tolist(), query_lens.tolist(), context_lens.tolist(), strict=True)
    ):
        keys, values = (part[tables[row].long()].flatten(0, 1)[:context].float() for part in cache)
        keys, values = (x.repeat_interleave(group, 1) for x in (keys, values))
        scores = torch.einsum("qhd,chd->hqc", q[start : start + n].float(), keys) * scale
        position = torch.arange(context, device=q.device)
        scores.masked_fill_(position[None, :] > position[context - n :, None], -torch.inf)
        out[start : start + n] = torch.einsum("hqc,chd->qhd", scores.softmax(-1), values).to(q.dtype)
    return out


def paged_prefill(q, cache, tables, table_rows, tokens, query_lens, context_lens, tiles, out, scale: float) -> None:
    """Causal attention of the rows that ``tiles`` (of plan_tiles, on the device) names.

    q, out: [T, heads, D], heads and dims dense; cache: [2, blocks, block_size, kv_heads, D]; tables:
    int32 [*, max_blocks], row b uses line table_rows[b]. tokens, query_lens, context_lens: int64 [B]:
    a row's first token in q, its number of new tokens, and its tokens with KV including these.
    """
    heads, d = q.shape[1:]
    block_size, kv_heads = cache.shape[2:4]
    group = heads // kv_heads
    wide = q.dtype == torch.float32
    _prefill_tiles[(kv_heads, tiles.shape[1])](
        q, cache, tables, table_rows, tokens, query_lens, context_lens, tiles, out, scale * 1.4426950408889634,
        q.stride(0), out.stride(0), cache.stride(0), tables.stride(0), tiles.shape[1],
        KV_HEADS=kv_heads, GROUP=group, GROUP_PAD=power_of_two(group), QUERIES=queries_per_tile(group),
        D=d, D_PAD=power_of_two(d), BLOCK_SIZE=block_size, TILE=32,
        PRECISION=dot_precision(q.dtype), **overlapped(q), num_warps=8, num_stages=1 if wide else 2,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_tiles"])
def _prefill_tiles(
    q, cache, tables, table_rows, tokens, query_lens, context_lens, tiles, out, scale,
    q_stride, out_stride, values, table_stride, num_tiles,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, QUERIES: tl.constexpr,
    D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Line i of the tile: query i // GROUP_PAD of the tile, head i % GROUP_PAD of the group."""
    begin(OVERLAP)
    head, tile = tl.program_id(0), tl.program_id(1)
    row, first_query = tl.load(tiles + tile), tl.load(tiles + num_tiles + tile).to(tl.int32)
    if row < 0:
        return
    n, context = tl.load(query_lens + row).to(tl.int32), tl.load(context_lens + row).to(tl.int32)
    table = tables + tl.load(table_rows + row) * table_stride
    line, dim, key = tl.arange(0, QUERIES * GROUP_PAD), tl.arange(0, D_PAD), tl.arange(0, TILE)
    query, member = first_query + line // GROUP_PAD, line % GROUP_PAD
    token = tl.load(tokens + row) + query
    real = ((query < n) & (member < GROUP))[:, None] & (dim < D)[None, :]
    place = token[:, None] * q_stride + (head * GROUP + member)[:, None] * D + dim[None, :]
    queries = tl.load(q + place, mask=real, other=0.0)
    sees = context - n + query  # the last position that each query may look at
    end = tl.minimum(context - n + first_query + QUERIES, context)

    highest = tl.full((QUERIES * GROUP_PAD,), float("-inf"), tl.float32)
    total = tl.zeros((QUERIES * GROUP_PAD,), tl.float32)
    result = tl.zeros((QUERIES * GROUP_PAD, D_PAD), tl.float32)
    for first in range(0, end, TILE):
        position = first + key
        there = tl.minimum(position, end - 1)  # beyond the end the last key again, which no query sees there
        block = tl.load(table + there // BLOCK_SIZE).to(tl.int64)
        slot = block * BLOCK_SIZE + there % BLOCK_SIZE
        at = cache + (slot * (KV_HEADS * D) + head * D)[:, None] + dim[None, :]
        keys = load_heads(at, dim, D, D_PAD)
        scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * scale
        scores = tl.where(position[None, :] <= sees[:, None], scores, float("-inf"))
        # key 0 is in the first tile and every query sees it: highest is finite from there on
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        shrink = tl.exp2(highest - new_highest)
        chance = tl.exp2(scores - new_highest[:, None])
        keys_values = load_heads(at + values, dim, D, D_PAD)
        total = total * shrink + tl.sum(chance, 1)
        result = result * shrink[:, None]
        result = tl.dot(chance.to(keys_values.dtype), keys_values, result, input_precision=PRECISION)
        highest = new_highest
    out_place = token[:, None] * out_stride + (head * GROUP + member)[:, None] * D + dim[None, :]
    tl.store(out + out_place, (result / total[:, None]).to(out.dtype.element_ty), mask=real)
