"""Reads a lesson's one source, from which the English and the Chinese notebook are both built.

A source is a Python file in percent format, ``lessons/src/NN_slug.py``. Each cell header carries the cell's id::

    # %% [markdown] id="idea"
    # ## The idea
    # Every step asks one question.
    #
    # <!-- zh -->
    # ## 想法
    # 每一步只问一个问题。

    # %% id="count" tags=["varies"]
    blocks = 12

Code stands once. Only the argument ``lang="en"`` of the cell that calls ``lesson("NN", lang="en")`` becomes
``lang="zh"`` in the Chinese notebook. CONTRIBUTING.md describes the format for authors.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import jupytext

from nanoengine.course.typography import chinese

LANGS = ("en", "zh")
ZH_MARK = "<!-- zh -->"
# The output of such a cell differs between runs or machines (a time, a version): it is recorded, not compared.
VARIES = "varies"

_NAME = re.compile(r"(?P<number>\d\d)_[a-z0-9_]+")
_ID = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
_LESSON_CALL = re.compile(r"(\blesson\(\s*[\"']\d\d[\"'].*?\blang\s*=\s*)([\"'])en\2")


class SourceError(ValueError):
    """A lesson source that cannot be read; the message names the file, the cell and what to write instead."""


@dataclass(frozen=True)
class Cell:
    """One cell of a source. ``en`` and ``zh`` hold its text in each language; for most code they are equal."""

    id: str
    kind: str  # "code" or "markdown"
    en: str
    zh: str
    tags: tuple[str, ...] = ()

    def text(self, lang: str) -> str:
        return self.zh if lang == "zh" else self.en


@dataclass(frozen=True)
class LessonSource:
    """A parsed source: ``name`` is the file's stem (``01_one_engine``), ``number`` its first two digits."""

    name: str
    number: str
    cells: tuple[Cell, ...]


def read_source(path: Path) -> LessonSource:
    """Parse ``NN_slug.py``.

    Raises:
        SourceError: the name, a cell header or a cell id does not follow the format.
        OSError: the file cannot be read.
    """
    named = _NAME.fullmatch(path.stem)
    if named is None:
        raise SourceError(f"{path}: name it NN_slug.py (two digits, then small letters, digits and _)")
    notebook = jupytext.reads(path.read_text(encoding="utf-8"), fmt="py:percent")
    cells = tuple(_cell(path, raw) for raw in notebook.cells)
    _refuse_repeated_ids(path, cells)
    return LessonSource(path.stem, named["number"], cells)


def find_sources(src: Path, numbers: list[str] | None = None) -> list[Path]:
    """All sources in the folder ``src`` in order, or those whose two-digit numbers are given.

    Raises:
        SourceError: a number has no source.
    """
    paths = sorted(p for p in src.glob("*.py") if _NAME.fullmatch(p.stem))
    if not numbers:
        return paths
    missing = set(numbers) - {p.stem[:2] for p in paths}
    if missing:
        raise SourceError(f"{src}: no source for {', '.join(sorted(missing))}; write two digits, as in 01")
    return [p for p in paths if p.stem[:2] in numbers]


def _cell(path: Path, raw) -> Cell:
    where = f"{path.name}, the cell that starts with {raw.source[:40]!r}"
    cell_id = raw.metadata.get("id")
    if cell_id is None:
        raise SourceError(f'{where}: write its id in the header in quotes: # %% id="a-slug"')
    if not _ID.fullmatch(cell_id) or len(cell_id) > 64:
        raise SourceError(f"{where}: id {cell_id!r} must be small letters, digits and single hyphens, at most 64")
    tags = tuple(raw.metadata.get("tags", ()))
    if raw.cell_type == "code":
        return Cell(cell_id, "code", raw.source, _LESSON_CALL.sub(r"\1\2zh\2", raw.source), tags)
    en, _, zh = raw.source.partition(ZH_MARK)
    return Cell(cell_id, "markdown", en.strip(), chinese(zh.strip()), tags)


def _refuse_repeated_ids(path: Path, cells: tuple[Cell, ...]) -> None:
    seen: set[str] = set()
    for cell in cells:
        if cell.id in seen:
            raise SourceError(f"{path.name}: two cells have the id {cell.id!r}; ids must be unique")
        seen.add(cell.id)
