"""Residual addition and RMSNorm in one pass over the row."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from nanoengine.kernels.common import begin, overlapped, power_of_two


def add_norm_reference(stream, delta, weight, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """See add_norm."""
    stream = stream if delta is None else stream + delta
    return stream, F.rms_norm(stream, (stream.shape[-1],), weight, eps)


def add_norm(stream, delta, weight, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(stream + delta, RMSNorm of that): two reads and two writes instead of three and three.

    stream, delta: [T, hidden]; delta None adds nothing. ``stream`` is changed in place.
    """
    hidden = stream.shape[1]
    normed = torch.empty_like(stream)
    _add_norm[(len(stream),)](
        stream, stream if delta is None else delta, weight, normed, eps,
        ADD=delta is not None, HIDDEN=hidden, PAD=power_of_two(hidden), **overlapped(stream),
        num_warps=4 if hidden <= 2048 else 8,
    )  # fmt: skip
    return stream, normed


@triton.jit
def _add_norm(stream, delta, weight, normed, eps, ADD: tl.constexpr, HIDDEN: tl.constexpr, PAD: tl.constexpr,
              OVERLAP: tl.constexpr):  # fmt: skip
    """One program a row. The sum is rounded to the stream's type before it is squared, as torch does."""
    begin(OVERLAP)
    column = tl.arange(0, PAD)
    real = column < HIDDEN
    at = tl.program_id(0).to(tl.int64) * HIDDEN + column
    x = tl.load(stream + at, mask=real, other=0.0)
    if ADD:
        x = (x.to(tl.float32) + tl.load(delta + at, mask=real, other=0.0).to(tl.float32)).to(stream.dtype.element_ty)
        tl.store(stream + at, x, mask=real)
    x = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / HIDDEN + eps)
    w = tl.load(weight + column, mask=real, other=0.0).to(tl.float32)
    tl.store(normed + at, (x * scale * w).to(normed.dtype.element_ty), mask=real)
