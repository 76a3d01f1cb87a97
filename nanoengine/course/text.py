"""A text in both languages, and how it becomes HTML. Needs markdown-it-py."""

from __future__ import annotations

import re
from dataclasses import dataclass
from html import unescape

from markdown_it import MarkdownIt

from nanoengine.course.typography import chinese

HAN = re.compile(r"[\u3400-\u9fff]")
_WORD = re.compile(r"[A-Za-z0-9][\w'’.,/%-]*")
_FOLD = re.compile(r"(?<=[\u3000-\u9fff\uff01-\uff1f,:;]) +(?=[\u3000-\u9fff])|(?<=[\u3001-\u3003]) +")
_TAG = re.compile(r"<[^>]+>")
_CELLS = (re.compile(r"</t[hd]>\s*(?=<t[hd])"), " | "), (re.compile(r"</tr>\s*(?=</thead|<tr)"), " · ")
_IN_A_WORD = re.compile(r"</?(?:a|code|em|strong)\b[^>]*>")  # no blank where they were


@dataclass(frozen=True)
class Text:
    """The same thing said in English and in Chinese, as Markdown without HTML."""

    en: str
    zh: str

    def __getitem__(self, lang: str) -> str:
        return chinese(self.zh) if lang == "zh" else self.en


def unfold(text: str) -> str:
    """Chinese without the blanks that YAML puts where a line was folded."""
    parts = re.split(r"(`[^`]*`)", text)  # in `hash(键, 词)` the blank is code
    return "".join(part if part.startswith("`") else _FOLD.sub("", part) for part in parts)


def has_han(text: str) -> bool:
    return HAN.search(text) is not None


def spoken_length(text: str) -> int:
    """Units of speech: English words, or, in a text with Chinese, its characters plus its Latin words."""
    return len(HAN.findall(text)) + len(_WORD.findall(HAN.sub(" ", text)))


def html(text: str) -> str:
    """Markdown as HTML blocks; HTML in the text is shown, not obeyed."""
    return MarkdownIt("commonmark", {"html": False}).enable("table").render(text).strip()


def inline(text: str) -> str:
    """Markdown of one line as HTML without a block around it."""
    return MarkdownIt("commonmark", {"html": False}).renderInline(text)


def bare(text: str) -> str:
    """Markdown as it is read in a terminal: without the marks of bold text and code."""
    return text.replace("**", "").replace("`", "")


def plain(markup: str) -> str:
    """HTML as plain text on one line; a table keeps marks between its cells and rows."""
    for edge, mark in _CELLS:
        markup = edge.sub(mark, markup)
    return " ".join(unescape(_TAG.sub(" ", _IN_A_WORD.sub("", markup))).split()).removeprefix("| ")
