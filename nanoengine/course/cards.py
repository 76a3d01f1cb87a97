"""Interview cards: 30 seconds aloud, then the answer; 3 minutes, then the answer; follow-ups; a grade that sets the day
on which the card comes again."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from nanoengine.course.deck import Schedule, span
from nanoengine.course.lesson import current_lang
from nanoengine.course.live import Countdown, Form, fill, folded, page, part, remember, row
from nanoengine.course.phrases import say
from nanoengine.course.record import Card, load, load_all
from nanoengine.course.text import html, inline

SHORT_SECONDS, LONG_SECONDS = 30, 180


def cards(no: str | None = None, *, lang: str | None = None) -> Cards:
    """The interview cards of lesson ``no``, or of all lessons; the value of a cell. Due cards come first.

    Raises:
        ValueError: there is no such lesson.
    """
    records = load_all() if no is None else [load(no)]
    return Cards([card for record in records for card in record.cards], lang or current_lang())


def follow_ups_html(card: Card, lang: str) -> str:
    """Follow-up questions with their answers, and when to stop talking."""
    asked = "".join(f"<p><b>{inline(f.question[lang])}</b><br>{inline(f.answer[lang])}</p>" for f in card.follow_ups)
    label = say("label", lang, name=say("stop_talking", lang)).rstrip()
    return f"{asked}<p><b>{label}</b> {inline(card.stop[lang])}</p>"


class Cards(Form):
    """What ``cards`` returns."""

    def __init__(self, deck: list[Card], lang: str) -> None:
        super().__init__(lang)
        self.deck = deck
        self.schedule: Schedule | None = None
        self.card: Card | None = None

    def start(self) -> Card:
        """Take up the schedule; returns the card to ask first."""
        self.schedule = self.schedule or Schedule()
        self.card = self.schedule.order(self.deck)[0]
        return self.card

    def grade(self, grade: int) -> str:
        """Grade the card on show, 1 to 4; returns when it comes again and whether that was saved, in words."""
        entry = self.schedule.review(self.card.key, grade)
        saved = remember("cards", self.card.key, entry, self.lang)
        ahead = self.schedule.due(self.card.key) - datetime.now(UTC)
        return f"{say('due_in', self.lang, time=span(ahead, self.lang))} {saved}"

    # the still form

    def html(self) -> str:
        return "".join(self._still(card) for card in self.deck)

    def _still(self, card: Card) -> str:
        parts = [("show_short", html(card.short[self.lang])), ("show_long", html(card.long[self.lang])),
                 ("follow_ups", follow_ups_html(card, self.lang))]  # fmt: skip
        answers = "".join(folded(say(key, self.lang), body) for key, body in parts)
        return part(f"<p><b>{inline(card.question[self.lang])}</b></p>{answers}")

    def text(self) -> str:
        return "\n".join(f"{n}. {card.question[self.lang]}" for n, card in enumerate(self.deck, 1))

    # the live form

    def build(self) -> Any:
        import ipywidgets as w

        self.start()
        self._head, self._short, self._long, self._follow, self._note = (page(w) for _ in range(5))
        self._short.layout.margin = "8px 0 0"  # off the buttons
        self._clock = Countdown(w, SHORT_SECONDS, self.lang)
        steps = {"show_short": self._on_short, "show_long": self._on_long, "show_follow": self._on_follow}
        self._steps = [self._button(w, key, act) for key, act in steps.items()]
        grades = [self._button(w, f"again_{n}", lambda _, n=n: self._on_grade(n)) for n in range(1, 5)]
        self._next = self._button(w, "next_card", self._on_next)
        self._grades = row(w, [w.HTML(say("grade_yourself", self.lang)), *grades])
        self._draw()
        return w.VBox([self._head, row(w, [self._clock.widget, *self._steps]), self._short, self._long, self._follow,
                       self._grades, row(w, [self._note, self._next])])  # fmt: skip

    def _button(self, w: Any, key: str, act: Any) -> Any:
        button = w.Button(description=say(key, self.lang), layout={"width": "auto"})
        button.on_click(act)
        return button

    def _draw(self) -> None:
        card, lang = self.card, self.lang
        place = say("card_of", lang, n=self.deck.index(card) + 1, of=len(self.deck))
        ask = inline(card.question[lang])
        fill(self._head, f"<p><small>{place}</small></p><p><b>{ask}</b></p><p>{say('say_short', lang)}</p>")
        for view in (self._short, self._long, self._follow, self._note):
            fill(view, "")
        for i, button in enumerate(self._steps):
            button.disabled = i > 0  # one after the other: reading ahead is not recalling
        self._grades.layout.display = self._next.layout.display = "none"
        self._clock.halt()

    def _on_short(self, _button: Any) -> None:
        fill(self._short, f"<p><b>{say('seconds_30', self.lang)}</b></p>{html(self.card.short[self.lang])}")
        self._steps[0].disabled, self._steps[1].disabled = True, False
        self._clock.restart(LONG_SECONDS)
        self._grades.layout.display = None

    def _on_long(self, _button: Any) -> None:
        fill(self._long, f"<p><b>{say('minutes_3', self.lang)}</b></p>{html(self.card.long[self.lang])}")
        self._steps[1].disabled, self._steps[2].disabled = True, False
        self._clock.halt()

    def _on_follow(self, _button: Any) -> None:
        head = f"<p><b>{say('follow_ups', self.lang)}</b></p>"
        fill(self._follow, head + follow_ups_html(self.card, self.lang))
        self._steps[2].disabled = True

    def _on_grade(self, grade: int) -> None:
        fill(self._note, f"<small>{inline(self.grade(grade))}</small>")
        self._grades.layout.display = "none"
        self._next.layout.display = None
        self._clock.halt()

    def _on_next(self, _button: Any) -> None:
        card = next(iter(self.schedule.order(self.deck)))
        if not self.schedule.is_due(card):
            ahead = self.schedule.due(card.key) - datetime.now(UTC)
            fill(self._note, say("all_done", self.lang, time=span(ahead, self.lang)))
            return
        self.card = card
        self._clock.play.max = self._clock.bar.max = self._clock.seconds = SHORT_SECONDS
        self._clock.play.value = 0
        self._draw()
