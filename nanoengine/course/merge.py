"""Two progress files become one, and how the times in them are read."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

SCHEMA = 1


def merge(left: dict[str, Any], right: dict[str, Any]) -> dict[str, Any]:
    """Both files as one; the order does not matter, and merging again changes nothing."""
    merged = {**left, **right, "schema": SCHEMA}
    for section in {k for data in (left, right) for k, value in data.items() if isinstance(value, dict)}:
        a, b = _entries(left.get(section)), _entries(right.get(section))
        join = _join_exercise if section == "exercises" else _later
        both = {key: join(a[key], b[key]) for key in a.keys() & b.keys()}
        merged[section] = {key: both.get(key) or a.get(key) or b.get(key) for key in sorted(a.keys() | b.keys())}
    return merged


def _entries(section: Any) -> dict[str, dict]:
    """What a section holds, without what is no entry."""
    return {k: entry for k, entry in section.items() if isinstance(entry, dict)} if isinstance(section, dict) else {}


def _later(a: dict, b: dict) -> dict:
    return max(a, b, key=lambda entry: (_instant(entry.get("at")), json.dumps(entry, sort_keys=True)))


def moment(text: Any) -> datetime | None:
    """A time of the file; None if it is none. One without a zone, as older versions wrote it, is UTC."""
    try:
        found = datetime.fromisoformat(text)
        return found.replace(tzinfo=UTC) if found.tzinfo is None else found.astimezone(UTC)
    except (TypeError, ValueError, OverflowError):
        return None


def _instant(text: Any) -> float:
    found = moment(text)
    return found.timestamp() if found else float("-inf")


def _join_exercise(a: dict, b: dict) -> dict:
    joined = dict(_later(a, b))
    passed = [entry for entry in (a, b) if entry.get("passed_at")]
    if passed:  # the newest pass: it belongs to the newest form of the exercise
        best = max(passed, key=lambda entry: (_instant(entry["passed_at"]), str(entry.get("source"))))
        joined |= {"passed_at": best["passed_at"], "source": best.get("source")}
    for name in ("attempts", "hints"):
        joined[name] = max(count(a, name), count(b, name))
    return joined


def count(entry: dict, name: str) -> int:
    """A whole number of an entry; 0 where it is missing or something else."""
    value = entry.get(name)
    return value if type(value) is int else 0
