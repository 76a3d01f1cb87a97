"""Write new keys and values to their slots of the paged cache."""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from nanoengine.kernels.common import begin, overlapped, power_of_two
from nanoengine.kernels.contract import Contract, ModelTensors


def store_kv_reference(
    k: torch.Tensor, v: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """See store_kv."""
    written = slot_mapping >= 0
    flat = kv_cache.view(2, -1, *kv_cache.shape[3:])
    flat[0, slot_mapping[written]] = k[written]
    flat[1, slot_mapping[written]] = v[written]


def store_kv(
    k: torch.Tensor, v: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """k, v: [T, num_kv_heads, head_dim], heads and dims dense.

    kv_cache: [2, blocks, block_size, num_kv_heads, head_dim]. slot_mapping: int64 [T], block *
    block_size + offset; a token with slot -1 is written nowhere.
    """
    width = k.shape[1] * k.shape[2]
    _store_kv[(len(slot_mapping),)](
        k,
        v,
        kv_cache,
        slot_mapping,
        k.stride(0),
        v.stride(0),
        kv_cache.stride(0),
        WIDTH=width,
        PAD=power_of_two(width),
        **overlapped(kv_cache),
    )


def _warmup(m: ModelTensors) -> list:
    k = m.zeros(2, m.num_kv_heads, m.head_dim)
    return [partial(store_kv, k, k, m.kv_cache(), m.numbers(-1, -1))]


CONTRACT = Contract(
    references={store_kv: store_kv_reference},
    early_reads={"_store_kv": ()},
    warmup=_warmup,
)


@triton.jit
def _store_kv(
    k,
    v,
    kv_cache,
    slot_mapping,
    k_stride,
    v_stride,
    v_offset,
    WIDTH: tl.constexpr,
    PAD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program per token. v_offset: elements from the start of K to the start of V."""
    begin(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)  # int64: a pool of 2**31 elements is only 4 GB
    if slot >= 0:
        column = tl.arange(0, PAD)
        mask = column < WIDTH
        pointers = kv_cache + slot * WIDTH + column
        tl.store(pointers, tl.load(k + token * k_stride + column, mask=mask), mask=mask)
        tl.store(pointers + v_offset, tl.load(v + token * v_stride + column, mask=mask), mask=mask)
