"""The process that runs one submission: ``python -m nanoengine.course.grade_child FD``, the job on stdin.

It is started by ``grade`` only. Each line that it writes to the descriptor carries the job's nonce, which the notebook
is not told, so that what a cell writes there is not taken for a result.
"""

from __future__ import annotations

import ast
import json
import os
import re
import signal
import sys
from contextlib import contextmanager
from typing import Any

from nanoengine.course import progress
from nanoengine.course.check import CheckFailed, examine
from nanoengine.course.checks import all_exercises, exercises_of
from nanoengine.course.handed_in import read_notebook
from nanoengine.course.integrity import Snapshot
from nanoengine.course.sandbox import Limits, confine, more_memory
from nanoengine.shown import reason

_CALL = re.compile(r"\bcheck\(\s*[\"'](ex\d\d[a-z])[\"']")
WALL_FACTOR = 3  # wall time of a cell over its processor time


class CellTimeout(BaseException):
    """Raised in a cell that takes too long; no ``except Exception`` of a learner stops it.

    clock: the signal that rang, of processor time or of wall time.
    """

    def __init__(self, clock: int) -> None:
        super().__init__(clock)
        self.clock = clock


class Grader:
    """Runs cells in one namespace and reports to the parent."""

    def __init__(self, job: dict[str, Any], descriptor: int):
        self.job, self.descriptor, self.notes = job, descriptor, []
        self.limits = Limits(**job["limits"])
        self.changed: set[str] = set()

    def tell(self, **facts: Any) -> None:
        line = json.dumps({"nonce": self.job["nonce"], **facts}) + "\n"
        os.write(self.descriptor, line.encode())

    def run(self, notebook: dict[str, Any]) -> None:
        cells = [(i, cell) for i, cell in enumerate(notebook["cells"]) if cell.get("cell_type") == "code"]
        sources = [(i, cell, _text(cell)) for i, cell in cells]
        exercises = {e.id: e for e in _expected(notebook, [text for _, _, text in sources])}
        self.tell(exercises=list(exercises))
        shell = _shell()
        self.snapshot = Snapshot()
        unchecked = dict(exercises)
        for index, cell, text in sources:
            ids = [i for i in dict.fromkeys(_checked_in(cell, text)) if i in exercises]
            if not (ids and _only_checks(text)):
                self.run_cell(shell, index, text)
            for exercise_id in ids:
                unchecked.pop(exercise_id, None)
                self.check(exercises[exercise_id], shell.user_ns)
        for exercise in unchecked.values():  # its check cell was deleted
            self.check(exercise, shell.user_ns)

    def run_cell(self, shell, index: int, text: str) -> None:
        self.tell(cell=index)
        with self.alarm():
            result = shell.run_cell(text, store_history=False)
        error = result.error_before_exec or result.error_in_exec
        if error is not None and not isinstance(error, CheckFailed):
            self.tell(note=f"cell {index}: {_describe(error, self.limits)}")
        if isinstance(error, MemoryError):
            more_memory()

    def check(self, exercise, namespace: dict[str, Any]) -> None:
        self.tell(checking=exercise.id)
        changed = set(self.snapshot.restore()) - self.changed
        self.changed |= changed
        if changed:
            self.tell(note=f"changed the package, put back: {', '.join(sorted(changed)[:5])}")
        try:
            with self.alarm():
                result = examine(exercise, namespace, seed=self.job["seed"], lang=self.job["lang"])
            verdict, message = result.verdict, result.message
        except BaseException as error:
            verdict, message = "wrong", f"{exercise.id}: {_describe(error, self.limits)}"
        self.tell(exercise=exercise.id, verdict=verdict, message=message)

    @contextmanager
    def alarm(self):
        """Raise CellTimeout after the cell's time, and every second again where it was swallowed.

        Processor time, so that a busy machine fails nobody; thrice that in wall time, for a cell that only sleeps.
        """
        if not hasattr(signal, "setitimer"):  # Windows
            yield
            return
        timers = {signal.ITIMER_PROF: signal.SIGPROF, signal.ITIMER_REAL: signal.SIGALRM}
        for timer, number in timers.items():
            signal.signal(number, _ring)
            factor = 1 if timer == signal.ITIMER_PROF else WALL_FACTOR
            signal.setitimer(timer, factor * self.limits.cell_seconds, 1.0)
        try:
            yield
        finally:
            for timer in timers:
                signal.setitimer(timer, 0)


def _ring(number: int, _frame: Any) -> None:
    raise CellTimeout(number)


def _describe(error: BaseException, limits: Limits) -> str:
    if isinstance(error, CellTimeout):
        if error.clock == signal.SIGALRM:
            return f"still running after {WALL_FACTOR * limits.cell_seconds:g} s"
        return f"still running after {limits.cell_seconds:g} s of processor time"
    if isinstance(error, MemoryError):
        return f"MemoryError (limit {limits.memory_gib:g} GiB)"
    # Python has kinds of its own within a public one: an unfinished cell is a _IncompleteInputError since 3.13.
    kind = next(base.__name__ for base in type(error).__mro__ if not base.__name__.startswith("_"))
    try:
        words = str(error)
    except BaseException as second:  # it is a learner's class
        words = f"(its text raises {type(second).__name__})"
    return f"{kind}: {words}"[:300]


def _shell():
    """IPython without a kernel, so that magics and display calls work; what they show goes nowhere."""
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell.instance()
    shell.history_manager.enabled = False
    return shell


def _text(cell: dict[str, Any]) -> str:
    source = cell.get("source", "")
    return "".join(map(str, source)) if isinstance(source, list) else str(source)


def _expected(notebook: dict[str, Any], texts: list[str]):
    """All exercises of the notebook's lesson; the lesson is told by its metadata, else by the checks in it."""
    facts = notebook.get("metadata", {}).get("nanoengine", {})
    lesson = facts.get("lesson") if isinstance(facts, dict) else None
    found = exercises_of(lesson) if isinstance(lesson, str) else []
    if found:
        return found
    lessons = {match[2:4] for text in texts for match in _CALL.findall(text)}
    named = [exercise for exercise in all_exercises() if exercise.id[2:4] in lessons]
    return named or [exercise for exercise in all_exercises() if exercise.id in "\n".join(texts)]


def _checked_in(cell: dict[str, Any], text: str) -> list[str]:
    """Ids of the exercises that are checked in this cell, by what it says or, where that was changed, by its id."""
    found = _CALL.findall(text)
    own = re.fullmatch(r"(ex\d\d[a-z])-check", str(cell.get("id", "")))
    return found or ([own[1]] if own else [])


def _only_checks(text: str) -> bool:
    """True if the cell is nothing but calls of check: it is replaced, not run."""
    try:
        body = ast.parse(text).body
    except SyntaxError:
        return False
    calls = [s.value for s in body if isinstance(s, ast.Expr) and isinstance(s.value, ast.Call)]
    return len(calls) == len(body) and all(isinstance(c.func, ast.Name) and c.func.id == "check" for c in calls)


def main() -> None:
    job = json.loads(sys.stdin.buffer.read())
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    grader = Grader(job, int(sys.argv[1]))
    try:
        notebook = read_notebook(os.fsdecode(bytes.fromhex(job["path"])))
    except ValueError as error:
        grader.tell(unreadable=str(error))
        return
    except OSError as error:
        grader.tell(unreadable=f"cannot be read: {reason(error)}")
        return
    progress.find = lambda start=None: None  # a check cell that runs as it stands records nothing
    confine(grader.limits)
    grader.run(notebook)
    grader.tell(done=True)
    os._exit(0)  # threads that the notebook left behind do not hold us up


if __name__ == "__main__":
    main()
