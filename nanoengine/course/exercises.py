"""Builds exercises and solutions: ``python -m nanoengine.course.exercises [--execute] [NN ...]``.

``exercises/src/NN_slug.py`` has the format of a lesson's source. A code cell tagged ``answer`` holds both forms::

    # %% id="ex01a-answer" tags=["answer"]
    from nanoengine.engine.batch import build_batch      (what stands before belongs to both)

    # --- stub
    def step(engine):  # yours
        raise NotImplementedError("ex01a")
    # --- solution
    def step(engine):
        ...

A cell tagged ``check`` calls ``check("ex01a", globals())``; ``<!-- hints ex01a -->`` in a text becomes the folded hints
of the check's registry. From it come ``exercises/`` and ``solutions/``, each in English and, under ``zh/``, Chinese.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from dataclasses import replace
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from nanoengine.course.build import build_sources
from nanoengine.course.checks import exercises_of, find_exercise
from nanoengine.course.execute import LessonFailed, execute
from nanoengine.course.notebook import keep_recorded, make_notebook, read_notebook, write_notebook
from nanoengine.course.rules import source_problems
from nanoengine.course.source import LANGS, Cell, LessonSource, SourceError
from nanoengine.course.typography import said

KINDS = ("exercise", "solution")
_FOLDERS = {"exercise": "exercises", "solution": "solutions"}
_STUB, _SOLUTION = "# --- stub\n", "# --- solution\n"
_HINTS = re.compile(r"<!-- hints (ex\d\d[a-z]) -->")
_HINT_WORD = {"en": "Hint {i}", "zh": "提示 {i}"}


def variant(source: LessonSource, kind: str) -> LessonSource:
    """The source as a learner gets it ("exercise") or solved ("solution"), hints filled in.

    Raises:
        SourceError: an answer cell lacks one of its two parts.
    """
    return replace(source, cells=tuple(_variant_cell(source.name, cell, kind) for cell in source.cells))


def _variant_cell(name: str, cell: Cell, kind: str) -> Cell:
    if cell.kind == "markdown":
        return replace(cell, en=_with_hints(cell.en, "en"), zh=_with_hints(cell.zh, "zh"))
    if "answer" not in cell.tags:
        return cell
    common, stub_mark, rest = cell.en.partition(_STUB)
    stub, solution_mark, solution = rest.partition(_SOLUTION)
    if not stub_mark or not solution_mark:
        raise SourceError(f"{name}, cell {cell.id}: an answer cell has a line '# --- stub' and a line '# --- solution'")
    code = common.rstrip("\n") + "\n\n\n" if common.strip() else ""
    code += (stub if kind == "exercise" else solution).strip("\n")
    return replace(cell, en=code, zh=code)


def _with_hints(text: str, lang: str) -> str:
    """Each hint folded, so that it is read only by those who ask for it; GitHub folds it as well."""

    def folded(match: re.Match) -> str:
        hints = find_exercise(match[1]).hints
        word = _HINT_WORD[lang]
        return "\n\n".join(
            f"<details><summary>{word.format(i=i)}</summary>\n\n{said(hint, lang)}\n\n</details>"
            for i, hint in enumerate(hints, 1)
        )

    return _HINTS.sub(folded, text)


def exercise_problems(source: LessonSource) -> list[str]:
    """Breaches of the lessons' rules, and of the exercises' own: each one has a stub, a check and its hints."""
    problems = []
    for kind in KINDS:
        problems += [p for p in source_problems(variant_for_rules(source, kind)) if p not in problems]
    code = {cell.id: cell for cell in source.cells if cell.kind == "code"}
    text = "\n".join(cell.en + cell.zh for cell in source.cells if cell.kind == "markdown")
    for exercise in exercises_of(source.number):
        where = f"{source.name}, {exercise.id}"
        answer, check = code.get(f"{exercise.id}-answer"), code.get(f"{exercise.id}-check")
        stub = f'raise NotImplementedError("{exercise.id}")'
        if answer is None or stub not in answer.en.partition(_SOLUTION)[0]:
            problems.append(f"{where}: the stub of cell {exercise.id}-answer must {stub}")
        line = f'check("{exercise.id}", globals())'
        if check is None or "check" not in check.tags or check.en != line:
            problems.append(f"{where}: cell {exercise.id}-check, tagged check, is: {line}")
        if text.count(f"<!-- hints {exercise.id} -->") != 2:
            problems.append(f"{where}: put <!-- hints {exercise.id} --> into the English and the Chinese of one cell")
    return problems


def variant_for_rules(source: LessonSource, kind: str) -> LessonSource:
    """The source with its answers taken apart, the hints still to come: they do not count as the cell's words."""
    made = variant(source, kind)
    pairs = zip(source.cells, made.cells, strict=True)
    return replace(source, cells=tuple(raw if raw.kind == "markdown" else cell for raw, cell in pairs))


def exercise_path(root: Path, source: LessonSource, kind: str, lang: str) -> Path:
    """Where a built notebook lies: ``exercises/``, ``exercises/zh/``, ``solutions/`` or ``solutions/zh/``."""
    folder = root / _FOLDERS[kind]
    return (folder / "zh" if lang == "zh" else folder) / f"{source.name}.ipynb"


def make_exercise(source: LessonSource, kind: str, lang: str) -> NotebookNode:
    """The notebook, not executed. Cells that belong to an exercise say so in their metadata, for the grader."""
    notebook = make_notebook(variant(source, kind), lang)
    notebook.metadata["nanoengine"]["kind"] = kind
    for cell in notebook.cells:
        exercise_id = cell.id.split("-")[0]
        if cell.cell_type == "code" and exercise_id != cell.id and re.fullmatch(r"ex\d\d[a-z]", exercise_id):
            cell.metadata["nanoengine"] = nbformat.from_dict({"exercise": exercise_id})
    return notebook


def build_exercise(
    source: LessonSource,
    kind: str,
    lang: str,
    recorded: NotebookNode | None,
    *,
    cwd: Path | None = None,
    env: dict[str, str] | None = None,
) -> NotebookNode:
    """One notebook, executed in ``cwd``; with ``cwd=None`` its outputs come from ``recorded``.

    In an exercise only the checks may fail, each because its own answer is not written; what they say is not kept, for
    a learner starts with clean checks.

    Raises:
        LessonFailed: another cell raised, or a check failed in another way.
    """
    notebook = make_exercise(source, kind, lang)
    if cwd is None:
        keep_recorded(notebook, recorded, only_varying=False)
        return notebook
    checks = [cell for cell in notebook.cells if "check" in cell.metadata.get("tags", ())]
    execute(notebook, cwd, env, may_raise=frozenset(c.id for c in checks) if kind == "exercise" else frozenset())
    for cell in checks if kind == "exercise" else ():
        _expect_not_written(cell)
        cell.outputs, cell.execution_count = [], None
    keep_recorded(notebook, recorded, only_varying=True)
    return notebook


def _expect_not_written(cell: NotebookNode) -> None:
    errors = [output for output in cell.outputs if output.output_type == "error"]
    if [error.ename for error in errors] != ["NotWritten"]:
        raise LessonFailed(f"cell {cell.id}: on the stub it must fail as not written, but it gave {cell.outputs}")


def build_exercises(root: Path, source: LessonSource, *, run: bool) -> list[str]:
    """Write the four notebooks of a source under ``root``; returns a line about each."""
    lines = []
    for kind in KINDS:
        for lang in LANGS:
            path = exercise_path(root, source, kind, lang)
            path.parent.mkdir(parents=True, exist_ok=True)
            start = time.perf_counter()
            try:
                notebook = build_exercise(source, kind, lang, read_notebook(path), cwd=path.parent if run else None)
            except LessonFailed as error:
                raise LessonFailed(f"{path}: {error}") from None
            write_notebook(notebook, path)
            seconds = f", {time.perf_counter() - start:.1f} s" if run else ""
            lines.append(f"{path}: {len(notebook.cells)} cells{seconds}")
    return lines


def main(argv: list[str] | None = None) -> int:
    """Exit status 0 if everything was built and keeps the rules, else 1."""
    parser = argparse.ArgumentParser(prog="python -m nanoengine.course.exercises", description=__doc__)
    parser.add_argument("numbers", nargs="*", metavar="NN", help="lessons whose exercises to build; all by default")
    parser.add_argument("--execute", action="store_true", help="run the cells")
    parser.add_argument("--root", type=Path, default=Path("."), metavar="DIR", help="the folder that holds exercises/")
    parser.add_argument("--zh-still-right", action="append", default=[], metavar="ID")
    args = parser.parse_args(argv)
    problems = build_sources(
        args.root / "exercises" / "src",
        args.numbers,
        frozenset(args.zh_still_right),
        exercise_problems,
        lambda source: build_exercises(args.root, source, run=args.execute),
    )
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
