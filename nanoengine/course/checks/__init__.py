"""The checks of all exercises, a module a lesson: ``lesson_01.EXERCISES`` and so on."""

from __future__ import annotations

import importlib
import pkgutil
import re

from nanoengine.course.checks.exercise import Exercise

_MODULE = re.compile(r"lesson_(\d\d)")


def lesson_numbers() -> list[str]:
    """The lessons that have exercises: ``["01", …]``."""
    found = (_MODULE.fullmatch(module.name) for module in pkgutil.iter_modules(__path__))
    return sorted(match[1] for match in found if match)


def exercises_of(lesson: str) -> list[Exercise]:
    """The exercises of a lesson in order; none where it has none."""
    if lesson not in lesson_numbers():
        return []
    return list(importlib.import_module(f"{__name__}.lesson_{lesson}").EXERCISES)


def all_exercises() -> list[Exercise]:
    return [exercise for lesson in lesson_numbers() for exercise in exercises_of(lesson)]


def find_exercise(exercise_id: str) -> Exercise:
    """ValueError naming the ids that exist, if this is none of them."""
    lesson = exercise_id[2:4] if isinstance(exercise_id, str) else ""
    for exercise in exercises_of(lesson):
        if exercise.id == exercise_id:
            return exercise
    known = ", ".join(exercise.id for exercise in all_exercises())
    raise ValueError(f"there is no exercise {exercise_id!r}; there are {known}")
