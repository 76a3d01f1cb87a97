"""The panes around the memory: why, queues, batch. Each draws itself at (x, y) and returns its height in px."""

from __future__ import annotations

from nanoengine.viz.explain import explain
from nanoengine.viz.state import State
from nanoengine.viz.svg import BG, INK, LINE, MUTED, PANEL, STRONG, Canvas, colour, fit, text_width, wrap
from nanoengine.viz.words import LABELS, label

WHY_LINES = 3
CHIP = 22


def number_of(state: State, seq: int) -> int:
    """The sequence's place in order of arrival: it chooses the colour."""
    return list(state.letters).index(seq) if seq in state.letters else 0


def heading(c: Canvas, x: float, y: float, text: str, note: str = "", width: float = 0) -> None:
    """A pane's title, and beside it what it counts."""
    c.text(x, y, text, 12, bold=True)
    if note:
        start = x + text_width(text, 12, bold=True) + 10
        c.text(start, y, fit(note, x + width - start, 11), 11, fill=MUTED)


def header(c: Canvas, state: State, lang: str, x: float, y: float, width: float) -> float:
    step, last = state.record, state.extent.steps - 1
    big = label(lang, "step", step=state.index)
    c.text(x, y + 16, big, 17, bold=True)
    after = x + text_width(big, 17, bold=True) + 9
    of = label(lang, "of", last=last)
    c.text(after, y + 16, of, 12, fill=MUTED)
    known = step["policy"] in ("token_budget", "prefill_first")
    policy = label(lang, step["policy"] if known else "own_policy", policy=step["policy"])
    sizes = label(lang, "sizes", budget=f"{step['max_num_batched_tokens']:,}", blocks=f"{step['num_blocks']:,}",
                  size=step["block_size"])  # fmt: skip
    note = f"{policy} · {sizes}"
    if after + text_width(of) + 16 + text_width(note, 11) < x + width:
        c.text(x + width, y + 16, note, 11, fill=MUTED, anchor="end")
        return 30
    c.text(x, y + 34, fit(note, width, 11), 11, fill=MUTED)
    return 46


def why(c: Canvas, state: State, lang: str, x: float, y: float, width: float) -> float:
    """The sentences that fit; of the others their number."""
    limit = WHY_LINES if width >= 640 else WHY_LINES + 2
    height = limit * 19 + 14
    c.rect(x, y, width, height, PANEL, rx=6)
    c.rect(x, y, 3, height, "#0072B2", rx=1.5)
    sentences = explain(state, lang)
    lines: list[str] = []
    for i, text in enumerate(sentences):
        more = label(lang, "more", n=len(sentences) - i)
        new = wrap(text, width - 28, 13)
        if len(lines) + len(new) > limit and lines:
            if text_width(f"{lines[-1]} {more}", 13) <= width - 28:
                lines[-1] += LABELS[lang]["join"] + more
            break
        lines += new
    for i, line in enumerate(lines[:limit]):
        c.text(x + 14, y + 21 + i * 19, line, 13)
    return height


def queues(c: Canvas, state: State, lang: str, x: float, y: float, width: float) -> float:
    step = state.record
    ending = {event["seq"] for event in step["events"] if event["kind"] in ("finish", "abort")}
    columns = [
        ("waiting", step["waiting"]),
        ("running", step["running"]),
        ("finished", [seq for seq, _ in state.ended if seq not in ending]),
    ]
    between = 14.0
    left, height = x, 66
    for (key, seqs), share in zip(columns, (0.3, 0.42, 0.28), strict=True):
        w = (width - 2 * between) * share
        note = f"{len(seqs)} · {label(lang, 'progress')}"
        if key != "running" or not seqs or text_width(note, 11) + 70 > w:
            note = str(len(seqs))
        heading(c, left, y + 12, label(lang, key), note, w)
        c.rect(left, y + 22, w, height - 22, PANEL, rx=6)
        _chips(c, state, lang, key, seqs, left + 8, y + 33, w - 16)
        left += w + between
    return height


def _chips(c: Canvas, state: State, lang: str, key: str, seqs: list[int], x: float, y: float, width: float) -> None:
    if not seqs:
        c.text(x, y + 15, label(lang, "nobody"), 11, fill=MUTED)
        return
    notes = [_progress(state, seq) if key != "finished" else "" for seq in seqs]
    size = max((text_width(note, 11) + 6 for note in notes if note), default=0)
    if len(seqs) * (CHIP + 8 + size) > width:  # too many to say how far each is
        notes, size = [""] * len(seqs), 0
    each = CHIP + size + (8 if size else 5)
    room = max(1, int((width + 5) / each))
    shown = seqs if len(seqs) <= room else seqs[: max(1, int((width - 30) / each))]
    for seq, note in zip(shown, notes, strict=False):
        c.badge(x, y, CHIP, state.letters[seq], number_of(state, seq))
        if note:
            c.text(x + CHIP + 5, y + 15, note, 11, fill=MUTED)
        x += each
    if len(shown) < len(seqs):
        c.text(x + 1, y + 15, f"+{len(seqs) - len(shown)}", 11, fill=MUTED)


def _progress(state: State, seq: int) -> str:
    progress = state.record["sequences"].get(seq)
    return f"{progress['computed']}/{progress['total']}" if progress else ""


def batch(c: Canvas, state: State, lang: str, x: float, y: float, width: float) -> float:
    """The tokens of this step laid end to end against the budget."""
    step, budget = state.record, state.record["max_num_batched_tokens"]
    top, high = y + 22, 34
    if state.asking:
        heading(c, x, y + 12, label(lang, "batch"))
        c.rect(x, top, width, high + 18, "none", rx=6, stroke=STRONG, dash="5 4")
        question = label(lang, "batch_hidden", step=state.index)
        points = 13 if text_width(question, 13, bold=True) + 20 <= width else 12
        c.text(x + width / 2, top + 22, question, points, bold=True, anchor="middle")
        hint = label(lang, "batch_hint", budget=f"{budget:,}", free=len(step["free"]), seqs=step["max_num_seqs"])
        c.text(x + width / 2, top + 41, hint, 11, fill=MUTED, anchor="middle")
        return 74
    used = sum(row["tokens"] for row in step["rows"])
    widths, to_scale = _widths([row["tokens"] for row in step["rows"]], budget, width)
    note = label(lang, "batch_of", used=used, budget=f"{budget:,}")
    heading(c, x, y + 12, label(lang, "batch"), note if to_scale else f"{note} · {label(lang, 'batch_scale')}", width)
    c.rect(x, top, width, high, PANEL, rx=4, stroke=LINE)
    at = x
    for row, w in zip(step["rows"], widths, strict=False):
        _segment(c, state, lang, row, at, top, w, high)
        at += w
    if len(widths) < len(step["rows"]):
        c.text(at + 6, top + 21, label(lang, "batch_more", n=len(step["rows"]) - len(widths)), 11, fill=MUTED)
    if to_scale:
        if budget <= 64:
            for i in range(1, budget):
                c.line(x + width * i / budget, top + high - 4, x + width * i / budget, top + high, STRONG)
        rest = label(lang, "batch_empty", n=budget - used)
        if used < budget and text_width(rest, 11) + 12 < x + width - at:
            c.text((at + x + width) / 2, top + 21, rest, 11, fill=MUTED, anchor="middle")
    c.rect(x, top + high + 5, width, 4, LINE, rx=2)
    c.rect(x, top + high + 5, max(2.0, width * used / budget) if used else 0, 4, MUTED, rx=2)
    key(c, x, top + high + 26, [(label(lang, "prefill"), "prefill"), (label(lang, "decode"), "decode")], width)
    return 88


def _widths(tokens: list[int], budget: int, width: float) -> tuple[list[float], bool]:
    """px of each row: true to the budget where that leaves room for a letter, else just room for it."""
    if all(n * width / budget >= 18 for n in tokens):
        return [n * width / budget for n in tokens], True
    each = min(64.0, max(24.0, width / max(1, len(tokens))))
    fitting = int(width / each) if len(tokens) * each <= width + 0.5 else int((width - 76) / each)
    return [each] * min(len(tokens), fitting), False


def _segment(c: Canvas, state: State, lang: str, row: dict, x: float, y: float, w: float, h: float) -> None:
    phase_box(c, row["kind"], x + 0.5, y + 0.5, w - 1, h - 1, number_of(state, row["seq"]))
    name, tokens = state.letters[row["seq"]], f"{row['tokens']:,}"
    full, short = f"{label(lang, row['kind'])} {tokens}", tokens  # not "D 1": that would read as request D
    middle = x + w / 2
    if text_width(full, 11) + 8 <= w:
        c.text(middle, y + 15, name, 12, bold=True, anchor="middle")
        c.text(middle, y + 28, full, 11, anchor="middle")
    elif text_width(short, 11) + 2 <= w:
        c.text(middle, y + 15, name, 12, bold=True, anchor="middle")
        c.text(middle, y + 28, short, 11, anchor="middle")
    else:
        c.text(middle, y + 21, name, 12 if len(name) < 2 else 11, bold=True, anchor="middle")


def phase_box(c: Canvas, phase: str, x: float, y: float, w: float, h: float, number: int | None) -> None:
    """prefill: full colour; decode: pale and dotted; preempted: crossed, no colour. Labels say it as well."""
    hue = STRONG if number is None else colour(number)
    if phase == "prefill":
        c.rect(x, y, w, h, hue, rx=3, stroke=hue, opacity=0.6)
    elif phase == "decode":
        c.rect(x, y, w, h, hue, rx=3, stroke=hue, opacity=0.2)
        c.texture(x, y, w, h, "dots", rx=3)
    elif phase == "preempted":
        c.rect(x, y, w, h, BG, rx=3, stroke=STRONG)
        c.texture(x, y, w, h, "cross", rx=3)
    elif phase == "waiting":
        c.rect(x, y + h / 2 - 3, w, 6, "none", rx=3, stroke=STRONG, dash="3 2")
    else:  # idle
        c.rect(x, y + h / 2 - 1.5, w, 3, hue, rx=1.5)


def key(c: Canvas, x: float, y: float, entries: list[tuple[str, str]], width: float) -> float:
    """One line that says what textures mean; wraps where it must. Returns the height it took."""
    left, first = x, y
    for text, sign in entries:
        w = (20 if sign else 0) + text_width(text, 11) + 16
        if left + w > x + width + 16 and left > x:
            left, y = x, y + 18
        if sign:
            _sign(c, sign, left, y - 10)
        c.text(left + (20 if sign else 0), y, text, 11, fill=MUTED)
        left += w
    return y - first + 18


def _sign(c: Canvas, sign: str, x: float, y: float) -> None:
    if sign in ("prefill", "decode", "preempted", "waiting", "idle"):
        phase_box(c, sign, x, y + 1, 14, 10, None)
    elif sign in ("hit", "preempt", "finish"):
        mark(c, sign, x + 7, y + 6)
    elif sign == "cached":
        c.rect(x + 0.5, y + 0.5, 13, 11, BG, rx=2, stroke=INK, width=1.5, dash="3 2")
    elif sign == "free":
        c.rect(x + 0.5, y + 0.5, 13, 11, PANEL, rx=2, stroke=LINE)
    else:  # shared, used, now
        c.rect(x + 0.5, y + 0.5, 13, 11, STRONG, rx=2, stroke=STRONG, opacity=0.28)
        if sign == "shared":
            c.texture(x + 0.5, y + 0.5, 13, 11, "hatch", rx=2)
        if sign == "now":
            c.texture(x + 0.5, y + 0.5, 13, 11, "dots", rx=2)


def mark(c: Canvas, kind: str, x: float, y: float) -> None:
    """A sign on the timeline: diamond for a hit, cross for a preemption, square for the end."""
    if kind == "hit":
        c.path(f"M{x:.1f} {y - 5:.1f}l5 5l-5 5l-5-5z", fill=BG, stroke=INK, width=1.5)
    elif kind == "preempt":
        c.path(f"M{x - 4:.1f} {y - 4:.1f}l8 8m0-8l-8 8", stroke=INK, width=2)
    else:
        c.rect(x - 4, y - 4, 8, 8, INK, rx=1.5)
