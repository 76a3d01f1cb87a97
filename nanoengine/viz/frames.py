"""Still pictures of a trace, for lessons, slides and pages where nothing runs.

A picture stands in an output as ``<img>`` with the SVG inside its address. Inline SVG would be lost: GitHub and, in a
notebook that is not trusted yet, JupyterLab take the elements out of HTML, but leave such an image alone.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence as Steps
from dataclasses import dataclass

import nanoengine.language as spoken
from nanoengine.markup import escape
from nanoengine.viz.explain import describe, explain
from nanoengine.viz.picture import PANES, WIDTH, check_panes, render
from nanoengine.viz.state import History, State
from nanoengine.viz.words import LABELS, check_lang, label

# The first step with a preemption teaches more than the fifth with an end.
_ORDER = ("preempt", "hit", "finish", "abort")


def language() -> str:
    """The language of the lesson that is open, "en" where none is."""
    return spoken.current


def image(svg: str, alt: str) -> str:
    """An ``<img>`` that holds the SVG."""
    data = base64.b64encode(svg.encode()).decode()
    return f'<img src="data:image/svg+xml;base64,{data}" alt="{escape(alt)}" style="max-width:100%;height:auto">'


@dataclass(frozen=True)
class Stills:
    """Pictures that a notebook shows as the value of a cell.

    states: one picture each. first: if given, only that state is shown open, above the others, each a line to click.
    """

    states: tuple[State, ...]
    lang: str
    panes: tuple[str, ...] = PANES
    selected: int | str | None = None
    width: int = WIDTH
    first: State | None = None

    def svgs(self) -> list[str]:
        return [
            render(state, self.lang, panes=self.panes, selected=self.selected, width=self.width)
            for state in self.states
        ]

    def html(self) -> str:
        """All pictures, as HTML that sanitisers leave alone."""
        opened, folded = [], []
        for state, svg in zip(self.states, self.svgs(), strict=True):
            picture = image(svg, describe(state, self.lang))
            if self.first in (None, state):
                opened.append(f"<div>{picture}</div>")
            else:
                name = label(self.lang, "frame", step=state.index) + LABELS[self.lang]["colon"]
                line = escape(name + explain(state, self.lang)[0])
                folded.append(f"<details><summary>{line}</summary>{picture}</details>")
        return "".join(opened + folded)

    def text(self) -> str:
        return "\n".join(describe(state, self.lang) for state in self.states)

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict[str, str]:
        return {"text/html": self.html(), "text/plain": self.text()}

    def __repr__(self) -> str:
        return self.text()


def frame(
    trace: Steps[dict] | History,
    step: int,
    *,
    lang: str | None = None,
    panes: Steps[str] = PANES,
    selected: int | str | None = None,
    width: int = WIDTH,
) -> Stills:
    """One step as a still picture (arguments as in ``render``; negative steps count from the end)."""
    history = trace if isinstance(trace, History) else History(trace)
    return _stills((history.at(step),), lang, panes, selected, width)


def keyframes(
    trace: Steps[dict] | History,
    k: int = 3,
    *,
    lang: str | None = None,
    panes: Steps[str] = PANES,
    selected: int | str | None = None,
    width: int = WIDTH,
) -> Stills:
    """The k steps of a run that tell most of it, in order: the first admission, the events, the last step."""
    history = trace if isinstance(trace, History) else History(trace)
    states = tuple(history.at(step) for step in key_steps(history, k))
    return _stills(states, lang, panes, selected, width)


def _stills(states, lang, panes, selected, width) -> Stills:
    check_panes(panes)
    lang = lang or language()
    check_lang(lang)
    return Stills(states, lang, tuple(panes), selected, width)


def key_steps(history: History, k: int = 3) -> list[int]:
    """Numbers of at most ``k`` steps. ValueError for k < 1."""
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    firsts = {}
    for i, step in enumerate(history.steps):
        for event in step["events"]:
            firsts.setdefault(event["kind"], i)
    events = [firsts[kind] for kind in _ORDER if kind in firsts]
    last = len(history) - 1
    # One picture: the most telling event. More: where it starts and ends as well.
    wanted = [*events[:1], firsts.get("admit", 0), last, *events[1:]]
    wanted += [step for kind in _ORDER for step in (history.jumps(kind) if kind in firsts else ())]
    return sorted(list(dict.fromkeys(wanted))[:k])
