"""The random numbers of sampling: a hash, so that nothing has to be stored. Needs torch, no triton.

The sampler and the reference of the sampling kernel share it.
"""

from __future__ import annotations

import torch

_GOLDEN, _C1, _C2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def signed(x: int) -> int:
    """The int64 with the bits of an unsigned 64-bit number: torch has no full uint64 arithmetic."""
    return x - 2**64 if x >= 2**63 else x


def _mix(x: torch.Tensor) -> torch.Tensor:
    """The finaliser of SplitMix64 on int64 bits. Masks make arithmetic shifts logical ones."""
    x = (x ^ ((x >> 30) & (2**34 - 1))) * signed(_C1)
    x = (x ^ ((x >> 27) & (2**37 - 1))) * signed(_C2)
    return x ^ ((x >> 31) & (2**33 - 1))


def gumbel_noise(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """float32 [S, vocab_size]: -log e, e ~ Exp(1), from int64 seeds [S] and positions [S] alone.

    Always finite. With u uniform, e = -log(1 - u): the winner of the race is the smallest e, and
    there u is near 0, where float32 is fine-grained. (u = 1 would be an infinite e; near 1 float32
    rounds to it.)
    """
    rows = _mix(seeds + _mix(positions + signed(_C1)))
    tokens = torch.arange(1, vocab_size + 1, device=seeds.device) * signed(_GOLDEN)
    bits = _mix(rows[:, None] + tokens) >> 11 & (2**53 - 1)
    uniform = bits.float().add_(0.5).mul_(2.0**-53).clamp_(max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()
