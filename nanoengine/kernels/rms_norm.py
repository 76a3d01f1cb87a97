"""Residual addition and RMSNorm in one pass over the row."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from nanoengine.kernels.common import let_next_start, overlapped, power_of_two, wait_for_last
from nanoengine.kernels.contract import Contract, ModelTensors
from nanoengine.kernels.split_k_gemm import SPLIT_K


def fused_add_rms_norm_reference(hidden_states, residual, weight, eps: float):
    """See fused_add_rms_norm."""
    if residual is None:
        residual = hidden_states
    else:
        if hidden_states.dim() == 3:
            hidden_states = hidden_states.float().sum(0)
        residual = residual + hidden_states.to(residual.dtype)
    return F.rms_norm(residual, (residual.shape[-1],), weight, eps), residual


def fused_add_rms_norm(
    hidden_states, residual, weight, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(RMSNorm of hidden_states + residual, that sum): 2 reads and 2 writes instead of 3 and 3.

    residual: [T, hidden_size], changed in place; None adds nothing and returns hidden_states as the
    sum. hidden_states: [T, hidden_size], or split-K partials [S, T, hidden_size] (see
    split_k_gemm), which are all added.
    """
    if residual is None:
        residual, splits = hidden_states, 0
    else:
        splits = hidden_states.shape[0] if hidden_states.dim() == 3 else 1
    (rows, hidden_size), normed = residual.shape, torch.empty_like(residual)
    _fused_add_rms_norm[(rows,)](
        hidden_states,
        residual,
        weight,
        normed,
        eps,
        rows,
        SPLITS=splits,
        HIDDEN=hidden_size,
        PAD=power_of_two(hidden_size),
        **overlapped(residual),
        num_warps=4 if hidden_size <= 2048 else 8,
    )
    return normed, residual


def _warmup(m: ModelTensors) -> list:
    if m.norm is None:
        return []
    x, partials = m.zeros(2, m.hidden_size), m.zeros(SPLIT_K, 2, m.hidden_size)
    calls = [
        partial(fused_add_rms_norm, x, x.clone(), m.norm, m.eps),
        partial(fused_add_rms_norm, x, None, m.norm, m.eps),
    ]
    if m.split_k:
        calls.append(partial(fused_add_rms_norm, partials, x.clone(), m.norm, m.eps))
    return calls


CONTRACT = Contract(
    references={fused_add_rms_norm: fused_add_rms_norm_reference},
    early_reads={"_fused_add_rms_norm": {"weight"}},
    warmup=_warmup,
)


@triton.jit(do_not_specialize=["rows"])
def _fused_add_rms_norm(
    hidden_states,
    residual,
    weight,
    normed,
    eps,
    rows,
    SPLITS: tl.constexpr,
    HIDDEN: tl.constexpr,
    PAD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program per row. The sum is rounded to residual's type before it is squared."""
    let_next_start(OVERLAP)
    column = tl.arange(0, PAD)
    mask = column < HIDDEN
    w = tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
    wait_for_last(OVERLAP)
    offsets = tl.program_id(0).to(tl.int64) * HIDDEN + column
    x = tl.load(residual + offsets, mask=mask, other=0.0)
    if SPLITS > 0:
        added = tl.load(hidden_states + offsets, mask=mask, other=0.0).to(tl.float32)
        for split in tl.static_range(1, SPLITS):
            pointers = hidden_states + split * rows * HIDDEN + offsets
            added += tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
        x = (x.to(tl.float32) + added).to(residual.dtype.element_ty)
        tl.store(residual + offsets, x, mask=mask)
    x = x.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x, 0) / HIDDEN + eps)
    tl.store(normed + offsets, (x * rstd * w).to(normed.dtype.element_ty), mask=mask)
