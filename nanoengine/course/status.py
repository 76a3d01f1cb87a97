"""What is passed and what comes next, from the progress file."""

from __future__ import annotations

from typing import Any

from nanoengine.course import progress
from nanoengine.course.checks import all_exercises
from nanoengine.course.checks.exercise import Exercise
from nanoengine.course.due import is_due
from nanoengine.shown import counted

_SIGNS = {"passed": "✓", "changed": "↻", "tried": "…", "open": "○"}


def status_lines(data: dict[str, Any]) -> list[str]:
    """A line a lesson and a line an exercise, then quiz and cards if there is anything to say."""
    lines: list[str] = []
    lesson = None
    for exercise in all_exercises():
        if exercise.section.lesson != lesson:
            lesson = exercise.section.lesson
            lines.append(f"Lesson {lesson}{_quiz(data, lesson)}")
        state = progress.state(data, exercise.id)
        lines.append(f"  {_SIGNS[state]} {exercise.id}  {exercise.title['en']}: {_words(data, exercise.id, state)}")
    cards = data.get("cards", {})
    if cards:
        due = sum(is_due(entry) for entry in cards.values())
        lines.append(f"Interview cards: {len(cards)} seen, {due} due")
    return lines


def _quiz(data: dict[str, Any], lesson: str) -> str:
    entry = data.get("quiz", {}).get(lesson)
    if not entry or "right" not in entry:
        return ""
    return f" · quiz {entry['right']} of {entry.get('of', 5)}"


def _words(data: dict[str, Any], exercise_id: str, state: str) -> str:
    entry = data["exercises"].get(exercise_id, {})
    attempts = counted(progress.count(entry, "attempts"), "attempt")
    match state:
        case "passed":
            return f"passed {str(entry['passed_at'])[:10]}, {attempts}"
        case "changed":
            return f"changed since you passed ({str(entry['passed_at'])[:10]}): look at it again"
        case "tried":
            return attempts
    return "open"


def next_exercise(data: dict[str, Any]) -> Exercise | None:
    """The first one, in the order of the course, that is not passed in its present form."""
    return next((e for e in all_exercises() if progress.state(data, e.id) != "passed"), None)
