"""Answers to the exercises of lesson 04 as learners might write them: right in several shapes, wrong in likely ways."""

from __future__ import annotations

import numpy as np

from nanoengine.engine.batch import span_slots


def _need_room(table, end, size):
    if end > len(table) * size:
        raise ValueError("no room")


def _merge(slots):
    runs = []
    for slot in slots:
        if runs and slot == runs[-1][0] + runs[-1][1]:
            runs[-1][1] += 1
        else:
            runs.append([slot, 1])
    return runs  # lists in place of tuples


def by_token(table, start, end, size):
    _need_room(table, end, size)
    return _merge([table[p // size] * size + p % size for p in range(start, end)])


def by_numpy(table, start, end, size):
    """All slots as an array, cut where the difference is not 1."""
    _need_room(table, end, size)
    p = np.arange(start, end)
    if not len(p):
        return []
    slots = np.asarray(table)[p // size] * size + p % size
    cuts = np.flatnonzero(np.diff(slots) != 1) + 1
    return [(part[0], len(part)) for part in np.split(slots, cuts)]


def _blocks(table, start, end, size, *, adjacent=True, cut=True, last=0, raise_it=True, order=False, through=True):
    """slot_runs with one thing done differently."""
    if raise_it:
        _need_room(table, end, size)
    runs, p, end = [], start, end + last
    while p < end:
        offset = p % size if cut else 0
        slot = (table[p // size] if through else p // size) * size + offset
        length = min(size - offset, end - p) if cut else size
        if runs and adjacent and slot == sum(runs[-1]):
            runs[-1] = (runs[-1][0], runs[-1][1] + length)
        else:
            runs.append((slot, length))
        p = (p // size + 1) * size
    return sorted(runs) if order else runs


def one_run(table, start, end, size):
    """Merges whatever follows in the table."""
    _need_room(table, end, size)
    return [(table[start // size] * size + start % size, end - start)] if end > start else []


def includes_the_end(table, start, end, size):
    return by_token([*table, table[-1] + 1 if table else 0], start, end + 1, size) if end > start else []


def asks_the_package(table, start, end, size):
    _need_room(table, end, size)
    return _merge(span_slots(table, start, end, size).tolist())


RIGHT = {"ex04a": {"a token at a time": by_token, "numpy": by_numpy}}
# name -> (answer, verdict, words of its message in English)
WRONG = {
    "ex04a": {
        "a run a block": (lambda *a: _blocks(*a, adjacent=False), "wrong", "there are too many runs"),
        "whole blocks": (lambda *a: _blocks(*a, cut=False), "wrong", "Cut before start and after end"),
        "no table": (lambda *a: _blocks(*a, through=False), "wrong", "These are the positions themselves"),
        "in order of memory": (lambda *a: _blocks(*a, order=True), "wrong", "in the order of the tokens"),
        "one run": (one_run, "wrong", "need not be neighbours in memory"),
        "first and last slot": (
            lambda *a: [(f, f + n - 1) for f, n in by_token(*a)], "wrong", "not where it ends"),
        "end included": (includes_the_end, "wrong", "One slot off at the end"),
        "no error": (lambda *a: _blocks(*a, raise_it=False), "wrong", "with ValueError instead of"),
        "slots in place of runs": (
            lambda t, s, e, n: [t[p // n] * n + p % n for p in range(s, e)], "wrong", "a list of pairs"),
        "the package's": (asks_the_package, "imported", "span_slots"),
    }
}  # fmt: skip


def _seats(newest=0, floor=False, static="most", skip=False, cut=True, keep=False, free_too=False, extra=False):
    """seats with one thing done differently."""

    def one(requests, free, size, fixed):
        admitted = empty = 0
        for prompt, generated, most in requests:
            written = prompt + generated - 1 + newest
            blocks = written // size if floor else written // size + 1 if extra else -(-written // size)
            owned = blocks * size
            if fixed:
                owned = {"most": prompt + most - 1 + newest, "all": 4096, "now": written}[static]
            if owned > free:
                if skip:
                    continue
                break
            free, admitted = free - owned, admitted + 1
            empty += most - generated if keep and fixed else owned - written
        return admitted, empty + (free if free_too else 0)

    def seats(requests, pool_slots, block_size):
        pool = pool_slots // block_size * block_size if cut else pool_slots
        return {"static": one(requests, pool_slots, block_size, True), "paged": one(requests, pool, block_size, False)}

    return seats


def by_sums(requests, pool_slots, block_size):
    """Running totals instead of a loop with a break; blocks counted, not slots."""
    rows = np.array(requests, np.int64).reshape(-1, 3)
    written = rows[:, 0] + rows[:, 1] - 1
    blocks = (written + block_size - 1) // block_size
    strips = rows[:, 0] + rows[:, 2] - 1
    static = int((strips.cumsum() <= pool_slots).sum())
    paged = int((blocks.cumsum() <= pool_slots // block_size).sum())
    return {
        "static": (static, int((strips - written)[:static].sum())),
        "paged": [paged, int((blocks * block_size - written)[:paged].sum())],
    }


def asks_the_check(requests, pool_slots, block_size):
    from nanoengine.course.checks.lesson_04_waste import WasteCase, seated

    return seated(WasteCase(tuple(requests), pool_slots, block_size))


RIGHT["ex04b"] = {"loop": _seats(), "pool not cut": _seats(cut=False), "sums": by_sums}
WRONG["ex04b"] = {
    "newest counted": (_seats(newest=1), "wrong", "the newest token was only sampled"),
    "rounded down": (_seats(floor=True), "wrong", "whole blocks, rounded up"),
    "one block more": (_seats(extra=True), "wrong", "needs no further one"),
    "static grows": (_seats(static="now"), "wrong", "prompt + max_tokens - 1 slots"),
    "static of 4096": (_seats(static="all"), "wrong", "prompt + max_tokens - 1 slots"),
    "overtaking": (_seats(skip=True), "wrong", "everybody behind it waits too"),
    "free slots counted": (_seats(free_too=True), "wrong", "Free slots that nobody owns do not count"),
    "a number": (lambda *a: 3, "wrong", 'Return {"static"'),
    "asks the check": (asks_the_check, "imported", "seated"),
}
