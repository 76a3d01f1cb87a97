"""Attention of ragged rows over paged KV: prompts, chunks and whatever else has many new tokens.

The new keys were stored before, so every key lies in the cache and one rule serves all rows: the
query at position p sees keys 0..p. One program takes a tile of consecutive queries of one row, all
heads of one KV head's group stacked, and walks the keys with an online softmax (FlashAttention, Dao
et al. 2022).
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
import triton
import triton.language as tl

from nanoengine.kernels.common import begin, dot_precision, load_heads, overlapped, power_of_two
from nanoengine.kernels.contract import Contract, ModelTensors
from nanoengine.kernels.paged_decode import LOG2_E

BLOCK_M = 128  # queries times group in one program


def queries_per_tile(group: int) -> int:
    """How many consecutive queries share a tile: it holds all heads of the group, padded."""
    return max(1, BLOCK_M // power_of_two(group))


def most_tiles(tokens: int, rows: int, per_tile: int) -> int:
    """Tiles that ``tokens`` of ``rows`` need at most: each row has one that is not full."""
    return tokens // per_tile + min(rows, tokens // 2)


def plan_tiles(
    query_lens: np.ndarray,
    seq_lens: np.ndarray,
    rows: np.ndarray,
    per_tile: int,
    size: int | None = None,
) -> np.ndarray:
    """int64 [2, P]: row and first query (within the row) of each tile, those with most keys first.

    size: P; what is left over are tiles of row -1, which do nothing. None: as many as are needed.
    """
    lens = query_lens[rows]
    counts = -(-lens // per_tile)
    owner = np.repeat(rows, counts)
    first = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    first *= per_tile
    order = np.argsort(-(seq_lens[owner] - query_lens[owner] + first), kind="stable")
    tiles = np.full((2, len(owner) if size is None else size), -1, np.int64)
    tiles[:, : len(owner)] = owner[order], first[order]
    return tiles


def paged_prefill_reference(
    q, kv_cache, block_tables, query_start_loc, query_lens, seq_lens, scale: float
) -> torch.Tensor:
    """q: [T, heads, D]; row b's tokens start at query_start_loc[b]; block_tables: [B, blocks]."""
    out = torch.empty_like(q)
    group = q.shape[1] // kv_cache.shape[3]
    rows = zip(query_start_loc.tolist(), query_lens.tolist(), seq_lens.tolist(), strict=True)
    for row, (start, n, seq_len) in enumerate(rows):
        table = block_tables[row].long()
        keys, values = (x[table].flatten(0, 1)[:seq_len].float() for x in kv_cache)
        keys, values = (x.repeat_interleave(group, 1) for x in (keys, values))
        scores = torch.einsum("qhd,chd->hqc", q[start : start + n].float(), keys) * scale
        position = torch.arange(seq_len, device=q.device)
        scores.masked_fill_(position[None, :] > position[seq_len - n :, None], -torch.inf)
        row_out = torch.einsum("hqc,chd->qhd", scores.softmax(-1), values)
        out[start : start + n] = row_out.to(q.dtype)
    return out


def paged_prefill(
    q,
    kv_cache,
    block_tables,
    request_rows,
    query_start_loc,
    query_lens,
    seq_lens,
    tiles,
    out,
    scale: float,
) -> None:
    """Causal attention of the rows that ``tiles`` (of plan_tiles, on the device) names.

    q, out: [T, heads, D], heads and dims dense. kv_cache: [2, blocks, block_size, num_kv_heads, D].
    block_tables: int32 [*, max_blocks]; row b uses row request_rows[b] of it. query_start_loc,
    query_lens, seq_lens: int64 [B], a row's first token in q, its number of new tokens, and its
    tokens with KV including these.
    """
    num_heads, d = q.shape[1:]
    block_size, num_kv_heads = kv_cache.shape[2:4]
    group = num_heads // num_kv_heads
    wide = q.dtype == torch.float32
    _paged_prefill[(num_kv_heads, tiles.shape[1])](
        q,
        kv_cache,
        block_tables,
        request_rows,
        query_start_loc,
        query_lens,
        seq_lens,
        tiles,
        out,
        scale * LOG2_E,
        q.stride(0),
        out.stride(0),
        kv_cache.stride(0),
        block_tables.stride(0),
        tiles.shape[1],
        KV_HEADS=num_kv_heads,
        GROUP=group,
        GROUP_PAD=power_of_two(group),
        QUERIES=queries_per_tile(group),
        D=d,
        D_PAD=power_of_two(d),
        BLOCK_SIZE=block_size,
        BLOCK_N=32,
        PRECISION=dot_precision(q.dtype),
        **overlapped(q),
        num_warps=8,
        num_stages=1 if wide else 2,
    )


def _warmup(m: ModelTensors) -> list:
    q = m.zeros(2, m.num_heads, m.head_dim)
    tables = torch.zeros(2, 16, dtype=torch.int32, device=q.device)
    tile = torch.zeros(2, 1, dtype=torch.int64, device=q.device)
    zeros, twos, out = m.numbers(0, 0), m.numbers(2, 2), torch.empty_like(q)
    rows = (zeros, zeros, twos, twos)
    return [partial(paged_prefill, q, m.kv_cache(), tables, *rows, tile, out, 1.0)]


CONTRACT = Contract(
    references={paged_prefill: paged_prefill_reference},
    early_reads={"_paged_prefill": ()},
    warmup=_warmup,
)


@triton.jit(do_not_specialize=["num_tiles"])
def _paged_prefill(
    q,
    kv_cache,
    block_tables,
    request_rows,
    query_start_loc,
    query_lens,
    seq_lens,
    tiles,
    out,
    scale,
    q_stride,
    out_stride,
    v_offset,
    table_stride,
    num_tiles,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    QUERIES: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Line i of the tile: query i // GROUP_PAD of the tile, head i % GROUP_PAD of the group."""
    begin(OVERLAP)
    kv_head, tile = tl.program_id(0), tl.program_id(1)
    row, first_query = tl.load(tiles + tile), tl.load(tiles + num_tiles + tile).to(tl.int32)
    if row < 0:
        return
    n, seq_len = tl.load(query_lens + row).to(tl.int32), tl.load(seq_lens + row).to(tl.int32)
    table = block_tables + tl.load(request_rows + row) * table_stride
    offs_m, dim = tl.arange(0, QUERIES * GROUP_PAD), tl.arange(0, D_PAD)
    offs_n = tl.arange(0, BLOCK_N)
    query, member = first_query + offs_m // GROUP_PAD, offs_m % GROUP_PAD
    token, head = tl.load(query_start_loc + row) + query, kv_head * GROUP + member
    mask = ((query < n) & (member < GROUP))[:, None] & (dim < D)[None, :]
    q_pointers = q + token[:, None] * q_stride + head[:, None] * D + dim[None, :]
    q_tile = tl.load(q_pointers, mask=mask, other=0.0)
    sees = seq_len - n + query  # the last position that each query may look at
    end = tl.minimum(seq_len - n + first_query + QUERIES, seq_len)

    m_i = tl.full((QUERIES * GROUP_PAD,), float("-inf"), tl.float32)
    l_i = tl.zeros((QUERIES * GROUP_PAD,), tl.float32)
    acc = tl.zeros((QUERIES * GROUP_PAD, D_PAD), tl.float32)
    for start_n in range(0, end, BLOCK_N):
        position = start_n + offs_n
        # Beyond the end the last key is read again; no query sees it there.
        there = tl.minimum(position, end - 1)
        block = tl.load(table + there // BLOCK_SIZE).to(tl.int64)
        slot = block * BLOCK_SIZE + there % BLOCK_SIZE
        pointers = kv_cache + (slot * (KV_HEADS * D) + kv_head * D)[:, None] + dim[None, :]
        k = load_heads(pointers, dim, D, D_PAD)
        qk = tl.dot(q_tile, tl.trans(k), input_precision=PRECISION) * scale
        qk = tl.where(position[None, :] <= sees[:, None], qk, float("-inf"))
        # key 0 is in the first tile and every query sees it: m_i is finite from there on
        m_new = tl.maximum(m_i, tl.max(qk, 1))
        alpha = tl.exp2(m_i - m_new)
        p = tl.exp2(qk - m_new[:, None])
        v = load_heads(pointers + v_offset, dim, D, D_PAD)
        l_i = l_i * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
        m_i = m_new
    out_pointers = out + token[:, None] * out_stride + head[:, None] * D + dim[None, :]
    tl.store(out_pointers, (acc / l_i[:, None]).to(out.dtype.element_ty), mask=mask)
