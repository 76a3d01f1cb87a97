"""Answers to the exercises of lesson 05 as learners might write them: right in several shapes, wrong in likely ways."""

from __future__ import annotations

from nanoengine.course.checks.lesson_05_pool import FaultyPool, Promises


def by_divmod(computed, wanted, owned, free, size):
    """The room first; blocks by quotient and remainder."""
    left = owned * size - computed
    if wanted <= left:
        return 0, wanted
    more, rest = divmod(wanted - left, size)
    more += rest > 0
    return (more, wanted) if more <= free else [free, left + free * size]


def by_loop(computed, wanted, owned, free, size):
    taken = tokens = 0
    while tokens < wanted:
        if computed + tokens == (owned + taken) * size:
            if taken == free:
                break
            taken += 1
        tokens += 1
    return taken, tokens


def _grow(form="ceiling", clip=True, partial=True, bound=True):
    """grow_by with one thing done differently."""

    def grow_by(computed, wanted, owned, free, size):
        room = (owned + free) * size - computed
        tokens = min(wanted, room) if bound else wanted
        if not partial and wanted > room:
            return 0, 0
        total = computed + tokens
        if form == "remainder":
            blocks = owned + (total % size == 1 and tokens > 0)
        else:
            blocks = {"ceiling": -(-total // size), "early": total // size + 1, "floor": total // size}[form]
        blocks -= owned
        return (max(0, blocks) if clip else blocks), tokens

    return grow_by


def forgets_the_open_block(computed, wanted, owned, free, size):
    tokens = min(wanted, free * size)
    return -(-tokens // size), tokens


def the_other_way_round(computed, wanted, owned, free, size):
    return tuple(by_divmod(computed, wanted, owned, free, size)[::-1])


def asks_the_check(computed, wanted, owned, free, size):
    from nanoengine.course.checks.lesson_05_grow import GrowCase, written

    return written(GrowCase(computed, wanted, owned, free, size))


RIGHT = {"ex05a": {"divmod": by_divmod, "loop": by_loop}}
# name -> (answer, verdict, words of its message in English)
WRONG = {
    "ex05a": {
        "remainder": (_grow("remainder"), "wrong", "A remainder sees one position only"),
        "floor": (_grow("floor"), "wrong", "written beyond the table"),
        "a block early": (_grow("early"), "wrong", "full is not yet too small"),
        "negative": (_grow(clip=False), "wrong", "Then it takes none"),
        "all or nothing": (_grow(partial=False), "wrong", "takes what there is"),
        "no bound": (_grow(bound=False), "wrong", "More tokens than slots"),
        "open block forgotten": (forgets_the_open_block, "wrong", "x size - computed"),
        "swapped": (the_other_way_round, "wrong", "The other way round"),
        "one number": (lambda *a: 1, "wrong", "Return (blocks to take"),
        "asks the check": (asks_the_check, "imported", "written"),
    }
}


class BySets:
    """No counts: a block is free if no table names it; the least id first."""

    def __init__(self, num_blocks):
        self.all, self.tables = range(num_blocks), {}

    @property
    def _unused(self):
        return [block for block in self.all if not any(block in table for table in self.tables.values())]

    @property
    def num_free(self):
        return len(self._unused)

    def allocate(self, name, count):
        unused = self._unused
        if len(unused) < count:
            raise ValueError("too few")
        self.tables[name] = unused[:count]
        return self.tables[name]

    def share(self, name, other, count):
        self.tables[name] = self.tables[other][:count]
        return self.tables[name]

    def release(self, name):
        before = self.num_free
        self.tables.pop(name, None)
        return self.num_free - before


class Careful(FaultyPool):
    """Repairs by inheriting: asks first, forgets the table."""

    def allocate(self, name, count):
        if count > self.num_free:
            raise ValueError("too few")
        return super().allocate(name, count)

    def release(self, name):
        freed = super().release(name) if name in self.tables else 0
        self.tables.pop(name, None)
        return freed


class OnlyGuardsTheCount(Careful):
    """Skips blocks whose count is 0 already; wrong when they have a new holder."""

    def release(self, name):
        freed = 0
        for block in self.tables.get(name, []):
            if self.refs[block]:
                self.refs[block] -= 1
                if not self.refs[block]:
                    self.free.append(block)
                    freed += 1
        return freed


class NoDuplicates(Careful):
    """Keeps the free list free of duplicates, and the table alive."""

    def release(self, name):
        freed = 0
        for block in self.tables.get(name, []):
            self.refs[block] -= 1
            if self.refs[block] <= 0 and block not in self.free:
                self.free.append(block)
                freed += 1
        return freed


class NoCounts(Careful):
    def release(self, name):
        table = self.tables.pop(name, [])
        self.free.extend(table)
        return len(table)


class Raises(Careful):
    def release(self, name):
        if name not in self.tables:
            raise ValueError(f"{name} has no blocks")
        return super().release(name)


class StillLeaks(FaultyPool):
    """The trace's fault is repaired, the other is not."""

    def release(self, name):
        freed = super().release(name) if name in self.tables else 0
        self.tables.pop(name, None)
        return freed


class RefusesTheLast(Careful):
    def allocate(self, name, count):
        if count >= self.num_free:
            raise ValueError("too few")
        return super().allocate(name, count)


class SharesUncounted(Careful):
    def share(self, name, other, count):
        self.tables[name] = self.tables[other][:count]
        return self.tables[name]


class ReturnsTheTable(Careful):
    def release(self, name):
        size = len(self.tables.get(name, []))
        super().release(name)
        return size


class NeverFrees(Careful):
    def release(self, name):
        self.tables.pop(name, None)
        return 0


class AsksTheCheck(Careful):
    def __init__(self, num_blocks):
        super().__init__(num_blocks)
        self.promises = Promises(num_blocks)

    def allocate(self, name, count):
        table = super().allocate(name, count)
        self.promises.give(name, table)
        return table


RIGHT["ex05b"] = {"sets": BySets, "inherits": Careful}
WRONG["ex05b"] = {
    "as it was": (FaultyPool, "wrong", "release returns 0 and changes nothing"),
    "guards the count": (OnlyGuardsTheCount, "wrong", "release returns 0 and changes nothing"),
    "no duplicates": (NoDuplicates, "wrong", "release returns 0 and changes nothing"),
    "no counts": (NoCounts, "wrong", "how many blocks became free"),
    "raises": (Raises, "wrong", "gives back none"),
    "still leaks": (StillLeaks, "wrong", "ask before you take"),
    "whole table": (ReturnsTheTable, "wrong", "not all of the table"),
    "refuses the last": (RefusesTheLast, "wrong", "refuses too early"),
    "shares uncounted": (SharesUncounted, "wrong", "counts from allocate or share on"),
    "never frees": (NeverFrees, "wrong", "how many blocks became free"),
    "asks the check": (AsksTheCheck, "imported", "Promises.give"),
}
