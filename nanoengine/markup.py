"""The one place where text becomes part of HTML or SVG. Needs the standard library alone."""

from __future__ import annotations

import html

# XML knows no other control characters, and a picture with one of them is not drawn at all.
_KEPT = frozenset("\t\n")


def escape(text: object, quote: bool = True) -> str:
    """Text for HTML or SVG: shown as it is, never obeyed.

    What XML cannot hold (control characters, lone surrogates) is written as Python escapes it.

    quote: False only for an element's content, where quotes may stand; an attribute needs them escaped.
    """
    return html.escape("".join(char if _allowed(char) else _escaped(char) for char in str(text)), quote)


def _allowed(char: str) -> bool:
    code = ord(char)
    return char in _KEPT or 0x20 <= code < 0x7F or 0xA0 <= code < 0xD800 or 0xE000 <= code not in (0xFFFE, 0xFFFF)


def _escaped(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")
