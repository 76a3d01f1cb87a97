"""Plots for lessons, one call each. Each is the value of a cell and carries its alternative text.

Labels and alternative text are in the reader's language: a lesson writes its labels in English, and ``chart_words``
says them in Chinese.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import FixedFormatter

from nanoengine.viz import han
from nanoengine.viz.chart_words import in_chinese
from nanoengine.viz.frames import image, language
from nanoengine.viz.state import History
from nanoengine.viz.svg import OKABE_ITO
from nanoengine.viz.words import typeset

# Reproducible SVG with text as text: smaller, and sharp at any size.
_STYLE = {
    "svg.hashsalt": "nanoengine",
    "svg.fonttype": "none",
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#8b94a3",
    "axes.labelcolor": "#1d2330",
    "axes.titlesize": 12,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "xtick.color": "#59616f",
    "ytick.color": "#59616f",
    "grid.color": "#d5dae1",
    "hatch.linewidth": 0.6,
    "legend.frameon": False,
}
# Blue, orange, green, purple, vermillion, sky; the light yellow is left out: a line in it is hard to see.
COLOURS = tuple(OKABE_ITO[i] for i in (4, 0, 2, 3, 5, 1))
_LINES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 1)))
_MARKERS = "osD^vP"
_ALT = {
    "en": {
        "tokens": "Bar chart: tokens computed in each of {steps} steps, prefill below decode; the largest step has "
        "{most} of {budget} budget tokens, {prefill} prefill and {decode} decode tokens in all.",
        "blocks": "Step chart: KV blocks in use over {steps} steps; at most {most} of {total}, at the end {last}.",
        "bars": "Bar chart, {title}: {values}.",
        "lines": "Line chart, {title}: {values}.",
        "range": "{name} from {first} to {last}",
    },
    "zh": {
        "tokens": "柱状图:{steps} 步里每步算了多少 token,prefill 在下,decode 在上;"
        "最多的一步用了预算 {budget} 里的 {most},合计 prefill {prefill}、decode {decode}。",
        "blocks": "阶梯图:{steps} 步里在用的 KV 块数;最多 {most} 块(共 {total} 块),最后 {last} 块。",
        "bars": "柱状图({title}):{values}。",
        "lines": "折线图({title}):{values}。",
        "range": "{name} 从 {first} 到 {last}",
    },
}


@dataclass(frozen=True)
class Plot:
    """A matplotlib figure and the text that stands for it. Change ``fig`` before the cell shows it, if need be."""

    fig: Figure
    alt: str

    def svg(self) -> str:
        """The figure as SVG; the same figure gives the same text."""
        # Fractions of a hundredth are lost to no reader, and a third of the size is saved.
        return re.sub(r"(\d+\.\d{2})\d+", r"\1", han.draw(self.fig, self._save))

    def _save(self) -> str:
        buffer = io.StringIO()
        with matplotlib.rc_context(_STYLE):
            self.fig.savefig(buffer, format="svg", metadata={"Date": None}, bbox_inches="tight", pad_inches=0.12)
        return buffer.getvalue()

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict[str, str]:
        return {"text/html": f"<div>{image(self.svg(), self.alt)}</div>", "text/plain": self.alt}

    def __repr__(self) -> str:
        return self.alt


def figure_alt(fig: Figure, text: str) -> Plot:
    """Give a figure of your own its alternative text. ValueError for an empty one."""
    if not text.strip():
        raise ValueError("a figure needs an alternative text: say in a sentence what it shows")
    return Plot(fig, text)


def tokens_per_step(trace: Sequence[dict], *, title: str = "Tokens per step") -> Plot:
    """Prefill and decode tokens of each step, stacked, against the budget."""
    steps = History(trace).steps
    counts = {kind: [sum(r["tokens"] for r in step["rows"] if r["kind"] == kind) for step in steps]
              for kind in ("prefill", "decode")}  # fmt: skip
    budget = steps[0]["max_num_batched_tokens"]
    totals = [a + b for a, b in zip(*counts.values(), strict=True)]
    with matplotlib.rc_context(_STYLE):
        fig, ax = _axes(title, "step", "tokens")
        x = range(len(steps))
        ax.bar(x, counts["prefill"], color=COLOURS[0], label="prefill", width=0.85)
        ax.bar(x, counts["decode"], bottom=counts["prefill"], color=COLOURS[1], hatch="//", edgecolor="#ffffff",
               label="decode", width=0.85)  # fmt: skip
        if budget <= 4 * max(totals):
            ax.set_ylim(0, budget * 1.08)
            ax.axhline(budget, color="#1d2330", linestyle="--", linewidth=1, label=_label(f"budget {budget}"))
        _legend(ax)
    values = {"prefill": sum(counts["prefill"]), "decode": sum(counts["decode"]), "most": max(totals)}
    return figure_alt(fig, _alt("tokens", steps=len(steps), budget=budget, **values))


def blocks_in_use(trace: Sequence[dict] | Mapping[str, Sequence[dict]], *, title: str = "KV blocks in use") -> Plot:
    """KV blocks in use over the steps of a trace, or of several by name."""
    named = trace if isinstance(trace, Mapping) else {"in use": trace}
    texts = []
    with matplotlib.rc_context(_STYLE):
        fig, ax = _axes(title, "step", "blocks")
        for i, (name, run) in enumerate(named.items()):
            steps = History(run).steps
            used = [step["num_blocks"] - len(step["free"]) for step in steps]
            look = {"color": COLOURS[i % 6], "linestyle": _LINES[i % 6], "linewidth": 2}
            ax.step(range(len(used)), used, where="post", label=_label(name), **look)
            total = steps[0]["num_blocks"]
            text = _alt("blocks", steps=len(used), most=max(used), total=total, last=used[-1])
            texts.append(text if len(named) == 1 else f"{_label(name)}: {text}")
        ax.axhline(total, color="#1d2330", linestyle=":", linewidth=1, label=_label(f"pool {total}"))
        ax.set_ylim(0, total * 1.08)
        _legend(ax)
    return figure_alt(fig, " ".join(texts))


def bars(values: Mapping[str, float], *, unit: str, title: str, alt: str | None = None) -> Plot:
    """Horizontal bars in the given order, their values with the unit beside them."""
    if not values:
        raise ValueError("values is empty: a bar chart needs at least one bar")
    names, numbers = list(values), list(values.values())
    with matplotlib.rc_context(_STYLE):
        fig, ax = _axes(title, "", "", height=0.8 + 0.42 * len(names))  # each bar says its unit
        drawn = ax.barh(range(len(names)), numbers, color=COLOURS[0], height=0.62)
        ax.set_yticks(range(len(names)))
        ax.yaxis.set_major_formatter(FixedFormatter([_label(name) for name in names]))
        ax.invert_yaxis()
        ax.grid(False, axis="y")
        ax.grid(True, axis="x")
        ax.bar_label(drawn, [f"{_label(_number(n))} {_label(unit)}" for n in numbers], padding=4)
        ax.margins(x=0.18)
    listed = ", ".join(f"{_label(name)} {_number(n)} {_label(unit)}" for name, n in values.items())
    return figure_alt(fig, alt or _alt("bars", title=_label(title), values=listed))


def lines(
    x: Sequence[float],
    series: Mapping[str, Sequence[float]],
    *,
    xlabel: str,
    ylabel: str,
    title: str,
    logx: bool = False,
    logy: bool = False,
    from_zero: bool = False,
    alt: str | None = None,
) -> Plot:
    """Lines over one x axis, told apart by colour, dash and marker; units belong into the labels.

    from_zero: the y axis begins at 0, so that heights can be compared (shares, counts)."""
    if not series:
        raise ValueError("series is empty: a line chart needs at least one line")
    with matplotlib.rc_context(_STYLE):
        fig, ax = _axes(title, xlabel, ylabel)
        for i, (name, ys) in enumerate(series.items()):
            ax.plot(x, ys, label=_label(name), color=COLOURS[i % 6], linestyle=_LINES[i % 6], marker=_MARKERS[i % 6],
                    markersize=5, linewidth=2)  # fmt: skip
        if logx:
            ax.set_xscale("log", base=2)
            ax.set_xticks(x, [_number(value) for value in x], minor=False)
        if logy:
            ax.set_yscale("log")
        elif from_zero:
            ax.set_ylim(bottom=0)
        if len(series) > 1:
            _legend(ax)
    ranges = [_ALT[language()]["range"].format(name=_label(name), first=_number(ys[0]), last=_number(ys[-1]))
              for name, ys in series.items()]  # fmt: skip
    return figure_alt(fig, alt or _alt("lines", title=_label(title), values="; ".join(ranges)))


def _axes(title: str, xlabel: str, ylabel: str, height: float = 3.2):
    fig = Figure(figsize=(7.6, height))
    ax = fig.add_subplot()
    ax.set_title(_label(title))
    ax.set_xlabel(_label(xlabel))
    ax.set_ylabel(_label(ylabel))
    ax.set_axisbelow(True)
    ax.grid(True, axis="y")
    return fig, ax


def _legend(ax) -> None:
    ax.legend(loc="lower left", bbox_to_anchor=(0, -0.34), ncols=4, borderaxespad=0, handlelength=2.4)


def _alt(key: str, **values) -> str:
    return typeset(_ALT[language()][key].format(**values), language())


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) or abs(value) >= 100 else f"{value:.3g}"


def _label(text: str) -> str:
    """The text as the picture says it, in the reader's language."""
    text = str(text)
    said = in_chinese(text) if language() == "zh" else text
    strange = [c for c in said if not (c.isascii() or c in "×²³µ–·" or han.is_wide(c))]
    if strange:
        raise ValueError(f"{said!r}: {strange[0]!r} may be in no font that draws this; put it into the text or alt")
    return said
