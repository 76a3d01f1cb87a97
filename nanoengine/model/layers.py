"""The few layers of a Llama, Qwen2 or Qwen3 decoder, with packed weights.

group: the ranks that share the model (parallel.group.Group), None for one. Each rank then has a
part of every weight matrix. Column-parallel layers (qkv_proj, gate_up_proj) need no other rank;
RowParallelLinear, VocabParallelEmbedding and ParallelLMHead are where ranks meet, as in Megatron-LM
(Shoeybi et al. 2019).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from nanoengine.model.capabilities import Declares
from nanoengine.model.config import ModelConfig


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [T, in] times weight [out, in] transposed, plus bias [out].

    For a few rows in float32 on a CPU, MKL is faster with the weight as the left operand: 1.2 to
    1.9 times with 16 rows. A single row is faster as two equal ones, because the matrix-vector
    product reaches less memory bandwidth than the matrix product: all linear layers of the embedded
    model took 49 ms for one token instead of 75. (2 threads of an AMD EPYC, 2026-11-29. From about
    100 rows on there is nothing to gain.)
    """
    rows = x.shape[0]
    if x.device.type == "cpu" and x.dtype == torch.float32 and 1 <= rows <= 64:
        columns = (x if rows > 1 else x.repeat(2, 1)).t()
        out = torch.mm(weight, columns).t()[:rows].contiguous()
        return out if bias is None else out.add_(bias)
    return F.linear(x, weight, bias)


def _parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape), requires_grad=False)


class RMSNorm(Declares, nn.Module):
    """x / sqrt(mean(x**2) + eps) * weight, over the last axis (Zhang and Sennrich 2019)."""

    fusable = True

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight, self.eps = _parameter(size), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class AddRMSNorm(RMSNorm):
    """A residual addition and the RMSNorm that follows it."""

    fusable = True

    def forward(
        self, hidden: torch.Tensor, residual: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(hidden + residual), hidden + residual); a residual of None adds nothing."""
        residual = hidden if residual is None else residual + hidden
        return super().forward(residual), residual


class Linear(Declares, nn.Module):
    """y = x W^T + b, with weight [out, in] and bias [out] or None."""

    fusable = True

    def __init__(self, in_features: int, out_features: int, bias: bool):
        super().__init__()
        self.weight = _parameter(out_features, in_features)
        self.bias = _parameter(out_features) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, self.bias)


class PackedLinear(Linear):
    """A Linear whose weight stacks several checkpoint matrices: one matmul instead of two or three.

    parts: output size of each part by its checkpoint name, in order of the rows.
    """

    def __init__(self, in_features: int, parts: dict[str, int], bias: bool):
        super().__init__(in_features, sum(parts.values()), bias)
        self.rows: dict[str, slice] = {}
        start = 0
        for name, size in parts.items():
            self.rows[name] = slice(start, start + size)
            start += size

    def load(self, part: str, kind: str, value: torch.Tensor) -> None:
        """kind: "weight" or "bias". The shape was checked against the config before."""
        getattr(self, kind).data[self.rows[part]].copy_(value)


class RowParallelLinear(Linear):
    """A Linear whose inputs are split over the ranks.

    Each rank computes a partial sum, and the sums are all-reduced. The bias must enter once, so
    only rank 0 has it.
    """

    fusable = True

    def __init__(self, in_features: int, out_features: int, bias: bool, group=None):
        super().__init__(in_features, out_features, bias and (group is None or group.rank == 0))
        self.group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.all_reduce(super().forward(x))

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.group is None else self.group.all_reduce(x)


class VocabParallelEmbedding(Declares, nn.Module):
    """Token ids -> rows of a table [vocab_size, hidden_size], which the ranks share by rows.

    first_token: the id whose row is this rank's first.
    """

    fusable = True

    def __init__(self, vocab_size: int, hidden_size: int, group=None, first_token: int = 0):
        super().__init__()
        self.weight, self.group = _parameter(vocab_size, hidden_size), group
        self.first_token = first_token

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """int64 [T] -> [T, hidden_size], complete on every rank."""
        if self.group is None:
            return F.embedding(input_ids, self.weight)
        local = input_ids - self.first_token
        others = (local < 0) | (local >= len(self.weight))
        rows = F.embedding(local.masked_fill(others, 0), self.weight)
        return self.all_reduce(rows.masked_fill_(others[:, None], 0))

    def all_reduce(self, rows: torch.Tensor) -> torch.Tensor:
        """rows: this rank's, with zeros for the ids that are others'."""
        return rows if self.group is None else self.group.all_reduce(rows)


class ParallelLMHead(Declares, nn.Module):
    """Hidden states -> logits. The ranks share the vocabulary; rank 0 gathers, because it samples.

    weight: [rows, hidden_size], the embedding's own where they are tied. vocab_size: the whole
    model's.
    """

    fusable = True

    def __init__(self, weight: nn.Parameter, vocab_size: int, group=None):
        super().__init__()
        self.weight, self.vocab_size, self.group = weight, vocab_size, group

    def forward(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """[S, hidden_size] -> [S, vocab_size] in the weight's format, into ``out`` if given.

        Ranks above 0 get [0, vocab_size].
        """
        if self.group is None:
            return self.matmul(hidden, out)
        if not len(hidden):
            return hidden.new_empty(0, self.vocab_size)
        return self.gather(self.matmul(hidden), out)

    def matmul(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        if out is None:
            return linear(hidden, self.weight)
        return torch.mm(hidden, self.weight.t(), out=out)

    def gather(self, part: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """part: this rank's columns [S, rows]."""
        parts = self.group.gather(part)
        if parts is None:
            return part.new_empty(0, self.vocab_size)
        out = part.new_empty(len(part), self.vocab_size) if out is None else out
        columns = out.split(parts.shape[2], 1)  # ids in order; the last rank's may end in padding
        for each, place in zip(parts, columns, strict=False):
            place.copy_(each[:, : place.shape[1]])
        return out


def rope_frequencies(config: ModelConfig) -> torch.Tensor:
    """float32 [head_dim / 2]: the angle per position of each pair of dimensions (Su et al. 2021).

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


class RotaryEmbedding(Declares, nn.Module):
    """cos and sin of every position, computed once: float32 [max_positions, head_dim]."""

    fusable = True

    def __init__(self, config: ModelConfig, max_positions: int):
        super().__init__()
        angles = torch.outer(torch.arange(max_positions).float(), rope_frequencies(config))
        cos, sin = angles.cos(), angles.sin()
        self.register_buffer("cos", torch.cat((cos, cos), -1), persistent=False)
        self.register_buffer("sin", torch.cat((-sin, sin), -1), persistent=False)

    def forward(
        self, positions: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """int64 [T] -> cos, sin, each [T, 1, head_dim]; sin has the sign of the rotation in it."""
        return self.cos[positions][:, None].to(dtype), self.sin[positions][:, None].to(dtype)


def apply_rotary_emb(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs (i, i + d/2) of each head of x [T, heads, d] by its position's angle."""
    return x * cos + x.roll(x.shape[-1] // 2, -1) * sin
