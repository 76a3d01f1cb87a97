"""How a form shows itself: live widgets where a kernel runs, and a still form where none does.

A cell gets two outputs. The first is the widget, which hides the second while it lives; the second is plain HTML that
GitHub, slides and a notebook without a kernel show. A saved notebook keeps only the second.
"""

from __future__ import annotations

import hashlib
from typing import Any

from nanoengine.course import progress
from nanoengine.course.phrases import say
from nanoengine.viz.play import OneAtATime, play_button

CLOCKS = OneAtATime()


class Form:
    """Base of quiz, recall, hunt, cards and interview. ``widget`` is built when it is first asked for."""

    def __init__(self, lang: str) -> None:
        self.lang = lang
        self._widget: Any = None

    def html(self) -> str:
        """The still form."""
        raise NotImplementedError

    def text(self) -> str:
        """The still form for a terminal."""
        raise NotImplementedError

    def build(self) -> Any:
        """The live form, an ipywidgets box."""
        raise NotImplementedError

    @property
    def widget(self) -> Any:
        if self._widget is None:
            self._widget = self.build()
        return self._widget

    def bundles(self) -> list[dict]:
        """The two MIME bundles that a cell shows: the live form and the still one."""
        import ipywidgets as w

        still = self.html()
        # Equal forms get an equal class, so that a rebuilt notebook does not differ.
        name = "nanoengine-still-" + hashlib.sha256(still.encode()).hexdigest()[:10]
        hide = w.HTML(f"<style>.{name}{{display:none}}</style>", layout={"display": "none"})
        live = w.VBox([self.widget, hide])._repr_mimebundle_()
        note = f"<p><small>{say('static', self.lang)}</small></p>"
        html = f'<div class="{name}">{still}{note}</div>'
        return [{**live, "text/plain": self.text()}, {"text/html": html, "text/plain": self.text()}]

    def _ipython_display_(self) -> None:
        from IPython.display import display

        for bundle in self.bundles():
            display(bundle, raw=True)

    def __repr__(self) -> str:
        return self.text()


def remember(section: str, key: str, entry: dict, lang: str) -> str:
    """Note a result in the progress file and say whether that worked: an error in a click is shown nowhere else."""
    kept = progress.note(section, key, entry)
    if kept.path is None:
        return say("not_saved", lang)
    return " ".join(filter(None, (say("saved", lang) if kept.saved else "", kept.said(lang))))


def folded(summary: str, body: str) -> str:
    """A box to open with a click, which needs no kernel. Both arguments are HTML."""
    return f"<details><summary>{summary}</summary>{body}</details>"


PART = '<div style="margin-bottom:16px">'


def part(body: str) -> str:
    """One of several parts of a still form, with room below it; slides cut a form before each ``PART``."""
    return f"{PART}{body}</div>"


def row(w: Any, items: list) -> Any:
    """Widgets in a line that wraps on a narrow page."""
    return w.HBox(items, layout={"flex_flow": "row wrap", "align_items": "center", "grid_gap": "4px 8px"})


def page(w: Any, html: str = "") -> Any:
    """An HTML widget that breaks long lines; JupyterLab's own style makes code and lists look as in the text."""
    return w.HTML(f'<div class="jp-RenderedHTMLCommon">{html}</div>' if html else "", layout={"max_width": "860px"})


def fill(view: Any, html: str) -> None:
    """Put HTML into what ``page`` made."""
    view.value = f'<div class="jp-RenderedHTMLCommon">{html}</div>' if html else ""


class Countdown:
    """A clock that runs in the page: it ticks while the kernel is busy, and keeps no thread.

    Play counts seconds; a button starts and halts it, and starts it anew at its end.
    """

    def __init__(self, w: Any, seconds: int, lang: str) -> None:
        self.seconds, self.lang = seconds, lang
        self.play = w.Play(value=0, min=0, max=seconds, step=1, interval=1000, show_repeat=False)
        self.bar = w.IntProgress(value=0, min=0, max=seconds, layout={"width": "180px"})
        w.jslink((self.play, "value"), (self.bar, "value"))
        CLOCKS.add(self.play)  # the clock of a form whose cell is run again stops
        self.label = w.HTML()
        self.play.observe(self._tick, "value")
        self._tick()
        self.widget = row(w, [play_button(w, self.play, lang), self.bar, self.label])

    def restart(self, seconds: int | None = None) -> None:
        """Back to the full time, and run."""
        self.play.playing = False
        if seconds is not None:
            self.seconds = self.play.max = self.bar.max = seconds
        self.play.value = 0
        self._tick()
        self.play.playing = True

    def halt(self) -> None:
        self.play.playing = False

    def _tick(self, _change: Any = None) -> None:
        left = self.seconds - self.play.value
        self.label.value = say("time_left", self.lang, time=clock(left)) if left else say("time_over", self.lang)


def clock(seconds: float) -> str:
    """Minutes and seconds, as in 2:07."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
