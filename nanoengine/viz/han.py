"""Chinese in matplotlib figures, whatever fonts the machine has that draws them.

An SVG keeps text as text, so the reader's browser brings the font. Only the layout needs to know how
wide a text is, and matplotlib's own font (DejaVu Sans) has no Chinese character. But it has glyphs
that are just as wide as one (playing cards, faces): these stand in while the figure is laid out.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import FixedFormatter

# What a browser draws one em wide: ideographs, and the punctuation and forms that go with them.
_WIDE = re.compile("[\u2e80-\u303f\u3400-\u9fff\uff00-\uffef]")
_RANGES = (0x1F0A0, 0x1F0AE), (0x1F0B1, 0x1F0BE), (0x1F0C1, 0x1F0CF), (0x1F0D1, 0x1F0DF), (0x1F603, 0x1F623)
_STAND_INS = [chr(code) for first, last in _RANGES for code in range(first, last + 1)]


def is_wide(text: str) -> bool:
    """True if the text has a character that matplotlib's font lacks and a browser has."""
    return _WIDE.search(text) is not None


def draw(fig: Figure, save: Callable[[], str]) -> str:
    """What ``save`` returns for ``fig``, laid out for its Chinese and with that Chinese in it.

    Errors: ValueError if the figure has more different Chinese characters than there are stand-ins.
    """
    texts = [text for text in fig.findobj(Text) if is_wide(text.get_text())]
    ticks = [f for axes in fig.axes for axis in (axes.xaxis, axes.yaxis)
             if isinstance(f := axis.get_major_formatter(), FixedFormatter)]  # fmt: skip
    labels = [text.get_text() for text in texts] + [str(label) for f in ticks for label in f.seq]
    characters = sorted({c for label in labels for c in _WIDE.findall(label)})
    if len(characters) > len(_STAND_INS):
        raise ValueError(f"{len(characters)} different Chinese characters in one figure, at most {len(_STAND_INS)}")
    there = str.maketrans(dict(zip(characters, _STAND_INS, strict=False)))
    back = str.maketrans(dict(zip(_STAND_INS, characters, strict=False)))
    kept = [f.seq for f in ticks]
    try:
        for f in ticks:
            f.seq = [str(label).translate(there) for label in f.seq]
        for text in texts:
            text.set_text(text.get_text().translate(there))
        return save().translate(back)
    finally:
        for f, seq in zip(ticks, kept, strict=True):
            f.seq = seq
        for text in texts:
            text.set_text(text.get_text().translate(back))
