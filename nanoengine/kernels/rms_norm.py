"""Residual addition and RMSNorm in one pass over the row."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from nanoengine.kernels.common import let_next_start, overlapped, power_of_two, wait_for_last


def add_norm_reference(stream, delta, weight, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """See add_norm."""
    if delta is not None:
        stream = stream + (delta if delta.dim() == 2 else delta.float().sum(0)).to(stream.dtype)
    return stream, F.rms_norm(stream, (stream.shape[-1],), weight, eps)


def add_norm(stream, delta, weight, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(stream + delta, RMSNorm of that): two reads and two writes instead of three and three.

    stream, delta: [T, hidden]; delta None adds nothing, and [parts, T, hidden] adds all parts (kernels.product).
    ``stream`` is changed in place.
    """
    hidden, normed = stream.shape[1], torch.empty_like(stream)
    parts = 0 if delta is None else delta.shape[0] if delta.dim() == 3 else 1
    _add_norm[(len(stream),)](
        stream, stream if delta is None else delta, weight, normed, eps, len(stream),
        PARTS=parts, HIDDEN=hidden, PAD=power_of_two(hidden), **overlapped(stream),
        num_warps=4 if hidden <= 2048 else 8,
    )  # fmt: skip
    return stream, normed


@triton.jit(do_not_specialize=["rows"])
def _add_norm(stream, delta, weight, normed, eps, rows, PARTS: tl.constexpr, HIDDEN: tl.constexpr, PAD: tl.constexpr,
              OVERLAP: tl.constexpr):  # fmt: skip
    """One program a row. The sum is rounded to the stream's type before it is squared, as torch does."""
    let_next_start(OVERLAP)
    column = tl.arange(0, PAD)
    real = column < HIDDEN
    w = tl.load(weight + column, mask=real, other=0.0).to(tl.float32)
    wait_for_last(OVERLAP)
    at = tl.program_id(0).to(tl.int64) * HIDDEN + column
    x = tl.load(stream + at, mask=real, other=0.0)
    if PARTS > 0:
        added = tl.load(delta + at, mask=real, other=0.0).to(tl.float32)
        for part in tl.static_range(1, PARTS):
            added += tl.load(delta + part * rows * HIDDEN + at, mask=real, other=0.0).to(tl.float32)
        x = (x.to(tl.float32) + added).to(stream.dtype.element_ty)
        tl.store(stream + at, x, mask=real)
    x = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / HIDDEN + eps)
    tl.store(normed + at, (x * scale * w).to(normed.dtype.element_ty), mask=real)
