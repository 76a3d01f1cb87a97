"""The few layers of a Llama, Qwen2 or Qwen3 decoder, with packed weights."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from nanoengine.model.config import ModelConfig


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [T, in] times weight [out, in] transposed, plus bias [out].

    For a few rows in float32 on a CPU, MKL is faster with the weight as the left operand: 1.2 to 1.9
    times with 16 rows. A single row is faster as two equal ones, since its matrix-vector product
    reaches less memory bandwidth than its matrix product: all products of one token of the embedded
    model took 49 ms instead of 75. (2 threads of an AMD EPYC, 2026-11-29; from some 100 rows on
    there is nothing to gain.)
    """
    rows = x.shape[0]
    if x.device.type == "cpu" and x.dtype == torch.float32 and 1 <= rows <= 64:
        columns = (x if rows > 1 else x.repeat(2, 1)).t()
        out = torch.mm(weight, columns).t()[:rows].contiguous()
        return out if bias is None else out.add_(bias)
    return F.linear(x, weight, bias)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x**2) + eps) * weight, over the last axis (Zhang and Sennrich 2019)."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.empty(size), requires_grad=False), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class PackedLinear(nn.Module):
    """y = x W^T + b, where W stacks several checkpoint matrices: one product instead of two or three.

    parts: output size of each part by its checkpoint name, in order of the rows.
    """

    def __init__(self, in_features: int, parts: dict[str, int], bias: bool):
        super().__init__()
        self.rows: dict[str, slice] = {}
        start = 0
        for name, size in parts.items():
            self.rows[name] = slice(start, start + size)
            start += size
        self.weight = nn.Parameter(torch.empty(start, in_features), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(start), requires_grad=False) if bias else None

    def load(self, part: str, kind: str, value: torch.Tensor) -> None:
        """kind: "weight" or "bias". The shape was checked against the config before."""
        getattr(self, kind).data[self.rows[part]].copy_(value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, self.bias)


def rope_frequencies(config: ModelConfig) -> torch.Tensor:
    """float32 [head_dim / 2]: the angle that each pair of dimensions turns by per position (Su et al. 2021).

    "linear" divides every angle by a factor. "llama3" leaves short wavelengths alone, divides
    long ones by the factor, and blends in between (Llama 3.1; as transformers computes it).
    """
    half = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    frequencies = 1.0 / (config.rope_theta**half)
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    factor = scaling["factor"]
    if scaling["rope_type"] == "linear":
        return frequencies / factor
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    original = scaling["original_max_position_embeddings"]
    wavelength = 2 * math.pi / frequencies
    blend = ((original / wavelength - low) / (high - low)).clamp(0, 1)
    return (1 - blend) * frequencies / factor + blend * frequencies


class RotaryTable(nn.Module):
    """cos and sin of every position, computed once: [max_positions, head_dim], in float32."""

    def __init__(self, config: ModelConfig, max_positions: int):
        super().__init__()
        angles = torch.outer(torch.arange(max_positions).float(), rope_frequencies(config))
        self.register_buffer("cos", torch.cat((angles.cos(), angles.cos()), -1), persistent=False)
        self.register_buffer("sin", torch.cat((-angles.sin(), angles.sin()), -1), persistent=False)

    def forward(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """[T] -> cos, sin, each [T, 1, head_dim]; sin has the sign of the rotation in it."""
        return self.cos[positions][:, None].to(dtype), self.sin[positions][:, None].to(dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn pairs (i, i + d/2) of each head of x [T, heads, d] by the angle of its position."""
    return x * cos + x.roll(x.shape[-1] // 2, -1) * sin
