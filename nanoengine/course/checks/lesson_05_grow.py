"""Check of ex05a: the new-block boundary where blocks are short.

The oracle writes token by token: each goes into the open block if that has a slot left, else into a new one if one is
free, else it stops. The answer is expected to compute.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from nanoengine.course.checks.exercise import Failure, Text, call


@dataclass(frozen=True)
class GrowCase:
    """computed tokens lie in the first of ``owned`` blocks; ``wanted`` more are to come, ``free`` blocks are left."""

    computed: int
    wanted: int
    owned: int
    free: int
    size: int


def run_grow(answer, case: GrowCase) -> Failure | None:
    want = written(case)
    got = call(answer, case.computed, case.wanted, case.owned, case.free, case.size)
    try:
        blocks, tokens = got
        pair = (int(blocks), int(tokens))
    except (TypeError, ValueError):
        return Failure(f"{want}", f"{got!r:.160}", SHAPE)
    if pair != (blocks, tokens):
        return Failure(f"{want}", f"{got!r:.160}", SHAPE)
    return None if pair == want else Failure(f"{want}", f"{pair}", _likely(case, pair, want))


def written(case: GrowCase) -> tuple[int, int]:
    """(blocks taken, tokens written), one token after the other."""
    slots = [0] * case.owned  # tokens in each block
    for p in range(case.computed):
        slots[p // case.size] += 1
    spare, tokens = case.free, 0
    for _ in range(case.wanted):
        room = [i for i, filled in enumerate(slots) if filled < case.size]
        if not room and not spare:
            break
        if not room:
            slots.append(0)
            spare -= 1
            room = [len(slots) - 1]
        slots[room[0]] += 1
        tokens += 1
    return len(slots) - case.owned, tokens


def _likely(case: GrowCase, got: tuple, want: tuple) -> Text:
    """Which known slip gives this answer, if one does."""
    blocks, tokens = got
    if got[::-1] == want:
        return SWAPPED
    if blocks < 0:
        return OWNED
    if tokens == want[1]:
        if blocks == want[0] + 1 and (case.computed + tokens) % case.size == 0:
            return FULL
        return TOO_MANY if blocks > want[0] else REMAINDER
    if tokens == 0 and want[1] < case.wanted:
        return ALL_OR_NOTHING
    return OVERRUN if tokens > want[1] else ROOM


def random_case(rng: random.Random) -> GrowCase:
    size = rng.choice((1, 2, 3, 4, 8, 16))
    owned = rng.randint(0, 4)
    return GrowCase(rng.randint(0, owned * size), rng.randint(0, 3 * size + 2), owned, rng.randint(0, 3), size)


def smaller(case: GrowCase) -> Iterator[GrowCase]:
    """Fewer tokens, fewer blocks; never more tokens than the blocks hold."""
    if case.wanted > 1:
        yield replace(case, wanted=case.wanted - 1)
    if case.free:
        yield replace(case, free=case.free - 1)
    if case.owned and case.computed >= case.size:
        yield replace(case, owned=case.owned - 1, computed=case.computed - case.size)
    if case.owned and case.computed <= (case.owned - 1) * case.size:
        yield replace(case, owned=case.owned - 1)
    if case.computed:
        yield replace(case, computed=case.computed - 1)


def show(case: GrowCase) -> str:
    return (f"computed {case.computed}, wanted {case.wanted}, owned {case.owned}, free {case.free}, "
            f"block_size {case.size}")  # fmt: skip


BOUNDARIES = (
    GrowCase(7, 1, 2, 5, 4),  # fits: position 7 is the last slot of block 1
    GrowCase(8, 1, 2, 5, 4),  # full: position 8 opens a block
    GrowCase(9, 1, 3, 5, 4),
    GrowCase(3, 1, 3, 5, 1),  # block size 1: every token opens one
    GrowCase(8, 8, 2, 5, 4),  # two at once
    GrowCase(6, 3, 2, 5, 4),  # a boundary in the middle of three tokens
    GrowCase(4, 4, 3, 5, 4),  # it owns more than it has filled, as after a rejected draft
    GrowCase(8, 1, 2, 0, 4),  # nothing is free
    GrowCase(6, 9, 2, 1, 4),  # two slots left and one block: six tokens
    GrowCase(6, 9, 2, 0, 4),
    GrowCase(0, 10, 0, 2, 4),  # a prompt that does not fit
    GrowCase(0, 10, 0, 9, 4),
    GrowCase(5, 0, 2, 3, 4),  # nothing wanted
    GrowCase(256, 1, 1, 1, 256),
)

SHAPE = dict(en="Return (blocks to take, tokens that get a slot), two whole numbers.",
             zh="返回 (要拿几块, 几个 token 有槽),两个整数。")  # fmt: skip
SWAPPED = dict(en="The other way round: first the blocks to take, then the tokens that get a slot.",
               zh="顺序反了:先是要拿的块数,再是有槽的 token 数。")  # fmt: skip
OWNED = dict(
    en="A negative number of blocks: the sequence owns more than it needs (a rejected draft leaves that). Then "
    "it takes "
    "none, and keeps what it has.",
    zh="块数是负的:这条序列手里的块比需要的多(草稿被拒就会这样)。那就一块都不拿,手里的留着。",
)
FULL = dict(
    en="A block too early: full is not yet too small. The next block is taken with the token that goes into it.",
    zh="早拿了一块:写满了不等于不够。下一块要等真有 token 写进去的时候再拿。",
)
TOO_MANY = dict(
    en="More blocks than these tokens need: ceil((computed + tokens) / size) - owned, for the tokens that "
    "really get a slot.",
    zh="拿多了:应该是 ceil((已算 + 能写的) / 块大小) - 已有,按真正有槽的 token 数算。",
)
REMAINDER = dict(
    en="Too few blocks: these tokens would be written beyond the table. A remainder sees one position only; "
    "several tokens "
    "may need several blocks, and with block size 1 every token needs one.",
    zh="拿少了:这些 token 会写到块表外面去。余数只看一个位置;几个 token 可能要好几块,块大小是 1 时每个 token 都"
    "要一块。",
)
ALL_OR_NOTHING = dict(
    en="This is the lesson's grow: all or nothing. Here it takes what there is: the slots left in owned "
    "blocks, and the free "
    "blocks.",
    zh="这是课里的 grow:要么全给,要么不给。这道题是有多少给多少:手里没写满的槽,加上空闲的块。",
)
OVERRUN = dict(en="More tokens than slots: there are (owned + free) x size slots, and computed of them are taken.",
               zh="token 比槽多:一共 (已有 + 空闲) × 块大小 个槽,其中已算的占掉了。")  # fmt: skip
ROOM = dict(
    en="Too few tokens: slots left = (owned + free) x size - computed; as many as wanted, at most that.",
    zh="少了:剩下的槽 = (已有 + 空闲) × 块大小 - 已算;想要几个给几个,最多这么多。",
)
