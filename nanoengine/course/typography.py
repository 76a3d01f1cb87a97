"""Chinese punctuation as print has it. Authors type what keyboards have; readers see full-width marks.

Between Chinese characters a comma, colon, semicolon, question or exclamation mark and brackets are as wide
as a character. Code, links, formulas and computed fields stay as they are.
"""

from __future__ import annotations

import re
from functools import lru_cache

_MARKS = dict(zip(",:;?!()", "\uff0c\uff1a\uff1b\uff1f\uff01\uff08\uff09", strict=True))
_CHINESE = re.compile("[\u3001\u3002\u300a-\u300f\u3400-\u9fff\uff01\uff08\uff09\uff0c\uff1a\uff1b\uff1f…—]")
_HAN = re.compile("[\u3400-\u9fff]")
# Fenced code, code, {{ fields }} and {fields}, link targets, HTML tags, formulas: one private character each.
# A formula is also a function of something, be that Chinese: O(块数), ceil((已算 + 要算) / 块大小).
_KEPT = re.compile(
    r"```.*?```|~~~.*?~~~|(`+).+?\1|\{\{.*?\}\}|\{[^{}\n]*\}|\]\([^)\s]*\)|<[A-Za-z/!][^>\n]*>|\$[^$\n]+\$"
    r"|(?<!\w)(?:O|ceil|floor|len|min|max|sqrt|log2?|exp2?|hash|softmax)\((?:[^()\n]|\([^()\n]*\))*\)",
    re.DOTALL,
)
_OPERATOR = re.compile(r" [-+−×÷/] ")
_NEXT_TO_OPERATOR = re.compile(r"[+−×÷/=] ?\($|^\) [-+−×÷/] ", re.MULTILINE)
# A full-width mark brings its own room; but the blank after "2." or "-" makes a list.
_BLANK = re.compile("(?<=[\uff01\uff0c\uff1a\uff1b\uff1f\uff08\uff09]) (?=[^\\s|])|(?<=[\\w\ue000]) (?=[\uff08\uff09])")
# "块大小 16,32 个": the comma before a number that counts something; three digits would be thousands.
_NEXT_NUMBER = re.compile("(?<=\\d),(?=(?:\\d{1,2}|\\d{4,}) ?[\u3400-\u9fff])")
_HOLE = "\ue000"
_SEE_THROUGH = "*_ " + _HOLE  # what may stand between a mark and the text it belongs to


@lru_cache(maxsize=4096)
def chinese(text: str) -> str:
    """``text`` (Markdown) with full-width marks wherever they belong to Chinese; other text unchanged."""
    if not _HAN.search(text):
        return text
    kept: list[str] = []

    def hide(match: re.Match) -> str:
        kept.append(match[0])
        return _HOLE

    chars = list(_KEPT.sub(hide, text))
    for opening, closing in _pairs(chars):
        if _wide_pair(chars, opening, closing):
            chars[opening], chars[closing] = _MARKS["("], _MARKS[")"]
    for i, c in enumerate(chars):
        if c in ",:;?!" and _belongs(chars, i):
            chars[i] = _MARKS[c]
    said = _BLANK.sub("", _NEXT_NUMBER.sub("\uff0c", "".join(chars)))
    parts = iter(kept)
    return re.sub(_HOLE, lambda _: next(parts), said)


def _pairs(chars: list[str]) -> list[tuple[int, int]]:
    """Positions of matching brackets, the inner ones first; a line break in a paragraph does not part them."""
    found, opened = [], []
    for i, c in enumerate(chars):
        if c == "(":
            opened.append(i)
        elif c == ")" and opened:
            found.append((opened.pop(), i))
        elif c == "\n" and i + 1 < len(chars) and chars[i + 1] == "\n":
            opened.clear()
    return found


def _wide_pair(chars: list[str], opening: int, closing: int) -> bool:
    """True if the brackets hold Chinese, or words that follow Chinese; (1, 2), f(x) and (总数 − 1) / 2 are neither."""
    inside = "".join(chars[opening + 1 : closing])
    if _HAN.search(inside):
        edges = "".join([*chars[max(0, opening - 2) : opening + 1], "\n", *chars[closing : closing + 4]])
        return not (_OPERATOR.search(inside) and _NEXT_TO_OPERATOR.search(edges))
    before = _beyond(chars, opening, -1, past="*_")
    return before is not None and bool(_CHINESE.match(before) and re.search(r"[A-Za-z]{2}|" + _HOLE, inside))


def _belongs(chars: list[str], i: int) -> bool:
    """True if the mark at ``i`` ends or begins something Chinese, or stands in a Chinese sentence as such a mark does.

    Between two Latin words that is: no blank after it. English has one, so has "KV cache, prefix cache". At the end
    of a line with Chinese in it: always.
    """
    before, after = _beyond(chars, i, -1), _beyond(chars, i, 1)
    if any(c is not None and _CHINESE.match(c) for c in (before, after)):
        return True
    if before is None or _HAN.search(_line(chars, i)) is None:
        return False
    if after is None:
        return True
    if chars[i + 1].isspace() or (chars[i] in ",:" and before.isdigit() and after.isdigit()):
        return False
    return not {_beyond(chars, i, -1, past="*_ "), _beyond(chars, i, 1, past="*_ ")} & set("/|-.=&\\'\"")


def _line(chars: list[str], i: int) -> str:
    text = "".join(chars)
    return text[text.rfind("\n", 0, i) + 1 :].split("\n", 1)[0]


def _beyond(chars: list[str], i: int, way: int, past: str = _SEE_THROUGH) -> str | None:
    """The next character on that side that is text, on the same line; what was hidden, if there is nothing else."""
    i += way
    hidden = None
    while 0 <= i < len(chars) and chars[i] in past:
        hidden = _HOLE if chars[i] == _HOLE else hidden
        i += way
    return chars[i] if 0 <= i < len(chars) and chars[i] != "\n" else hidden


def printed(texts: dict[str, dict]) -> dict[str, dict]:
    """A table {"en": {name: text}, "zh": {name: text}} with its Chinese as ``chinese`` has it."""
    return texts | {"zh": {name: chinese(t) if isinstance(t, str) else t for name, t in texts["zh"].items()}}


def said(text: dict[str, str], lang: str) -> str:
    """The text of {"en": …, "zh": …} in a language, as print has it."""
    return chinese(text["zh"]) if lang == "zh" else text[lang]
