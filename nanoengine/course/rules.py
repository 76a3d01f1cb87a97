"""What a lesson source must keep to: limits of length, both languages in every cell, a Chinese text not left behind.

Each function returns the problems it finds as sentences, so that an author sees all of them at once.
"""

from __future__ import annotations

import hashlib
import json
import re
import statistics
from pathlib import Path

from nanoengine.course.source import Cell, LessonSource

MAX_WORDS = 90  # of English in a markdown cell
MAX_HAN = 200  # Chinese characters in a markdown cell: about what 90 English words become
MAX_CODE_LINES = 40
MEDIAN_CODE_LINES = 8
MIN_CELLS, MAX_CELLS = 35, 60  # of those a reader sees

_UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX|TBD)\b|待补|待办|待写")
_HAN = re.compile(r"[\u3400-\u9fff]")
_HAN_COMMENT = re.compile(r"#[^\n]*[\u3400-\u9fff]")
_MARKUP = re.compile(r"<[^>]*>|\]\([^)]*\)|\{\{ .*?\}\}")
_WORD = re.compile(r"[A-Za-z0-9][\w'’.,/-]*")

# Hashes of both texts of a markdown cell, by cell id, as they were when last seen to agree.
SyncRecord = dict[str, dict[str, str]]


def words(text: str) -> int:
    """English words in a markdown text; HTML tags, link targets and computed numbers do not count."""
    return len(_WORD.findall(_MARKUP.sub(" ", text)))


def source_problems(source: LessonSource) -> list[str]:
    """Breaches of the limits and of "both languages, nothing unfinished", a sentence each."""
    problems = [f"{source.name}, cell {cell.id}: {p}" for cell in source.cells for p in _cell_problems(cell)]
    lengths = [len(cell.en.splitlines()) for cell in source.cells if cell.kind == "code"]
    if lengths and statistics.median(lengths) > MEDIAN_CODE_LINES:
        problems.append(
            f"{source.name}: the median code cell has {statistics.median(lengths):g} lines, limit {MEDIAN_CODE_LINES}"
        )
    calls = [cell.id for cell in source.cells if cell.kind == "code" and cell.en != cell.zh]
    if len(calls) != 1:
        problems.append(
            f'{source.name}: exactly one code cell must call lesson("{source.number}", lang="en"), found {calls}'
        )
    elif f'lesson("{source.number}"' not in next(cell.en for cell in source.cells if cell.id == calls[0]):
        problems.append(f'{source.name}, cell {calls[0]}: call lesson("{source.number}", lang="en")')
    return problems


def size_problems(source: LessonSource) -> list[str]:
    """A lesson that is too long to take in at once, or too short to be one. (Exercises have no such limit.)"""
    visible = sum("hidden" not in cell.tags for cell in source.cells)
    if MIN_CELLS <= visible <= MAX_CELLS:
        return []
    return [f"{source.name}: {visible} cells, a lesson has {MIN_CELLS} to {MAX_CELLS}: merge, cut or split"]


def _cell_problems(cell: Cell) -> list[str]:
    problems = []
    if _UNFINISHED.search(cell.en) or _UNFINISHED.search(cell.zh):
        problems.append("something is marked as unfinished")
    if cell.kind == "code":
        if len(cell.en.splitlines()) > MAX_CODE_LINES:
            problems.append(f"{len(cell.en.splitlines())} lines of code, limit {MAX_CODE_LINES}")
        if _HAN_COMMENT.search(cell.en):
            problems.append("a Chinese comment; both languages share the code, so comments are English")
        return problems
    if not cell.en:
        problems.append("the English text is missing")
    if not cell.zh:
        problems.append("the Chinese text is missing (it follows a line <!-- zh -->)")
    if _HAN.search(cell.en):
        problems.append("Chinese before the line <!-- zh -->")
    if words(cell.en) > MAX_WORDS:
        problems.append(f"{words(cell.en)} English words, limit {MAX_WORDS}; split the cell")
    if len(_HAN.findall(cell.zh)) > MAX_HAN:
        problems.append(f"{len(_HAN.findall(cell.zh))} Chinese characters, limit {MAX_HAN}; split the cell")
    return problems


def read_sync(path: Path) -> dict[str, SyncRecord]:
    """The committed records by lesson name; empty where the file does not exist yet."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def write_sync(path: Path, records: dict[str, SyncRecord]) -> None:
    text = json.dumps(records, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


def stale_cells(source: LessonSource, record: SyncRecord) -> list[str]:
    """Ids of markdown cells whose English changed after their Chinese was last written."""
    stale = []
    for cell in _markdown(source):
        known, now = record.get(cell.id), _hashes(cell)
        if known is not None and now["en"] != known["en"] and now["zh"] == known["zh"]:
            stale.append(cell.id)
    return stale


def updated_record(source: LessonSource, record: SyncRecord, accept: frozenset[str] = frozenset()) -> SyncRecord:
    """The record after a build: new and jointly changed cells enter, stale ones keep their old entry.

    ``accept`` names cells whose Chinese still says the same although the English was changed.
    """
    stale = set(stale_cells(source, record)) - accept
    return {cell.id: record[cell.id] if cell.id in stale else _hashes(cell) for cell in _markdown(source)}


def unrecorded_cells(source: LessonSource, record: SyncRecord) -> list[str]:
    """Ids of cells that differ from the record in any way: `make notebooks` was not run after an edit."""
    now = {cell.id: _hashes(cell) for cell in _markdown(source)}
    return sorted(key for key in now.keys() | record.keys() if now.get(key) != record.get(key))


def _markdown(source: LessonSource) -> list[Cell]:
    return [cell for cell in source.cells if cell.kind == "markdown"]


def _hashes(cell: Cell) -> dict[str, str]:
    return {lang: hashlib.sha256(cell.text(lang).encode()).hexdigest()[:12] for lang in ("en", "zh")}
