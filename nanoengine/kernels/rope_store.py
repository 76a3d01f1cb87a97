"""QK-norm, RoPE and the write to the KV cache in one kernel: what lies between the qkv product and attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from nanoengine.kernels.common import let_next_start, overlapped, power_of_two, wait_for_last
from nanoengine.kernels.store_kv import store_kv_reference


def rope_store_reference(qkv, heads: int, q_weight, k_weight, eps: float, cos, sin, positions, cache, slots):
    """See rope_store; in float32 up to the last rounding, as the kernel."""
    d, kv_heads = cache.shape[4], cache.shape[3]
    parts = qkv.view(len(qkv), heads + 2 * kv_heads, d)
    q, k, v = parts.split((heads, kv_heads, kv_heads), 1)
    if q_weight is not None:
        q, k = (F.rms_norm(x.float(), (d,), w.float(), eps) for x, w in ((q, q_weight), (k, k_weight)))
    c, s = cos[positions][:, None], sin[positions][:, None]
    q, k = ((x * c + x.roll(d // 2, -1) * s).to(qkv.dtype) for x in (q.float(), k.float()))
    store_kv_reference(k, v, cache, slots)
    return q


def rope_store(qkv, heads: int, q_weight, k_weight, eps: float, cos, sin, positions, cache, slots) -> torch.Tensor:
    """Returns q [T, heads, D], normed and turned; k (likewise) and v go to their slots of the cache.

    qkv: [T, (heads + 2 * kv_heads) * D]; q_weight, k_weight: [D], or None without QK-norm.
    cos, sin: float32 [positions, D], sin with the sign of the rotation (model.layers.RotaryTable);
    positions: int64 [T]. cache: [2, blocks, block_size, kv_heads, D]; slots: int64 [T], -1 writes nowhere.
    """
    kv_heads, d = cache.shape[3:]
    q = qkv.new_empty(len(qkv), heads, d)
    per_program = 4
    grid = (len(qkv), triton.cdiv(heads + 2 * kv_heads, per_program))
    norm = q_weight is not None
    _rope_store[grid](
        qkv, q_weight if norm else qkv, k_weight if norm else qkv, cos, sin, positions, cache, slots, q, eps,
        cache.stride(0), HEADS=heads, KV_HEADS=kv_heads, D=d, D_PAD=power_of_two(d), SOME=per_program, NORM=norm,
        **overlapped(q), num_warps=2,
    )  # fmt: skip
    return q


@triton.jit
def _rope_store(
    qkv, q_weight, k_weight, cos, sin, positions, cache, slots, q, eps, values,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, SOME: tl.constexpr,
    NORM: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """SOME heads of one token a program: query heads first, then keys, then values."""
    let_next_start(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    head, dim = tl.program_id(1) * SOME + tl.arange(0, SOME), tl.arange(0, D_PAD)
    real = (head < HEADS + 2 * KV_HEADS)[:, None] & (dim < D)[None, :]
    # RoPE mixes each dimension with the one half a head away
    partner = tl.where(dim < D // 2, dim + D // 2, dim - D // 2)
    angle, slot = tl.load(positions + token) * D + dim, tl.load(slots + token)
    c, s = tl.load(cos + angle, mask=dim < D, other=0.0), tl.load(sin + angle, mask=dim < D, other=0.0)
    if NORM:
        # the norm's weight is that of queries or of keys, the same for all heads of a kind
        weight, choice = tl.where(head < HEADS, 1, 0)[:, None], real & (head < HEADS + KV_HEADS)[:, None]
        at = tl.where(weight == 1, q_weight + dim[None, :], k_weight + dim[None, :])
        at_other = tl.where(weight == 1, q_weight + partner[None, :], k_weight + partner[None, :])
        own, others = tl.load(at, mask=choice, other=0.0), tl.load(at_other, mask=choice, other=0.0)
    wait_for_last(OVERLAP)  # up to here it read what the host has sent, and weights
    row = qkv + token * ((HEADS + 2 * KV_HEADS) * D) + head[:, None] * D
    raw = tl.load(row + dim[None, :], mask=real, other=0.0)
    x, other = raw.to(tl.float32), tl.load(row + partner[None, :], mask=real, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
        x = x * scale * own.to(tl.float32)
        other = other * scale * others.to(tl.float32)
    turned = (x * c[None, :] + other * s[None, :]).to(q.dtype.element_ty)
    q_place = q + token * (HEADS * D) + head[:, None] * D + dim[None, :]
    tl.store(q_place, turned, mask=real & (head < HEADS)[:, None])
    if slot >= 0:
        kv = head - HEADS
        place = cache + slot * (KV_HEADS * D) + kv[:, None] * D + dim[None, :]
        tl.store(place, turned, mask=real & ((kv >= 0) & (kv < KV_HEADS))[:, None])
        tl.store(place + values - KV_HEADS * D, raw, mask=real & (kv >= KV_HEADS)[:, None])
