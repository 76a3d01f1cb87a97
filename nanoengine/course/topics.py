"""What interviewers ask: the list of topics, which lesson answers each, and what is out of the course's scope.

``topics.yaml`` holds the list. A topic is covered by a card that names it, or has a 30-second answer marked out of
scope, or is still open; the list of open ones may only become shorter (a test holds it).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import yaml

from nanoengine.course.text import Text, unfold

FILE = Path(__file__).with_name("topics.yaml")


@dataclass(frozen=True)
class Topic:
    """lesson: the one whose card answers it, or None with an ``answer`` of 30 seconds: out of scope."""

    id: str
    area: str
    asked: Text
    lesson: str | None
    answer: Text | None


@lru_cache(maxsize=1)
def topics() -> dict[str, Topic]:
    """All topics by id.

    Raises:
        ValueError: a topic stands twice, or has not exactly one of lesson and answer.
    """
    found: dict[str, Topic] = {}
    for area, entries in yaml.safe_load(FILE.read_text(encoding="utf-8"))["areas"].items():
        for entry in entries:
            answer = entry.get("out_of_scope")
            if entry["id"] in found or (answer is None) == (entry.get("lesson") is None):
                raise ValueError(f"{FILE.name}: {entry['id']}: must stand once, with a lesson or out_of_scope")
            asked = Text(entry["en"], entry["zh"])
            said = Text(answer["en"], unfold(answer["zh"])) if answer else None
            found[entry["id"]] = Topic(entry["id"], area, asked, entry.get("lesson"), said)
    return found


def most_open() -> int:
    """How many topics may be open; lowered with each lesson, never raised."""
    return int(yaml.safe_load(FILE.read_text(encoding="utf-8"))["most_open"])


def open_topics(records) -> list[Topic]:
    """Topics that no card of ``records`` names and that are in scope."""
    covered = {topic for record in records for card in record.cards for topic in card.topics}
    return [topic for topic in topics().values() if topic.answer is None and topic.id not in covered]
