"""What quiz, hunt, cards and lessons point at: a section of the lesson, our source, or nano-vllm's and vLLM's.

    source-intro                                        a cell of the same lesson, named by its id
    nanoengine/engine/scheduler.py:Scheduler.preempt    our source, resolved to a line when it is shown
    vllm/v1/engine/core.py:EngineCore.step              another engine's, which must stand in manifest.yaml
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from nanoengine.course.manifest import manifest
from nanoengine.course.record import Record, course_root
from nanoengine.course.show import ref
from nanoengine.course.topics import topics
from nanoengine.course.typography import chinese

# file:symbol in prose: at least one folder before the file, so that "scheduler.py: …" is no reference.
REFERENCE = re.compile(r"\b((?:[\w-]+/)+\w+\.py):([A-Za-z_][\w.]*\w)")
_HEADER = re.compile(r'^# %%.*?\bid="([a-z0-9-]+)"')
_HEADING = re.compile(r"^# #{1,6} +(.+)")
_INNER_QUOTES = str.maketrans("「」", "『』")


@dataclass(frozen=True)
class Section:
    """A cell of a lesson: the heading it stands under and its own text, by language."""

    id: str
    title: dict[str, str]
    text: dict[str, str]


def sections(name: str, root: Path | None = None) -> dict[str, Section]:
    """The cells of ``lessons/src/NAME.py`` by id, in order; empty if there is no such file."""
    path = (root or course_root()) / "lessons" / "src" / f"{name}.py"
    return dict(_sections(path, path.stat().st_mtime_ns)) if path.exists() else {}


@lru_cache(maxsize=64)
def _sections(path: Path, _changed: int) -> dict[str, Section]:
    # Not by source.read_source: importing jupytext costs seconds, and a learner waits for a quiz.
    found: dict[str, Section] = {}
    title = {"en": "", "zh": ""}
    for block in re.split(r"(?m)^(?=# %%)", path.read_text(encoding="utf-8")):
        header = _HEADER.match(block)
        if header is None:
            continue
        lines = block.splitlines()[1:] if block.startswith("# %% [markdown]") else []
        english, _, other = "\n".join(lines).partition("# <!-- zh -->")
        texts = {"en": english, "zh": chinese(other)}
        for lang, text in texts.items():
            heading = next((m[1] for m in map(_HEADING.match, text.splitlines()) if m), None)
            title = title | {lang: heading} if heading else title
        body = {
            lang: "\n".join(line.removeprefix("#").strip() for line in text.splitlines() if not _HEADING.match(line))
            for lang, text in texts.items()
        }
        found[header[1]] = Section(header[1], title, {lang: text.strip() for lang, text in body.items()})
    return found


def describe(pointer: str, lesson_name: str, lang: str, *, live: bool = True) -> str:
    """A pointer in words: the section's heading, or file, line and symbol.

    live: with the line number of today; a saved notebook does without, so that it stays true when code moves.
    """
    if ":" not in pointer:
        section = sections(lesson_name).get(pointer)
        name = section.title[lang] if section else pointer
        return f"「{name.translate(_INNER_QUOTES)}」" if lang == "zh" else f"“{name}”"
    return str(ref(pointer)) if live and pointer.startswith("nanoengine/") else pointer


def pointer_problem(pointer: str, known: dict[str, Section]) -> str | None:
    """Why a pointer leads nowhere, or None."""
    if ":" not in pointer:
        return None if pointer in known else f"the lesson has no cell with the id {pointer!r}"
    file = pointer.partition(":")[0]
    if file.startswith("nanoengine/"):
        try:
            ref(pointer)
        except ValueError as error:
            return str(error)
        return None
    if pointer not in manifest():
        return f"{pointer!r} is not in nanoengine/course/manifest.yaml; add it with its version and a fact"
    return None


def record_problems(record: Record, root: Path | None = None) -> list[str]:
    """Dangling pointers, lines to mark that are not there, unknown topics; a sentence each."""
    known = sections(record.name, root)
    if not known:
        return [f"{record.name}.yaml: there is no lessons/src/{record.name}.py beside it"]
    problems = []
    for where, pointer in record.pointers():
        problem = pointer_problem(pointer, known)
        if problem:
            problems.append(f"{record.name}.yaml: {where}: {problem}")
    for stop in record.hunt:
        source = "".join(ref(stop.at).source()) if pointer_problem(stop.at, known) is None else ""
        missing = [mark for mark in stop.marks if source and mark not in source]
        problems += [f"{record.name}.yaml: hunt ({stop.id}).marks: {mark!r} is not in {stop.at}" for mark in missing]
    ids = topics()
    for card in record.cards:
        unknown = [topic for topic in card.topics if topic not in ids]
        problems += [f"{record.name}.yaml: cards ({card.id}).topics: {t!r} is not in topics.yaml" for t in unknown]
    return problems


def reference_problems(text: str, name: str) -> list[str]:
    """Every file:symbol in a text that leads nowhere, a sentence each."""
    found = {f"{m[1]}:{m[2]}" for m in REFERENCE.finditer(text)}
    problems = ((pointer, pointer_problem(pointer, {})) for pointer in sorted(found))
    return [f"{name}: {problem}" for _, problem in problems if problem]
