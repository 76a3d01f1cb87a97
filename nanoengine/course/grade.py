"""Grades one notebook or a folder of a class: ``nanoengine course grade PATH…``.

Each submission runs in a process of its own (see ``sandbox``), from top to bottom, with the course's checks in place of
those in the file. What is not shown to be right counts as wrong, and every file gets its row.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import secrets
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from nanoengine.course.checks import all_exercises, find_exercise
from nanoengine.course.sandbox import Ended, Limits, no_survivors, run_child
from nanoengine.shown import visible

CHILD = "nanoengine.course.grade_child"
VERDICTS = ("passed", "wrong", "stub", "missing", "imported", "no result")


@dataclass(frozen=True)
class Mark:
    """verdict: one of ``VERDICTS``; only the first counts."""

    verdict: str
    message: str = ""


@dataclass
class Row:
    """One submission. notes: what went wrong outside the checks, for the teacher."""

    path: Path
    marks: dict[str, Mark] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def name(self) -> str:
        """The path as it can be printed: the name of a file may be any bytes."""
        return visible(self.path)

    @property
    def num_passed(self) -> int:
        return sum(mark.verdict == "passed" for mark in self.marks.values())


def find_submissions(paths: Iterable[Path]) -> list[Path]:
    """Files as they are given, and of each folder all notebooks below it, in order.

    What an archive or an editor leaves beside a notebook is none: ``__MACOSX``, ``._name.ipynb``, checkpoints. A folder
    that cannot be read is a submission that cannot be: it gets its row. Links to folders are not followed.

    Raises:
        FileNotFoundError: a path does not exist, or no notebook was found at all.
    """
    paths = list(paths)
    found: list[Path] = []
    for path in paths:
        if not os.path.exists(path):
            raise FileNotFoundError(f"{visible(path)} does not exist")
        found += sorted(_inside(path) if os.path.isdir(path) else [path])
    found = [path for path in found if not path.name.startswith("._") and not _LEFTOVERS.intersection(path.parts)]
    if not found:
        raise FileNotFoundError(f"no notebook (*.ipynb) in {', '.join(map(visible, paths))}")
    return list(dict.fromkeys(found))


_LEFTOVERS = {".ipynb_checkpoints", "__MACOSX"}


def _inside(folder: Path) -> Iterator[Path]:
    locked: list[Path] = []
    for place, _, names in os.walk(folder, onerror=lambda error: locked.append(Path(error.filename))):
        yield from (Path(place, name) for name in names if name.lower().endswith(".ipynb"))
    yield from locked


def grade(
    paths: Iterable[Path],
    *,
    seed: int = 0,
    lang: str = "en",
    limits: Limits = Limits(),  # noqa: B008 (frozen)
    jobs: int = 1,
    on_row: Callable[[Row], None] = lambda row: None,
) -> list[Row]:
    """Grade every submission; rows in the order of the files.

    Args:
        seed: of the random cases. Give a class one that it does not know.
        lang: of the messages.
        jobs: submissions at the same time.
        on_row: called with each row as soon as it is there.
    """
    files = find_submissions(paths)
    with no_survivors(), concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        waiting = [pool.submit(grade_one, path, seed=seed, lang=lang, limits=limits) for path in files]
        rows = []
        for future in waiting:
            rows.append(future.result())
            on_row(rows[-1])
    _fill_missing(rows)
    return rows


def grade_one(path: Path, *, seed: int = 0, lang: str = "en", limits: Limits = Limits()) -> Row:  # noqa: B008
    """Run one submission and read what its process reported."""
    nonce = secrets.token_hex(16)
    # Bytes: the child's locale may read the same name as other characters.
    job = dict(path=os.fsencode(os.path.abspath(path)).hex(), seed=seed, lang=lang, limits=asdict(limits), nonce=nonce)
    row = Row(path)
    try:
        ended = run_child(CHILD, json.dumps(job).encode(), limits)
        row.seconds = ended.seconds
        _read_results(row, ended, nonce, limits)
    except Exception as error:  # no process, no memory, a fault of ours: one submission never takes the class with it
        row.notes.append(f"could not be graded: {type(error).__name__}: {error}")
    return row


def _read_results(row: Row, ended: Ended, nonce: str, limits: Limits) -> None:
    at, finished = "before the first cell", False
    known = {exercise.id for exercise in all_exercises()}
    for line in ended.results.splitlines():
        try:
            facts = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if not isinstance(facts, dict) or facts.get("nonce") != nonce:
            continue
        match facts:
            case {"exercises": list(ids)}:
                row.marks = {exercise_id: Mark("no result") for exercise_id in ids if exercise_id in known}
            case {"exercise": str(exercise_id), "verdict": str(verdict), "message": str(message)}:
                if exercise_id in known:
                    row.marks[exercise_id] = Mark(verdict if verdict in VERDICTS else "no result", message)
            case {"note": str(text)} | {"unreadable": str(text)}:
                row.notes.append(text)
                finished = finished or "unreadable" in facts
            case {"cell": int(index)}:
                at = f"in cell {index}"
            case {"checking": str(exercise_id)} if exercise_id in known:
                at = f"in the check of {exercise_id}"
                row.marks[exercise_id] = Mark("no result")
            case {"done": True}:
                finished = True
    if ended.reason == "time":
        row.notes.append(f"stopped after {limits.seconds:g} s, {at}")
    elif not finished:
        row.notes.append(f"its process ended {at} (exit code {ended.code})")


def _fill_missing(rows: list[Row]) -> None:
    """A file that could not be read has failed everything that the others were asked."""
    asked = sorted({exercise_id for row in rows for exercise_id in row.marks})
    for row in rows:
        if not row.marks:
            row.marks = {exercise_id: Mark("no result") for exercise_id in asked}


def titles(rows: list[Row], lang: str) -> dict[str, str]:
    """The exercises that occur in the rows, by id, with their titles."""
    ids = sorted({exercise_id for row in rows for exercise_id in row.marks})
    return {exercise_id: find_exercise(exercise_id).title[lang] for exercise_id in ids}
