"""From logits to tokens in one pass: greedy, or a temperature draw with the same random numbers as worker.sampler.

The draw is argmax over tokens of logit / temperature + Gumbel noise, and the noise is a hash of (seed,
position, token): nothing has to be stored, sorted or summed, and no float32 copy of the logits is made.

A row that holds NaN or +inf, or nothing but -inf, gets a negative number (ROW_ERRORS of
engine.protocols). It costs no further pass: NaN and +inf become a score of +inf, finite logits stay
below it, and the best score tells.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice

from nanoengine.engine.protocols import NO_TOKEN, NON_FINITE
from nanoengine.kernels.common import begin, overlapped, power_of_two
from nanoengine.kernels.contract import Contract, ModelTensors
from nanoengine.kernels.gumbel_noise import gumbel_noise

TILE = 2048
INF_BITS = tl.constexpr(0x7F800000)  # float32's +inf; what lies beyond it, the sign aside, is NaN
MOST = tl.constexpr(3e38)  # of a score, so that no finite logit becomes an infinite one


def gumbel_sample_reference(logits, temperatures, seeds, positions) -> torch.Tensor:
    """See gumbel_sample."""
    scores = logits.float()
    noise = gumbel_noise(seeds, positions, logits.shape[1])
    hot = scores / temperatures.float().clamp(min=1e-6)[:, None]
    hot = torch.where(scores.isfinite(), hot.clamp(-3e38, 3e38) + noise, scores)
    tokens = torch.where(temperatures[:, None] > 0, hot, scores).argmax(-1)
    tokens[(scores == -torch.inf).all(-1)] = NO_TOKEN
    tokens[(scores.isnan() | (scores == torch.inf)).any(-1)] = NON_FINITE
    return tokens


def gumbel_sample(logits, temperatures, seeds, positions, out, last_tokens=None, sample_rows=None) -> None:
    """out int64 [S]: the next token of each row, or NON_FINITE or NO_TOKEN. logits [S, vocabulary], any float type.

    temperatures: float [S], 0 for the likeliest token; seeds, positions: int64 [S].
    last_tokens: int64 [rows]; if given, the token of row i is written to last_tokens[sample_rows[i]], too.
    """
    rows, vocab = logits.shape
    tiles = triton.cdiv(vocab, TILE)
    scores = torch.empty(rows, tiles, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(rows, tiles, dtype=torch.int64, device=logits.device)
    _best_of_tile[(rows, tiles)](logits, temperatures, seeds, positions, scores, tokens, vocab, tiles, TILE=TILE,
                                 ON_GPU=logits.device.type == "cuda", **overlapped(logits))  # fmt: skip
    by_row = last_tokens is not None
    _best_of_row[(rows,)](scores, tokens, out, last_tokens if by_row else out, sample_rows if by_row else out, tiles,
                          PAD=power_of_two(tiles), BY_ROW=by_row, NON_FINITE=NON_FINITE, NO_TOKEN=NO_TOKEN,
                          **overlapped(logits), num_warps=1)  # fmt: skip


def _warmup(m: ModelTensors) -> list:
    logits, zeros = m.zeros(2, m.vocab_size), m.numbers(0, 0)
    arrays = (zeros.double(), zeros, zeros, zeros.clone(), zeros.clone(), zeros)
    return [partial(gumbel_sample, logits, *arrays)]


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
    logit = tl.load(logits + row.to(tl.int64) * vocab + token, mask=real, other=float("-inf")).to(tl.float32)
    temperature = tl.load(temperatures + row)
    score = logit
    if temperature > 0:  # before it is rounded: 1e-300 is no zero
        seed, position = tl.load(seeds + row).to(tl.uint64), tl.load(positions + row).to(tl.uint64)
        base = _mix(seed + _mix(position + 0xBF58476D1CE4E5B9))
        bits = _mix(base + (token + 1).to(tl.uint64) * 0x9E3779B97F4A7C15) >> 11
        uniform = tl.minimum((bits.to(tl.float32) + 0.5) * 1.1102230246251565e-16, 0.999999940395355)  # 2**-53
        series = uniform * (1 + uniform * (0.5 + uniform * (0.33333334 + uniform * 0.25)))
        exponential = tl.where(uniform < 0.01, series, -_log(1.0 - uniform, ON_GPU))  # -log1p(-uniform)
        score = logit * (1.0 / tl.maximum(temperature.to(tl.float32), 1e-6))
        score = tl.minimum(tl.maximum(score, -MOST), MOST) - _log(exponential, ON_GPU)
    # Bits are compared, not numbers: Triton's compiler takes it that there is no NaN, so that a
    # comparison may come out either way, and argmax over NaN may name a token that does not exist.
    bits = logit.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    score = tl.where(size < INF_BITS, score, float("-inf"))
    score = tl.where((size > INF_BITS) | (bits == INF_BITS), float("inf"), score)
    best, at = tl.max(score, 0, return_indices=True)
    tl.store(scores + row * tiles + tile, best)
    tl.store(tokens + row * tiles + tile, (tile * TILE + at).to(tl.int64))


@triton.jit
def _best_of_row(scores, tokens, out, last_tokens, sample_rows, tiles, PAD: tl.constexpr, BY_ROW: tl.constexpr,
                 NON_FINITE: tl.constexpr, NO_TOKEN: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    begin(OVERLAP)
    row, tile = tl.program_id(0), tl.arange(0, PAD)
    score = tl.load(scores + row * tiles + tile, mask=tile < tiles, other=float("-inf"))
    best, at = tl.max(score, 0, return_indices=True)
    token = tl.load(tokens + row * tiles + at)
    token = tl.where(best == float("inf"), NON_FINITE, token)
    token = tl.where(best == float("-inf"), NO_TOKEN, token)
    tl.store(out + row, token)
    if BY_ROW:
        tl.store(last_tokens + tl.load(sample_rows + row), token)
