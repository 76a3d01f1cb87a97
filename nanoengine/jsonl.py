"""JSON that stays on one line, whoever splits it."""

from __future__ import annotations

import json

# What str.splitlines splits at beside the control characters, which JSON itself escapes. Half a
# surrogate pair has no UTF-8 form.
_ESCAPED = {code: f"\\u{code:04x}" for code in (0x85, 0x2028, 0x2029, *range(0xD800, 0xE000))}


def json_line(value) -> str:
    """``value`` as compact JSON on one line, without the end of line.

    Other letters than ASCII's are written as they are; each character at which any reader would
    split a line (U+0085, U+2028, U+2029, the control characters) is written as its escape.
    Errors: those of json.dumps; ValueError for NaN and infinities, which are no JSON.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text if text.isascii() else text.translate(_ESCAPED)
