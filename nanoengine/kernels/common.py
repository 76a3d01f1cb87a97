"""What all kernels share."""

from __future__ import annotations

import torch
import triton


def dot_precision(dtype: torch.dtype) -> str:
    """Matrix units round float32 to 10-bit mantissas (tf32) unless told not to; 16-bit types are exact either way."""
    return "ieee" if dtype == torch.float32 else "tf32"


def power_of_two(n: int, at_least: int = 1) -> int:
    """The power of two >= max(n, at_least): the shape of a Triton tile; what is beyond n is masked."""
    return max(at_least, triton.next_power_of_2(n))
