"""Copies lessons and exercises into the learner's ``work/`` and never overwrites what the learner wrote there.

The copies keep the course's folders (``lessons/``, ``exercises/``, each with ``zh/``), so that links between them work.
``work/.course.json`` remembers in which form each file was handed out: a hash of its cells' sources, since running a
notebook is no change of it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanoengine.course import progress
from nanoengine.course.files import write_whole
from nanoengine.shown import reason, visible

HANDED_OUT = ".course.json"
# outcome of a copy -> what to say about it
WORDS = {
    "new": "new",
    "same": "up to date",
    "updated": "updated: you had not changed it",
    "kept": "yours, kept",
    "beside": "yours, kept; the course's new form is beside it: {beside}",
}


class StartError(ValueError):
    """Nothing was copied or put back; the message says why and what to type."""


@dataclass(frozen=True)
class Copied:
    """One file: where it is, and what was done (a key of WORDS)."""

    path: Path
    outcome: str

    def __str__(self) -> str:
        return f"{self.path}: {WORDS[self.outcome].format(beside=beside(self.path).name)}"


def start(course: Path, work: Path, lang: str = "en") -> list[Copied]:
    """Hand out all notebooks of one language; a second call brings what is new.

    Args:
        course: the folder that holds ``lessons`` and ``exercises``.
        work: the learner's folder; made if it is not there.

    Raises:
        StartError: ``work`` is the course's own folder or cannot be written, or the course has no notebooks.
    """
    if work.resolve() in (course.resolve(), course.resolve() / "lessons", course.resolve() / "exercises"):
        raise StartError(f"{work} is the course itself: choose another folder, as in --work work")
    sub = "zh/*.ipynb" if lang == "zh" else "*.ipynb"
    sources = sorted(path for kind in ("lessons", "exercises") for path in (course / kind).glob(sub))
    if not sources:
        raise StartError(f"no notebooks in {course / 'lessons'}: run `make notebooks` first")
    try:
        work.mkdir(parents=True, exist_ok=True)
        record = _read_record(work)
        copied = []
        for source in sources:
            name = source.relative_to(course).as_posix()
            copied.append(_hand_out(source, work / name, record, name))
        _write_record(work, record)
        if not os.path.lexists(work / progress.NAME):
            progress.save(work / progress.NAME, progress.empty())
    except OSError as error:
        raise StartError(
            f"{visible(work)} cannot be written ({reason(error)}, {visible(error.filename)}): "
            "name another folder, as in  nanoengine course start --work FOLDER"
        ) from error
    return copied


def _hand_out(source: Path, target: Path, record: dict[str, str], name: str) -> Copied:
    now, handed = content(source), record.get(name)
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
        record[name] = now
        return Copied(target, "new")
    theirs = content(target)
    if theirs == now:
        record[name] = now
        return Copied(target, "same")
    if theirs == handed:  # only the course has changed
        shutil.copyfile(source, target)
        record[name] = now
        return Copied(target, "updated")
    if handed == now:
        return Copied(target, "kept")
    shutil.copyfile(source, beside(target))
    record[name] = now
    return Copied(target, "beside")


def beside(path: Path) -> Path:
    """Where the course's new form of a notebook goes that the learner has changed."""
    return path.with_name(f"{path.stem}.new{path.suffix}")


def content(path: Path) -> str:
    """A hash of a notebook's cells, without outputs and ids; of the bytes, if it is no notebook."""
    data = path.read_bytes()
    try:
        cells = json.loads(data)["cells"]
        data = json.dumps([[cell["cell_type"], _text(cell)] for cell in cells]).encode()
    except (ValueError, KeyError, TypeError):
        pass
    return hashlib.sha256(data).hexdigest()[:16]


def reset(course: Path, work: Path, name: str) -> tuple[list[Path], list[Path]]:
    """Put back what was handed out: the answer of an exercise (``ex01a``), or the notebooks of a lesson (``01``).

    What was there is kept in a copy beside it. The progress of the exercises concerned is taken back.

    Returns:
        (files put back, the copies of what they were); files that nobody changed are left alone.

    Raises:
        StartError: there is nothing of that name in ``work``.
    """
    lesson = name[2:4] if name.startswith("ex") else name
    folders = ("exercises",) if name.startswith("ex") else ("exercises", "lessons")
    found = [path for folder in folders for path in sorted((work / folder).rglob(f"{lesson}_*.ipynb"))]
    pairs = [(course / path.relative_to(work), path) for path in found]
    pairs = [(source, path) for source, path in pairs if source.exists()]
    if not pairs:
        raise StartError(f"{work} has no notebook of {name}: type `nanoengine course start`")
    pairs = [(source, path) for source, path in pairs if content(source) != content(path)]
    kept = [_keep_copy(path) for _, path in pairs]
    for source, target in pairs:
        if name.startswith("ex"):
            _reset_cell(source, target, f"{name}-answer")
        else:
            shutil.copyfile(source, target)
    _forget(work, name if name.startswith("ex") else f"ex{lesson}")
    return [path for _, path in pairs], kept


def _keep_copy(path: Path) -> Path:
    number = 1
    while (copy := path.with_name(f"{path.stem}.before-reset-{number}{path.suffix}")).exists():
        number += 1
    return Path(shutil.copyfile(path, copy))


def _reset_cell(source: Path, target: Path, cell_id: str) -> None:
    try:
        notebook = json.loads(target.read_text(encoding="utf-8-sig"))
        (cell,) = [cell for cell in notebook["cells"] if cell.get("id") == cell_id]
        (fresh,) = [c for c in json.loads(source.read_text(encoding="utf-8"))["cells"] if c.get("id") == cell_id]
    except (ValueError, KeyError, TypeError):
        lesson = target.name[:2]
        raise StartError(
            f"{target} has no cell {cell_id}: put the whole notebook back with `nanoengine course reset {lesson}`"
        ) from None
    cell |= {"source": fresh["source"], "outputs": [], "execution_count": None}
    write_whole(target, json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


def _forget(work: Path, prefix: str) -> None:
    def take_back(data: dict[str, Any]) -> None:
        data["exercises"] = {key: entry for key, entry in data["exercises"].items() if not key.startswith(prefix)}

    kept = progress.change(work / progress.NAME, take_back)
    if not kept.saved:
        raise StartError(f"the notebooks are put back, the progress is not: {kept.said('en')}")


def notebook_of(work: Path, exercise_id: str) -> Path:
    """The learner's notebook with this exercise; of two languages the one changed last.

    Raises:
        StartError: there is none.
    """
    found = [path for path in (work / "exercises").rglob(f"{exercise_id[2:4]}_*.ipynb") if path.stem.count(".") == 0]
    if not found:
        raise StartError(f"{work} has no notebook with {exercise_id}: type `nanoengine course start`")
    return max(found, key=lambda path: path.stat().st_mtime)


def _text(cell: dict[str, Any]) -> str:
    source = cell["source"]
    return source if isinstance(source, str) else "".join(source)


def _read_record(work: Path) -> dict[str, str]:
    path = work / HANDED_OUT
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return dict(data["files"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return {}  # then every changed file counts as the learner's own: nothing can be lost


def _write_record(work: Path, record: dict[str, str]) -> None:
    text = json.dumps({"schema": 1, "files": record}, indent=1, sort_keys=True)
    write_whole(work / HANDED_OUT, text + "\n")
