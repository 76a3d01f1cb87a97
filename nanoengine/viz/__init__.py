"""Pictures of a trace: ``render`` makes one SVG of one step, ``player`` the widget, ``keyframes`` still pictures.

Imports neither torch nor matplotlib nor ipywidgets; the plots are in ``nanoengine.viz.plots``.
"""

from nanoengine.viz.explain import describe, explain
from nanoengine.viz.frames import frame, keyframes, language
from nanoengine.viz.picture import PANES, render, snapshot
from nanoengine.viz.player import player
from nanoengine.viz.state import History

__all__ = [
    "PANES",
    "History",
    "describe",
    "explain",
    "frame",
    "keyframes",
    "language",
    "player",
    "render",
    "snapshot",
]
