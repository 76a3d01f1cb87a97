"""silu(gate) * up in one pass."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from nanoengine.kernels.common import begin, overlapped


def swiglu_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """See swiglu."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [T, 2 * size], gate first -> [T, size]."""
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, size)
    _swiglu[(rows, triton.cdiv(size, 1024))](gate_up, out, size, TILE=1024, **overlapped(out), num_warps=4)
    return out


@triton.jit
def _swiglu(gate_up, out, size, TILE: tl.constexpr, OVERLAP: tl.constexpr):
    begin(OVERLAP)
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE + tl.arange(0, TILE)
    real = column < size
    gate = tl.load(gate_up + row * 2 * size + column, mask=real).to(tl.float32)
    up = tl.load(gate_up + row * 2 * size + size + column, mask=real).to(tl.float32)
    tl.store(out + row * size + column, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=real)
