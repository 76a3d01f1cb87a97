"""Matrix times vector, for a batch of one token: it reads every weight once, so it is a memory copy in disguise.

What comes before the product (residual addition and RMSNorm, or SwiGLU) is computed by every program
anew: a few KB from the L2 cache, in exchange for a kernel and its launch.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from nanoengine.kernels.common import let_next_start, overlapped, power_of_two, wait_for_last
from nanoengine.kernels.norm import add_norm_reference
from nanoengine.kernels.swiglu import swiglu_reference

MOST_INPUTS = 4096  # a program holds whole rows in registers


def fits(weight: torch.Tensor) -> bool:
    """True if a product with one token is for these kernels: rows of ``weight`` [out, in] are short and dense."""
    return weight.shape[1] <= MOST_INPUTS and weight.is_contiguous()


def gemv_reference(x, weight, bias=None) -> torch.Tensor:
    return F.linear(x, weight, bias)


def norm_gemv_reference(stream, delta, norm_weight, eps: float, weight, bias=None):
    """See norm_gemv."""
    stream, normed = add_norm_reference(stream, delta, norm_weight, eps)
    return stream, F.linear(normed, weight, bias)


def swiglu_gemv_reference(gate_up, weight, bias=None) -> torch.Tensor:
    return F.linear(swiglu_reference(gate_up), weight, bias)


def gemv(x, weight, bias=None, out=None) -> torch.Tensor:
    """x [1, in] times weight [out, in] transposed, plus bias [out]; float32 sums. Returns [1, out], in ``out`` if
    given."""
    return _launch(x, x, x, None, weight, bias, 0.0, plain=True, out=out)


def norm_gemv(stream, delta, norm_weight, eps: float, weight, bias=None) -> tuple[torch.Tensor, torch.Tensor]:
    """(stream + delta, the product of its RMSNorm with ``weight``): [1, in], [1, out]; delta may be None."""
    new = stream if delta is None else torch.empty_like(stream)
    return new, _launch(stream, stream if delta is None else delta, norm_weight, new, weight, bias, eps,
                        norm=True, add=delta is not None)  # fmt: skip


def swiglu_gemv(gate_up, weight, bias=None) -> torch.Tensor:
    """silu(gate) * up, times ``weight``: gate_up [1, 2 * in] -> [1, out]."""
    return _launch(gate_up, gate_up, gate_up, None, weight, bias, 0.0, swiglu=True)


def _launch(x, delta, norm_weight, new, weight, bias, eps, *, plain=False, norm=False, add=False, swiglu=False,
            out=None):  # fmt: skip
    outputs, inputs = weight.shape
    out = x.new_empty(1, outputs) if out is None else out
    rows = 2 if outputs <= 4096 else 4
    _gemv[(triton.cdiv(outputs, rows),)](
        x, delta, norm_weight, out if new is None else new, weight, weight if bias is None else bias, out, eps, outputs,
        INPUTS=inputs, PAD=power_of_two(inputs), ROWS=rows, NORM=norm, ADD=add, SWIGLU=swiglu,
        BIAS=bias is not None, **overlapped(out), num_warps=4 if inputs <= 1024 else 8,
    )  # fmt: skip
    return out


@triton.jit
def _gemv(
    x, delta, norm_weight, new, weight, bias, out, eps, outputs,
    INPUTS: tl.constexpr, PAD: tl.constexpr, ROWS: tl.constexpr, NORM: tl.constexpr, ADD: tl.constexpr,
    SWIGLU: tl.constexpr, BIAS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """ROWS outputs a program, the whole input at once: all its loads are in flight together.

    The weights were there before the last kernel began, so loading them does not wait for it.
    """
    let_next_start(OVERLAP)
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, PAD)
    real = column < INPUTS
    at = row.to(tl.int64)[:, None] * INPUTS + column[None, :]
    w = tl.load(weight + at, mask=(row < outputs)[:, None] & real[None, :], other=0.0).to(tl.float32)
    wait_for_last(OVERLAP)
    value = tl.load(x + column, mask=real, other=0.0)
    if ADD:
        value = (value.to(tl.float32) + tl.load(delta + column, mask=real, other=0.0).to(tl.float32)).to(
            x.dtype.element_ty
        )
        if tl.program_id(0) == 0:
            tl.store(new + column, value, mask=real)
    value = value.to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(value * value, 0) / INPUTS + eps)
        value = value * scale * tl.load(norm_weight + column, mask=real, other=0.0).to(tl.float32)
        value = value.to(x.dtype.element_ty).to(tl.float32)
    if SWIGLU:
        up = tl.load(x + INPUTS + column, mask=real, other=0.0).to(tl.float32)
        value = (value * tl.sigmoid(value) * up).to(x.dtype.element_ty).to(tl.float32)
    result = tl.sum(w * value[None, :], 1)
    if BIAS:
        result += tl.load(bias + row, mask=row < outputs, other=0.0).to(tl.float32)
    tl.store(out + row, result.to(out.dtype.element_ty), mask=row < outputs)
