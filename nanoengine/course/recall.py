"""The recall sheet: tell it from memory in the time given, then grade yourself by three levels."""

from __future__ import annotations

from typing import Any

from nanoengine.course.lesson import current_lang
from nanoengine.course.live import Countdown, Form, fill, folded, page, remember, row
from nanoengine.course.phrases import say
from nanoengine.course.record import LEVELS, Record, load
from nanoengine.course.text import html, inline


def recall(no: str, *, lang: str | None = None) -> RecallSheet:
    """The recall sheet of lesson ``no``, the value of a cell. Your grade goes into the progress file.

    Raises:
        ValueError: there is no such lesson.
    """
    return RecallSheet(load(no), lang or current_lang())


class RecallSheet(Form):
    """What ``recall`` returns."""

    def __init__(self, record: Record, lang: str) -> None:
        super().__init__(lang)
        self.record, self.sheet = record, record.recall
        self.level: str | None = None

    def grade(self, level: str) -> str:
        """Grade yourself: "none", "pass", "good" or "excellent"; returns whether it was saved, in words."""
        if level not in ("none", *LEVELS):
            raise ValueError(f"level is {level!r}; it must be one of none, {', '.join(LEVELS)}")
        self.level = level
        return remember("recall", self.record.lesson, {"level": level, "passed": level != "none"}, self.lang)

    def rubric(self) -> str:
        """The three levels as HTML."""
        names = (say("level", self.lang, name=say(f"level_{level}", self.lang)) for level in LEVELS)
        texts = (inline(self.sheet.rubric[level][self.lang]) for level in LEVELS)
        return "".join(f"<p><b>{name}</b> {text}</p>" for name, text in zip(names, texts, strict=True))

    def html(self) -> str:
        return html(self.sheet.prompt[self.lang]) + folded(say("rubric", self.lang), self.rubric())

    def text(self) -> str:
        names = (say("label", self.lang, name=say(f"level_{level}", self.lang)) for level in LEVELS)
        levels = (f"  {name}{self.sheet.rubric[level][self.lang]}" for level, name in zip(LEVELS, names, strict=True))
        return "\n".join([self.sheet.prompt[self.lang], *levels])

    def build(self) -> Any:
        import ipywidgets as w

        self._clock = Countdown(w, self.sheet.minutes * 60, self.lang)
        self._rubric, self._note = page(w), page(w)
        self._rubric.layout.margin = "8px 0 0"  # off the buttons
        reveal = w.Button(description=say("show_rubric", self.lang), layout={"width": "auto"})
        reveal.on_click(self._on_reveal)
        buttons = []
        for level in ("none", *LEVELS):
            button = w.Button(description=say(f"level_{level}", self.lang), layout={"width": "auto"})
            button.on_click(lambda _, level=level: self._on_grade(level))
            buttons.append(button)
        self._grades = row(w, [w.HTML(say("grade_yourself", self.lang)), *buttons, self._note])
        self._grades.layout.display = "none"  # first look, then grade
        prompt = page(w, html(self.sheet.prompt[self.lang]))
        return w.VBox([prompt, row(w, [self._clock.widget, reveal]), self._rubric, self._grades])

    def _on_reveal(self, _button: Any) -> None:
        self._clock.halt()
        fill(self._rubric, self.rubric())
        self._grades.layout.display = None

    def _on_grade(self, level: str) -> None:
        saved = self.grade(level)
        graded = say("graded", self.lang, level=say(f"level_{level}", self.lang))
        fill(self._note, f"{graded} <small>{inline(saved)}</small>")
