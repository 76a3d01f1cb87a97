"""A Play widget goes on in the page when its cell has been run again and it is no longer seen: it is stopped here."""

from __future__ import annotations

import weakref
from typing import Any


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
