"""What stands beside a lesson in ``lessons/src/NN_slug.yaml``: quiz, recall, hunt, cards, FAQ, notes for the teacher.

Every text is ``{en: …, zh: …}``. CONTRIBUTING.md shows the format; ``read_record`` says what breaks it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import yaml

import nanoengine
from nanoengine.course.fields import Fields
from nanoengine.course.text import Text

PASS_MARK = 4  # of five
# What can be said in the time: about 150 English words or 300 Chinese characters a minute, and a little more for
# those who speak fast.
SHORT_LIMIT = (95, 185)
LONG_LIMIT = (480, 900)
LEVELS = ("pass", "good", "excellent")


class RecordError(ValueError):
    """A record that breaks the format; one line a problem, with file, record and field."""


@dataclass(frozen=True)
class Option:
    text: Text
    right: bool
    reason: Text
    see: tuple[str, ...]  # pointers: section ids of the lesson, or file:symbol


@dataclass(frozen=True)
class Question:
    id: str
    question: Text
    options: tuple[Option, ...]

    @property
    def right(self) -> frozenset[int]:
        """Indices of the right options."""
        return frozenset(i for i, option in enumerate(self.options) if option.right)


@dataclass(frozen=True)
class Recall:
    prompt: Text
    minutes: int
    rubric: dict[str, Text]  # by level


@dataclass(frozen=True)
class Stop:
    id: str
    at: str  # file:symbol
    question: Text
    answer: Text
    marks: tuple[str, ...] = ()  # pieces of source whose lines are highlighted


@dataclass(frozen=True)
class FollowUp:
    question: Text
    answer: Text


@dataclass(frozen=True)
class Card:
    id: str
    lesson: str
    question: Text
    short: Text  # 30 seconds
    long: Text  # 3 minutes
    follow_ups: tuple[FollowUp, ...]
    stop: Text  # when to stop talking
    topics: tuple[str, ...]
    see: tuple[str, ...]

    @property
    def key(self) -> str:
        """Unique in the course and never changed: progress and Anki hang on it."""
        return f"{self.lesson}/{self.id}"


@dataclass(frozen=True)
class Faq:
    id: str
    question: Text
    answer: Text
    see: tuple[str, ...]


@dataclass(frozen=True)
class PlanItem:
    minutes: int
    sections: tuple[str, ...]
    what: Text


@dataclass(frozen=True)
class WrongAnswer:
    where: str
    says: Text
    reply: Text


@dataclass(frozen=True)
class Record:
    """All that stands beside one lesson. ``name`` is the file's stem, ``lesson`` its two digits."""

    name: str
    lesson: str
    quiz: tuple[Question, ...]
    recall: Recall
    hunt: tuple[Stop, ...]
    cards: tuple[Card, ...]
    faq: tuple[Faq, ...]
    plan: tuple[PlanItem, ...]
    wrong_answers: tuple[WrongAnswer, ...]

    def pointers(self) -> list[tuple[str, str]]:
        """(where it stands, pointer) of every pointer in the record."""
        found = []
        for q in self.quiz:
            found += [(f"quiz ({q.id}).options[{i}]", p) for i, o in enumerate(q.options, 1) for p in o.see]
        found += [(f"hunt ({stop.id}).at", stop.at) for stop in self.hunt]
        found += [(f"cards ({card.id}).see", p) for card in self.cards for p in card.see]
        found += [(f"faq ({entry.id}).see", p) for entry in self.faq for p in entry.see]
        return found + [(f"notes.plan[{i}]", p) for i, item in enumerate(self.plan, 1) for p in item.sections]


def course_root() -> Path:
    """The folder that holds ``lessons/src``: that of the installed package, or one above the current folder.

    Raises:
        FileNotFoundError: neither has it; the message says what to do.
    """
    here = Path.cwd()
    places = [os.environ.get("NANOENGINE_COURSE"), Path(nanoengine.__file__).parents[1], here, *here.parents]
    for place in places:
        if place and (Path(place) / "lessons" / "src").is_dir():
            return Path(place)
    raise FileNotFoundError(
        "the lessons are not here: run this inside a clone of the course, "
        "or set NANOENGINE_COURSE to the folder that holds lessons/"
    )


def record_paths(src: Path | None = None) -> list[Path]:
    """All ``NN_slug.yaml`` in ``src`` (the course's own by default), in order."""
    return sorted((src or course_root() / "lessons" / "src").glob("[0-9][0-9]_*.yaml"))


def load(no: str) -> Record:
    """The record of a lesson, ``"01"`` to ``"18"``.

    Raises:
        ValueError: there is none. RecordError: it breaks the format.
    """
    for path in record_paths():
        if path.stem.startswith(f"{no}_"):
            return _cached(path, path.stat().st_mtime_ns)
    have = ", ".join(repr(path.stem[:2]) for path in record_paths())
    raise ValueError(f"lesson {no!r} has no quiz, hunt or cards; these have: {have or 'none'}")


def load_all() -> list[Record]:
    """The records of all lessons, in order."""
    return [_cached(path, path.stat().st_mtime_ns) for path in record_paths()]


@lru_cache(maxsize=64)
def _cached(path: Path, _changed: int) -> Record:
    return read_record(path)


def read_record(path: Path) -> Record:
    """Parse and check a file by itself (``pointers.record_problems`` checks what it points at).

    Raises:
        RecordError: anything is missing, misspelt, unfinished or too long.
    """
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise RecordError(f"{path.name}: no YAML: {error}") from None
    problems: list[str] = []
    record = _record(path.stem, Fields(data, path.name, problems))
    if problems:
        raise RecordError("\n".join(problems))
    return record


def _record(name: str, top: Fields) -> Record:
    lesson = name[:2]
    if top.get("lesson", str) != lesson:
        top.bad("lesson", f'must be "{lesson}", as in the file\'s name')
    notes = top.inner("notes")
    record = Record(
        name=name,
        lesson=lesson,
        quiz=tuple(_question(item) for item in top.items("quiz", count=(5, 5))),
        recall=_recall(top.inner("recall")),
        hunt=tuple(_stop(item) for item in top.items("hunt", count=(3, 4))),
        cards=tuple(_card(item, lesson) for item in top.items("cards", count=(1, 8))),
        faq=tuple(_faq(item) for item in top.items("faq", count=(0, 20))),
        plan=tuple(_plan(item) for item in notes.items("plan", count=(3, 20), ids=False)),
        wrong_answers=tuple(_wrong(item) for item in notes.items("wrong_answers", count=(2, 20), ids=False)),
    )
    notes.done()
    top.done()
    return record


def _question(item: Fields) -> Question:
    question = Question(item.id(), item.text("question"), tuple(map(_option, item.items("options", count=(3, 5),
                        ids=False))))  # fmt: skip
    if not question.right or len(question.right) == len(question.options):
        item.bad("options", "one or more must be right, and not all")
    item.done()
    return question


def _option(item: Fields) -> Option:
    option = Option(item.text("text"), item.get("right", bool, False), item.text("reason"),
                    item.strings("see", at_least=1))  # fmt: skip
    item.done()
    return option


def _recall(item: Fields) -> Recall:
    rubric = item.inner("rubric")
    recall = Recall(item.text("prompt"), item.get("minutes", int), {level: rubric.text(level) for level in LEVELS})
    rubric.done()
    item.done()
    return recall


def _stop(item: Fields) -> Stop:
    stop = Stop(item.id(), item.get("at", str), item.text("question"), item.text("answer"), item.strings("marks"))
    item.done()
    return stop


def _card(item: Fields, lesson: str) -> Card:
    card = Card(
        id=item.id(),
        lesson=lesson,
        question=item.text("question"),
        short=item.text("short", limit=SHORT_LIMIT),
        long=item.text("long", limit=LONG_LIMIT),
        follow_ups=tuple(_follow_up(f) for f in item.items("follow_ups", count=(1, 6), ids=False)),
        stop=item.text("stop"),
        topics=item.strings("topics", at_least=1),
        see=item.strings("see", at_least=1),
    )
    item.done()
    return card


def _follow_up(item: Fields) -> FollowUp:
    follow_up = FollowUp(item.text("question"), item.text("answer"))
    item.done()
    return follow_up


def _faq(item: Fields) -> Faq:
    entry = Faq(item.id(), item.text("question"), item.text("answer"), item.strings("see", at_least=1))
    item.done()
    return entry


def _plan(item: Fields) -> PlanItem:
    plan = PlanItem(item.get("minutes", int), item.strings("sections"), item.text("what"))
    item.done()
    return plan


def _wrong(item: Fields) -> WrongAnswer:
    wrong = WrongAnswer(item.get("where", str), item.text("says"), item.text("reply"))
    item.done()
    return wrong
