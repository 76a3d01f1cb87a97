"""What a check is made of: cases, an oracle, hints, and the section to re-read."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

Text = dict[str, str]  # {"en": …, "zh": …}


@dataclass(frozen=True)
class Section:
    """Where to re-read: a cell id of the lesson's source, and its heading in both languages."""

    lesson: str
    cell: str
    heading: Text


@dataclass(frozen=True)
class Failure:
    """How an answer missed on one case. ``why`` says in both languages what that usually means.

    expected, got: a plain str where no language is in it, as in a number or a shape.
    """

    expected: str | Text
    got: str | Text
    why: Text


@dataclass(frozen=True)
class Exercise:
    """One exercise as the check knows it.

    name: what the learner writes, looked up in the notebook's globals.
    run: (answer, case) -> Failure or None; calls the answer through ``call`` only.
    boundaries: cases picked by hand, tried first. random_case: one case from a random.Random.
    smaller: cases a little smaller than a given one, the boldest cut first; used to shrink a failure.
    show: a case as one line of text, a plain str where no language is in it.
    explain: what an exception that the answer raised usually means here, or None.
    forbidden: the package's own objects that answer the exercise; an answer that is one of them, or
        calls one, is ``imported``.
    """

    id: str
    name: str
    title: Text
    section: Section
    hints: tuple[Text, Text, Text]
    run: Callable[[Any, Any], Failure | None]
    boundaries: tuple[Any, ...]
    random_case: Callable[[random.Random], Any]
    smaller: Callable[[Any], Iterable[Any]]
    show: Callable[[Any], str | Text]
    explain: Callable[[Exception], Text | None] = lambda error: None
    forbidden: tuple[Callable, ...] = ()
    num_random: int = 40


def call(answer: Callable, *args: Any, **kwargs: Any) -> Any:
    """Call the learner's answer. The frame of this function marks, for the check, what happens on its behalf."""
    return answer(*args, **kwargs)
