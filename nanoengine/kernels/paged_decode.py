"""Decode attention over paged KV: one new token per row, its keys and values split among programs.

A decode step reads every key and value once and does next to no arithmetic, so all that counts is
to keep the memory busy. One program takes one *KV split*, a range of one row's keys, for one KV
head: it loads each key once for all query heads of the group. kv_splits.py cuts the rows, and has
the second, small kernel that combines the rows with several splits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

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
from nanoengine.kernels.contract import Contract, ModelTensors
from nanoengine.kernels.kv_splits import KEYS_PER_TILE, combine_kv_splits, plan_kv_splits

LOG2_E = 1.4426950408889634  # exp(x) = exp2(LOG2_E * x), and exp2 is what the hardware has


@dataclass(frozen=True)
class Tuning:
    """tile: keys that a program loads at a time; stages: tiles whose loads are in flight.

    By default what was fastest on an H200 (bench/results/h200_decode_kernel.json); `bench
    attention` compares others.
    """

    tile: int = KEYS_PER_TILE
    warps: int = 2
    stages: int = 2


def paged_decode_reference(q, kv_cache, block_tables, seq_lens, scale: float) -> torch.Tensor:
    """q: [R, heads, D]; block_tables: [R, blocks]; seq_lens: [R]. Returns [R, heads, D]."""
    out = torch.empty_like(q)
    group = q.shape[1] // kv_cache.shape[3]
    for row, seq_len in enumerate(seq_lens.tolist()):
        table = block_tables[row].long()
        keys, values = (x[table].flatten(0, 1)[:seq_len].float() for x in kv_cache)
        keys, values = (x.repeat_interleave(group, 1) for x in (keys, values))
        scores = torch.einsum("hd,chd->hc", q[row].float(), keys) * scale
        out[row] = torch.einsum("hc,chd->hd", scores.softmax(-1), values).to(q.dtype)
    return out


def paged_decode(
    q,
    kv_cache,
    block_tables,
    request_rows,
    query_start_loc,
    kv_splits,
    combined,
    out,
    scale: float,
    tuning=Tuning(),
) -> None:
    """Attention of one query token per row over its row's keys.

    q, out: [T, heads, D], heads and dims dense. Row b's token is query_start_loc[b], int64 [B]; out
    is written for these tokens alone. kv_cache: [2, blocks, block_size, num_kv_heads, D].
    block_tables: int32 [*, max_blocks]; row b of the batch uses row request_rows[b] of it.
    kv_splits, combined: what plan_kv_splits returns for the tile of ``tuning``, on the device.
    """
    num_heads, d = q.shape[1:]
    block_size, num_kv_heads = kv_cache.shape[2:4]
    num_kv_splits, num_combined = kv_splits.shape[1], combined.shape[1]
    shape = (num_kv_splits if num_combined else 0, num_heads, d)
    partial_out = torch.empty(shape, dtype=torch.float32, device=q.device)
    lse = torch.empty(shape[:2], dtype=torch.float32, device=q.device)
    _decode_kv_splits[(num_kv_heads, num_kv_splits)](
        q,
        kv_cache,
        block_tables,
        request_rows,
        query_start_loc,
        kv_splits,
        out,
        partial_out,
        lse,
        scale * LOG2_E,
        q.stride(0),
        out.stride(0),
        kv_cache.stride(0),
        block_tables.stride(0),
        num_kv_splits,
        KV_HEADS=num_kv_heads,
        GROUP=num_heads // num_kv_heads,
        GROUP_PAD=power_of_two(num_heads // num_kv_heads, 16),
        D=d,
        D_PAD=power_of_two(d),
        BLOCK_SIZE=block_size,
        BLOCK_N=tuning.tile,
        PRECISION=dot_precision(q.dtype),
        **overlapped(q),
        num_warps=tuning.warps,
        num_stages=tuning.stages,
    )
    if num_combined:
        combine_kv_splits(partial_out, lse, query_start_loc, combined, out)


def _warmup(m: ModelTensors) -> list:
    q = m.zeros(2, m.num_heads, m.head_dim)
    tables = torch.zeros(2, 16, dtype=torch.int32, device=q.device)
    plan = plan_kv_splits(np.array([2, 2]), np.arange(2), 2)
    kv_splits, combined = (torch.from_numpy(x).to(q.device) for x in plan)
    zeros, out = m.numbers(0, 0), torch.empty_like(q)
    return [
        partial(paged_decode, q, m.kv_cache(), tables, zeros, zeros, kv_splits, combined, out, 1.0)
    ]


CONTRACT = Contract(
    references={paged_decode: paged_decode_reference},
    early_reads={"_decode_kv_splits": {"kv_splits", "request_rows", "query_start_loc"}},
    warmup=_warmup,
)


@triton.jit(do_not_specialize=["num_kv_splits"])
def _decode_kv_splits(
    q,
    kv_cache,
    block_tables,
    request_rows,
    query_start_loc,
    kv_splits,
    out,
    partial_out,
    lse,
    scale,
    q_stride,
    out_stride,
    v_offset,
    table_stride,
    num_kv_splits,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program per KV split and KV head. Heads of one split run together, on shared lines."""
    let_next_start(OVERLAP)
    kv_head, item = tl.program_id(0), tl.program_id(1)
    row = tl.load(kv_splits + item)
    if row < 0:  # nothing to do; but if no program waited, the next kernel could begin too early
        wait_for_last(OVERLAP)
        return
    start = tl.multiple_of(tl.load(kv_splits + num_kv_splits + item).to(tl.int32), BLOCK_N)
    end = tl.load(kv_splits + 2 * num_kv_splits + item).to(tl.int32)
    number = tl.load(kv_splits + 3 * num_kv_splits + item)
    token = tl.load(query_start_loc + row)
    table = block_tables + tl.load(request_rows + row) * table_stride
    wait_for_last(OVERLAP)  # up to here it read the work list alone, which the host has sent
    # the query heads of the group, padded to the 16 rows that tl.dot needs
    member, dim, offs_n = tl.arange(0, GROUP_PAD), tl.arange(0, D_PAD), tl.arange(0, BLOCK_N)
    head = kv_head * GROUP + member
    mask = (member < GROUP)[:, None] & (dim < D)[None, :]
    q_pointers = q + token * q_stride + head[:, None] * D + dim[None, :]
    q_tile = tl.load(q_pointers, mask=mask, other=0.0)
    # online softmax (Milakov and Gimelshein 2018), in base 2
    m_i = tl.full((GROUP_PAD,), float("-inf"), tl.float32)
    l_i = tl.zeros((GROUP_PAD,), tl.float32)
    acc = tl.zeros((GROUP_PAD, D_PAD), tl.float32)
    # The last tile may be shorter. It is read first: its registers are free when the others come.
    base, last = kv_cache + kv_head * D, start + (end - start - 1) // BLOCK_N * BLOCK_N
    m_i, l_i, acc = _attend(
        q_tile,
        m_i,
        l_i,
        acc,
        table,
        base,
        v_offset,
        last,
        end,
        scale,
        dim,
        offs_n,
        KV_HEADS * D,
        D,
        D_PAD,
        BLOCK_SIZE,
        PRECISION,
        True,
    )
    for start_n in range(start, last, BLOCK_N):
        m_i, l_i, acc = _attend(
            q_tile,
            m_i,
            l_i,
            acc,
            table,
            base,
            v_offset,
            start_n,
            end,
            scale,
            dim,
            offs_n,
            KV_HEADS * D,
            D,
            D_PAD,
            BLOCK_SIZE,
            PRECISION,
            False,
        )
    acc = acc / l_i[:, None]
    if number < 0:
        pointers = out + token * out_stride + head[:, None] * D + dim[None, :]
        tl.store(pointers, acc.to(out.dtype.element_ty), mask=mask)
    else:
        line = number * (KV_HEADS * GROUP) + head
        tl.store(partial_out + line[:, None] * D + dim[None, :], acc, mask=mask)
        tl.store(lse + line, m_i + tl.log2(l_i), mask=member < GROUP)


@triton.jit
def _attend(
    q_tile,
    m_i,
    l_i,
    acc,
    table,
    base,
    v_offset,
    start_n,
    end,
    scale,
    dim,
    offs_n,
    STRIDE: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PRECISION: tl.constexpr,
    LAST: tl.constexpr,
):
    """(m_i, l_i, acc) with one more tile of keys. LAST: it may reach beyond the split's end."""
    position = start_n + offs_n
    # Beyond the end the last key is read again and does not count. Loads without a mask are faster.
    there = tl.minimum(position, end - 1) if LAST else position
    block = tl.load(table + there // BLOCK_SIZE).to(tl.int64)
    slot = block * BLOCK_SIZE + there % BLOCK_SIZE
    pointers = base + (slot * STRIDE)[:, None] + dim[None, :]
    k = load_heads(pointers, dim, D, D_PAD)
    qk = tl.dot(q_tile, tl.trans(k), input_precision=PRECISION) * scale
    if LAST:
        qk = tl.where((position < end)[None, :], qk, float("-inf"))
    m_new = tl.maximum(m_i, tl.max(qk, 1))
    alpha = tl.exp2(m_i - m_new)
    p = tl.exp2(qk - m_new[:, None])
    v = load_heads(pointers + v_offset, dim, D, D_PAD)
    l_i = l_i * alpha + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
    return m_new, l_i, acc
