"""What ``ask`` looks through: the course's own text and source, as entries with a place, and how text becomes terms."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import nanoengine
from nanoengine.course.manifest import manifest
from nanoengine.course.phrases import say
from nanoengine.course.pointers import describe, sections
from nanoengine.course.record import Record, course_root, load_all
from nanoengine.course.text import HAN, html, plain
from nanoengine.course.topics import topics

_VALUE = re.compile(r"\{\{ .*?\}\}")
_HAN_RUN = re.compile(r"[\u3400-\u9fff]+")
_LATIN = re.compile(r"[A-Za-z][A-Za-z0-9_]*|\d+")
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
# Words that say how something is asked, not what about.
_STOP_EN = frozenset(
    """a an and are as at be been but by can could did do does done for from had has have he her his how i if in into
    is it its just like me more most my no not of on one only or our out own say she should so some than that the their
    them then there these they this those to too up us use used very was we were what when where which while who whom
    why will with would you your get gets got tell explain mean means about between please happen happens thing things
    """.split()
)
_STOP_ZH = re.compile(
    "为什么|什么时候|是什么意思|有什么用|怎么样|怎么办|怎么|什么|怎样|哪里|哪些|哪个|如何|多少|可以|能不能|是不是|有没有|"
    "请问|解释|一下|告诉我|到底|究竟|之后|之前|越来越|越大|"
    "这个|那个|这里|那里|这样|我们|你们|他们|一个|一条|的时候|里面|不会|不能|就是|还是|以及|但是|所以|因为|"
    "[的了吗呢啊吧是在和与或有会要被把给让这那它他她我你很都就也还又再不没去到从对能得着过上下里中做受说越]"
)
# Of single characters only the course's own terms count; the rest is what a stop word left over.
_ALONE_ZH = frozenset("块槽页步")


@dataclass(frozen=True)
class Entry:
    """One thing that can be found. ``title`` weighs more than ``body``; ``shown`` is what the reader sees, Markdown."""

    kind: str  # "section", "faq", "card", "source", "cited", "topic"
    place: str  # where it stands, in words
    title: str
    body: str
    shown: str
    see: tuple[str, ...] = ()


def terms(text: str) -> list[str]:
    """Terms of a text: Latin words without endings, parts of identifiers, pairs of Chinese characters."""
    found: list[str] = []
    for word in _LATIN.findall(text):
        parts = [part for piece in word.split("_") for part in _CAMEL.split(piece) if part]
        if len(parts) > 1:
            found.append(word.lower())
        found += [_stem(part.lower()) for part in parts if part.lower() not in _STOP_EN]
    for run in _HAN_RUN.findall(_STOP_ZH.sub(" ", text)):
        if len(run) > 1 or run in _ALONE_ZH:
            found += [run] if len(run) == 1 else [run[i : i + 2] for i in range(len(run) - 1)]
    return found


def words(text: str) -> list[str]:
    """The words of a question that are looked up, as they were written; of Chinese what stands between stop words."""
    latin = [word for word in _LATIN.findall(text) if terms(word)]
    return list(dict.fromkeys(latin + [run for run in _HAN_RUN.findall(_STOP_ZH.sub(" ", text)) if terms(run)]))


def _stem(word: str) -> str:
    """Enough of a stemmer that "preempts", "preempted" and "preemption" meet."""
    for ending in ("ations", "ation", "ptions", "ption", "ings", "ing", "ies", "ers", "ed", "er", "es", "s"):
        if word.endswith(ending) and len(word) - len(ending) >= 3:
            return word[: -len(ending)] + ("pt" if ending.startswith("pt") else "")
    return word


def language(question: str) -> str:
    """The language of a question: Chinese if it has a Chinese character."""
    return "zh" if HAN.search(question) else "en"


def entries(lang: str) -> list[Entry]:
    """Everything that can be found, in one language; our docstrings are English in both."""
    records = load_all()
    found = [entry for record in records for entry in _lesson(record, lang)]
    for topic in topics().values():
        if topic.answer is not None:
            place = say("kind_topic", lang)
            found.append(Entry("topic", place, topic.asked[lang], topic.answer[lang], topic.answer[lang]))
    for cited in manifest().values():
        place = say("kind_cited", lang, engine=cited.engine, version=cited.version)
        title = f"{cited.engine} {cited.at.rpartition(':')[2]}"
        found.append(Entry("cited", place, title, cited.fact[lang], cited.fact[lang], (cited.at,)))
    return found + _source(lang)


def newest() -> int:
    """When a lesson was last changed: an index older than that is made anew."""
    return max((path.stat().st_mtime_ns for path in (course_root() / "lessons" / "src").glob("*")), default=0)


def _lesson(record: Record, lang: str) -> list[Entry]:
    where = {kind: say(f"kind_{kind}", lang, no=record.lesson) for kind in ("section", "faq", "card")}
    found = []
    for section in sections(record.name).values():
        if section.id in ("ask-intro", "next"):  # about asking, and about another lesson: no answers
            continue
        text = _VALUE.sub("…", section.text[lang])
        body = plain(html(text))
        if body:
            found.append(Entry("section", where["section"], section.title[lang], body, _short(body)))
    for faq in record.faq:
        see = _places(faq.see, record.name, lang)
        found.append(Entry("faq", where["faq"], faq.question[lang], faq.answer[lang], faq.answer[lang], see))
    for card in record.cards:
        see = _places(card.see, record.name, lang)
        asked = " ".join(f.question[lang] for f in card.follow_ups)
        body = f"{card.short[lang]} {asked}"
        found.append(Entry("card", where["card"], card.question[lang], body, card.short[lang], see))
    return found


def _places(pointers: Iterable[str], lesson_name: str, lang: str) -> tuple[str, ...]:
    """The pointers in words; two cells under one heading are one place."""
    return tuple(dict.fromkeys(describe(pointer, lesson_name, lang) for pointer in pointers))


def _short(text: str, limit: int = 260) -> str:
    return text if len(text) <= limit else text[:limit].rsplit(" ", 1)[0] + " …"


def _source(lang: str) -> list[Entry]:
    place = say("kind_source", lang)
    return [Entry("source", place, title, doc, _short(doc), (at,)) for at, title, doc in _docstrings()]


@lru_cache(maxsize=1)
def _docstrings() -> tuple[tuple[str, str, str], ...]:
    """(file:line symbol, symbol, docstring) of every documented class and function of the engine's own modules."""
    root = Path(nanoengine.__file__).parent
    found = []
    for path in sorted(root.rglob("*.py")):
        file = path.relative_to(root.parent).as_posix()
        if "/course/" not in file:  # the course's machinery answers nothing about engines
            found += _documented(ast.parse(path.read_text(encoding="utf-8")), file, "")
    return tuple(found)


def _documented(node: ast.AST, file: str, prefix: str) -> list[tuple[str, str, str]]:
    found = []
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.ClassDef, ast.FunctionDef)) and not child.name.startswith("_"):
            symbol = prefix + child.name
            doc = ast.get_docstring(child)
            if doc:
                found.append((f"{file}:{child.lineno} {symbol}", symbol, " ".join(doc.split())))
            if isinstance(child, ast.ClassDef):
                found += _documented(child, file, symbol + ".")
    return found
