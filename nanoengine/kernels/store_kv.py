"""Write new keys and values to their slots of the paged cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nanoengine.kernels.common import begin, overlapped, power_of_two


def store_kv_reference(k: torch.Tensor, v: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    """See store_kv."""
    written = slots >= 0
    flat = cache.view(2, -1, *cache.shape[3:])
    flat[0, slots[written]] = k[written]
    flat[1, slots[written]] = v[written]


def store_kv(k: torch.Tensor, v: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    """k, v: [T, kv_heads, head_dim], heads and dims dense; cache: [2, blocks, block_size, kv_heads, head_dim].

    slots: int64 [T], block * block_size + offset; a token with slot -1 is written nowhere.
    """
    width = k.shape[1] * k.shape[2]
    _store_kv[(len(slots),)](k, v, cache, slots, k.stride(0), v.stride(0), cache.stride(0),
                             WIDTH=width, WIDTH_PAD=power_of_two(width), **overlapped(cache))  # fmt: skip


@triton.jit
def _store_kv(k, v, cache, slots, k_stride, v_stride, values, WIDTH: tl.constexpr, WIDTH_PAD: tl.constexpr,
              OVERLAP: tl.constexpr):  # fmt: skip
    """One program a token. ``values``: elements from the start of K to the start of V."""
    begin(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)  # int64: a pool of 2**31 elements is only 4 GB
    if slot >= 0:
        column = tl.arange(0, WIDTH_PAD)
        real = column < WIDTH
        place = cache + slot * WIDTH + column
        tl.store(place, tl.load(k + token * k_stride + column, mask=real), mask=real)
        tl.store(place + values, tl.load(v + token * v_stride + column, mask=real), mask=real)
