"""Builds the lessons: ``python -m nanoengine.course.build [--execute] [NN ...]``.

``lessons/src/NN_slug.py`` becomes ``lessons/NN_slug.ipynb`` (English) and ``lessons/zh/NN_slug.ipynb`` (Chinese).
Without ``--execute`` outputs and computed numbers are carried over from the notebooks already there.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable
from pathlib import Path

from nbformat import NotebookNode

from nanoengine.course.execute import LessonFailed, execute
from nanoengine.course.notebook import fill_values, keep_recorded, make_notebook, read_notebook, write_notebook
from nanoengine.course.rules import read_sync, source_problems, stale_cells, updated_record, write_sync
from nanoengine.course.source import LANGS, LessonSource, SourceError, find_sources, read_source

SYNC_FILE = "zh_sync.json"


def notebook_path(lessons: Path, source: LessonSource, lang: str) -> Path:
    """Where the notebook of a source lies: ``lessons`` itself for English, ``lessons/zh`` for Chinese."""
    return (lessons / "zh" if lang == "zh" else lessons) / f"{source.name}.ipynb"


def build_notebook(
    source: LessonSource,
    lang: str,
    recorded: NotebookNode | None,
    *,
    cwd: Path | None = None,
    measure: bool = False,
    anew: frozenset[str] = frozenset(),
    env: dict[str, str] | None = None,
) -> NotebookNode:
    """One notebook, executed in ``cwd``; with ``cwd=None`` outputs and numbers come from ``recorded``.

    Args:
        recorded: the notebook as committed. Its outputs of cells tagged ``varies`` are kept, unless ``measure``.
        anew: ids of such cells whose new outputs are taken all the same.
        env: additions to the kernel's environment.

    Raises:
        LessonFailed: a cell raised or a number is missing.
    """
    notebook = make_notebook(source, lang)
    if cwd is not None:
        execute(notebook, cwd, env)
        if not measure:
            keep_recorded(notebook, recorded, only_varying=True, but=anew)
    elif recorded is not None:
        keep_recorded(notebook, recorded, only_varying=False)
        fill_values(notebook, dict(recorded.metadata.get("nanoengine", {}).get("values", {})))
    return notebook


def build_lesson(
    lessons: Path, source: LessonSource, *, run: bool, measure: bool = False, anew: frozenset[str] = frozenset()
) -> list[str]:
    """Write both notebooks of a source under ``lessons``; returns a line about each."""
    lines = []
    for lang in LANGS:
        path = notebook_path(lessons, source, lang)
        path.parent.mkdir(parents=True, exist_ok=True)
        start = time.perf_counter()
        try:
            notebook = build_notebook(
                source, lang, read_notebook(path), cwd=path.parent if run else None, measure=measure, anew=anew
            )
        except LessonFailed as error:
            raise LessonFailed(f"{path}: {error}") from None
        write_notebook(notebook, path)
        lines.append(f"{path}: {len(notebook.cells)} cells" + (f", {_since(start)}" if run else ""))
    return lines


def _since(start: float) -> str:
    return f"{time.perf_counter() - start:.1f} s"


def build_sources(
    src: Path,
    numbers: list[str],
    accept: frozenset[str],
    rules: Callable[[LessonSource], list[str]],
    build: Callable[[LessonSource], list[str]],
) -> list[str]:
    """Build each source in the folder ``src`` with ``build``, print its lines, keep the record of translations.

    Returns:
        What breaks the rules or could not be built, a sentence each.
    """
    problems = []
    try:
        for path in find_sources(src, numbers):
            source = read_source(path)
            record = updated_record(source, read_sync(src / SYNC_FILE).get(source.name, {}), accept)
            stale = stale_cells(source, record)
            problems += rules(source)
            problems += [f"{source.name}, cell {i}: the Chinese is older than the English" for i in stale]
            for line in build(source):
                print(line, flush=True)
            # read again: another lesson may have been built meanwhile
            write_sync(src / SYNC_FILE, read_sync(src / SYNC_FILE) | {source.name: record})
    except (SourceError, LessonFailed) as error:
        problems.append(str(error))
    return problems


def main(argv: list[str] | None = None) -> int:
    """Exit status 0 if everything was built and keeps the rules, else 1."""
    args = _parser().parse_args(argv)
    anew = frozenset(args.measure_cell)
    build = functools.partial(build_lesson, args.lessons, run=args.execute, measure=args.measure, anew=anew)
    accept = frozenset(args.zh_still_right)
    problems = build_sources(args.lessons / "src", args.numbers, accept, source_problems, build)
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m nanoengine.course.build", description=__doc__)
    parser.add_argument("numbers", nargs="*", metavar="NN", help="lessons to build; all if none is named")
    parser.add_argument("--execute", action="store_true", help="run the cells and fill computed numbers into the prose")
    parser.add_argument("--measure", action="store_true", help="record the outputs of cells tagged varies anew")
    parser.add_argument("--measure-cell", action="append", default=[], metavar="ID",
                        help="the output of this cell alone; may be repeated")  # fmt: skip
    parser.add_argument("--lessons", type=Path, default=Path("lessons"), metavar="DIR", help="default: lessons")
    parser.add_argument(
        "--zh-still-right",
        action="append",
        default=[],
        metavar="ID",
        help="a cell whose English was changed and whose Chinese still says the same; may be repeated",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
