"""Check of ex04a: the slots of a span of tokens as few contiguous runs.

The oracle paints the pool: it writes every position of the sequence into its slot, block by block, and then walks
through memory slot by slot. The answer is expected to compute.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from nanoengine.course.checks.exercise import Failure, Text, call

TOO_LONG = "ValueError: the table has no room for the span"


@dataclass(frozen=True)
class RunsCase:
    """Positions start..end-1 of a sequence with this block table."""

    table: tuple[int, ...]
    start: int
    end: int
    size: int


def run_runs(answer, case: RunsCase) -> Failure | None:
    want = painted(case)
    try:
        got = call(answer, list(case.table), case.start, case.end, case.size)
    except ValueError as error:
        return None if want is None else Failure(f"{want}", f"ValueError: {error}", ROOM)
    except IndexError as error:
        if want is None:
            return Failure(TOO_LONG, f"IndexError: {error}", NO_ROOM)
        raise
    if want is None:
        return Failure(TOO_LONG, f"{got!r:.160}", NO_ROOM)
    if not _is_runs(got):
        return Failure(f"{want}", f"{got!r:.160}", SHAPE)
    got = [tuple(int(n) for n in run) for run in got]
    return None if got == want else Failure(f"{want}", f"{got!r:.160}", _likely(case, got, want))


def painted(case: RunsCase) -> list[tuple[int, int]] | None:
    """The runs in order of position, found in a painted pool; None if the table is too short."""
    pool: dict[int, int] = {}
    position = 0
    for block in case.table:
        for offset in range(case.size):
            pool[block * case.size + offset] = position
            position += 1
    if case.end > position:
        return None
    wanted = {slot: p for slot, p in pool.items() if case.start <= p < case.end}
    runs: list[list[int]] = []
    for slot in sorted(wanted):
        if runs and slot == sum(runs[-1]) and wanted[slot] == wanted[slot - 1] + 1:
            runs[-1][1] += 1
        else:
            runs.append([slot, 1])
    return [(slot, length) for slot, length in sorted(runs, key=lambda run: wanted[run[0]])]


def _is_runs(got) -> bool:
    try:
        return isinstance(got, list) and all(len(run) == 2 and all(float(n).is_integer() for n in run) for run in got)
    except (TypeError, ValueError):
        return False


def _likely(case: RunsCase, got: list, want: list) -> Text:
    """Which known slip gives these runs, if one does."""
    slots, right = _expand(got), _expand(want)
    if got in ([(a, a + n - 1) for a, n in want], [(a, a + n) for a, n in want]):
        return LAST_SLOT
    if slots == right:
        return SPLIT if len(got) > len(want) else EMPTY_RUN
    if sorted(slots) == sorted(right):
        return ORDER
    if slots == list(range(case.start, case.end)):
        return NO_TABLE
    if slots[:-1] == right or slots == right[:-1]:
        return END
    if len(slots) > len(right) and set(right) <= set(slots):
        return WHOLE_BLOCKS
    if len(got) < len(want) and len(slots) == len(right):
        return GAP
    return FORMULA


def _expand(runs: list) -> list[int]:
    return [slot for first, length in runs for slot in range(first, first + length)]


def random_case(rng: random.Random) -> RunsCase:
    size, blocks = rng.randint(1, 8), rng.randint(1, 8)
    table: list[int] = []
    while len(table) < blocks:  # about half of the neighbours adjacent, as in a pool that is not quite new
        following = table[-1] + 1 if table else -1
        table.append(following if following not in (-1, *table) and rng.random() < 0.5 else _fresh(rng, table))
    room = blocks * size
    end = rng.randint(0, room + (rng.random() < 0.15))
    return RunsCase(tuple(table), rng.randint(0, min(end, room)), end, size)  # no empty span beyond the table


def _fresh(rng: random.Random, table: list[int]) -> int:
    return rng.choice([block for block in range(24) if block not in table])


def smaller(case: RunsCase) -> Iterator[RunsCase]:
    """Fewer blocks, a shorter span, smaller blocks; never a start behind the end."""
    if len(case.table) > 1:
        room = (len(case.table) - 1) * case.size
        if case.end <= room:
            yield replace(case, table=case.table[:-1])
        if case.start >= case.size:
            yield replace(case, table=case.table[1:], start=case.start - case.size, end=case.end - case.size)
    if case.end > case.start:
        yield replace(case, end=case.end - 1)
        if case.start < len(case.table) * case.size:  # an empty span beyond the table: [] or ValueError, both are right
            yield replace(case, start=case.start + 1)
    if case.size > 1 and case.end <= len(case.table) * (case.size - 1):
        yield replace(case, size=case.size - 1)


def show(case: RunsCase) -> str:
    return f"block_table {list(case.table)}, start {case.start}, end {case.end}, block_size {case.size}"


def explain(error: Exception) -> Text | None:
    return NO_ROOM if isinstance(error, IndexError) else None


BOUNDARIES = (
    RunsCase((7, 2, 5), 0, 10, 4),  # the lesson's table, whole prompt
    RunsCase((7, 2, 5), 6, 11, 4),  # both ends in mid-block
    RunsCase((7, 2, 5), 4, 8, 4),  # exactly one block
    RunsCase((7, 2, 5), 9, 10, 4),  # a decode
    RunsCase((7, 2, 5), 5, 5, 4),  # nothing
    RunsCase((3, 4, 5), 2, 11, 4),  # adjacent blocks: one run
    RunsCase((3, 4, 9, 10, 5), 0, 20, 4),  # two adjacent pairs and a single
    RunsCase((5, 4, 3), 0, 12, 4),  # adjacent the wrong way round
    RunsCase((2, 3), 0, 2, 1),  # block size 1
    RunsCase((6,), 0, 256, 256),
    RunsCase((7, 2), 6, 9, 4),  # one token too many for the table
    RunsCase((), 0, 1, 4),
    RunsCase((), 0, 0, 4),
)

ROOM = dict(en="The table has room here: len(block_table) x block_size tokens. Raise only where end is beyond that.",
            zh="这里块表放得下:len(block_table) × block_size 个 token。end 超过它才抛错。")  # fmt: skip
NO_ROOM = dict(
    en="end is beyond len(block_table) x block_size: these tokens have no slot yet. Say so with ValueError instead of "
    "giving out a slot that is somebody else's, or an IndexError.",
    zh="end 超过了 len(block_table) × block_size:这些 token 还没有槽。抛 ValueError 说清楚,不要给出别人的槽,也不要"
    "冒出 IndexError。",
)
SHAPE = dict(en="Return a list of pairs (first slot, number of slots), both whole numbers; [] for an empty span.",
             zh="返回一个列表,元素是 (第一个槽, 槽数) 这样的整数对;空的一段返回 []。")  # fmt: skip
SPLIT = dict(
    en="The slots are right, and there are too many runs: where one block ends and the next in the table lies directly "
    "behind it in memory, the run goes on.",
    zh="槽都对,只是段太多了:块表里的下一块如果在显存里正好接在后面,这一段就没有断。",
)
LAST_SLOT = dict(
    en="The second number of a run is its number of slots, not where it ends.",
    zh="每段的第二个数是槽的个数,不是它在哪儿结束。",
)
EMPTY_RUN = dict(en="The slots are right; leave out runs of length 0.", zh="槽都对;长度为 0 的段不要放进来。")
ORDER = dict(en="These are the right slots in another order. Runs stand in the order of the tokens, not of memory.",
             zh="槽是对的,顺序不对。各段按 token 的顺序排,不按显存的顺序。")  # fmt: skip
NO_TABLE = dict(en="These are the positions themselves. A position becomes a slot through the table.",
                zh="这是位置本身。位置要查过块表才变成槽。")  # fmt: skip
END = dict(en="One slot off at the end: the span is start..end-1, end itself is not in it.",
           zh="末尾差一个槽:这一段是 start..end-1,不含 end。")  # fmt: skip
WHOLE_BLOCKS = dict(
    en="Too many slots: a span may start and end in the middle of a block. Cut before start and after end.",
    zh="槽太多了:一段可能从块中间开始、在块中间结束。start 之前和 end 之后的都要切掉。",
)
GAP = dict(
    en="A run goes on only if the next block's id is the last one's plus 1. Neighbours in the table need not be "
    "neighbours in memory.",
    zh="只有下一块的块号正好是上一块加 1,这一段才连得上。块表里挨着,显存里不一定挨着。",
)
FORMULA = dict(
    en="Compute one by hand: position p is in block table[p // size], at offset p % size, and that block "
    "starts at slot "
    "id x size.",
    zh="手算一个:位置 p 在块 table[p // size] 里,块内第 p % size 格,而这一块从 块号 × size 号槽开始。",
)
