"""``render``: one step of a trace becomes one SVG. A pure function; the same state gives the same text."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence as Steps

from nanoengine.viz import panes as parts
from nanoengine.viz.explain import describe, title
from nanoengine.viz.gantt import gantt
from nanoengine.viz.pool import pool, table
from nanoengine.viz.state import History, State
from nanoengine.viz.svg import Canvas, document
from nanoengine.viz.words import check_lang

PANES = ("why", "queues", "batch", "pool", "table", "gantt")
THEMES = ("auto", "light", "dark")
WIDTH = 760
MARGIN, GAP = 18, 20


def snapshot(trace: Steps[dict] | History, step: int) -> State:
    """The state in which a step runs. For many steps of one trace make a ``History`` once and ask it.

    Raises:
        ValueError: the trace is empty. IndexError: it has no such step.
    """
    return (trace if isinstance(trace, History) else History(trace)).at(step)


def render(
    state: State,
    lang: str = "en",
    *,
    panes: Steps[str] = PANES,
    theme: str = "auto",
    selected: int | str | None = None,
    width: int = WIDTH,
    uid: str = "",
) -> str:
    """One self-contained SVG.

    Args:
        state: from ``snapshot`` or ``History``.
        lang: "en" or "zh".
        panes: any of ``PANES``, drawn in the order of ``PANES``.
        theme: "auto" follows JupyterLab's theme, else the system's; "light"; "dark".
        selected: whose block table is shown, by letter or sequence id; None: whom this step's events are about.
        width: px, at least 420.
        uid: goes into the picture's ids. Two pictures differ in their ids if they differ in anything; pass a
            different uid where the same picture stands on a page twice.

    Raises:
        ValueError: an unknown language, pane, theme or sequence, or a width too small.
    """
    check_lang(lang)
    check_panes(panes)
    if theme not in THEMES:
        raise ValueError(f"theme is {theme!r}; known: {', '.join(THEMES)}")
    if width < 420:
        raise ValueError(f"width must be at least 420 px, got {width}")
    seq = choose(state, selected)
    description = describe(state, lang)
    canvas = Canvas("PREFIX")
    height = _lay_out(canvas, state, lang, panes, seq, width)
    seed = "".join((uid, theme, description, *canvas.parts))
    digest = "ne" + hashlib.sha256(seed.encode()).hexdigest()[:10]
    canvas.prefix = digest
    canvas.parts = [part.replace("#PREFIX-", f"#{digest}-") for part in canvas.parts]
    return document(canvas, width, height, title(state, lang), description, theme, lang)


def check_panes(panes: Steps[str]) -> None:
    unknown = [pane for pane in panes if pane not in PANES]
    if isinstance(panes, str) or unknown or not panes:
        raise ValueError(f"panes is {panes!r}; choose some of {', '.join(PANES)}")


def choose(state: State, selected: int | str | None) -> int | None:
    """The sequence whose block table is shown; None where nobody holds a block and nobody was asked for."""
    if selected is not None:
        found = [seq for seq, name in state.letters.items() if selected in (seq, name)]
        if not found:
            raise ValueError(f"selected is {selected!r}; this trace has {', '.join(state.letters.values())}")
        return found[0]
    tables = state.record["block_tables"]
    for wanted in ("hit", "admit", "finish"):
        for event in state.record["events"]:
            if event["kind"] == wanted and event["seq"] in tables:
                return event["seq"]
    for event in state.record["events"]:
        if event["kind"] == "preempt" and event["needed_by"] in tables:
            return event["needed_by"]
    return next((seq for seq in state.record["running"] if seq in tables), None)


def _lay_out(c: Canvas, state: State, lang: str, panes: Steps[str], seq: int | None, width: float) -> float:
    x, inner = MARGIN, width - 2 * MARGIN
    y = MARGIN + parts.header(c, state, lang, x, MARGIN - 2, inner)
    simple = {"why": parts.why, "queues": parts.queues, "batch": parts.batch, "gantt": gantt}
    for pane in PANES:
        if pane not in panes:
            continue
        if pane in simple:
            y += simple[pane](c, state, lang, x, y, inner) + GAP
        elif pane == "pool":
            y += _memory(c, state, lang, x, y, inner, "table" in panes, seq) + GAP
        elif "pool" not in panes:
            y += table(c, state, lang, x, y, min(inner, 300), seq) + GAP
    return y - GAP + MARGIN


def _memory(c: Canvas, state: State, lang: str, x: float, y: float, width: float, with_table: bool, seq) -> float:
    """Pool and block table side by side where there is room."""
    if not with_table:
        return pool(c, state, lang, x, y, width)
    if width < 620:
        above = pool(c, state, lang, x, y, width) + GAP
        return above + table(c, state, lang, x, y + above, min(width, 300), seq)
    side = 256
    heights = (
        pool(c, state, lang, x, y, width - side - 32),
        table(c, state, lang, x + width - side, y, side, seq),
    )
    return max(heights)
