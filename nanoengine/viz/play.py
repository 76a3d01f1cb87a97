"""Play as a button that has a name, for the player and the clocks of forms. Needs ipywidgets.

The buttons of ipywidgets' own Play have neither a text nor a title, so that a screen reader cannot tell them. Play
itself stays in the page, unseen, for its timer. That timer goes on when the cell is run again and its Play is no longer
seen: a new one stops the others here.
"""

from __future__ import annotations

import weakref
from typing import Any

from nanoengine.viz.words import label


class OneAtATime:
    """Play widgets of which one runs: a new one, and one that is started, stops the others."""

    def __init__(self) -> None:
        self._plays: weakref.WeakSet[Any] = weakref.WeakSet()

    def add(self, play: Any) -> None:
        """Take part from now on."""
        self._stop_others(play)
        self._plays.add(play)
        play.observe(self._on_playing, "playing")

    def _on_playing(self, change: dict) -> None:
        if change["new"]:
            self._stop_others(change["owner"])

    def _stop_others(self, play: Any) -> None:
        for other in list(self._plays):
            if other is not play and other.playing:
                other.playing = False


def play_button(w: Any, play: Any, lang: str) -> Any:
    """A box with the unseen ``play`` and a button in its stead: start and pause, and at the end start anew."""
    play.layout.display = "none"
    toggle = w.ToggleButton(icon="play", tooltip=label(lang, "play"), layout={"width": "40px"})
    w.jslink((toggle, "value"), (play, "playing"))

    def show(change: dict) -> None:
        running = change["new"]
        toggle.icon, toggle.tooltip = ("pause", label(lang, "pause")) if running else ("play", label(lang, "play"))

    play.observe(show, "playing")
    return w.HBox([toggle, play])
