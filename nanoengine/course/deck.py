"""When each interview card comes again (FSRS), and the same cards for Anki."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from nanoengine.course import progress
from nanoengine.course.due import is_due, local, utc
from nanoengine.course.merge import moment
from nanoengine.course.phrases import say
from nanoengine.course.record import Card, Record, load_all
from nanoengine.course.text import html, inline
from nanoengine.course.topics import topics

# Anki recognises decks and the note type by these numbers: never change them, or every reader's history is lost.
MODEL_ID = 1_629_403_517
DECK_IDS = {"en": 1_629_403_520, "zh": 1_629_403_521}
DECK_NAMES = {"en": "nanoengine · interview", "zh": "nanoengine · 面试卡"}
FIELDS = ("Question", "Short", "Long", "FollowUps", "Stop", "Lesson")


class Schedule:
    """The due time of each card, by ``Card.key``. Kept in the progress file, or in this object where there is none.

    ``nanoengine.course.due`` says when a card counts as due. ``now`` may stand in any time zone;
    without one it is local time.
    """

    def __init__(self) -> None:
        import fsrs

        # Without fuzz: the same grades give the same days, which a reader can check.
        self._fsrs = fsrs
        self._scheduler = fsrs.Scheduler(enable_fuzzing=False)
        path = progress.find()
        try:
            self._entries: dict[str, dict] = dict(progress.load(path)["cards"]) if path else {}
        except progress.ProgressError:  # the cards are asked all the same; the first grade says what is wrong
            self._entries = {}

    def due(self, key: str) -> datetime | None:
        """The instant from which the card is due, in UTC; None for one that was never graded."""
        entry = self._entries.get(key)
        return moment(entry.get("due")) if entry else None

    def review(self, key: str, grade: int, now: datetime | None = None) -> dict:
        """Grade a card: 1 again, 2 hard, 3 good, 4 easy. Returns what the progress file must hold for it."""
        before, when = self._entries.get(key) or {}, utc(now)
        card, _ = self._scheduler.review_card(self._card(key, before), self._fsrs.Rating(grade), when)
        reviews = progress.count(before, "reviews") + 1
        self._entries[key] = {**card.to_dict(), "reviews": reviews, "grade": grade}
        return self._entries[key]

    def _card(self, key: str, entry: dict) -> Any:
        """The card as it was kept; a new one where an older version kept too little of it."""
        kept = {name: entry.get(name) for name in _CARD_FIELDS} | {"card_id": _number(key)}
        due, last = moment(kept["due"]), moment(kept["last_review"])
        if due is None:
            return self._fsrs.Card(card_id=kept["card_id"])
        kept |= {"due": due.isoformat(), "last_review": last.isoformat() if last else None}
        try:
            card = self._fsrs.Card.from_dict(kept)
        except (TypeError, ValueError):
            return self._fsrs.Card(card_id=kept["card_id"])
        learned = card.stability is not None and card.difficulty is not None and card.last_review is not None
        whole = learned and (card.step is not None or card.state == self._fsrs.State.Review)
        return card if whole else self._fsrs.Card(card_id=kept["card_id"])

    def order(self, cards: Iterable[Card], now: datetime | None = None) -> list[Card]:
        """What to ask now: due cards, longest overdue first, then new ones, then those not due yet."""
        now = local(now)

        def rank(card: Card) -> tuple[int, float]:
            if card.key not in self._entries:
                return (1, 0.0)
            due = self.due(card.key)
            return (0 if self.is_due(card, now) else 2, due.timestamp() if due else 0.0)

        return sorted(cards, key=rank)

    def is_due(self, card: Card, now: datetime | None = None) -> bool:
        """True for a card that is due or was never graded."""
        entry = self._entries.get(card.key)
        return entry is None or is_due(entry, now)


_CARD_FIELDS = ("card_id", "state", "step", "stability", "difficulty", "due", "last_review")


def _number(key: str) -> int:
    import hashlib

    return int(hashlib.sha256(key.encode()).hexdigest()[:12], 16)


def span(delta: timedelta, lang: str) -> str:
    """A time ahead in its largest unit, rounded: minutes, hours or days."""
    minutes = max(1, round(delta.total_seconds() / 60))
    if minutes < 60:
        return say("minutes", lang, n=minutes)
    if minutes < 36 * 60:
        return say("hours", lang, n=round(minutes / 60))
    return say("days", lang, n=round(minutes / 1440))


def export_anki(out: Path, *, lang: str = "en", records: list[Record] | None = None) -> int:
    """Write all cards, and the 30-second answers of what is out of scope, as an Anki package.

    Importing a newer export into Anki updates the cards and keeps their history: ids depend on the card's key alone.

    Args:
        out: ends in ``.apkg``. lang: "en" or "zh".

    Returns:
        The number of notes written.

    Raises:
        ValueError: another ending.
    """
    import genanki

    if out.suffix != ".apkg":
        raise ValueError(f"out is {str(out)!r}; an Anki package ends in .apkg")
    deck = genanki.Deck(DECK_IDS[lang], DECK_NAMES[lang])
    model = _model(genanki, lang)
    for key, fields, tags in anki_notes(lang, load_all() if records is None else records):
        guid = genanki.guid_for("nanoengine", lang, key)
        deck.add_note(genanki.Note(model=model, fields=fields, guid=guid, tags=tags))
    out.parent.mkdir(parents=True, exist_ok=True)
    genanki.Package(deck).write_to_file(str(out))
    return len(deck.notes)


def anki_notes(lang: str, records: list[Record]) -> list[tuple[str, list[str], list[str]]]:
    """(key, fields as HTML in the order of ``FIELDS``, tags) of each note."""
    notes = []
    for card in (card for record in records for card in record.cards):
        follow = "".join(
            f"<p><b>{inline(f.question[lang])}</b><br>{inline(f.answer[lang])}</p>" for f in card.follow_ups
        )
        fields = [inline(card.question[lang]), html(card.short[lang]), html(card.long[lang]), follow,
                  inline(card.stop[lang]), card.lesson]  # fmt: skip
        notes.append((card.key, fields, [f"lesson-{card.lesson}", *card.topics]))
    for topic in topics().values():
        if topic.answer is not None:
            fields = [inline(topic.asked[lang]), html(topic.answer[lang]), "", "", "", "-"]
            notes.append((f"topic/{topic.id}", fields, ["out-of-scope", topic.id]))
    return notes


def _model(genanki, lang: str):
    parts = [("show_short", "Short"), ("show_long", "Long"), ("follow_ups", "FollowUps"), ("stop_talking", "Stop")]
    back = "".join(f"{{{{#{f}}}}}<h4>{say(key, lang)}</h4>{{{{{f}}}}}{{{{/{f}}}}}" for key, f in parts)
    template = {"name": "Card", "qfmt": "<h3>{{Question}}</h3>", "afmt": "{{FrontSide}}<hr id=answer>" + back}
    css = ".card{font-family:sans-serif;font-size:18px;text-align:left;line-height:1.5;max-width:44em;margin:auto}"
    # One note type a language: its headings are in the template.
    return genanki.Model(
        MODEL_ID + (lang == "zh"),
        f"nanoengine card ({lang})",
        fields=[{"name": name} for name in FIELDS],
        templates=[template],
        css=css,
    )
