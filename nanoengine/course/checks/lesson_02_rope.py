"""Check of ex02a: keys that were turned already move to other positions.

The oracle turns the unturned numbers, which the answer never sees, once to the old and once to the new positions; each
pair is one complex number, one at a time. The answer is expected to turn whole arrays once, by the difference.
"""

from __future__ import annotations

import cmath
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from nanoengine.course.checks.exercise import Failure, Text, call


@dataclass(frozen=True)
class MoveCase:
    """Row i was turned at ``old[i]`` and is wanted at ``new[i]``; its numbers come from the seed."""

    old: tuple[int, ...]
    new: tuple[int, ...]
    heads: int
    dim: int
    theta: float
    seed: int = 0

    def unturned(self) -> np.ndarray:
        numbers = np.random.default_rng(self.seed).integers(-4, 5, (len(self.old), self.heads, self.dim))
        return numbers.astype(np.float64) + 0.5  # no zeros: each number shows how its pair was turned


def run_move(answer, case: MoveCase) -> Failure | None:
    raw = case.unturned()
    keys, want = turned(raw, case.old, case.theta), turned(raw, case.new, case.theta)
    given = keys.copy(), np.array(case.old, dtype=np.int64), np.array(case.new, dtype=np.int64)
    got = call(answer, *given, case.theta)
    if not isinstance(got, np.ndarray) or got.shape != want.shape:
        grown = isinstance(got, np.ndarray) and got.ndim == 3 and got.shape[0] == got.shape[1] == len(case.old)
        return Failure(array_of(want.shape), described(got), HEAD_AXIS if grown else SHAPE)
    for name, now, before in zip(("keys", "old", "new"), given, (keys, case.old, case.new), strict=True):
        if not np.array_equal(now, before):
            said = dict(en=f"{name} as it was", zh=f"{name} 保持原样")
            return Failure(said, dict(en=f"{name} was changed", zh=f"{name} 被改了"), CHANGED)
    if _close(got, want):
        return None
    i = np.unravel_index(np.argmax(~np.isclose(got, want, atol=1e-6)), want.shape)
    at = f"out[{', '.join(str(int(n)) for n in i)}]"
    return Failure(f"{at} = {want[i]:.4f}", f"{at} = {got[i]:.4f}", _likely(keys, case, got))


def turned(x, positions: Iterable[int], theta: float, *, halves=False, power=2.0, spoilt=False) -> np.ndarray:
    """x [tokens, heads, d] with each pair (2j, 2j + 1) of row i turned by positions[i] * theta^(-2j/d).

    The keywords make it wrong in one known way, to recognise an answer by. spoilt: the second number of a pair is
    computed from the first after that was overwritten.
    """
    out, (_, heads, dim) = np.empty_like(x), x.shape
    for i, place in enumerate(positions):
        for j in range(dim // 2):
            turn = cmath.exp(1j * place * theta ** (-power * j / dim))
            a, b = (j, j + dim // 2) if halves else (2 * j, 2 * j + 1)
            for h in range(heads):
                pair = complex(x[i, h, a], x[i, h, b]) * turn
                out[i, h, a], out[i, h, b] = pair.real, pair.imag
                if spoilt:
                    out[i, h, b] = x[i, h, b] * turn.real + pair.real * turn.imag
    return out


def array_of(shape: Iterable[int]) -> Text:
    size = list(shape)
    return dict(en=f"a numpy array {size}", zh=f"形状为 {size} 的 numpy 数组")


def described(got) -> str | Text:
    return array_of(got.shape) if isinstance(got, np.ndarray) else f"{got!r:.80}"


def _close(a: np.ndarray, b: np.ndarray) -> bool:
    return bool(np.allclose(a, b, atol=1e-6))


def _wrong_turns(case: MoveCase) -> list[tuple[Text, np.ndarray]]:
    """By how many positions each row turns in an answer with a known slip."""
    old, new = np.array(case.old), np.array(case.new)
    rows, by = np.arange(len(old)), new - old
    return [(UNMOVED, by * 0), (TWICE, new), (HALFWAY, -old), (BACKWARDS, -by), (ROWS, rows), (ROWS, rows - old),
            (ROWS, new - rows), (ONE_SHIFT, by * 0 + by[0]), (ONE_SHIFT, by * 0 + by[-1])]  # fmt: skip


def _tells_apart(case: MoveCase) -> bool:
    """False where two slips give the same numbers, so that a shrunk case would blame the wrong one."""
    by = tuple(int(b - a) for a, b in zip(case.old, case.new, strict=True))
    blamed: dict[tuple, Text] = {}
    turns = ((tuple(turn.tolist()), why) for why, turn in _wrong_turns(case))
    return all(turn == by or blamed.setdefault(turn, why) is why for turn, why in turns)


def _likely(keys: np.ndarray, case: MoveCase, got: np.ndarray) -> Text:
    """Which known slip gives these numbers, if one does."""
    by, theta = np.array(case.new) - np.array(case.old), case.theta

    def joined() -> np.ndarray:
        out = turned(keys, by, theta)
        return np.concatenate((out[..., 0::2], out[..., 1::2]), axis=-1)

    slips: list[tuple[Text, Callable[[], np.ndarray]]] = [
        *((why, lambda turn=turn: turned(keys, turn, theta)) for why, turn in _wrong_turns(case)),
        (PAIRS, lambda: turned(keys, by, theta, halves=True)),
        (PAIRS, lambda: turned(keys, case.new, theta, halves=True)),
        (JOINED, joined),
        (SPOILT, lambda: turned(keys, by, theta, spoilt=True)),
        (SPEED, lambda: turned(keys, by, theta, power=1.0)),
    ]
    return next((why for why, slip in slips if _close(got, slip())), FORMULA)


def random_case(rng: random.Random) -> MoveCase:
    tokens = rng.randint(1, 5)
    if rng.random() < 0.5:  # a stretch before position `cut` is gone, and what follows moves up
        first, cut = rng.randint(0, 40), rng.randint(0, 20)
        old = tuple(first + cut + i for i in range(tokens))
        new = tuple(first + i for i in range(tokens))
    else:
        old, new = (tuple(rng.randint(0, 60) for _ in range(tokens)) for _ in range(2))
    return MoveCase(old, new, rng.randint(1, 3), 2 * rng.randint(1, 4), rng.choice((1e4, 1e5, 1e6)), rng.randint(0, 99))


def smaller(case: MoveCase) -> Iterator[MoveCase]:
    yield from (less for less in _less(case) if _tells_apart(less))


def _less(case: MoveCase) -> Iterator[MoveCase]:
    for i in range(len(case.old) if len(case.old) > 1 else 0):
        yield replace(case, old=case.old[:i] + case.old[i + 1 :], new=case.new[:i] + case.new[i + 1 :])
    for name in ("old", "new"):
        if any(value := getattr(case, name)):
            yield replace(case, **{name: tuple(n // 2 for n in value)})
    if case.heads > 1:
        yield replace(case, heads=1)
    if case.dim > 2:
        yield replace(case, dim=case.dim - 2)


def show(case: MoveCase) -> str:
    shape = f"[{len(case.old)}, {case.heads}, {case.dim}]"
    return f"keys {shape}, old {list(case.old)}, new {list(case.new)}, theta {case.theta:g}"


def explain(error: Exception) -> Text | None:
    return HEAD_AXIS if isinstance(error, ValueError) and "broadcast" in str(error) else None


BOUNDARIES = (
    MoveCase((8, 9, 10), (5, 6, 7), 2, 4, 1e4),  # three positions were cut out before it
    MoveCase((2, 5, 9), (1, 5, 6), 1, 8, 1e5),  # two cuts; each row its own shift
    MoveCase((3,), (11,), 2, 4, 1e4),  # ahead
    MoveCase((7, 0, 3), (2, 9, 3), 1, 6, 1e4),  # any order, one stays
    MoveCase((6, 7), (0, 1), 3, 2, 1e4),  # one pair a head
    MoveCase((30_000, 12), (5, 20_000), 1, 6, 1e6),
    MoveCase((), (), 2, 4, 1e4),  # nothing to move
)

SHAPE = dict(
    en="Return a new numpy array of the shape of keys: [tokens, heads, d].",
    zh="返回一个和 keys 同样形状的新 numpy 数组:`[token, 头, d]`。",
)
HEAD_AXIS = dict(
    en="The angles are [tokens, d/2], what they turn is [tokens, heads, d/2]: tokens met heads. Give cos and sin an "
    "axis of length 1 for the heads, [:, None].",
    zh="角度是 `[token, d/2]`,要转的是 `[token, 头, d/2]`:token 那一维对到头上去了。"
    "给 cos、sin 在中间加一个长度 1 的轴:`[:, None]`。",
)
CHANGED = dict(
    en="The input was changed. The caller still needs it: make a new array.",
    zh="输入被改了。调用方还要用它:另建一个数组。",
)
UNMOVED = dict(
    en="These are the keys as they came, still turned for the old positions.",
    zh="key 原样返回了,还停在旧位置上。",
)
TWICE = dict(
    en="You turned by the new position. But the keys are turned by the old one already, and rotations add up: "
    "what is missing between the two?",
    zh="你又按新位置转了一遍。可是 key 已经按旧位置转过了,旋转是累加的:两者之间还差多少?",
)
HALFWAY = dict(
    en="The keys were turned back to position 0 and left there. They still have to go to the new one.",
    zh="你把 key 转回了位置 0,就停在那了。还要转到新位置去。",
)
BACKWARDS = dict(
    en="Turned the other way: the angle is (new − old) × speed, and (a, b) becomes (a·cos − b·sin, b·cos + a·sin).",
    zh="转反了:角度是 (new − old) × 转速,(a, b) 变成 (a·cos − b·sin, b·cos + a·sin)。",
)
ROWS = dict(
    en="You took the row for the position. A row's place in the array says nothing about its place in the text: use "
    "old and new.",
    zh="你把行号当成位置了。排在数组的第几行,和在文本里的位置没关系:要用 old 和 new。",
)
ONE_SHIFT = dict(
    en="All rows were moved by the same distance. Each row has its own: new[i] − old[i].",
    zh="所有行都挪了同样的距离。每一行有自己的:new[i] − old[i]。",
)
PAIRS = dict(
    en="You paired the halves, (j, j + d/2), as the lesson does. In llama.cpp's layout neighbours (2j, 2j + 1) are "
    "a pair.",
    zh="你像课上那样把前后两半配成了对 (j, j + d/2)。llama.cpp 的排法里,相邻的 (2j, 2j + 1) 才是一对。",
)
JOINED = dict(
    en="The numbers are right, in the wrong places: both of a pair go back to 2j and 2j + 1, not into two halves.",
    zh="数是对的,位置不对:一对数要放回 2j 和 2j + 1,不是拼成前后两半。",
)
SPOILT = dict(
    en="The second of a pair was computed from the first after that had been overwritten. Compute both from "
    "the old a and b.",
    zh="算一对里的第二个时,第一个已经被改掉了。两个都要用原来的 a、b 来算。",
)
SPEED = dict(
    en="The exponent is −2j / d for pair j = 0, 1, 2, …; yours is half of that.",
    zh="第 j 对的指数是 −2j / d,j 从 0 数起;你的只有一半。",
)
FORMULA = dict(
    en="Compute one pair by hand: angle = (new[i] − old[i]) × theta ** (−2j / d), pair (2j, 2j + 1).",
    zh="手算一对:角度 = (new[i] − old[i]) × theta ** (−2j / d),一对是 (2j, 2j + 1)。",
)
