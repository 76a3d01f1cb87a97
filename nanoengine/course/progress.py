"""What a learner has done, in one portable file: ``work/progress.json``. Needs no torch.

    {"schema": 1,
     "exercises": {"ex01a": {"at": time, "passed_at": time or null, "source": hash of the exercise when passed,
                             "attempts": n, "hints": n}},
     "quiz": {...}, "cards": {...}, …}       each entry a dict with "at", the time of its last change (UTC, ISO 8601)

Files of two machines are merged entry by entry: the later one counts, an exercise once passed stays passed. Nothing is
recorded where no file is found, so that running the course's own notebooks leaves no trace.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

SCHEMA = 1
NAME = "progress.json"
SECTIONS = ("exercises", "quiz", "cards")
_HEADER = re.compile(r'^# %% .*?\bid="([a-z0-9-]+)"', re.MULTILINE)


class ProgressError(ValueError):
    """The file cannot be read; the message names it and says what to do."""


def empty() -> dict[str, Any]:
    return {"schema": SCHEMA, **{section: {} for section in SECTIONS}}


def find(start: Path | None = None) -> Path | None:
    """The progress file of a folder: ``$NANOENGINE_PROGRESS``, or ``progress.json`` or ``work/progress.json`` in the
    folder or above it; None if there is none."""
    named = os.environ.get("NANOENGINE_PROGRESS")
    if named:
        return Path(named)
    start = (start or Path.cwd()).resolve()
    for folder in (start, *start.parents):
        for path in (folder / NAME, folder / "work" / NAME):
            if path.is_file() and _is_ours(path):
                return path
    return None


def _is_ours(path: Path) -> bool:
    """Other programs have a progress.json, too; a damaged one in a work folder is ours all the same."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return path.parent.name == "work"
    return isinstance(data, dict) and "exercises" in data


def load(path: Path) -> dict[str, Any]:
    """Read a file; an empty record where there is none.

    Raises:
        ProgressError: the text is no JSON, no progress, or of a newer schema.
    """
    if not path.exists():
        return empty()
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ProgressError(f"{path} is damaged ({error}): restore it, or delete it to start over") from None
    if not isinstance(data, dict) or not isinstance(data.get("schema"), int):
        raise ProgressError(f"{path} is no progress file of this course")
    if data["schema"] > SCHEMA:
        raise ProgressError(f"{path} was written by a newer nanoengine (schema {data['schema']}): update this one")
    for section in SECTIONS:
        entries = data.setdefault(section, {})
        if not isinstance(entries, dict) or not all(isinstance(entry, dict) for entry in entries.values()):
            raise ProgressError(f"{path} is damaged ({section} is not a table of entries): restore it, or delete it")
    return data


def save(path: Path, data: dict[str, Any]) -> None:
    """Write the whole file or nothing: a full disk or a killed kernel leaves the old one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(data, file, indent=1, sort_keys=True, ensure_ascii=False)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def merge(left: dict[str, Any], right: dict[str, Any]) -> dict[str, Any]:
    """Both files as one; the order does not matter, and merging again changes nothing."""
    merged = {**left, **right, "schema": SCHEMA}
    for section in {k for data in (left, right) for k, value in data.items() if isinstance(value, dict)}:
        a, b = left.get(section, {}), right.get(section, {})
        join = _join_exercise if section == "exercises" else _later
        merged[section] = {key: join(a[key], b[key]) if key in a and key in b else a.get(key, b.get(key))
                           for key in sorted(a.keys() | b.keys())}  # fmt: skip
    return merged


def _later(a: dict, b: dict) -> dict:
    return max(a, b, key=lambda entry: (str(entry.get("at", "")), json.dumps(entry, sort_keys=True)))


def _join_exercise(a: dict, b: dict) -> dict:
    joined = dict(_later(a, b))
    passed = [entry for entry in (a, b) if entry.get("passed_at")]
    if passed:  # the newest pass: it belongs to the newest form of the exercise
        best = max(passed, key=lambda entry: (entry["passed_at"], str(entry.get("source"))))
        joined |= {"passed_at": best["passed_at"], "source": best.get("source")}
    for name in ("attempts", "hints"):
        joined[name] = max(a.get(name, 0), b.get(name, 0))
    return joined


def note(section: str, key: str, entry: dict[str, Any], *, path: Path | None = None) -> bool:
    """Replace one entry and stamp it with the time; False, and nothing written, where there is no file."""
    path = path or find()
    if path is None:
        return False
    data = load(path)
    data.setdefault(section, {})[key] = {**entry, "at": now()}
    save(path, data)
    return True


def note_attempt(exercise_id: str, passed: bool, *, path: Path | None = None) -> None:
    """Count an attempt at an exercise, and a pass with the form of the exercise that was passed."""
    path = path or find()
    if path is None:
        return
    entry = _exercise(load(path), exercise_id)
    entry["attempts"] += 1
    if passed:
        entry |= {"passed_at": now(), "source": source_hash(exercise_id)}
    note("exercises", exercise_id, entry, path=path)


# Hints of learners without a progress file: counted as long as the kernel lives.
_hints_shown: dict[str, int] = {}


def next_hint(exercise_id: str, *, path: Path | None = None) -> int:
    """How many hints of this exercise were given before; counts this one."""
    path = path or find()
    if path is None:
        _hints_shown[exercise_id] = _hints_shown.get(exercise_id, 0) + 1
        return _hints_shown[exercise_id] - 1
    entry = _exercise(load(path), exercise_id)
    entry["hints"] += 1
    note("exercises", exercise_id, entry, path=path)
    return entry["hints"] - 1


def _exercise(data: dict[str, Any], exercise_id: str) -> dict[str, Any]:
    blank = {"at": None, "passed_at": None, "source": None, "attempts": 0, "hints": 0}
    return {**blank, **data["exercises"].get(exercise_id, {})}


def state(data: dict[str, Any], exercise_id: str) -> str:
    """"passed", "changed" (it was passed in an older form), "tried" or "open"."""
    entry = data["exercises"].get(exercise_id)
    if entry is None:
        return "open"
    if entry.get("passed_at"):
        current = source_hash(exercise_id)
        return "changed" if current and entry.get("source") and entry["source"] != current else "passed"
    return "tried" if entry.get("attempts") else "open"


def source_hash(exercise_id: str) -> str | None:
    """12 hex digits of what the exercise says and hands out; None where its source is not on this machine."""
    from nanoengine.course.record import course_root

    try:
        sources = sorted((course_root() / "exercises" / "src").glob(f"{exercise_id[2:4]}_*.py"))
    except FileNotFoundError:
        return None
    if not sources:
        return None
    text = sources[0].read_text(encoding="utf-8")
    starts = [(match.start(), match[1]) for match in _HEADER.finditer(text)]
    ends = [start for start, _ in starts[1:]] + [len(text)]
    parts = [text[a:b].split("\n# --- solution", 1)[0].strip() for (a, name), b in zip(starts, ends, strict=True)
             if name == exercise_id or name.startswith(f"{exercise_id}-")]  # fmt: skip
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12] if parts else None


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
