"""``check("ex01a", globals())``: is the learner's answer right, and if not, on which smallest input is it wrong?

A check calls the answer on cases picked by hand, then on random ones made from a seed. The first failure is shrunk and
shown with what was expected, what came, and the section to re-read. ``hint("ex01a")`` gives one hint after another.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanoengine.course import progress
from nanoengine.course.checks import find_exercise
from nanoengine.course.checks.exercise import Exercise, Failure, Text
from nanoengine.course.lesson import current_lang
from nanoengine.course.typography import printed, said
from nanoengine.course.watch import own_line, uses
from nanoengine.course.wrap import columns, wrap
from nanoengine.shown import counted

LINE = 96  # columns of a message
SHRINK_SECONDS = 2.0
WATCHED_CASES = 3  # the first ones run under a profile hook, which sees what the answer calls; it is slow

_TEXT = printed(
    {
        "en": {
            "passed": "✓ {id} passed ({n})",
            "stub": "{id}: not written yet. Write {name}() in the cell above; hint({id!r}) helps.",
            "missing": "{id}: there is no {name} here. Run the cell that defines it first.",
            "imported": "{id}: {name} is, or calls, {what}. That is the package's own answer: write it yourself.",
            "failed": "{id}: not yet.",
            "rows": ("input", "expected", "got", "why", "re-read"),
            "where": "lesson {no}, “{heading}”\nhint({id!r}) gives the next hint",
            "no_error": "no exception",
            "raised": "your code raised an exception; the line is the one named above.",
            "hint": "Hint {i} of {n}: {text}",
        },
        "zh": {
            "passed": "✓ {id} 通过({n} 个用例)",
            "stub": "{id}:还没写。在上面那格写出 {name}();没思路可以运行 hint({id!r})。",
            "missing": "{id}:这里没有 {name}。先运行定义它的那一格。",
            "imported": "{id}:{name} 就是(或者调用了){what}。那是包里自带的答案,请自己写。",
            "failed": "{id}:还不对。",
            "rows": ("输入", "应得", "实得", "为什么", "回看"),
            "where": "第 {no} 课「{heading}」\n运行 hint({id!r}) 看下一条提示",
            "no_error": "不抛异常",
            "raised": "你的代码抛了异常,上面写着是哪一行。",
            "hint": "提示 {i}/{n}:{text}",
        },
    }
)


class CheckFailed(AssertionError):
    """An answer is not right yet. A notebook shows the message without a traceback.

    verdict: "stub", "missing", "imported" or "wrong".
    """

    def __init__(self, message: str, verdict: str = "wrong"):
        super().__init__(message)
        self.verdict = verdict

    def _render_traceback_(self) -> list[str]:
        return str(self).splitlines()


class NotWritten(CheckFailed, NotImplementedError):
    """The stub is still there."""


@dataclass(frozen=True)
class Result:
    """verdict: "passed", "stub", "missing", "imported" or "wrong". message: what the learner reads."""

    verdict: str
    message: str
    num_cases: int = 0

    @property
    def passed(self) -> bool:
        return self.verdict == "passed"


def check(exercise_id: str, namespace: dict[str, Any], *, seed: int = 0) -> None:
    """Check one answer, print one line if it is right, note the result in the progress file if there is one.

    The verdict always comes. A second line says so where the progress file cannot be written or was damaged.

    Args:
        exercise_id: as ``"ex01a"``.
        namespace: the notebook's ``globals()``.
        seed: of the random cases; a class is graded with another one.

    Raises:
        ValueError: there is no such exercise.
        CheckFailed: the answer is missing, a stub, the package's own, or wrong.
    """
    result = examine(find_exercise(exercise_id), namespace, seed=seed)
    kept = progress.note_attempt(exercise_id, result.passed)
    message = "\n".join(filter(None, (result.message, kept.said(current_lang()))))
    if result.passed:
        print(message)
        return
    kind = NotWritten if result.verdict == "stub" else CheckFailed
    raise kind(message, result.verdict)


def hint(exercise_id: str) -> None:
    """Print the next hint of an exercise; after the last one they start over."""
    print(hint_text(exercise_id))


def hint_text(exercise_id: str, *, lang: str | None = None, path: Path | None = None) -> str:
    """The next hint, and a line more where it could not be counted.

    path: the progress file that counts them, the one in reach by default.
    """
    exercise = find_exercise(exercise_id)
    lang, total = lang or current_lang(), len(exercise.hints)
    kept = progress.next_hint(exercise_id, path=path)
    index = kept.value % total
    text = _TEXT[lang]["hint"].format(i=index + 1, n=total, text=said(exercise.hints[index], lang))
    return "\n".join(filter(None, (text, kept.said(lang))))


def examine(exercise: Exercise, namespace: dict[str, Any], *, seed: int = 0, lang: str | None = None) -> Result:
    """What ``check`` finds, as data; records and prints nothing."""
    lang = lang or current_lang()
    text, names = _TEXT[lang], dict(id=exercise.id, name=exercise.name)
    answer = namespace.get(exercise.name)
    if answer is None:
        return Result("missing", text["missing"].format(**names))
    tried = 0
    for case in _cases(exercise, seed):
        watch = tried < WATCHED_CASES
        try:
            failure, used = _try(exercise, answer, case, lang, watch=watch)
        except NotImplementedError as error:
            if error.args[:1] != (exercise.id,):
                raise
            return Result("stub", text["stub"].format(**names))
        if used is not None:
            return Result("imported", text["imported"].format(what=used, **names))
        if failure is not None:
            case, failure = _shrink(exercise, answer, case, failure, lang)
            return Result("wrong", _message(exercise, case, failure, lang), tried + 1)
        tried += 1
    number = counted(tried, "case") if lang == "en" else tried
    return Result("passed", text["passed"].format(n=number, **names), tried)


def _cases(exercise: Exercise, seed: int) -> Iterator[Any]:
    yield from exercise.boundaries
    rng = random.Random(f"{exercise.id}/{seed}")
    for _ in range(exercise.num_random):
        yield exercise.random_case(rng)


def _try(exercise: Exercise, answer: Any, case: Any, lang: str, *, watch: bool = False) -> tuple[Failure | None, Any]:
    """(how the answer missed, or None; the forbidden object that it used, or None)"""
    with uses(exercise.forbidden if watch else ()) as used:
        try:
            failure = exercise.run(answer, case)
        except MemoryError:  # no smaller input to look for: what it takes is gone already
            raise
        except Exception as error:
            if isinstance(error, NotImplementedError) and error.args[:1] == (exercise.id,):
                raise
            failure = _from_exception(exercise, error, lang)
    return failure, next(iter(used), None)


def _from_exception(exercise: Exercise, error: Exception, lang: str) -> Failure:
    why: Text = exercise.explain(error) or {name: _TEXT[name]["raised"] for name in _TEXT}
    got = f"{type(error).__name__}: {error}"
    line = own_line(error)
    return Failure(_TEXT[lang]["no_error"], f"{got}\n{line}" if line else got, why)


def _shrink(exercise: Exercise, answer: Any, case: Any, failure: Failure, lang: str) -> tuple[Any, Failure]:
    """A smaller case that fails, too: as long as any cut of it does, or the time is over."""
    deadline = time.monotonic() + SHRINK_SECONDS
    found = True
    while found:
        found = False
        for candidate in exercise.smaller(case):
            if time.monotonic() > deadline:
                return case, failure
            try:
                missed, _ = _try(exercise, answer, candidate, lang)
            except NotImplementedError:
                continue
            if missed is not None:
                case, failure, found = candidate, missed, True
                break
    return case, failure


def _message(exercise: Exercise, case: Any, failure: Failure, lang: str) -> str:
    text = _TEXT[lang]
    section = exercise.section
    where = text["where"].format(no=section.lesson, heading=said(section.heading, lang), id=exercise.id)
    values = [exercise.show(case), failure.expected, failure.got, failure.why, where]
    values = [value if isinstance(value, str) else said(value, lang) for value in values]
    width = max(map(columns, text["rows"]))
    lines = [text["failed"].format(id=exercise.id)]
    for name, value in zip(text["rows"], values, strict=True):
        label = name + " " * (width - columns(name))
        for line in (part for whole in value.split("\n") for part in wrap(whole, LINE - width)):
            lines.append(f"  {label}  {line}")
            label = " " * width
    return "\n".join(lines)
