"""A mock interview: a timed set of cards from all lessons, follow-ups, a grade each, and a rubric at the end.

``interview()`` in a notebook shows widgets; ``run_interview`` talks in a terminal (``nanoengine course interview``).
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from nanoengine.course.cards import LONG_SECONDS, SHORT_SECONDS
from nanoengine.course.lesson import current_lang
from nanoengine.course.live import Countdown, Form, clock, fill, page, row
from nanoengine.course.phrases import INTERVIEW_RUBRIC, say
from nanoengine.course.record import Card, FollowUp, load_all
from nanoengine.course.text import bare, html, inline

MINUTES = 15
# 30 seconds, 3 minutes, and a short follow-up.
CARD_SECONDS = SHORT_SECONDS + LONG_SECONDS + 15


@dataclass(frozen=True)
class Asked:
    """One question of the set: the card, one of its follow-ups, and how it went."""

    card: Card
    follow_up: FollowUp
    seconds: float = 0.0
    grade: int = 0

    @property
    def over(self) -> bool:
        return self.seconds > CARD_SECONDS


def draw(deck: Sequence[Card], minutes: int = MINUTES, seed: int | None = None) -> list[Asked]:
    """Cards that fill the time, drawn at random, no lesson twice before each was asked once.

    Args:
        minutes: of the whole set, at least 4. seed: makes the draw repeatable.

    Raises:
        ValueError: no cards, or too little time for one.
    """
    number = minutes * 60 // CARD_SECONDS
    if number < 1:
        raise ValueError(f"minutes is {minutes}; one question needs {-(-CARD_SECONDS // 60)}")
    if not deck:
        raise ValueError("there are no interview cards to draw from")
    rng = random.Random(seed)
    left = sorted(deck, key=lambda card: card.key)
    rng.shuffle(left)
    chosen: list[Card] = []
    while left and len(chosen) < number:
        asked = [card.lesson for card in chosen]
        card = min(left, key=lambda c: asked.count(c.lesson))
        left.remove(card)
        chosen.append(card)
    return [Asked(card, rng.choice(card.follow_ups)) for card in chosen]


def summary(asked: Sequence[Asked], lang: str) -> str:
    """The closing line: questions, time, mean grade, how many ran over."""
    graded = [item for item in asked if item.grade]
    if not graded:
        return say("interview_early", lang)
    mean = sum(item.grade for item in graded) / len(graded)
    spent = clock(sum(item.seconds for item in graded))
    over = sum(item.over for item in graded)
    return say("interview_sum", lang, cards=len(graded), time=spent, mean=mean, over=over)


def opening(asked: Sequence[Asked], minutes: int, lang: str) -> str:
    """What is said first; honest where there are too few cards for the time."""
    real = round(len(asked) * CARD_SECONDS / 60)
    few = len(asked) < minutes * 60 // CARD_SECONDS
    intro = say("interview_intro", lang, cards=len(asked), minutes=real if few else minutes)
    return f"{say('interview_few', lang, cards=len(asked), minutes=real)} {intro}" if few else intro


def run_interview(
    minutes: int = MINUTES,
    *,
    seed: int | None = None,
    lang: str = "en",
    deck: Sequence[Card] | None = None,
    read: Callable[[str], str] = input,
    write: Callable[[str], None] = print,
    now: Callable[[], float] = time.monotonic,
) -> list[Asked]:
    """Hold the interview in a terminal; ends early, with its rubric, at Ctrl-D or Ctrl-C.

    Args:
        minutes, seed, deck: as in ``draw``; deck: None: the cards of all lessons.
        read, write, now: for tests.

    Returns:
        The questions that were graded.

    Raises:
        ValueError: no cards, or too little time for one.
    """
    asked = draw(_all_cards() if deck is None else deck, minutes, seed)
    write(opening(asked, minutes, lang))
    done: list[Asked] = []
    try:
        for number, item in enumerate(asked, 1):
            write(f"\n{number}/{len(asked)}  {bare(item.card.question[lang])}")
            start = now()
            read(say("interview_enter", lang))
            write(f"\n{_label('interview_follow', lang)}{bare(item.follow_up.question[lang])}")
            read(say("interview_enter", lang))
            seconds = now() - start
            over = say("interview_over", lang) if seconds > CARD_SECONDS else ""
            write(f"{say('interview_took', lang, time=clock(seconds))}{over}\n")
            for line in _answer_lines(item, lang):
                write(bare(line))
            done.append(Asked(item.card, item.follow_up, seconds, _read_grade(read, write, lang)))
    except (EOFError, KeyboardInterrupt):
        write("\n" + say("interview_early", lang))
    if done:
        write("\n" + summary(done, lang))
    write(f"\n{say('interview_rubric', lang)}")
    for line in INTERVIEW_RUBRIC:
        write("  - " + bare(line[lang]))
    return done


def _label(key: str, lang: str) -> str:
    return say("label", lang, name=say(key, lang))


def _answer_lines(item: Asked, lang: str) -> list[str]:
    card = item.card
    return [
        _label("seconds_30", lang) + card.short[lang],
        f"\n{_label('minutes_3', lang)}{card.long[lang]}",
        f"\n{_label('interview_follow', lang)}{item.follow_up.answer[lang]}",
        f"\n{_label('stop_talking', lang)}{card.stop[lang]}",
        f"\n{say('interview_grade', lang)}",
    ]


def _read_grade(read: Callable[[str], str], write: Callable[[str], None], lang: str) -> int:
    while True:
        typed = read(say("interview_your_grade", lang)).strip()
        if typed in ("1", "2", "3", "4"):
            return int(typed)
        write(say("interview_bad_grade", lang))


def _all_cards() -> list[Card]:
    return [card for record in load_all() for card in record.cards]


def interview(minutes: int = MINUTES, *, seed: int | None = None, lang: str | None = None) -> Interview:
    """A mock interview as widgets, the value of a cell.

    Raises:
        ValueError: as ``draw``.
    """
    return Interview(draw(_all_cards(), minutes, seed), minutes, lang or current_lang())


class Interview(Form):
    """What ``interview`` returns: one question at a time, at the end the rubric."""

    def __init__(self, asked: list[Asked], minutes: int, lang: str, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__(lang)
        self.asked, self.minutes, self._now = asked, minutes, now
        self.done: list[Asked] = []

    @property
    def current(self) -> Asked | None:
        return self.asked[len(self.done)] if len(self.done) < len(self.asked) else None

    def grade(self, grade: int, seconds: float) -> None:
        item = self.current
        self.done.append(Asked(item.card, item.follow_up, seconds, grade))

    def closing(self) -> str:
        """The result and the rubric as HTML."""
        rubric = "".join(f"<li>{inline(line[self.lang])}</li>" for line in INTERVIEW_RUBRIC)
        head = f"<p><b>{summary(self.done, self.lang)}</b></p>" if self.done else ""
        return f"{head}<p>{say('interview_rubric', self.lang)}</p><ul>{rubric}</ul>"

    def html(self) -> str:
        questions = "".join(f"<li>{inline(item.card.question[self.lang])}</li>" for item in self.asked)
        return f"<p>{opening(self.asked, self.minutes, self.lang)}</p><ol>{questions}</ol>{self.closing()}"

    def text(self) -> str:
        lines = [f"{n}. {item.card.question[self.lang]}" for n, item in enumerate(self.asked, 1)]
        return "\n".join([opening(self.asked, self.minutes, self.lang), *lines])

    def build(self) -> Any:
        import ipywidgets as w

        self._head, self._answer = page(w, f"<p>{opening(self.asked, self.minutes, self.lang)}</p>"), page(w)
        self._clock = Countdown(w, CARD_SECONDS, self.lang)
        self._go = w.Button(description=say("interview_begin", self.lang), button_style="primary")
        self._go.on_click(self._on_go)
        grades = []
        for n in range(1, 5):
            button = w.Button(description=str(n), layout={"width": "44px"})
            button.on_click(lambda _, n=n: self._on_grade(n))
            grades.append(button)
        self._grades = row(w, [w.HTML(say("interview_grade", self.lang)), *grades])
        self._grades.layout.display = "none"
        self._stage = "begin"
        return w.VBox([self._head, row(w, [self._clock.widget, self._go]), self._answer, self._grades])

    def _on_go(self, _button: Any) -> None:
        item = self.current
        if self._stage == "begin":
            self._ask(item)
        elif self._stage == "question":
            self._stage = "follow"
            ask = inline(item.follow_up.question[self.lang])
            fill(self._answer, f"<p><b>{_label('interview_follow', self.lang).rstrip()}</b> {ask}</p>")
        else:
            self._seconds = self._now() - self._start
            self._clock.halt()
            self._go.layout.display = "none"
            took = say("interview_took", self.lang, time=clock(self._seconds))
            body = "".join(html(line.strip()) for line in _answer_lines(item, self.lang)[:-1])
            fill(self._answer, f"<p><b>{took}</b></p>{body}")
            self._grades.layout.display = None

    def _ask(self, item: Asked) -> None:
        self._stage, self._start = "question", self._now()
        place = f"{len(self.done) + 1}/{len(self.asked)}"
        fill(self._head, f"<p><b>{place}</b> {inline(item.card.question[self.lang])}</p>")
        fill(self._answer, "")
        self._go.description = say("interview_next", self.lang)
        self._go.layout.display, self._grades.layout.display = None, "none"
        self._clock.restart()

    def _on_grade(self, grade: int) -> None:
        self.grade(grade, self._seconds)
        if self.current is not None:
            self._ask(self.current)
            return
        self._grades.layout.display = "none"
        fill(self._head, self.closing())
        fill(self._answer, "")
