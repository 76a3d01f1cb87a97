"""From a trace to what a picture of one step needs. Pure functions of the records.

``History`` reads a trace once; ``History.at(i)`` is the state in which step i runs (after scheduling, before its
tokens are known), ``History.before(i)`` the state that the scheduler saw, for "who runs next?".
"""

from __future__ import annotations

from collections.abc import Sequence as Steps
from dataclasses import dataclass, replace
from string import ascii_uppercase

# What a jump can stop at; "any" is their union.
JUMPS = ("admit", "hit", "preempt", "finish")


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive steps of one sequence in one phase: "waiting", "prefill", "decode", "preempted" or "idle"
    (it holds its blocks, but this step computes none of its tokens). ``last`` is included."""

    phase: str
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Extent:
    """Sizes over the whole trace, so that a picture keeps its size from step to step.

    axis: steps on the timeline, more than ``steps`` where a longer run stands beside this one.
    """

    steps: int
    axis: int
    sequences: int
    table: int  # blocks in the longest block table


@dataclass(frozen=True, slots=True)
class State:
    """One step and the little it needs of the trace around it.

    record: the step, as nanoengine.trace describes it. index: its number in the trace.
    letters: sequence id -> "A", "B", ..., "Z", "AA", ... in order of arrival.
    runs: sequence id -> its runs up to this step. marks: sequence id -> [(step, "hit" | "preempt" | "finish" |
    "abort")] up to this step. ended: [(sequence id, reason)] before this step, oldest first.
    wrote: free block that holds a known content -> the sequence that computed it, where the trace saw that.
    asking: True for the state before scheduling: no rows, no events, nobody chosen yet.
    """

    record: dict
    index: int
    letters: dict[int, str]
    runs: dict[int, list[Run]]
    marks: dict[int, list[tuple[int, str]]]
    ended: list[tuple[int, str]]
    wrote: dict[int, int]
    extent: Extent
    asking: bool = False


def letter(number: int) -> str:
    """0 -> "A", 25 -> "Z", 26 -> "AA"."""
    text = ""
    number += 1
    while number:
        number, rest = divmod(number - 1, 26)
        text = ascii_uppercase[rest] + text
    return text


class History:
    """All phases and events of a trace (a Trace or a list of its records), read once."""

    def __init__(self, trace: Steps[dict]):
        self.steps = list(trace)
        if not self.steps:
            raise ValueError("the trace is empty: run the engine inside `with record(llm) as trace:`")
        ids = sorted({seq for step in self.steps for seq in _seen(step)})
        self.letters = {seq: letter(i) for i, seq in enumerate(ids)}
        self.runs: dict[int, list[Run]] = {seq: [] for seq in ids}
        self.marks: dict[int, list[tuple[int, str]]] = {seq: [] for seq in ids}
        self.ended: list[tuple[int, int, str]] = []  # (step, sequence id, reason)
        self.wrote: list[dict[int, int]] = []  # at each step: of free cached blocks, and of those just found
        preempted: set[int] = set()
        writers: dict[int, int] = {}
        for i, step in enumerate(self.steps):
            self._read_events(i, step, preempted)
            self._read_phases(i, step, preempted)
            self._read_writers(step, writers)
        self.extent = Extent(
            steps=len(self.steps),
            axis=len(self.steps),
            sequences=len(ids),
            table=max((len(table) for step in self.steps for table in step["block_tables"].values()), default=0),
        )

    def __len__(self) -> int:
        return len(self.steps)

    def _read_events(self, i: int, step: dict, preempted: set[int]) -> None:
        for event in step["events"]:
            seq, kind = event["seq"], event["kind"]
            if kind in ("hit", "preempt", "finish", "abort"):
                self.marks[seq].append((i, kind))
            if kind in ("finish", "abort"):
                self.ended.append((i, seq, event.get("reason", "abort")))
            if kind == "preempt":
                preempted.add(seq)
            elif kind == "admit":
                preempted.discard(seq)

    def _read_phases(self, i: int, step: dict, preempted: set[int]) -> None:
        phases = {seq: "preempted" if seq in preempted else "waiting" for seq in step["waiting"]}
        phases.update((seq, "idle") for seq in step["running"])
        phases.update((row["seq"], row["kind"]) for row in step["rows"])
        for seq, phase in phases.items():
            runs = self.runs[seq]
            if runs and runs[-1].phase == phase and runs[-1].last == i - 1:
                runs[-1] = Run(phase, runs[-1].first, i)
            else:
                runs.append(Run(phase, i, i))

    def _read_writers(self, step: dict, writers: dict[int, int]) -> None:
        """Who wrote each block last. A row's positions are consecutive: one slot in block_size meets every block."""
        size, first = step["block_size"], 0
        for row in step["rows"]:
            slots = step["slot_mapping"][first : first + row["tokens"]]
            writers.update((slot // size, row["seq"]) for slot in (*slots[::size], *slots[-1:]) if slot >= 0)
            first += row["tokens"]
        self.wrote.append({b: writers[b] for b in (*step["cached_free"], *_found(step)) if b in writers})

    def _index(self, i: int) -> int:
        if not -len(self.steps) <= i < len(self.steps):
            raise IndexError(f"step {i} is not in this trace of {len(self.steps)} steps")
        return i % len(self.steps)

    def at(self, i: int) -> State:
        """The state in which step ``i`` runs; negative numbers count from the end. IndexError beyond the trace."""
        i = self._index(i)
        return self._state(self.steps[i], i, i, self.wrote[i])

    def _state(self, record: dict, i: int, upto: int, wrote: dict[int, int], asking: bool = False) -> State:
        runs = {
            seq: [r if r.last <= upto else Run(r.phase, r.first, upto) for r in runs if r.first <= upto]
            for seq, runs in self.runs.items()
        }
        marks = {seq: [mark for mark in marks if mark[0] <= upto] for seq, marks in self.marks.items()}
        ended = [(seq, reason) for step, seq, reason in self.ended if step < i]
        return State(record, i, self.letters, runs, marks, ended, wrote, self.extent, asking)

    def before(self, i: int) -> State:
        """What the scheduler sees when it plans step ``i``: newcomers wait, who ended is gone, nobody is chosen.

        Rebuilt from the records on both sides: what a block held that was taken at once is not known, so
        it is shown as plain free.
        """
        i = self._index(i)
        record = _before(self.steps[i], self.steps[i - 1] if i else None)
        wrote = (self.wrote[i - 1] if i else {}) | self.wrote[i]
        return self._state(record, i, i - 1, wrote, asking=True)

    def jumps(self, kind: str) -> list[int]:
        """Steps with an event of ``kind`` ("admit", "hit", "preempt", "finish" or "any")."""
        wanted = JUMPS if kind == "any" else (kind,)
        return [i for i, step in enumerate(self.steps) if any(event["kind"] in wanted for event in step["events"])]


def share_extent(histories: list[History]) -> None:
    """Give runs that stand side by side one scale: the same axis, the same room for lines and tables."""
    shared = {name: max(getattr(h.extent, name) for h in histories) for name in ("axis", "sequences", "table")}
    for history in histories:
        history.extent = replace(history.extent, **shared)


def _seen(step: dict) -> list[int]:
    return [*step["sequences"], *(event["seq"] for event in step["events"])]


def _before(step: dict, previous: dict | None) -> dict:
    events = step["events"]
    arrived = [event["seq"] for event in events if event["kind"] == "arrive"]
    admitted = {event["seq"] for event in events if event["kind"] == "admit"}
    gone = {event["seq"] for event in events if event["kind"] == "abort"}
    if previous is None:
        running = [seq for seq in step["running"] if seq not in admitted]
        waiting = list(dict.fromkeys([*arrived, *step["waiting"]]))
        tables = {seq: table for seq, table in step["block_tables"].items() if seq in running}
    else:
        gone |= {event["seq"] for event in previous["events"] if event["kind"] == "finish"}
        running = [seq for seq in previous["running"] if seq not in gone]
        waiting = [seq for seq in previous["waiting"] if seq not in gone] + arrived
        tables = {seq: table for seq, table in previous["block_tables"].items() if seq not in gone}
    refs = [0] * step["num_blocks"]
    for table in tables.values():
        for block in table:
            refs[block] += 1
    free = [block for block, count in enumerate(refs) if not count]
    cached = set(step["cached_free"]) | _found(step) | set(previous["cached_free"] if previous else ())
    return {
        **step,
        "waiting": waiting,
        "running": running,
        "rows": [],
        "events": [],
        "sequences": {**step["sequences"], **_progress(step, previous, gone)},
        "block_tables": tables,
        "ref_counts": refs,
        "free": free,
        "cached_free": [block for block in free if block in cached],
        "slot_mapping": [],
    }


def _found(step: dict) -> set[int]:
    """Blocks that this step's newcomers took from the prefix cache."""
    size, found = step["block_size"], set()
    for event in step["events"]:
        if event["kind"] == "hit":
            found.update(step["block_tables"].get(event["seq"], [])[: event["tokens"] // size])
    return found


def _progress(step: dict, previous: dict | None, gone: set[int]) -> dict:
    """Progress before scheduling: nobody's cache hit or preemption of this step has happened yet."""
    if previous is None:
        return {seq: {**progress, "computed": 0, "cached": 0} for seq, progress in step["sequences"].items()}
    tokens = {row["seq"]: row for row in previous["rows"]}
    known = {}
    for seq, progress in previous["sequences"].items():
        if seq not in gone:
            row = tokens.get(seq, {"tokens": 0, "new": []})
            known[seq] = {
                **progress,
                "computed": progress["computed"] + row["tokens"],
                "total": progress["total"] + len(row["new"]),
            }
    return known
