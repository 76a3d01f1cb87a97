"""The shapes of one forward pass, drawn from tensors that were really there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nanoengine.viz.frames import image, language
from nanoengine.viz.svg import BG, INK, MUTED, OKABE_ITO, PANEL, STRONG, Canvas, document, fit
from nanoengine.viz.words import typeset

_ALT = {
    "en": "Shape flow of one forward pass, top to bottom: {steps}.",
    "zh": "一次前向的形状流,从上到下:{steps}。",
}
_TITLE = {"en": "One forward pass, shape by shape", "zh": "一次前向，逐个形状"}
_WIDTH, _LEFT, _ROW = 760, 190, 30


@dataclass(frozen=True)
class ShapeFlow:
    """rows: (name, shape) in the order in which the tensors came; each bar is as long as its last axes' product."""

    rows: tuple[tuple[str, tuple[int, ...]], ...]

    def svg(self) -> str:
        lang = language()
        c = Canvas("shape-flow")
        widths = [_per_token(shape) for _, shape in self.rows]
        longest = _full_length(widths)
        c.text(12, 24, _TITLE[lang], 14, bold=True)
        for i, ((name, shape), size) in enumerate(zip(self.rows, widths, strict=True)):
            y = 40 + i * _ROW
            length = max(4.0, (_WIDTH - _LEFT - 190) * min(1.0, size / longest))
            c.rect(8, y - 2, _WIDTH - 16, _ROW - 4, PANEL if i % 2 else "none")
            c.text(14, y + 15, fit(name, _LEFT - 24), 12, fill=INK)
            c.rect(_LEFT, y + 2, length, 18, OKABE_ITO[4], rx=3, stroke=STRONG, opacity=0.45)
            if size > longest:  # a cut bar shows a gap
                c.rect(_LEFT + length * 0.8, y, 10, 22, PANEL if i % 2 else BG)
            c.text(_LEFT + length + 8, y + 15, f"[{', '.join(map(str, shape))}]", 12, fill=MUTED)
        return document(c, _WIDTH, 48 + len(self.rows) * _ROW, _TITLE[lang], self.alt(), "light", lang)

    def alt(self) -> str:
        steps = "; ".join(f"{name} {list(shape)}" for name, shape in self.rows)
        return typeset(_ALT[language()].format(steps=steps), language())

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict[str, str]:
        return {"text/html": f"<div>{image(self.svg(), self.alt())}</div>", "text/plain": self.alt()}

    def __repr__(self) -> str:
        return self.alt()


def _per_token(shape: Sequence[int]) -> int:
    product = 1
    for size in shape[1:]:
        product *= size
    return product


def _full_length(widths: Sequence[int]) -> int:
    """What a bar of full length stands for: the widest, or less where it would leave only dots of the others."""
    *_, second, widest = [1, *sorted(widths)]
    return widest if widest <= 8 * second else 2 * second


def shape_flow(noted: Sequence[tuple[str, Sequence[int]]]) -> ShapeFlow:
    """The picture of (name, shape) pairs, first axis tokens; a bar is as long as the numbers that a token has there
    (one that is far longer than all others is cut, with a gap).

    Errors: ValueError where nothing was noted.
    """
    if not noted:
        raise ValueError("no shapes were noted: run the forward pass with note=… first")
    return ShapeFlow(tuple((name, tuple(int(n) for n in shape)) for name, shape in noted))
