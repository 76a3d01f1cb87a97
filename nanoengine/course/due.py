"""When an interview card is due, as Anki has it.

A card that is being learned (steps of minutes) is due at its instant. A card in review (steps of days) is due on its
calendar day, from midnight on, in the reader's time zone: one that falls due at 20:00 can be done at 08:00 of that day.

Times are compared as instants, whatever zones they stand in. A stored time without a zone is UTC, as older versions
wrote it; ``now`` without a zone is local time, as everywhere in Python.
"""

from __future__ import annotations

from datetime import UTC, datetime, tzinfo
from typing import Any

from nanoengine.course.merge import moment

_LEARNING = (1, 3)  # fsrs.State.Learning and Relearning


def local(now: datetime | None = None) -> datetime:
    """The time with its zone: ``now``, or the present, in the zone that decides which day it is."""
    if now is None:
        return datetime.now().astimezone()
    return now if now.tzinfo is not None else now.astimezone()


def is_due(entry: dict[str, Any], now: datetime | None = None) -> bool:
    """Whether a card of the progress file is due; one whose time cannot be read is."""
    due, now = moment(entry.get("due")), local(now)
    if due is None or due <= now:
        return True
    return entry.get("state") not in _LEARNING and _day(due, now.tzinfo) == now.date()


def _day(instant: datetime, zone: tzinfo | None):
    return instant.astimezone(zone).date()


def utc(now: datetime | None = None) -> datetime:
    """The instant as fsrs takes it: in ``timezone.utc`` itself, not in another zone of the same time."""
    return local(now).astimezone(UTC)
