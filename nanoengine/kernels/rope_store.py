"""QK-norm, RoPE and the write to the KV cache in one kernel: all between qkv_proj and attention."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from nanoengine.kernels.common import let_next_start, overlapped, power_of_two, wait_for_last
from nanoengine.kernels.contract import Contract, ModelTensors
from nanoengine.kernels.store_kv import store_kv_reference


def rope_store_reference(
    qkv, num_heads: int, q_weight, k_weight, eps: float, cos, sin, positions, kv_cache, slot_mapping
):
    """See rope_store; in float32 up to the last rounding, as the kernel."""
    d, num_kv_heads = kv_cache.shape[4], kv_cache.shape[3]
    heads = qkv.view(len(qkv), num_heads + 2 * num_kv_heads, d)
    q, k, v = heads.split((num_heads, num_kv_heads, num_kv_heads), 1)
    if q_weight is not None:
        pairs = ((q, q_weight), (k, k_weight))
        q, k = (F.rms_norm(x.float(), (d,), w.float(), eps) for x, w in pairs)
    c, s = cos[positions][:, None], sin[positions][:, None]
    q, k = ((x * c + x.roll(d // 2, -1) * s).to(qkv.dtype) for x in (q.float(), k.float()))
    store_kv_reference(k, v, kv_cache, slot_mapping)
    return q


def rope_store(
    qkv, num_heads: int, q_weight, k_weight, eps: float, cos, sin, positions, kv_cache, slot_mapping
) -> torch.Tensor:
    """Returns q [T, num_heads, D], normed and rotated; k, likewise, and v go to the cache.

    qkv: [T, (num_heads + 2 * num_kv_heads) * D]; q_weight, k_weight: [D], or None without QK-norm.
    cos, sin: float32 [positions, D], sin with the sign of the rotation
    (model.layers.RotaryEmbedding). positions: int64 [T]. kv_cache: [2, blocks, block_size,
    num_kv_heads, D]. slot_mapping: int64 [T]; -1 writes nowhere.
    """
    num_kv_heads, d = kv_cache.shape[3:]
    q = qkv.new_empty(len(qkv), num_heads, d)
    heads_per_program = 4
    grid = (len(qkv), triton.cdiv(num_heads + 2 * num_kv_heads, heads_per_program))
    norm = q_weight is not None
    _rope_store[grid](
        qkv,
        q_weight if norm else qkv,
        k_weight if norm else qkv,
        cos,
        sin,
        positions,
        kv_cache,
        slot_mapping,
        q,
        eps,
        kv_cache.stride(0),
        HEADS=num_heads,
        KV_HEADS=num_kv_heads,
        D=d,
        D_PAD=power_of_two(d),
        BLOCK_H=heads_per_program,
        NORM=norm,
        **overlapped(q),
        num_warps=2,
    )
    return q


def _warmup(m: ModelTensors) -> list:
    qkv = m.zeros(2, (m.num_heads + 2 * m.num_kv_heads) * m.head_dim)
    norms, rope = (m.q_norm, m.k_norm, m.eps), (m.cos, m.sin)
    zeros, nowhere = m.numbers(0, 0), m.numbers(-1, -1)
    return [partial(rope_store, qkv, m.num_heads, *norms, *rope, zeros, m.kv_cache(), nowhere)]


CONTRACT = Contract(
    references={rope_store: rope_store_reference},
    early_reads={
        "_rope_store": {"q_weight", "k_weight", "cos", "sin", "positions", "slot_mapping"}
    },
    warmup=_warmup,
)


@triton.jit
def _rope_store(
    qkv,
    q_weight,
    k_weight,
    cos,
    sin,
    positions,
    kv_cache,
    slot_mapping,
    q,
    eps,
    v_offset,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK_H: tl.constexpr,
    NORM: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """BLOCK_H heads of one token per program: query heads first, then keys, then values."""
    let_next_start(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    head, dim = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H), tl.arange(0, D_PAD)
    mask = (head < HEADS + 2 * KV_HEADS)[:, None] & (dim < D)[None, :]
    # RoPE mixes each dimension with the one half a head away
    partner = tl.where(dim < D // 2, dim + D // 2, dim - D // 2)
    angle, slot = tl.load(positions + token) * D + dim, tl.load(slot_mapping + token)
    c = tl.load(cos + angle, mask=dim < D, other=0.0)
    s = tl.load(sin + angle, mask=dim < D, other=0.0)
    if NORM:
        # the norm's weight is that of queries or of keys, the same for all heads of a kind
        is_query, normed = (head < HEADS)[:, None], mask & (head < HEADS + KV_HEADS)[:, None]
        own = tl.where(is_query, q_weight + dim[None, :], k_weight + dim[None, :])
        other = tl.where(is_query, q_weight + partner[None, :], k_weight + partner[None, :])
        w, w_partner = tl.load(own, mask=normed, other=0.0), tl.load(other, mask=normed, other=0.0)
    wait_for_last(OVERLAP)  # up to here it read what the host has sent, and weights
    row = qkv + token * ((HEADS + 2 * KV_HEADS) * D) + head[:, None] * D
    raw = tl.load(row + dim[None, :], mask=mask, other=0.0)
    x = raw.to(tl.float32)
    x_partner = tl.load(row + partner[None, :], mask=mask, other=0.0).to(tl.float32)
    if NORM:
        rstd = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
        x = x * rstd * w.to(tl.float32)
        x_partner = x_partner * rstd * w_partner.to(tl.float32)
    rotated = (x * c[None, :] + x_partner * s[None, :]).to(q.dtype.element_ty)
    q_pointers = q + token * (HEADS * D) + head[:, None] * D + dim[None, :]
    tl.store(q_pointers, rotated, mask=mask & (head < HEADS)[:, None])
    if slot >= 0:
        kv_head = head - HEADS
        pointers = kv_cache + slot * (KV_HEADS * D) + kv_head[:, None] * D + dim[None, :]
        is_key = ((kv_head >= 0) & (kv_head < KV_HEADS))[:, None]
        tl.store(pointers, rotated, mask=mask & is_key)
        v_pointers = pointers + v_offset - KV_HEADS * D
        tl.store(v_pointers, raw, mask=mask & (kv_head >= KV_HEADS)[:, None])
