"""``nanoengine course start``, ``status``, ``next``, ``check``, ``grade`` and the like.

Imports nothing heavy by itself, so that the command line stays quick.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from contextlib import suppress
from pathlib import Path


def add_course(course: argparse.ArgumentParser) -> None:
    """Add the learner's and the teacher's commands to the ``course`` command."""
    commands = course.add_subparsers(title="what to do", metavar="COMMAND", required=True)

    start = _command(commands, "start", run_start, "copy lessons and exercises into your work folder")
    start.add_argument("--quiet", action="store_true", help="say only what is new or needs you")
    _add_work(_command(commands, "status", run_status, "what is passed, changed, open"))
    _add_work(_command(commands, "next", run_next, "the next exercise, and the file to open"))
    check = _command(commands, "check", run_check, "check one exercise in your notebook")
    check.add_argument("exercise", metavar="ID", help="as ex01a")
    hint = _command(commands, "hint", run_hint, "the next hint of an exercise")
    hint.add_argument("exercise", metavar="ID", help="as ex01a")
    reset = _command(commands, "reset", run_reset, "put a stub or a lesson's notebooks back; a copy of yours is kept")
    reset.add_argument("name", metavar="ID|NN", help="an exercise as ex01a, or a lesson as 01")
    export = _command(commands, "export", run_export, "your progress as a file, or the interview cards for Anki")
    export.add_argument("what", choices=("progress", "anki"))
    export.add_argument("file", type=Path, help="the file to write, as progress.json or cards.apkg")
    merge = _command(commands, "merge", run_merge, "take the progress of another machine into yours")
    merge.add_argument("file", type=Path, help="what `export progress` wrote there")
    for parser in (start, check, hint, reset, export, merge):
        _add_work(parser)
    for parser in (start, check, hint, export):
        _add_lang(parser)
    interview = _command(commands, "interview", run_interview, "a timed mock interview in the terminal")
    interview.add_argument("--minutes", type=int, default=15, metavar="N", help="default: 15")
    interview.add_argument("--seed", type=int, metavar="N", help="draw the same questions again")
    _add_lang(interview)
    _add_grade(commands)


def _command(commands, name: str, run, text: str) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    parser.set_defaults(run=run)
    return parser


def _add_work(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--work", type=Path, metavar="DIR", help="your folder (default: work beside the course)")


def _add_lang(parser: argparse.ArgumentParser) -> None:
    wanted = os.environ.get("L", "en")  # as `make` has it; any other L is no language
    default = wanted if wanted in ("en", "zh") else "en"
    parser.add_argument("--lang", "-L", choices=("en", "zh"), default=default, help="default: en")


def _add_grade(commands) -> None:
    grade = _command(commands, "grade", run_grade, "grade one notebook or a folder of a class")
    grade.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="a notebook, or a folder of them")
    grade.add_argument("--seed", type=int, default=0, metavar="N", help="of the random cases: keep yours secret")
    grade.add_argument("--csv", type=Path, default=Path("grades.csv"), metavar="FILE", help="default: grades.csv")
    grade.add_argument("--html", type=Path, default=Path("grades.html"), metavar="FILE", help="default: grades.html")
    grade.add_argument("--jobs", type=int, default=1, metavar="N", help="submissions at the same time (default: 1)")
    grade.add_argument("--seconds", type=float, default=60, metavar="S", help="of one submission (default: 60)")
    grade.add_argument("--cell-seconds", type=float, default=20, metavar="S", help="of one cell (default: 20)")
    grade.add_argument("--memory", type=float, default=4, metavar="GIB", help="address space of one (default: 4)")
    _add_lang(grade)


def run_start(args) -> int:
    from nanoengine.course.record import course_root
    from nanoengine.course.start import start
    from nanoengine.shown import for_terminal

    work = _work(args)
    for copied in start(course_root(), work, args.lang):
        if not args.quiet or copied.outcome in ("new", "updated", "beside"):
            print(for_terminal(copied))
    if not args.quiet:
        print(f"Your folder is {for_terminal(work)}; `nanoengine course next` says where to go on.")
    return 0


def run_status(args) -> int:
    from nanoengine.course.status import status_lines
    from nanoengine.shown import for_terminal

    path = _progress(args)
    print("\n".join(status_lines(_recovered(path))))
    begun = os.path.exists(path)
    print(f"\n{for_terminal(path)}" if begun else "\nNothing is recorded yet: type `nanoengine course start`.")
    return 0


def _recovered(path: Path) -> dict:
    """The progress in ``path``; a damaged file is set aside, and named."""
    from nanoengine.course import progress

    try:
        return progress.load(path)
    except progress.Damaged:
        kept = progress.change(path, lambda data: data)
        if not kept.saved:
            raise progress.ProgressError(path, kept.failure) from None
        print(kept.said("en"))
        return kept.value


def run_next(args) -> int:
    from nanoengine.course.start import StartError, notebook_of
    from nanoengine.course.status import next_exercise
    from nanoengine.shown import for_terminal

    exercise = next_exercise(_recovered(_progress(args)))
    if exercise is None:
        print("Every exercise is passed. `nanoengine course interview` asks you about them.")
        return 0
    print(f"{exercise.id}: {exercise.title['en']} · {exercise.title['zh']}")
    try:
        print(f"open {for_terminal(notebook_of(_work(args), exercise.id))}")
    except StartError as error:
        print(error)
    return 0


def run_check(args) -> int:
    from nanoengine.course import progress
    from nanoengine.course.checks import find_exercise
    from nanoengine.course.grade import Mark, grade_one
    from nanoengine.course.start import notebook_of
    from nanoengine.shown import for_terminal

    exercise_id = find_exercise(args.exercise).id
    row = grade_one(notebook_of(_work(args), exercise_id), lang=args.lang)
    mark = row.marks.get(exercise_id, Mark("no result"))
    print(mark.message or f"{exercise_id}: {mark.verdict}")
    for note in row.notes if mark.verdict != "passed" else ():
        print(f"({for_terminal(note)})")
    path = _progress(args)
    if os.path.lexists(path):
        kept = progress.note_attempt(exercise_id, mark.verdict == "passed", path=path)
        if kept.said(args.lang):
            print(kept.said(args.lang))
    return 0 if mark.verdict == "passed" else 1


def run_hint(args) -> int:
    from nanoengine.course.check import hint_text

    path = _progress(args)
    print(hint_text(args.exercise, lang=args.lang, path=path if os.path.lexists(path) else None))
    return 0


def run_reset(args) -> int:
    from nanoengine.course.record import course_root
    from nanoengine.course.start import reset
    from nanoengine.shown import for_terminal, visible

    done, kept = reset(course_root(), _work(args), args.name)
    if not done:
        print(f"{visible(args.name)}: the notebooks are as they were handed out; only its progress was taken back")
    for path, copy in zip(done, kept, strict=True):
        print(f"{for_terminal(path)}: put back; what you had is {for_terminal(copy.name)}")
    return 0


def run_export(args) -> int:
    from nanoengine.course import progress
    from nanoengine.course.files import check_writable
    from nanoengine.shown import counted, for_terminal, quoted

    check_writable(args.file)
    if args.what == "anki":
        from nanoengine.course.deck import export_anki

        print(f"{for_terminal(args.file)}: {counted(export_anki(args.file, lang=args.lang), 'card')}")
    else:
        progress.save(args.file, progress.load(_existing(_progress(args))))
        there = f"nanoengine course merge {for_terminal(quoted(args.file.name))}"
        print(f"{for_terminal(args.file)}: take it to the other machine and type `{there}` there")
    return 0


def run_merge(args) -> int:
    from nanoengine.course import progress
    from nanoengine.shown import for_terminal

    path, theirs = _progress(args), progress.load(_existing(args.file))

    def take(data: dict) -> None:
        data.update(progress.merge(data, theirs))

    kept = progress.change(path, take)
    if not kept.saved:
        raise OSError(kept.said("en"))
    if kept.aside is not None:
        print(kept.said("en"))
    print(f"{for_terminal(path)}: merged with {for_terminal(args.file)}")
    return 0


def run_interview(args) -> int:
    from nanoengine.course.interview import run_interview as ask

    ask(args.minutes, seed=args.seed, lang=args.lang)
    return 0


def run_grade(args) -> int:
    from nanoengine.course.files import check_writable
    from nanoengine.course.grade import grade
    from nanoengine.course.grade_report import write_reports
    from nanoengine.course.sandbox import Limits
    from nanoengine.shown import counted, for_terminal

    if args.jobs < 1 or min(args.seconds, args.cell_seconds, args.memory) <= 0:
        raise ValueError("--jobs must be at least 1; --seconds, --cell-seconds and --memory must be above 0")
    for path in (args.csv, args.html):  # said now, not when a class has been graded
        check_writable(path)
    limits = Limits(args.seconds, args.cell_seconds, args.memory)
    start = time.perf_counter()

    def show(row) -> None:
        verdicts = ", ".join(f"{name} {mark.verdict}" for name, mark in row.marks.items()) or "; ".join(row.notes)
        with suppress(OSError):  # nobody reads along any more, as in `| head`: the reports are written all the same
            print(for_terminal(f"{row.name}: {row.num_passed}/{len(row.marks)} ({verdicts})"), flush=True)

    rows = grade(args.paths, seed=args.seed, lang=args.lang, limits=limits, jobs=args.jobs, on_row=show)
    seconds = time.perf_counter() - start
    write_reports(rows, args.csv, args.html, lang=args.lang, seed=args.seed, seconds=seconds)
    where = f"{for_terminal(args.csv)}, {for_terminal(args.html)}"
    print(f"{counted(len(rows), 'submission')} in {seconds:.1f} s: {where}")
    if args.seed == 0:
        print("The random cases were those that learners see; --seed N takes others.", file=sys.stderr)
    return 0


def _work(args) -> Path:
    """The learner's folder: as given, that of the progress file in reach, or ``work`` beside the course."""
    from nanoengine.course import progress
    from nanoengine.course.record import course_root

    if args.work is not None:
        return args.work
    found = progress.find()
    return found.parent if found is not None else course_root() / "work"


def _progress(args) -> Path:
    from nanoengine.course import progress

    found = None if args.work is not None else progress.find()
    return found or _work(args) / progress.NAME


def _existing(path: Path) -> Path:
    from nanoengine.shown import for_terminal

    if not os.path.exists(path):
        raise FileNotFoundError(f"{for_terminal(path)} does not exist")
    return path
