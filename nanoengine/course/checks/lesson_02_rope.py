"""Check of ex02a: RoPE of a chunk that starts in the middle of a text. Needs no torch.

The oracle turns each pair as one complex number, one at a time; the answer is expected to work on whole arrays.
"""

from __future__ import annotations

import cmath
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from nanoengine.course.checks.exercise import Failure, Text, call


@dataclass(frozen=True)
class RopeCase:
    """A chunk of ``tokens`` rows at positions start, start + 1, …; its numbers come from the seed."""

    tokens: int
    heads: int
    dim: int
    start: int
    theta: float
    seed: int = 0

    def chunk(self) -> np.ndarray:
        numbers = np.random.default_rng(self.seed).integers(-4, 5, (self.tokens, self.heads, self.dim))
        return numbers.astype(np.float64) + 0.5  # no zeros: each number shows how its pair was turned


def run_rope(answer, case: RopeCase) -> Failure | None:
    x = case.chunk()
    want = turned(x, case.start, case.theta)
    given = x.copy()
    got = call(answer, given, case.start, case.theta)
    if not isinstance(got, np.ndarray) or got.shape != want.shape:
        kind = f"an array {list(got.shape)}" if isinstance(got, np.ndarray) else f"{got!r:.80}"
        grown = isinstance(got, np.ndarray) and got.ndim == 3 and got.shape[0] == got.shape[1] == case.tokens
        return Failure(f"a numpy array {list(want.shape)}", kind, HEAD_AXIS if grown else SHAPE)
    if not np.array_equal(given, x):
        return Failure("x as it was", "x was changed", CHANGED)
    if _close(got, want):
        return None
    i = np.unravel_index(np.argmax(~np.isclose(got, want, atol=1e-6)), want.shape)
    at = f"[{', '.join(str(int(n)) for n in i)}]"
    return Failure(f"{want[i]:.4f} at {at}", f"{got[i]:.4f}", _likely(x, case, got))


def turned(x, start: int, theta: float, *, positions=None, interleaved=False, sign=1, power=2.0,
           spoilt=False) -> np.ndarray:  # fmt: skip
    """x [tokens, heads, d] with each pair (j, j + d/2) turned by position * theta^(-2j/d).

    The keywords make it wrong in one known way, to recognise an answer by. spoilt: the second number of a pair is
    computed from the first after that was overwritten.
    """
    out, (tokens, heads, dim) = np.empty_like(x), x.shape
    half = dim // 2
    for i in range(tokens):
        place = start + i if positions is None else positions(i)
        for j in range(half):
            turn = cmath.exp(1j * sign * place * theta ** (-power * j / dim))
            a, b = (2 * j, 2 * j + 1) if interleaved else (j, j + half)
            for h in range(heads):
                pair = complex(x[i, h, a], x[i, h, b]) * turn
                out[i, h, a], out[i, h, b] = pair.real, pair.imag
                if spoilt:
                    out[i, h, b] = x[i, h, b] * turn.real + pair.real * turn.imag
    return out


def _neighbours_then_halves(x: np.ndarray, start: int, theta: float) -> np.ndarray:
    """Pairs cut out as (2j, 2j + 1), but put together as two halves."""
    out = turned(x, start, theta, interleaved=True)
    return np.concatenate((out[..., 0::2], out[..., 1::2]), axis=-1)


def _close(a: np.ndarray, b: np.ndarray) -> bool:
    return bool(np.allclose(a, b, atol=1e-6))


def _likely(x: np.ndarray, case: RopeCase, got: np.ndarray) -> Text:
    """Which known slip gives these numbers, if one does."""
    start, theta = case.start, case.theta
    slips: list[tuple[Text, Callable[[], np.ndarray]]] = [
        (FROM_ZERO, lambda: turned(x, 0, theta)),
        (ONE_OFF, lambda: turned(x, start + 1, theta)),
        (ONE_OFF, lambda: turned(x, start - 1, theta)),
        (ALL_SAME, lambda: turned(x, start, theta, positions=lambda i: start)),
        (PAIRS, lambda: turned(x, start, theta, interleaved=True)),
        (PAIRS, lambda: _neighbours_then_halves(x, start, theta)),
        (SPOILT, lambda: turned(x, start, theta, spoilt=True)),
        (BACKWARDS, lambda: turned(x, start, theta, sign=-1)),
        (SPEED, lambda: turned(x, start, theta, power=1.0)),
    ]
    return next((why for why, slip in slips if _close(got, slip())), FORMULA)


def random_case(rng: random.Random) -> RopeCase:
    return RopeCase(rng.randint(1, 5), rng.randint(1, 3), 2 * rng.randint(1, 4), rng.randint(0, 40),
                    rng.choice((10_000.0, 100_000.0, 1e6)), rng.randint(0, 999))  # fmt: skip


def smaller(case: RopeCase) -> Iterator[RopeCase]:
    for name, least in (("tokens", 1), ("heads", 1), ("start", 0)):
        value = getattr(case, name)
        if value > least:
            yield replace(case, **{name: (value + least) // 2})
    if case.dim > 2:
        yield replace(case, dim=case.dim - 2)


def show(case: RopeCase) -> str:
    return f"x of shape [{case.tokens}, {case.heads}, {case.dim}], start {case.start}, theta {case.theta:g}"


def explain(error: Exception) -> Text | None:
    return HEAD_AXIS if isinstance(error, ValueError) and "broadcast" in str(error) else None


BOUNDARIES = (
    RopeCase(3, 2, 4, 0, 10_000.0),  # the beginning of a text: row 0 stays as it is
    RopeCase(1, 2, 4, 9, 10_000.0),  # a decode
    RopeCase(4, 1, 8, 5, 100_000.0),  # a chunk
    RopeCase(2, 3, 2, 7, 10_000.0),  # one pair a head
    RopeCase(2, 1, 6, 2000, 1e6),
    RopeCase(0, 2, 4, 3, 10_000.0),  # an empty chunk
)

SHAPE = dict(
    en="Return a new array of the shape of x: [tokens, heads, d].",
    zh="返回一个和 x 同样形状的新数组:[token, 头, d]。",
)
HEAD_AXIS = dict(
    en="The angles are [tokens, half], x is [tokens, heads, half]: tokens met heads. Give cos and sin an axis of "
    "length 1 for the heads, [:, None].",
    zh="角度是 [token, half],x 是 [token, 头, half]:token 那一维对到头上去了。"
    "给 cos、sin 在中间加一个长度 1 的轴:[:, None]。",
)
SPOILT = dict(
    en="The second half was computed from the first after that had been overwritten. Compute both from "
    "the old a and b.",
    zh="算后一半的时候,前一半已经被改掉了。两半都要用原来的 a、b 来算。",
)
CHANGED = dict(
    en="The input was changed. The caller still needs it: make a new array.",
    zh="输入被改了。调用方还要用它:另建一个数组。",
)
FROM_ZERO = dict(
    en="These are the angles of positions 0, 1, 2, …: row i of a chunk stands at start + i.",
    zh="这是按位置 0、1、2、…转的:chunk 的第 i 行在 start + i。",
)
ONE_OFF = dict(
    en="All rows are one position off: row 0 stands at start itself.",
    zh="所有行都差一位:第 0 行就在 start。",
)
ALL_SAME = dict(
    en="All rows were turned by the angle of start. Each row has its own position.",
    zh="所有行都按 start 转了。每一行有自己的位置。",
)
PAIRS = dict(
    en="You paired neighbours (2j, 2j + 1). Here, as in the Hugging Face layout, number j is a pair with j + d/2.",
    zh="你把相邻的 (2j, 2j + 1) 当成一对。这里和 Hugging Face 的排法一样,j 和 j + d/2 才是一对。",
)
BACKWARDS = dict(
    en="Turned the other way round: (a, b) becomes (a·cos − b·sin, b·cos + a·sin).",
    zh="转反了:(a, b) 变成 (a·cos − b·sin, b·cos + a·sin)。",
)
SPEED = dict(
    en="The exponent is −2j / d, which is −j / half; yours is half of that.",
    zh="指数是 −2j / d,也就是 −j / half;你的只有一半。",
)
FORMULA = dict(
    en="Compute one pair by hand: angle = (start + row) × theta ** (−2j / d), pair (j, j + d/2).",
    zh="手算一对:角度 = (start + 行号) × theta ** (−2j / d),一对是 (j, j + d/2)。",
)
