"""Breaks lines of English and Chinese for a place with columns of one width, as an error's text in a notebook is."""

from __future__ import annotations

import re
import unicodedata

# A run of Latin letters stays whole; Chinese may break after any character.
_PIECE = re.compile(r"[!-~]+ *|.", re.DOTALL)
_NOT_FIRST = "，。、；：？！）」』”…,.;:?!)"


def columns(text: str) -> int:
    """How many columns a text takes; a Chinese character takes two."""
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def wrap(text: str, width: int) -> list[str]:
    """The text in lines of at most ``width`` columns, where its words are no longer than that."""
    lines, line = [], ""
    for piece in _PIECE.findall(text):
        if line and columns(line + piece.rstrip()) > width and piece[0] not in _NOT_FIRST:
            lines.append(line.rstrip())
            line = ""
        line += piece
    return [*lines, line.rstrip()]
