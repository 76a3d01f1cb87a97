"""The engine player: a run of the engine, step by step, as a widget. Needs ipywidgets, no network.

A slider chooses the step; the picture is an HTML widget whose value is the SVG of ``render``. Below it the cell holds
still pictures as a second output: hidden while the widget lives, and all there is to see where it does not.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence as Steps

from nanoengine.markup import escape
from nanoengine.viz.explain import describe
from nanoengine.viz.frames import Stills, key_steps, language
from nanoengine.viz.picture import PANES, WIDTH, check_panes, choose, render
from nanoengine.viz.play import OneAtATime, play_button
from nanoengine.viz.state import JUMPS, History, share_extent
from nanoengine.viz.words import check_lang, label

PLAYING = OneAtATime()
SPEEDS = {"0.5×": 1600, "1×": 800, "2×": 400, "4×": 200}  # ms a step
COMPARE_WIDTH = 440
# Of a pair each picture is narrow; what both show is enough to compare two policies.
COMPARE_PANES = ("why", "queues", "batch", "pool", "gantt")


def player(
    trace: Steps[dict],
    *,
    lang: str | None = None,
    panes: Steps[str] | None = None,
    start: int = 0,
    compare: Steps[dict] | None = None,
    labels: tuple[str, str] | None = None,
    predict: bool = False,
) -> Player:
    """Watch a run. The value of a cell; shows itself. One player plays at a time: a new one stops the others.

    Args:
        trace: from ``with record(llm) as trace``, or ``Trace.load``.
        lang: "en" or "zh"; None: the language of the lesson that is open.
        panes: any of ``PANES``; None: all, or without the block table beside another run.
        start: the step shown first; negative numbers count from the end.
        compare: another run, shown beside it and moved by the same slider.
        labels: names of the two runs, where there are two.
        predict: start in predict-then-reveal mode.

    Raises:
        ValueError: an empty trace, an unknown language or pane. IndexError: no step ``start``.
    """
    return Player(trace, lang=lang, panes=panes, start=start, compare=compare, labels=labels, predict=predict)


class Player:
    """What ``player`` returns. ``step`` may be read and set; ``widget`` is the ipywidgets box."""

    def __init__(self, trace, *, lang=None, panes=None, start=0, compare=None, labels=None, predict=False):
        self.lang = lang or language()
        check_lang(self.lang)
        runs = [trace] if compare is None else [trace, compare]
        self.histories = [History(run) for run in runs]
        share_extent(self.histories)
        self.panes = tuple(panes or (PANES if compare is None else COMPARE_PANES))
        check_panes(self.panes)
        self.labels = labels
        self.steps = max(map(len, self.histories))
        start = start + self.steps if start < 0 else start
        if not 0 <= start < self.steps:
            raise IndexError(f"start is {start}, and the run has {self.steps} steps")
        self._revealed: int | None = None
        self._build(start, predict)
        self._draw()

    # the model: which step, what is hidden

    @property
    def step(self) -> int:
        return self.slider.value

    @step.setter
    def step(self, value: int) -> None:
        self.slider.value = value

    @property
    def hidden(self) -> bool:
        """True while the reader is asked who runs next."""
        return self.predict.value and self._revealed != self.step

    def jump(self, kind: str, direction: int = 1) -> bool:
        """Go to the next step with an event of ``kind`` ("admit", "hit", "preempt", "finish", "any") in either run;
        False, and nothing moves, if there is none."""
        steps = {step for history in self.histories for step in history.jumps(kind)}
        ahead = [step for step in sorted(steps)[::direction] if (step - self.step) * direction > 0]
        if ahead:
            self.step = ahead[0]
        return bool(ahead)

    # the view

    def svgs(self) -> list[str]:
        """The pictures on show, one a run."""
        return [self._svg(i) for i in range(len(self.histories))]

    def _svg(self, i: int) -> str:
        history = self.histories[i]
        step = min(self.step, len(history) - 1)  # the shorter run stays at its end
        state = history.before(step) if self.hidden else history.at(step)
        chosen = self.sequence.value
        selected = chosen if chosen in state.letters.values() else choose(state, None)
        width = WIDTH if len(self.histories) == 1 else COMPARE_WIDTH
        return render(state, self.lang, panes=self.panes, selected=selected, width=width)

    def _draw(self, _change=None) -> None:
        for i, (view, svg) in enumerate(zip(self.views, self.svgs(), strict=True)):
            view.value, style = split_style(svg, f"ne{id(self):x}-{i}")
            self.styles[i].value = style
        self.reveal.disabled = not self.hidden
        self.back.disabled, self.forward.disabled = self.step == 0, self.step == self.steps - 1
        self.note.value = ""

    def stills(self) -> list[Stills]:
        """The still form of the player, a set of keyframes a run."""
        width = WIDTH if len(self.histories) == 1 else COMPARE_WIDTH
        kept = []
        for history in self.histories:
            states = tuple(history.at(step) for step in key_steps(history, 3))
            telling = key_steps(history, 1)[0]
            first = next(state for state in states if state.index == telling)
            kept.append(Stills(states, self.lang, self.panes, None, width, first))
        return kept

    def bundles(self) -> list[dict]:
        """The two mime bundles that a cell shows: the live widget, and the stills."""
        stills = self.stills()
        pictures = "".join(f"{self._caption(i)}{still.html()}" for i, still in enumerate(stills))
        # Equal stills get an equal class, so that a rebuilt notebook does not differ.
        name = "nanoengine-stills-" + hashlib.sha256(pictures.encode()).hexdigest()[:10]
        self.note_style.value = f"<style>.{name}{{display:none}}</style>"
        html = f'<div class="{name}">{pictures}<p><small>{label(self.lang, "static")}</small></p></div>'
        text = "\n".join(still.text() for still in stills)
        live = {**self.widget._repr_mimebundle_(), "text/plain": self.text()}
        return [live, {"text/html": html, "text/plain": text}]

    def _caption(self, i: int) -> str:
        if len(self.histories) == 1:
            return ""
        return f"<p><b>{escape(self._names()[i])}</b></p>"

    def _names(self) -> tuple[str, str]:
        return self.labels or (label(self.lang, "left"), label(self.lang, "right"))

    def text(self) -> str:
        """The step on show as a paragraph."""
        states = [history.at(min(self.step, len(history) - 1)) for history in self.histories]
        return "\n".join(describe(state, self.lang) for state in states)

    def _ipython_display_(self) -> None:
        from IPython.display import display

        for bundle in self.bundles():
            display(bundle, raw=True)

    # widgets

    def _build(self, start: int, predict: bool) -> None:
        import ipywidgets as w

        say = lambda key: label(self.lang, key)  # noqa: E731 - it is only a shorter name here
        self.views = [w.HTML() for _ in self.histories]
        ends = {"value": start, "max": self.steps - 1}
        self.play = w.Play(interval=800, **ends)
        self.slider = w.IntSlider(readout=False, layout={"flex": "1 1 200px"}, **ends)
        # ipywidgets gives its slider's handle no name; this field has one, says the step, and takes it.
        self.number = w.BoundedIntText(
            description=say("slider"), style={"description_width": "auto"}, layout={"width": "104px"}, **ends
        )
        w.jslink((self.slider, "value"), (self.number, "value"))
        w.jslink((self.play, "value"), (self.slider, "value"))
        PLAYING.add(self.play)
        self.back, self.forward = (
            w.Button(icon=icon, tooltip=say(key), layout={"width": "38px"})
            for icon, key in (("step-backward", "back"), ("step-forward", "forward"))
        )
        self.speed = _choice(w, say("speed"), list(SPEEDS.items()), 800, 56)
        kinds = [(say(f"jump_{kind}"), kind) for kind in ("any", *JUMPS)]
        self.kind = _choice(w, say("jump"), kinds, "any", 75)
        self.go = w.Button(icon="fast-forward", tooltip=say("jump"), layout={"width": "38px"})
        letters = dict.fromkeys(name for history in self.histories for name in history.letters.values())
        names = [(say("automatic"), ""), *((name, name) for name in letters)]
        self.sequence = _choice(w, say("show_table"), names, "", 85)
        self.predict = w.Checkbox(value=predict, description=say("predict"), indent=False, layout={"width": "auto"})
        self.reveal = w.Button(description=say("reveal"), layout={"width": "84px"})
        self.note, self.note_style = w.HTML(), w.HTML(layout={"display": "none"})
        self.styles = [w.HTML(layout={"display": "none"}) for _ in self.views]
        self._connect()
        first = [play_button(w, self.play, self.lang), self.back, self.forward, self.slider, self.number, self.speed]
        second = [self.kind, self.go, *([self.sequence] if "table" in self.panes else []), self.predict, self.reveal]
        row = {"flex_flow": "row wrap", "align_items": "center", "grid_gap": "4px 8px"}
        width = f"{WIDTH if len(self.views) == 1 else 2 * COMPARE_WIDTH + 12}px"
        controls = [w.HBox(items, layout={**row, "max_width": width}) for items in (first, [*second, self.note])]
        self.widget = w.VBox([*controls, self._pictures(w), self.note_style, *self.styles])

    def _pictures(self, w):
        if len(self.views) == 1:
            return self.views[0]
        columns = []
        for i, view in enumerate(self.views):
            name = w.HTML(f"<b>{escape(self._names()[i])}</b>")
            columns.append(w.VBox([name, view], layout={"width": f"{COMPARE_WIDTH}px"}))
        return w.HBox(columns, layout={"flex_flow": "row wrap", "grid_gap": "12px"})

    def _connect(self) -> None:
        self.slider.observe(self._draw, "value")
        self.sequence.observe(self._draw, "value")
        self.predict.observe(self._draw, "value")
        self.speed.observe(lambda change: setattr(self.play, "interval", change["new"]), "value")
        self.back.on_click(lambda _: self._move(-1))
        self.forward.on_click(lambda _: self._move(1))
        self.go.on_click(self._on_jump)
        self.reveal.on_click(self._on_reveal)

    def _move(self, by: int) -> None:
        self.step = min(max(self.step + by, 0), self.steps - 1)

    def _on_jump(self, _button) -> None:
        if not self.jump(self.kind.value):
            self.note.value = label(self.lang, "no_more")

    def _on_reveal(self, _button) -> None:
        self._revealed = self.step
        self._draw()


def split_style(svg: str, name: str) -> tuple[str, str]:
    """The picture under a fixed id, and its style sheet apart from it.

    A browser that meets a new style sheet looks at every element of the page again; with the same one at each step it
    need not.
    """
    svg = svg.replace(re.search(r' id="(ne[0-9a-f]+)"', svg)[1], name)
    style = re.search(r"<style>.*?</style>", svg)[0]
    return svg.replace(style, ""), style


def _choice(w, text: str, options: list, value, width: int):
    style = {"description_width": "auto"}
    return w.Dropdown(description=text, options=options, value=value, style=style, layout={"width": f"{width + 90}px"})
