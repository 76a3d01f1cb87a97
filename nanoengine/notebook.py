"""Everything that a lesson's cells call, in one place: ``from nanoengine.notebook import lesson, show, player``.

Names are looked up when they are first used, so that a cell pays only for what it shows.
"""

from __future__ import annotations

import importlib

_HOMES = {
    "lesson": "nanoengine.course.lesson",
    "show": "nanoengine.course.show",
    "ask": "nanoengine.course.ask",
    "quiz": "nanoengine.course.quiz",
    "recall": "nanoengine.course.recall",
    "hunt": "nanoengine.course.hunt",
    "cards": "nanoengine.course.cards",
    "interview": "nanoengine.course.interview",
    "check": "nanoengine.course.check",
    "hint": "nanoengine.course.check",
    "record": "nanoengine.trace",
    "player": "nanoengine.viz",
    "keyframes": "nanoengine.viz",
}
__all__ = list(_HOMES)


def __getattr__(name: str):
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'nanoengine.notebook' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
