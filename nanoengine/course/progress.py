"""What a learner has done, in one portable file: ``work/progress.json``.

    {"schema": 1,
     "exercises": {"ex01a": {"at": time, "passed_at": time or null, "source": hash of the exercise when passed,
                             "attempts": n, "hints": n}},
     "quiz": {...}, "cards": {...}, …}       each entry a dict with "at", the time of its last change (UTC, ISO 8601)

Files of two machines are merged entry by entry: the later one counts, an exercise once passed stays passed. Nothing is
recorded where no file is found, so that running the course's own notebooks leaves no trace.

Each change is read, made and written under a lock, so that several kernels lose nothing. A file that cannot be written
stops nobody: ``note``, ``note_attempt`` and ``next_hint`` do not raise for it, their result says so in a sentence. A
damaged file is renamed, never deleted or overwritten.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from nanoengine.course.files import locked, remove_unfinished, write_whole
from nanoengine.course.merge import SCHEMA, count, merge
from nanoengine.course.progress_text import TEXT, Both, said, system_said
from nanoengine.shown import reason, visible

__all__ = ["SCHEMA", "Kept", "ProgressError", "change", "find", "load", "merge", "note", "note_attempt", "save"]
NAME = "progress.json"
SECTIONS = ("exercises", "quiz", "cards")
_HEADER = re.compile(r'^# %% .*?\bid="([a-z0-9-]+)"', re.MULTILINE)


class ProgressError(ValueError):
    """The file cannot be read; the message names it and says what to do.

    why: the same without the file, by language.
    """

    def __init__(self, path: Path, why: Both):
        super().__init__(f"{visible(path)} {why['en']}")
        self.why = why


class Damaged(ProgressError):
    """The file is ours by its name or place, and cannot be read as what we wrote."""


@dataclass(frozen=True)
class Kept:
    """What became of a change. saved: it is in the file. value: what the change returned.

    failure: why it is not saved, by language. aside: (the file, where its damaged form is now), if it was damaged.
    """

    saved: bool
    value: Any = None
    path: Path | None = None
    failure: Both | None = None
    aside: Path | None = None

    def __bool__(self) -> bool:
        return self.saved

    def said(self, lang: str) -> str:
        """What a reader must know, on one line; empty if all is well, or if there is no file to keep it in."""
        text, parts = TEXT[lang], []
        if self.aside is not None:
            parts.append(text["aside"].format(path=visible(self.path), aside=visible(self.aside.name)))
        if self.failure:
            parts += [text["not_kept"].format(path=visible(self.path), why=self.failure[lang]), text["elsewhere"]]
        return ("" if lang == "zh" else " ").join(parts)


def empty() -> dict[str, Any]:
    return {"schema": SCHEMA, **{section: {} for section in SECTIONS}}


def find(start: Path | None = None) -> Path | None:
    """The progress file of a folder: ``$NANOENGINE_PROGRESS``, or ``progress.json`` or ``work/progress.json`` in the
    folder or above it; None if there is none."""
    named = os.environ.get("NANOENGINE_PROGRESS")
    if named:
        try:
            return Path(named).expanduser()
        except RuntimeError:  # ~ of somebody unknown: as a shell has it, a name like any other
            return Path(named)
    try:
        start = (start or Path.cwd()).resolve()
    except (OSError, RuntimeError):  # the folder was deleted, or a link leads in a circle
        return None
    for folder in (start, *start.parents):
        for path in (folder / NAME, folder / "work" / NAME):
            if os.path.isfile(path) and _is_ours(path):  # no Path.is_file: it raises where a folder is locked
                return path
    return None


def _is_ours(path: Path) -> bool:
    """Other programs have a progress.json, too; a damaged one in a work folder is ours all the same."""
    if os.path.exists(path.with_name(".course.json")):  # `course start` made this folder
        return True
    try:
        data = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError):
        return path.parent.name == "work"
    return isinstance(data, dict) and "exercises" in data


def load(path: Path) -> dict[str, Any]:
    """Read a file; an empty record where there is none.

    Raises:
        ProgressError: the file cannot be opened, its text is no JSON (``Damaged``) or no progress, or it is of a newer
            schema.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8-sig"))  # an editor may have put a mark before it
    except (FileNotFoundError, NotADirectoryError):
        return empty()
    except OSError as error:
        raise ProgressError(path, said("unreadable", why=reason(error))) from None
    except (ValueError, RecursionError) as error:
        raise Damaged(path, said("damaged", why=error)) from None
    if not isinstance(data, dict) or not isinstance(data.get("schema"), int):
        raise Damaged(path, said("foreign"))
    if data["schema"] > SCHEMA:
        raise ProgressError(path, said("newer", schema=data["schema"]))
    for section in SECTIONS:
        entries = data.setdefault(section, {})
        if not isinstance(entries, dict) or not all(isinstance(entry, dict) for entry in entries.values()):
            raise Damaged(path, said("damaged", why=f"{section} is not a table of entries"))
    return data


def recover(path: Path) -> tuple[dict[str, Any], Path | None]:
    """``load``; but a damaged file is renamed, and an empty record takes its place. Only under the lock.

    Returns:
        (the record, the damaged file's new place or None)

    Raises:
        ProgressError: as ``load``, for a damaged file if it has another name than ``NAME`` or cannot be renamed.
    """
    try:
        return load(path), None
    except Damaged as error:
        if path.name != NAME:  # somebody's own file, named by mistake
            raise
        number = 1
        while os.path.lexists(aside := path.with_name(f"{path.stem}.damaged-{number}{path.suffix}")):
            number += 1
        try:
            os.rename(path, aside)
        except OSError as refused:
            raise ProgressError(path, said("stuck", why=error.why, refused=reason(refused))) from None
        with suppress(OSError):  # ``find`` looks for a file: without one, nothing more would be recorded
            save(path, empty())
        return empty(), aside


def save(path: Path, data: dict[str, Any]) -> None:
    """Write the whole file or nothing: a full disk or a killed kernel leaves the old one."""
    write_whole(path, json.dumps(data, indent=1, sort_keys=True, ensure_ascii=False) + "\n")


def change(path: Path | None, make: Callable[[dict[str, Any]], Any]) -> Kept:
    """Read, change and write the file in one go, while no other kernel does. ``make`` changes the record in place.

    Raises nothing for a file that cannot be read or written: ``make`` then works on an empty record, for what it
    returns.
    """
    if path is None:
        return Kept(False, make(empty()))
    aside = None
    try:
        with locked(path):
            data, aside = recover(path)
            value = make(data)
            remove_unfinished(path)
            save(path, data)
    except ProgressError as error:
        return Kept(False, _alone(path, make), path, error.why, aside)
    except OSError as error:
        return Kept(False, _alone(path, make), path, system_said(error), aside)
    return Kept(True, value, path, aside=aside)


def _alone(path: Path, make: Callable[[dict[str, Any]], Any]) -> Any:
    """What ``make`` returns for the record as it can be read."""
    try:
        return make(load(path))
    except ProgressError:
        return make(empty())


def note(section: str, key: str, entry: dict[str, Any], *, path: Path | None = None) -> Kept:
    """Replace one entry and stamp it with the time; nothing is written where there is no file."""

    def make(data: dict[str, Any]) -> None:
        if not isinstance(data.setdefault(section, {}), dict):
            data[section] = {}
        data[section][key] = {**entry, "at": now()}

    return change(path or find(), make)


def note_attempt(exercise_id: str, passed: bool, *, path: Path | None = None) -> Kept:
    """Count an attempt at an exercise, and a pass with the form of the exercise that was passed."""
    source = source_hash(exercise_id) if passed else None

    def make(data: dict[str, Any]) -> None:
        entry = _exercise(data, exercise_id)
        entry["attempts"] += 1
        if passed:
            entry |= {"passed_at": now(), "source": source}
        data["exercises"][exercise_id] = {**entry, "at": now()}

    return change(path or find(), make)


# Hints of learners without a progress file, or with one that cannot be written: counted as long as the kernel lives.
_hints_shown: dict[str, int] = {}


def next_hint(exercise_id: str, *, path: Path | None = None) -> Kept:
    """Its ``value``: how many hints of this exercise were given before. Counts this one."""

    def make(data: dict[str, Any]) -> int:
        entry = _exercise(data, exercise_id)
        given = max(entry["hints"], _hints_shown.get(exercise_id, 0))
        entry["hints"] = given + 1
        data["exercises"][exercise_id] = {**entry, "at": now()}
        return given

    kept = change(path or find(), make)
    if not kept.saved:
        _hints_shown[exercise_id] = kept.value + 1
    return kept


def _exercise(data: dict[str, Any], exercise_id: str) -> dict[str, Any]:
    found = data["exercises"].get(exercise_id, {})
    blank = {"at": None, "passed_at": None, "source": None}
    return {**blank, **found, "attempts": count(found, "attempts"), "hints": count(found, "hints")}


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
    try:
        text = sources[0].read_text(encoding="utf-8")
    except OSError:
        return None
    starts = [(match.start(), match[1]) for match in _HEADER.finditer(text)]
    ends = [start for start, _ in starts[1:]] + [len(text)]
    parts = [text[a:b].split("\n# --- solution", 1)[0].strip() for (a, name), b in zip(starts, ends, strict=True)
             if name == exercise_id or name.startswith(f"{exercise_id}-")]  # fmt: skip
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12] if parts else None


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
