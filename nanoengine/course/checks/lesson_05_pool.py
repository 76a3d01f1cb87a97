"""Check of ex05b: a pool that frees a block twice, repaired.

A case is a life of one pool. The oracle keeps no pool: for each block it lists who was given it, and holds every call
of the answer against that list.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from nanoengine.course.checks.exercise import Failure, Text, call

NAMES = "ABCDEF"


class FaultyPool:
    """Blocks by name of the request."""

    def __init__(self, num_blocks):
        self.free = deque(range(num_blocks))
        self.refs = [0] * num_blocks
        self.tables = {}

    @property
    def num_free(self):
        return len(self.free)

    def allocate(self, name, count):
        """Fresh blocks for a new request."""
        self.tables[name] = []
        for _ in range(count):
            if not self.free:
                raise ValueError(f"no free block for {name}")
            block = self.free.popleft()
            self.refs[block] += 1
            self.tables[name].append(block)
        return self.tables[name]

    def share(self, name, other, count):
        """A new request begins with the first blocks of another one."""
        self.tables[name] = self.tables[other][:count]
        for block in self.tables[name]:
            self.refs[block] += 1
        return self.tables[name]

    def release(self, name):
        """Give the blocks of a request back; how many became free."""
        freed = 0
        for block in self.tables[name]:
            self.refs[block] -= 1
            if self.refs[block] <= 0:
                self.free.append(block)
                freed += 1
        return freed


@dataclass(frozen=True)
class PoolCase:
    """operations: ("allocate", name, count), ("share", name, other, count) or ("release", name), in order."""

    operations: tuple[tuple, ...]
    num_blocks: int = 6


class Promises:
    """Who was given each block, and still has it."""

    def __init__(self, num_blocks: int):
        self.of: list[list[str]] = [[] for _ in range(num_blocks)]
        self.given: dict[str, list[int]] = {}

    @property
    def unowned(self) -> int:
        return sum(not names for names in self.of)

    def give(self, name: str, blocks: list[int]) -> None:
        self.given[name] = list(blocks)
        for block in blocks:
            self.of[block].append(name)

    def take_back(self, name: str) -> int:
        """How many blocks nobody has any more."""
        freed = 0
        for block in self.given.pop(name, []):
            self.of[block].remove(name)
            freed += not self.of[block]
        return freed

    def makes_sense(self, operation: tuple) -> bool:
        """A request is new once, and shares with one that has blocks (cuts of a case may break that)."""
        kind, name, *rest = operation
        if kind == "share":
            return name not in self.given and 0 < rest[1] <= len(self.given.get(rest[0], []))
        return kind == "release" or name not in self.given


def run_pool(answer, case: PoolCase) -> Failure | None:
    pool, promises = call(answer, case.num_blocks), Promises(case.num_blocks)
    for number, operation in enumerate(case.operations, 1):
        if not promises.makes_sense(operation):
            continue
        kind, name, *rest = operation
        where = f"operation {number}, {_spelled(operation)}:"
        if kind == "release":
            failure = _release(pool, promises, name, where)
        elif kind == "share":
            failure = _share(pool, promises, name, *rest, where)
        else:
            failure = _allocate(pool, promises, name, *rest, where)
        if failure is None and pool.num_free != promises.unowned:
            why = LEAK if pool.num_free < promises.unowned else TWICE
            failure = Failure(f"num_free {promises.unowned}", f"{where} num_free is {pool.num_free}", why)
        if failure is not None:
            return failure
    return None


def _release(pool, promises: Promises, name: str, where: str) -> Failure | None:
    again = name not in promises.given
    want = promises.take_back(name)
    try:
        got = call(pool.release, name)
    except (KeyError, ValueError) as error:
        return Failure(f"{want}", f"{where} {type(error).__name__}: {error}", AGAIN)
    if got == want:
        return None
    return Failure(f"{want} blocks became free", f"{where} returned {got!r:.80}", AGAIN if again else COUNT)


def _share(pool, promises: Promises, name: str, other: str, count: int, where: str) -> Failure | None:
    want = promises.given[other][:count]
    got = call(pool.share, name, other, count)
    promises.give(name, want)
    return None if list(got) == want else Failure(f"{want}", f"{where} {got!r:.80}", SHARE)


def _allocate(pool, promises: Promises, name: str, count: int, where: str) -> Failure | None:
    try:
        got = list(call(pool.allocate, name, count))
    except ValueError as error:
        if count > promises.unowned:
            return None
        return Failure(f"{count} of {promises.unowned} free blocks", f"{where} ValueError: {error}", LOST)
    if count > promises.unowned:
        return Failure(f"ValueError: {promises.unowned} blocks are free", f"{where} {got}", TWICE)
    if len(set(got)) != count or not all(0 <= block < len(promises.of) for block in got):
        return Failure(f"{count} different blocks", f"{where} {got}", TWICE)
    taken = {block: promises.of[block] for block in got if promises.of[block]}
    if taken:
        block, names = next(iter(taken.items()))
        return Failure("blocks that nobody has", f"{where} {got}, but {' and '.join(names)} still has {block}", TWICE)
    promises.give(name, got)
    return None


def _spelled(operation: tuple) -> str:
    return f"{operation[0]}({', '.join(map(repr, operation[1:]))})"


def random_case(rng: random.Random) -> PoolCase:
    operations: list[tuple] = []
    for _ in range(rng.randint(3, 14)):
        name = rng.choice(NAMES)
        kind = rng.choice(("allocate", "allocate", "share", "release", "release"))
        if kind == "allocate":
            operations.append((kind, name, rng.randint(1, 4)))
        elif kind == "share":
            operations.append((kind, name, rng.choice(NAMES.replace(name, "")), rng.randint(1, 3)))
        else:
            operations.append((kind, name))
    return PoolCase(tuple(operations), rng.randint(2, 7))


def smaller(case: PoolCase) -> Iterator[PoolCase]:
    """Without one operation; with fewer blocks asked for.

    A cut must not make a stranger of a request that is released: any answer that looks it up without care fails on that
    alone, and the learner would see this in place of the double free.
    """
    operations = case.operations
    for i, operation in enumerate(operations):
        without = operations[:i] + operations[i + 1 :]
        if _strangers(without) <= _strangers(operations):
            yield PoolCase(without, case.num_blocks)
        if isinstance(operation[-1], int) and operation[-1] > 1:
            less = (*operation[:-1], operation[-1] - 1)
            yield PoolCase((*operations[:i], less, *operations[i + 1 :]), case.num_blocks)
    if case.num_blocks > 1:
        yield PoolCase(operations, case.num_blocks - 1)


def _strangers(operations: tuple[tuple, ...]) -> int:
    """How many releases are of a request that never had a block."""
    known, count = set(), 0
    for kind, name, *_ in operations:
        count += kind == "release" and name not in known
        known.add(name)
    return count


def show(case: PoolCase) -> str:
    return f"pool of {case.num_blocks}: " + "; ".join(map(_spelled, case.operations))


def explain(error: Exception) -> Text | None:
    return AGAIN if isinstance(error, KeyError) else None


A3, B2, B3 = ("allocate", "A", 3), ("share", "B", "A", 2), ("allocate", "B", 3)
C2, C4, END_A, END_B = ("allocate", "C", 2), ("allocate", "C", 4), ("release", "A"), ("release", "B")
BOUNDARIES = (
    PoolCase((A3, END_A)),
    PoolCase((A3, END_A, END_A)),  # the trace's fault
    PoolCase((A3, END_A, END_A, B3, C2)),  # ... and what comes of it
    PoolCase((A3, END_A, B3, END_A, C2)),  # the second release comes when the blocks are somebody else's
    PoolCase((A3, B2, END_A, END_B)),  # shared: free with the second
    PoolCase((A3, B2, END_A, END_A, C4)),  # twice, while B still has two of them
    PoolCase((A3, B2, END_B, END_B, END_A)),
    PoolCase((END_A,)),  # released before it ever got a block
    PoolCase((A3, C4, END_A, C4)),  # four are not free: nothing may be lost
    PoolCase((A3, C4, ("release", "C"), END_A)),
    PoolCase((A3, C4, B3, END_B, END_A)),
    PoolCase((A3, END_A, A3, B2, END_A, END_B)),  # a name comes back
    PoolCase((("allocate", "A", 6), END_A, ("allocate", "B", 6))),  # to the last block
)

AGAIN = dict(
    en="A request that has no blocks (any more, or yet) gives back none: release returns 0 and changes nothing. It is "
    "called twice when a request ends in the very step in which its client leaves.",
    zh="已经没有块(或者还没有块)的请求,什么也还不了:release 返回 0,什么都不变。请求在某一步结束、客户端恰好同一步断开,"
    "就会调两次。",
)
TWICE = dict(
    en="A block was given out while somebody has it: it came into the free list too early, or twice. A block "
    "joins the free "
    "list in the call in which its count falls to 0, and in no other.",
    zh="还有人占着的块被发了出去:它进空闲链表太早,或者进了两次。一块只在计数降到 0 的那一次调用里进空闲链表。",
)
LEAK = dict(
    en="Blocks that nobody has are missing from the free list. An allocate that fails must leave everything as "
    "it was: ask "
    "before you take.",
    zh="有些块没人占,空闲链表里却没有。allocate 失败时必须一切照旧:先问够不够,再拿。",
)
LOST = dict(
    en="Enough blocks are free, counted by who has what. Either allocate refuses too early (count == free "
    "still fits), or some blocks were lost before.",
    zh="按「谁手里有什么」来数,空闲块是够的。要么 allocate 拒绝得太早(正好够也是够),要么之前丢了几块。",
)
COUNT = dict(
    en="release returns how many blocks became free: those whose last holder this was, not all of the table. (A holder "
    "counts from allocate or share on.)",
    zh="release 返回的是**变成空闲**的块数:最后一个占用者放手的才算,不是整张块表。"
    "(allocate 和 share 都要把自己计进去。)",
)
SHARE = dict(en="share begins the new table with the first `count` blocks of the other one, in order.",
             zh="share 让新块表以另一张块表的前 `count` 块开头,顺序不变。")  # fmt: skip
