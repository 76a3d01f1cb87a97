"""``ask("why is sampling not in postprocess?")``: what course and source say about it, or that they say nothing.

A search (BM25) over the course's own text, not a language model: it shows what stands there, with the place.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

from nanoengine.course.corpus import Entry, entries, language, newest, terms, words
from nanoengine.course.phrases import say
from nanoengine.course.text import inline
from nanoengine.markup import escape

# An entry must hold this share of what the question asks for, by weight of its terms (a rare term weighs more, one
# that the course never uses weighs most). Measured on the questions in tests/course/test_ask.py: of those that the
# course answers the least is 0.63 in English and 0.40 in Chinese, of the others the most is 0.52 and 0.32. Chinese has
# less because pairs of characters that straddle two words find nothing. A docstring that shares a few words of a
# question rarely answers it, so it must hold more.
MIN_SHARE = {"en": 0.56, "zh": 0.37}
SOURCE_SHARE = 0.75
MORE_SHARE = 0.8  # of the best one's share, for the second and third
TITLE_WEIGHT = 3
# A written answer before a passage, a passage before a docstring, where they fit about equally well.
_KIND_WEIGHT = {"faq": 1.25, "card": 1.1, "section": 1.0, "topic": 1.0, "cited": 0.9, "source": 0.8}


@dataclass(frozen=True)
class Found:
    entry: Entry
    share: float  # of the question's weight that the entry's terms cover, 0 to 1
    score: float  # BM25, weighted by kind


@dataclass(frozen=True)
class Answer:
    """What ``ask`` returns: at most ``limit`` finds, best first; none where nothing fits."""

    question: str
    lang: str
    found: tuple[Found, ...]
    unknown: tuple[str, ...]  # words of the question that the course never uses

    def html(self) -> str:
        if not self.found:
            return "".join(f"<p>{inline(line)}</p>" for line in self._nothing())
        return "".join(
            f'<p style="margin:6px 0"><b>{inline(f.entry.title)}</b> <small>· {escape(f.entry.place)}</small><br>'
            f"{inline(f.entry.shown)}{_see(f.entry)}</p>"
            for f in self.found
        )

    def text(self) -> str:
        if not self.found:
            return "\n".join(self._nothing())
        lines = []
        for f in self.found:
            lines += [f"{f.entry.title} · {f.entry.place}", f"  {f.entry.shown}"]
            lines += [f"  → {place}" for place in f.entry.see]
        return "\n".join(lines)

    def _nothing(self) -> list[str]:
        lines = [say("nothing_fits", self.lang)]
        if self.unknown:
            lines.append(say("unknown_words", self.lang, words=say("enumerate", self.lang).join(self.unknown)))
        return [*lines, say("ask_hint", self.lang)]

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict[str, str]:
        return {"text/html": self.html(), "text/plain": self.text()}

    def __repr__(self) -> str:
        return self.text()


def _see(entry: Entry) -> str:
    return "".join(f"<br><small>→ <code>{escape(place)}</code></small>" for place in entry.see)


def ask(question: str, *, limit: int = 3) -> Answer:
    """Look a question up, in the language it is asked in; the value of a cell.

    Args:
        question: English or Chinese. limit: at most so many finds.

    Raises:
        ValueError: the question is empty.
    """
    if not question.strip():
        raise ValueError('the question is empty: ask("what does a step do?")')
    lang = language(question)
    return _index(lang, newest()).search(question, lang, limit)


@lru_cache(maxsize=2)
def _index(lang: str, _newest: int) -> Index:
    return Index(entries(lang))


class Index:
    """BM25 over entries, and how rare each term is."""

    def __init__(self, found: list[Entry]) -> None:
        import bm25s

        self.entries = found
        documents = [terms(entry.title) * TITLE_WEIGHT + terms(entry.body) for entry in found]
        self._terms = [frozenset(document) for document in documents]
        self._count = Counter(term for document in self._terms for term in document)
        self._bm25 = bm25s.BM25()
        self._bm25.index(documents, show_progress=False)

    def weight(self, term: str) -> float:
        """Inverse document frequency; highest for a term that stands nowhere."""
        return math.log(1 + (len(self.entries) + 0.5) / (self._count[term] + 0.5))

    def search(self, question: str, lang: str, limit: int = 3) -> Answer:
        asked = list(dict.fromkeys(terms(question)))
        unknown = tuple(word for word in words(question) if not any(self._count[term] for term in terms(word)))
        total = sum(self.weight(term) for term in asked)
        known = [term for term in asked if self._count[term]]
        if not known:
            return Answer(question, lang, (), unknown)
        scores = self._bm25.get_scores(known)
        found = []
        for entry, has, score in zip(self.entries, self._terms, scores, strict=True):
            share = sum(self.weight(term) for term in known if term in has) / total
            if share >= (SOURCE_SHARE if entry.kind == "source" else MIN_SHARE[lang]):
                found.append(Found(entry, share, float(score) * _KIND_WEIGHT[entry.kind]))
        found.sort(key=lambda f: -f.score * f.share)
        best = found[0].share if found else 0.0
        kept = [f for f in found if f.share >= best * MORE_SHARE]
        return Answer(question, lang, tuple(kept[:limit]), unknown)
