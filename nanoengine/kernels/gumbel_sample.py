"""From logits to tokens in one pass: greedy, or a temperature draw with the same random numbers as worker.sampler.

The draw is argmax over tokens of logit / temperature + Gumbel noise, and the noise is a hash of (seed,
position, token): nothing has to be stored, sorted or summed, and no float32 copy of the logits is made.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice

from nanoengine.kernels.common import begin, overlapped, power_of_two
from nanoengine.kernels.contract import Contract, ModelTensors
from nanoengine.kernels.gumbel_noise import gumbel_noise

TILE = 2048


def gumbel_sample_reference(logits, temperatures, seeds, positions) -> torch.Tensor:
    """See gumbel_sample."""
    scores = logits.float()
    noise = gumbel_noise(seeds, positions, logits.shape[1])
    hot = scores / temperatures.float().clamp(min=1e-6)[:, None] + noise
    return torch.where(temperatures[:, None] > 0, hot, scores).argmax(-1)


def gumbel_sample(logits, temperatures, seeds, positions, out) -> None:
    """out int64 [S]: the next token of each row. logits [S, vocabulary], any float type.

    temperatures: float [S], 0 for the likeliest token; seeds, positions: int64 [S].
    """
    rows, vocab = logits.shape
    tiles = triton.cdiv(vocab, TILE)
    scores = torch.empty(rows, tiles, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(rows, tiles, dtype=torch.int64, device=logits.device)
    _best_of_tile[(rows, tiles)](logits, temperatures, seeds, positions, scores, tokens, vocab, tiles, TILE=TILE,
                                 ON_GPU=logits.device.type == "cuda", **overlapped(logits))  # fmt: skip
    _best_of_row[(rows,)](scores, tokens, out, tiles, PAD=power_of_two(tiles), **overlapped(logits), num_warps=1)


def _warmup(m: ModelTensors) -> list:
    logits, zeros = m.zeros(2, m.vocab_size), m.numbers(0, 0)
    return [partial(gumbel_sample, logits, zeros.double(), zeros, zeros, zeros.clone())]


CONTRACT = Contract(
    references={gumbel_sample: gumbel_sample_reference},
    early_reads={"_best_of_tile": (), "_best_of_row": ()},
    warmup=_warmup,
)


@triton.jit
def _mix(x):
    """The finaliser of SplitMix64, on uint64."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _log(x, ON_GPU: tl.constexpr):
    """The hardware's own logarithm, good to 4e-5 here: the exact one would be half of this kernel's work."""
    if ON_GPU:
        return libdevice.fast_logf(x)
    return tl.log(x)


@triton.jit
def _best_of_tile(logits, temperatures, seeds, positions, scores, tokens, vocab, tiles, TILE: tl.constexpr,
                  ON_GPU: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    begin(OVERLAP)
    row, tile = tl.program_id(0), tl.program_id(1)
    token = tile * TILE + tl.arange(0, TILE)
    real = token < vocab
    score = tl.load(logits + row.to(tl.int64) * vocab + token, mask=real, other=float("-inf")).to(tl.float32)
    temperature = tl.load(temperatures + row).to(tl.float32)
    if temperature > 0:
        seed, position = tl.load(seeds + row).to(tl.uint64), tl.load(positions + row).to(tl.uint64)
        base = _mix(seed + _mix(position + 0xBF58476D1CE4E5B9))
        bits = _mix(base + (token + 1).to(tl.uint64) * 0x9E3779B97F4A7C15) >> 11
        uniform = tl.minimum((bits.to(tl.float32) + 0.5) * 1.1102230246251565e-16, 0.999999940395355)  # 2**-53
        series = uniform * (1 + uniform * (0.5 + uniform * (0.33333334 + uniform * 0.25)))
        exponential = tl.where(uniform < 0.01, series, -_log(1.0 - uniform, ON_GPU))  # -log1p(-uniform)
        score = score * (1.0 / tl.maximum(temperature, 1e-6)) - _log(exponential, ON_GPU)
    best = tl.argmax(score, 0)
    tl.store(scores + row * tiles + tile, tl.max(score, 0))
    tl.store(tokens + row * tiles + tile, (tile * TILE + best).to(tl.int64))


@triton.jit
def _best_of_row(scores, tokens, out, tiles, PAD: tl.constexpr, OVERLAP: tl.constexpr):
    begin(OVERLAP)
    row, tile = tl.program_id(0), tl.arange(0, PAD)
    score = tl.load(scores + row * tiles + tile, mask=tile < tiles, other=float("-inf"))
    tl.store(out + row, tl.load(tokens + row * tiles + tl.argmax(score, 0)))
