"""The timeline: a line per request over the steps so far."""

from __future__ import annotations

from nanoengine.viz.panes import heading, key, mark, number_of, phase_box
from nanoengine.viz.state import Run, State
from nanoengine.viz.svg import INK, LINE, MUTED, Canvas, text_width
from nanoengine.viz.words import label

MAX_LINES = 12
ROW = 22
_SIGNS = ("waiting", "prefill", "decode", "idle", "preempted")


def lines_shown(state: State) -> list[int]:
    """All requests where they fit; else those running, then waiting, then the last to end, in order of arrival."""
    if state.extent.sequences <= MAX_LINES:
        return list(state.letters)
    step = state.record
    ranked = [*step["running"], *step["waiting"], *(seq for seq, _ in reversed(state.ended))]
    return sorted(dict.fromkeys(ranked[:MAX_LINES]))


def gantt(c: Canvas, state: State, lang: str, x: float, y: float, width: float) -> float:
    """Step numbers run over the whole trace from the start, so that nothing moves while one steps through it."""
    heading(c, x, y + 12, label(lang, "gantt"))
    seqs = lines_shown(state)
    rows = min(state.extent.sequences, MAX_LINES)
    left, top = x + 30, y + 22
    each = (width - 34) / state.extent.axis
    bottom = top + rows * ROW
    for tick in _ticks(state.extent.axis, width):
        c.line(left + tick * each, top, left + tick * each, bottom + 3, LINE)
        c.text(left + (tick + 0.5) * each if each > 16 else left + tick * each, bottom + 16, str(tick), 11,
               fill=MUTED, anchor="middle")  # fmt: skip
    for i, seq in enumerate(seqs):
        _line(c, state, lang, seq, x, left, top + i * ROW, each)
    cursor = left + (state.index if state.asking else state.index + 1) * each
    c.line(cursor, top - 4, cursor, bottom + 3, INK, width=1.5)
    entries = [(label(lang, "key_waiting" if sign == "waiting" else sign), sign) for sign in _SIGNS]
    entries += [(label(lang, f"key_{sign}"), sign) for sign in ("hit", "preempt", "finish")]
    after = bottom + 34 + key(c, x, bottom + 36, entries, width) - 14
    if state.extent.sequences > MAX_LINES:
        hidden = set(state.letters) - set(seqs)
        done = sum(seq in hidden for seq, _ in state.ended)
        active = sum(seq in hidden for seq in [*state.record["running"], *state.record["waiting"]])
        text = label(lang, "gantt_more", n=active + done, active=active, done=done)
        c.text(x, after + 16, text, 11, fill=MUTED)
        after += 18
    return after + 4 - y


def _line(c: Canvas, state: State, lang: str, seq: int, x: float, left: float, y: float, each: float) -> None:
    number = number_of(state, seq)
    c.badge(x, y + 1, 20, state.letters[seq], number)
    gap = 1.0 if each >= 4 else 0.0
    for run in state.runs[seq]:
        start, w = left + run.first * each, (run.last - run.first + 1) * each - gap
        phase_box(c, run.phase, start + gap / 2, y + 3, max(w, 0.5), ROW - 7, number)
        marked = each >= 12 and any(kind in ("hit", "preempt") and step == run.first for step, kind in state.marks[seq])
        room = 0.0 if not marked else 12.0 if run.phase != "preempted" else each / 2 + 8
        _name(c, lang, run, start + room, w - room, y)
    for step, kind in state.marks[seq]:
        # A hit stands where the step begins, an end where it is over.
        at = {"hit": step, "preempt": step + 0.5}.get(kind, step + 1)
        nudge = {"hit": 6.0, "preempt": 0.0}.get(kind, -6.0) if each >= 12 else 0.0
        mark(c, kind if kind != "abort" else "finish", left + at * each + nudge, y + ROW / 2 - 0.5)


def _name(c: Canvas, lang: str, run: Run, start: float, w: float, y: float) -> None:
    if run.phase in ("prefill", "decode", "preempted"):
        full = label(lang, run.phase)
        if text_width(full, 11) + 14 <= w:
            c.text(start + w / 2, y + 14.5, full, 11, anchor="middle")
        elif run.phase != "preempted" and w >= 18:
            c.text(start + w / 2, y + 14.5, run.phase[0].upper(), 11, anchor="middle")


def _ticks(steps: int, width: float) -> range:
    most = max(2, int(width / 44))
    for gap in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000):
        if steps <= gap * most:
            return range(0, steps, gap)
    return range(0, steps, -(-steps // most))
