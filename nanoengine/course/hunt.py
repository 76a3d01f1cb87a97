"""The code hunt: go to a place in the source, think, then unfold the answer."""

from __future__ import annotations

from typing import Any

from nanoengine.course.lesson import current_lang
from nanoengine.course.live import Form, fill, folded, page, part, remember, row
from nanoengine.course.phrases import say
from nanoengine.course.record import Record, Stop, load
from nanoengine.course.show import ref, show
from nanoengine.course.text import html
from nanoengine.markup import escape


def hunt(no: str, *, lang: str | None = None) -> Hunt:
    """The code hunt of lesson ``no``, the value of a cell.

    Raises:
        ValueError: there is no such lesson.
    """
    return Hunt(load(no), lang or current_lang())


class Hunt(Form):
    """What ``hunt`` returns."""

    def __init__(self, record: Record, lang: str) -> None:
        super().__init__(lang)
        self.record = record
        self.seen: set[str] = set()

    def source(self, stop: Stop) -> str:
        """The place as HTML, as it is today, the lines in question marked; its docstring might give the answer away."""
        return show(stop.at, highlight=stop.marks, doc=False).html()

    def reveal(self, stop: Stop) -> str:
        """Note that the answer was looked at; returns it as HTML."""
        self.seen.add(stop.id)
        if len(self.seen) == len(self.record.hunt):
            remember("hunt", self.record.lesson, {"passed": True, "stops": len(self.seen)}, self.lang)
        return html(stop.answer[self.lang])

    def _head(self, number: int, stop: Stop, place: str) -> str:
        name = say("hunt_stop", self.lang, n=number)
        return f"<p><b>{name}</b> · <code>{escape(place)}</code></p>{html(stop.question[self.lang])}"

    def html(self) -> str:
        return "".join(
            part(self._head(n, stop, stop.at) + folded(say("unfold_answer", self.lang), html(stop.answer[self.lang])))
            for n, stop in enumerate(self.record.hunt, 1)
        )

    def text(self) -> str:
        lines = []
        for n, stop in enumerate(self.record.hunt, 1):
            lines += [f"{say('hunt_stop', self.lang, n=n)} · {stop.at}", f"  {stop.question[self.lang]}"]
        return "\n".join(lines)

    def build(self) -> Any:
        import ipywidgets as w

        return w.VBox([self._stop(w, n, stop) for n, stop in enumerate(self.record.hunt, 1)])

    def _stop(self, w: Any, number: int, stop: Stop) -> Any:
        source, answer = page(w), page(w)
        source.layout.max_width, source.layout.overflow = "1000px", "auto"  # a long line scrolls, the question stays
        show_source = w.ToggleButton(description=say("show_source", self.lang), layout={"width": "auto"})
        show_answer = w.ToggleButton(description=say("show_answer", self.lang), layout={"width": "auto"})
        show_source.observe(lambda c: fill(source, self.source(stop) if c["new"] else ""), "value")
        show_answer.observe(lambda c: fill(answer, self.reveal(stop) if c["new"] else ""), "value")
        head = page(w, self._head(number, stop, str(ref(stop.at))))
        return w.VBox([head, row(w, [show_source, show_answer]), source, answer], layout={"margin": "0 0 14px 0"})
