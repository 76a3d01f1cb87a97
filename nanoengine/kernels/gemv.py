"""Matrix times vector, for a step of one token: every weight is read once, as in a memory copy.

What comes before the matmul (residual addition and RMSNorm, or SiLU and multiplication) is computed
again by every program. That reads a few KB from the L2 cache and saves a kernel and its launch.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from nanoengine.kernels.common import let_next_start, overlapped, power_of_two, wait_for_last
from nanoengine.kernels.contract import Contract, ModelTensors
from nanoengine.kernels.rms_norm import fused_add_rms_norm_reference
from nanoengine.kernels.silu_and_mul import silu_and_mul_reference

MAX_K = 4096  # a program holds whole rows in registers


def fits_gemv(weight: torch.Tensor) -> bool:
    """True if a token times ``weight`` [out, in] is for these kernels: short, dense rows."""
    return weight.shape[1] <= MAX_K and weight.is_contiguous()


def gemv_reference(x, weight, bias=None) -> torch.Tensor:
    return F.linear(x, weight, bias)


def rms_norm_gemv_reference(hidden_states, residual, norm_weight, eps: float, weight, bias=None):
    """See rms_norm_gemv."""
    normed, residual = fused_add_rms_norm_reference(hidden_states, residual, norm_weight, eps)
    return F.linear(normed, weight, bias), residual


def silu_and_mul_gemv_reference(gate_up, weight, bias=None) -> torch.Tensor:
    return F.linear(silu_and_mul_reference(gate_up), weight, bias)


def gemv(x, weight, bias=None, out=None) -> torch.Tensor:
    """x [1, in] times weight [out, in] transposed, plus bias [out]: [1, out], in ``out`` if given.

    Sums are float32.
    """
    return _launch(x, x, x, None, weight, bias, 0.0, out=out)


def rms_norm_gemv(
    hidden_states, residual, norm_weight, eps: float, weight, bias=None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(linear(RMSNorm(hidden_states + residual)), that sum): [1, out], [1, in].

    residual None adds nothing, and the sum is hidden_states. No argument is changed.
    """
    if residual is None:
        out = _launch(hidden_states, hidden_states, norm_weight, None, weight, bias, eps, norm=True)
        return out, hidden_states
    total = torch.empty_like(residual)
    out = _launch(
        residual, hidden_states, norm_weight, total, weight, bias, eps, norm=True, add=True
    )
    return out, total


def silu_and_mul_gemv(gate_up, weight, bias=None) -> torch.Tensor:
    """silu(gate) * up, times ``weight``: gate_up [1, 2 * in] -> [1, out]."""
    return _launch(gate_up, gate_up, gate_up, None, weight, bias, 0.0, silu_and_mul=True)


def _launch(
    x,
    added,
    norm_weight,
    total,
    weight,
    bias,
    eps,
    *,
    norm=False,
    add=False,
    silu_and_mul=False,
    out=None,
):
    outputs, k = weight.shape
    out = x.new_empty(1, outputs) if out is None else out
    rows = 2 if outputs <= 4096 else 4
    _gemv[(triton.cdiv(outputs, rows),)](
        x,
        added,
        norm_weight,
        out if total is None else total,
        weight,
        weight if bias is None else bias,
        out,
        eps,
        outputs,
        K=k,
        PAD=power_of_two(k),
        BLOCK_N=rows,
        NORM=norm,
        ADD=add,
        SILU_AND_MUL=silu_and_mul,
        BIAS=bias is not None,
        **overlapped(out),
        num_warps=4 if k <= 1024 else 8,
    )
    return out


def _warmup(m: ModelTensors) -> list:
    x, calls = m.zeros(1, m.hidden_size), []
    if m.lm_head is not None and fits_gemv(m.lm_head.weight):
        calls.append(partial(gemv, x, *m.lm_head))
    for linear, residual in (
        (m.qkv_proj, None),  # the first layer's
        (m.qkv_proj, x.clone()),
        (m.gate_up_proj, x.clone()),
    ):
        if linear is not None and fits_gemv(linear.weight):
            calls.append(partial(rms_norm_gemv, x, residual, m.norm, m.eps, *linear))
    if m.o_proj is not None and fits_gemv(m.o_proj.weight):
        calls.append(partial(gemv, m.zeros(1, m.o_proj.weight.shape[1]), *m.o_proj))
    if m.down_proj is not None and fits_gemv(m.down_proj.weight):
        gate_up = m.zeros(1, 2 * m.down_proj.weight.shape[1])
        calls.append(partial(silu_and_mul_gemv, gate_up, *m.down_proj))
    return calls


CONTRACT = Contract(
    references={
        gemv: gemv_reference,
        rms_norm_gemv: rms_norm_gemv_reference,
        silu_and_mul_gemv: silu_and_mul_gemv_reference,
    },
    early_reads={"_gemv": {"weight", "bias"}},
    warmup=_warmup,
)


@triton.jit
def _gemv(
    x,
    added,
    norm_weight,
    total,
    weight,
    bias,
    out,
    eps,
    outputs,
    K: tl.constexpr,
    PAD: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NORM: tl.constexpr,
    ADD: tl.constexpr,
    SILU_AND_MUL: tl.constexpr,
    BIAS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """BLOCK_N outputs per program, the whole input at once: all its loads are in flight together.

    No kernel writes the weights, so loading them does not wait for the kernel ahead.
    """
    let_next_start(OVERLAP)
    n, k = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, PAD)
    mask_k = k < K
    offsets = n.to(tl.int64)[:, None] * K + k[None, :]
    mask = (n < outputs)[:, None] & mask_k[None, :]
    w = tl.load(weight + offsets, mask=mask, other=0.0).to(tl.float32)
    wait_for_last(OVERLAP)
    value = tl.load(x + k, mask=mask_k, other=0.0)
    if ADD:
        other = tl.load(added + k, mask=mask_k, other=0.0).to(tl.float32)
        value = (value.to(tl.float32) + other).to(x.dtype.element_ty)
        if tl.program_id(0) == 0:
            tl.store(total + k, value, mask=mask_k)
    value = value.to(tl.float32)
    if NORM:
        rstd = tl.rsqrt(tl.sum(value * value, 0) / K + eps)
        value = value * rstd * tl.load(norm_weight + k, mask=mask_k, other=0.0).to(tl.float32)
        value = value.to(x.dtype.element_ty).to(tl.float32)
    if SILU_AND_MUL:
        up = tl.load(x + K + k, mask=mask_k, other=0.0).to(tl.float32)
        value = (value * tl.sigmoid(value) * up).to(x.dtype.element_ty).to(tl.float32)
    acc = tl.sum(w * value[None, :], 1)
    if BIAS:
        acc += tl.load(bias + n, mask=n < outputs, other=0.0).to(tl.float32)
    tl.store(out + n, acc.to(out.dtype.element_ty), mask=n < outputs)
