"""What all kernels share."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl


def dot_precision(dtype: torch.dtype) -> str:
    """tl.dot's input_precision.

    Matrix units round float32 to mantissas of 10 bits (tf32) unless they are told not to. 16-bit
    types are exact either way.
    """
    return "ieee" if dtype == torch.float32 else "tf32"


@cache
def power_of_two(n: int, at_least: int = 1) -> int:
    """The power of two >= max(n, at_least): a Triton tile's shape. What lies beyond n is masked."""
    return max(at_least, triton.next_power_of_2(n))


@cache
def _can_overlap(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def overlapped(x: torch.Tensor) -> dict:
    """Launch options of a kernel that may be set up while the one ahead still runs.

    CUDA calls this programmatic dependent launch; Hopper and newer GPUs have it. It hides a
    microsecond or two per kernel. Such a kernel lets the next one start at once. Before it touches
    what an earlier kernel wrote or reads, it waits until that one has ended: ``begin(OVERLAP)``, or
    ``let_next_start`` and ``wait_for_last``. It waits even if it has nothing to do, because its own
    end tells the next kernel that all kernels ahead have ended.
    """
    if _can_overlap(x.device):
        return dict(OVERLAP=True, launch_pdl=True)
    return dict(OVERLAP=False)


@triton.jit
def let_next_start(OVERLAP: tl.constexpr):
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_last(OVERLAP: tl.constexpr):
    if OVERLAP:
        tl.extra.cuda.gdc_wait()


@triton.jit
def begin(OVERLAP: tl.constexpr):
    """The next kernel may be set up now; this one goes on when the one ahead has ended."""
    let_next_start(OVERLAP)
    wait_for_last(OVERLAP)


@triton.jit
def load_heads(pointers, dim, D: tl.constexpr, D_PAD: tl.constexpr):
    """One head of some tokens, [*, D_PAD], zeros from D on. dim: 0..D_PAD."""
    if D == D_PAD:
        return tl.load(pointers)
    return tl.load(pointers, mask=(dim < D)[None, :], other=0.0)
