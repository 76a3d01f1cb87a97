"""Reads YAML field by field and collects what is wrong with it, each problem with file, record and field.

All problems are found in one pass, so that an author sees them together.
"""

from __future__ import annotations

import re
from typing import Any

from nanoengine.course.lesson import LANGS
from nanoengine.course.text import Text, has_han, spoken_length, unfold

_UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX|TBD)\b|待补|待办|待写")
_ID = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


class Fields:
    """One mapping of a YAML file. ``where`` names it in messages; ``problems`` is shared by the whole file."""

    def __init__(self, data: Any, where: str, problems: list[str]) -> None:
        self.where, self.problems = where, problems
        self.data: dict = data if isinstance(data, dict) else {}
        self._seen: set[str] = set()
        if not isinstance(data, dict):
            self.bad("", f"must have fields, got {data!r}")

    def bad(self, field: str, what: str) -> None:
        self.problems.append(f"{self._name(field)}: {what}")

    def _name(self, field: str) -> str:
        """ "01_x.yaml: quiz" and, further in, "01_x.yaml: quiz[1] (its-id).question"."""
        return f"{self.where}{': ' if self.where.endswith('.yaml') else '.' if field else ''}{field}"

    def inner(self, field: str) -> Fields:
        """A mapping inside this one."""
        return Fields(self.get(field, dict), self._name(field), self.problems)

    def get(self, field: str, kind: type, default: Any = None) -> Any:
        """The value if it is of ``kind``; otherwise a problem is noted, unless it is missing and has a default."""
        self._seen.add(field)
        value = self.data.get(field)
        if value is None or (isinstance(value, str) and not value.strip()):
            if default is None:
                self.bad(field, "is missing")
                return kind()
            return default
        if type(value) is not kind:
            self.bad(field, f"must be {_NAMES[kind]}, got {value!r}")
            return kind()
        return value

    def id(self) -> str:
        """The field ``id``, which from now on names this record in messages."""
        value = self.get("id", str)
        if value and not _ID.fullmatch(value):
            self.bad("id", f"{value!r} must be small letters, digits and single hyphens")
        self.where += f" ({value})" if value else ""
        return value

    def text(self, field: str, *, limit: tuple[int, int] | None = None) -> Text:
        """A text in both languages. limit: most words of English, most characters of Chinese."""
        said = self.inner(field)
        texts = {lang: said.get(lang, str).strip() for lang in LANGS}
        for lang, value in texts.items():
            found = _UNFINISHED.search(value)
            if found:
                said.bad(lang, f"is unfinished: {found[0]}")
            if limit and spoken_length(value) > limit[LANGS.index(lang)]:
                unit = "words" if lang == "en" else "characters"
                said.bad(lang, f"{spoken_length(value)} {unit}, limit {limit[LANGS.index(lang)]}")
        if has_han(texts["en"]):
            said.bad("en", "contains Chinese")
        if texts["zh"] and not has_han(texts["zh"]) and texts["zh"] != texts["en"]:
            said.bad("zh", "contains no Chinese (equal to the English is allowed, for code and numbers)")
        said.done()
        return Text(texts["en"], unfold(texts["zh"]))

    def items(self, field: str, *, count: tuple[int, int], ids: bool = True) -> list[Fields]:
        """The mappings of a list with ``count[0]`` to ``count[1]`` entries, ids unique among them."""
        values = self.get(field, list, [] if count[0] == 0 else None)
        if not count[0] <= len(values) <= count[1]:
            wanted = str(count[0]) if count[0] == count[1] else f"{count[0]} to {count[1]}"
            self.bad(field, f"must have {wanted} entries, got {len(values)}")
        if ids:
            known = [value.get("id") for value in values if isinstance(value, dict)]
            for twice in sorted({str(i) for i in known if known.count(i) > 1}):
                self.bad(field, f"the id {twice!r} is used twice")
        return [Fields(value, f"{self._name(field)}[{i}]", self.problems) for i, value in enumerate(values, 1)]

    def strings(self, field: str, *, at_least: int = 0) -> tuple[str, ...]:
        """A list of strings; one string alone is a list of one."""
        value = self.data.get(field)
        self._seen.add(field)
        values = [value] if isinstance(value, str) else value or []
        if not isinstance(values, list) or not all(isinstance(v, str) for v in values):
            self.bad(field, f"must be a string or a list of strings, got {value!r}")
            return ()
        if len(values) < at_least:
            self.bad(field, f"needs at least {at_least}")
        return tuple(values)

    def done(self) -> None:
        """Note every field that nobody asked for: a misspelt one would be lost silently."""
        for field in self.data.keys() - self._seen:
            self.bad(str(field), f"unknown field; known are {', '.join(sorted(self._seen))}")


_NAMES = {str: "a string", list: "a list", dict: "fields", bool: "true or false", int: "a whole number"}
