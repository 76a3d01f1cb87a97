"""silu(gate) * up in one pass: the middle of a SwiGLU MLP (Shazeer 2020)."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from nanoengine.kernels.common import begin, overlapped
from nanoengine.kernels.contract import Contract, ModelTensors


def silu_and_mul_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """See silu_and_mul."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [T, 2 * size], gate first -> [T, size]."""
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, size)
    grid = (rows, triton.cdiv(size, 1024))
    _silu_and_mul[grid](gate_up, out, size, BLOCK=1024, **overlapped(out), num_warps=4)
    return out


def _warmup(m: ModelTensors) -> list:
    if m.down_proj is None:
        return []
    return [partial(silu_and_mul, m.zeros(2, 2 * m.down_proj.weight.shape[1]))]


CONTRACT = Contract(
    references={silu_and_mul: silu_and_mul_reference},
    early_reads={"_silu_and_mul": ()},
    warmup=_warmup,
)


@triton.jit
def _silu_and_mul(gate_up, out, size, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    begin(OVERLAP)
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < size
    gate = tl.load(gate_up + row * 2 * size + column, mask=mask).to(tl.float32)
    up = tl.load(gate_up + row * 2 * size + size + column, mask=mask).to(tl.float32)
    value = gate * tl.sigmoid(gate) * up
    tl.store(out + row * size + column, value.to(out.dtype.element_ty), mask=mask)
