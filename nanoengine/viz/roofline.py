"""The roofline (Williams, Waterman and Patterson 2009): what a machine can reach, by arithmetic intensity."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib

from nanoengine.viz.frames import language
from nanoengine.viz.plots import _LINES, _MARKERS, _STYLE, COLOURS, Plot, _axes, _label, figure_alt
from nanoengine.viz.words import typeset

_WORDS = {
    "en": {
        "roof": "{name}: bandwidth {bandwidth} GB/s, arithmetic {peak} TFLOP/s, they meet at {ridge} FLOP/byte; ",
        "dot": "{label} at {x} FLOP/byte",
        "all": "Roofline plot, log scales. {texts}",
    },
    "zh": {
        "roof": "{name}:带宽 {bandwidth} GB/s,算力 {peak} TFLOP/s,两者在 {ridge} FLOP/字节处相交;",
        "dot": "{label} 在 {x} FLOP/字节",
        "all": "屋顶线图,对数坐标。{texts}",
    },
}


def roofline(
    machines: Mapping[str, tuple[float, float]],
    dots: Mapping[str, Mapping[str, float]],
    *,
    title: str = "Roofline",
) -> Plot:
    """machines: name -> (bytes a second, FLOP a second). dots: name -> {label: FLOP a byte}, each drawn on that roof.

    Returns a plot with both scales logarithmic and its alternative text. ValueError for an empty mapping or a dot of
    a machine that is not there.
    """
    if not machines or set(dots) - set(machines):
        raise ValueError(f"machines are {sorted(machines)}, dots are given for {sorted(dots)}")
    span = _span(machines, dots)
    texts = []
    with matplotlib.rc_context(_STYLE):
        fig, ax = _axes(title, "FLOP a byte", "TFLOP/s", height=3.8)
        for i, (name, (bandwidth, peak)) in enumerate(machines.items()):
            look = {"color": COLOURS[i % 6], "linestyle": _LINES[i % 6]}
            corner = peak / bandwidth
            xs = sorted({span[0], corner, span[1]})
            ax.plot(xs, [reach(x, bandwidth, peak) for x in xs], label=_label(name), linewidth=2, **look)
            for label, x in dots.get(name, {}).items():
                y = reach(x, bandwidth, peak)
                ax.plot([x], [y], marker=_MARKERS[i % 6], markersize=7, color=COLOURS[i % 6])
                ax.annotate(_label(label), (x, y), textcoords="offset points", xytext=(6, -12), fontsize=11)
            texts.append(_describe(name, bandwidth, peak, dots.get(name, {})))
        ax.set_xscale("log")
        ax.set_yscale("log")
        ax.grid(True, axis="x")
        ax.legend(loc="lower left", bbox_to_anchor=(0, -0.3), ncols=2, borderaxespad=0, handlelength=2.4)
    words = _WORDS[language()]
    return figure_alt(fig, typeset(words["all"].format(texts=" ".join(texts)), language()))


def reach(intensity: float, bandwidth: float, peak: float) -> float:
    """TFLOP/s that are possible at this intensity (FLOP a byte)."""
    return min(peak, intensity * bandwidth) / 1e12


def _span(machines: Mapping, dots: Mapping) -> Sequence[float]:
    xs = [x for labelled in dots.values() for x in labelled.values()] + [p / b for b, p in machines.values()]
    return min(xs) / 4, max(xs) * 4


def _describe(name: str, bandwidth: float, peak: float, labelled: Mapping[str, float]) -> str:
    words = _WORDS[language()]
    values = {"bandwidth": f"{bandwidth / 1e9:.3g}", "peak": f"{peak / 1e12:.3g}", "ridge": f"{peak / bandwidth:.3g}"}
    listed = ", ".join(words["dot"].format(label=_label(label), x=f"{x:.3g}") for label, x in labelled.items())
    return words["roof"].format(name=_label(name), **values) + listed + "."
