"""The memory's panes: the KV pool with a cell a block, and one sequence's block table."""

from __future__ import annotations

from dataclasses import dataclass

from nanoengine.viz.explain import pool_counts
from nanoengine.viz.panes import heading, key, number_of
from nanoengine.viz.state import State
from nanoengine.viz.svg import BG, INK, LINE, MUTED, PANEL, STRONG, Canvas, colour, text_width
from nanoengine.viz.words import label

# A cell a block up to here; beyond it shares of a bar.
MAX_CELLS = 1024
TABLE_ROWS = 8


@dataclass(frozen=True, slots=True)
class Grid:
    """How the pool is drawn. detail: "full" (block id, owners, ref count), "letter" (letter and a ref count above
    one) or "runs" (neighbours of one owner share a letter)."""

    cols: int
    rows: int
    w: float
    h: float
    detail: str


def grid(num_blocks: int, width: float) -> Grid:
    for detail, least, h, gap in (("full", 52, 44, 4), ("letter", 26, 26, 3), ("runs", 12.5, 14, 1.5)):
        most = max(1, int((width + gap) / (least + gap)))
        rows = -(-num_blocks // most)
        if rows <= {"full": 3, "letter": 6}.get(detail, 10**6):
            cols = -(-num_blocks // rows)
            if detail == "runs":
                cols = most
            w = min((width + gap) / cols - gap, least * 1.5)
            return Grid(cols, -(-num_blocks // cols), w + gap, h + gap, detail)
    raise AssertionError("the last detail takes any number of blocks")


def owners(state: State) -> dict[int, list[int]]:
    """Block -> sequences that hold it, in order of arrival."""
    held: dict[int, list[int]] = {}
    for seq, table in sorted(state.record["block_tables"].items()):
        for block in table:
            held.setdefault(block, []).append(seq)
    return held


def pool(c: Canvas, state: State, lang: str, x: float, y: float, width: float) -> float:
    step = state.record
    heading(c, x, y + 12, label(lang, "pool"), pool_counts(state, lang), width)
    top = y + 24
    if step["num_blocks"] > MAX_CELLS:
        return _shares(c, state, lang, x, top, width) + 24
    g = grid(step["num_blocks"], width)
    held, cached = owners(state), set(step["cached_free"])
    if g.detail == "runs":
        _runs(c, state, g, held, cached, x, top)
    else:
        for block in range(step["num_blocks"]):
            left, upper = x + block % g.cols * g.w, top + block // g.cols * g.h
            _cell(c, state, g, block, held.get(block, []), block in cached, left, upper)
    bottom = top + g.rows * g.h
    number = {"full": "key_ref", "letter": "key_ref_some", "runs": "pool_runs"}[g.detail]
    whose = "key_cached" if g.detail == "runs" else "key_cached_whose"
    named = (("key_used", "used"), ("key_shared", "shared"), (whose, "cached"), ("key_free", "free"))
    entries = [(label(lang, name), sign) for name, sign in named]
    return bottom + 12 + key(c, x, bottom + 12, [*entries, (label(lang, number), "")], width) - 12 - y


def _cell(c: Canvas, state: State, g: Grid, block: int, held: list[int], cached: bool, x: float, y: float) -> None:
    gap = 4 if g.detail == "full" else 3
    w, h = g.w - gap, g.h - gap
    _box(c, state, held, cached, x + 0.5, y + 0.5, w - 1, h - 1)
    names = [state.letters[seq] for seq in held]
    whose = state.letters[state.wrote[block]] if cached and block in state.wrote else ""
    if g.detail == "full":
        c.text(x + 5, y + 13, str(block), 11, fill=MUTED)
        if held:
            c.text(x + w - 5, y + 13, str(state.record["ref_counts"][block]), 11, anchor="end")
            text = "".join(names) if len(names) < 4 else f"{names[0]}+{len(names) - 1}"
            c.text(x + w / 2, y + 33, text, 15 if len(text) < 4 else 12, bold=True, anchor="middle")
        elif whose:
            c.text(x + w / 2, y + 32, whose, 13, fill=MUTED, anchor="middle")
    elif held:
        many = len(held) > 1
        middle, points = x + w / 2 - (5 if many else 0), 12 if len(names[0]) < 2 else 11
        c.text(middle, y + 17, names[0], points, bold=True, anchor="middle")
        if many:
            c.text(x + w - 3, y + 12, str(len(held)), 11, anchor="end")
    elif whose:
        c.text(x + w / 2, y + 17, whose, 11, fill=MUTED, anchor="middle")


def _box(c: Canvas, state: State, held: list[int], cached: bool, x, y, w, h, rx=4.0) -> None:
    if not held:
        if cached:
            c.rect(x + 0.5, y + 0.5, w - 1, h - 1, BG, rx=rx, stroke=INK, width=1.5, dash="4 3")
        else:
            c.rect(x, y, w, h, PANEL, rx=rx, stroke=LINE)
        return
    hue = colour(number_of(state, held[0]))
    c.rect(x, y, w, h, hue, rx=rx, stroke=hue, opacity=0.28)
    if len(held) > 1:
        c.texture(x, y, w, h, "hatch", rx=rx)


def _runs(c: Canvas, state: State, g: Grid, held: dict, cached: set[int], x: float, top: float) -> None:
    """Neighbours of one kind in one row become one bar."""
    total, start = state.record["num_blocks"], 0

    def kind(block: int) -> tuple:
        return tuple(held.get(block, ())), block in cached

    while start < total:
        end = start + 1
        while end < total and end % g.cols and kind(end) == kind(start):
            end += 1
        left, y, w = x + start % g.cols * g.w, top + start // g.cols * g.h, (end - start) * g.w - 1.5
        seqs = held.get(start, [])
        _box(c, state, seqs, start in cached, left + 0.5, y + 0.5, w - 1, g.h - 2.5, rx=2)
        if seqs and text_width(state.letters[seqs[0]], 11, bold=True) <= w:
            c.text(left + w / 2, y + 11.5, state.letters[seqs[0]], 11, bold=True, anchor="middle")
        start = end


def _shares(c: Canvas, state: State, lang: str, x: float, y: float, width: float) -> float:
    """A pool too large for cells: one bar, as long as the pool, shared blocks counted once."""
    step, at = state.record, x
    total = step["num_blocks"]
    mine: dict[int, int] = {}
    for seqs in owners(state).values():
        mine[seqs[0]] = mine.get(seqs[0], 0) + 1
    for seq, count in sorted(mine.items()):
        w = width * count / total
        _box(c, state, [seq], False, at, y + 0.5, w, 27, rx=0)
        if w >= 16:
            c.text(at + w / 2, y + 18, state.letters[seq], 12, bold=True, anchor="middle")
        at += w
    cached = width * len(step["cached_free"]) / total
    _box(c, state, [], True, at, y + 0.5, max(cached, 1.0), 27, rx=0) if cached else None
    rest = x + width - at - cached
    if rest > 1:
        _box(c, state, [], False, at + cached, y + 0.5, rest, 27, rx=0)
    entries = [(label(lang, f"key_{sign}"), sign) for sign in ("used", "cached", "free")]
    entries.append((label(lang, "pool_coarse", blocks=f"{total:,}"), ""))
    return 40 + key(c, x, y + 46, entries, width)


def table(c: Canvas, state: State, lang: str, x: float, y: float, width: float, seq: int | None) -> float:
    """Logical block -> slots -> physical block of one sequence; as high in every step."""
    step = state.record
    rows = min(state.extent.table, TABLE_ROWS)
    height = 46 + rows * 24 + 18
    if seq is None:
        return height
    name, blocks = state.letters[seq], step["block_tables"].get(seq, [])
    heading(c, x, y + 12, label(lang, "table", who=name))
    if not blocks:
        c.text(x, y + 34, label(lang, "table_none", who=name), 11, fill=MUTED)
        return height
    middle, right = x + 58, x + width - 52
    for left, column in ((x, "logical"), (middle, "slots"), (right, "physical")):
        c.text(left, y + 32, label(lang, column), 11, fill=MUTED)
    at = y + 40
    for i in _rows_shown(len(blocks)):
        if i is None:
            c.text(middle, at + 15, label(lang, "rows_more", n=len(blocks) - TABLE_ROWS + 1), 11, fill=MUTED)
        else:
            _row(c, state, seq, i, blocks[i], x, at, middle, right)
        at += 24
    signs = (("key_computed", "used"), ("key_now", "now"), ("key_room", "free"))
    key(c, x, y + height - 6, [(label(lang, name), sign) for name, sign in signs], width)
    return height


def _rows_shown(count: int) -> list[int | None]:
    """Head and tail where not all rows fit; None stands for what is left out between them."""
    if count <= TABLE_ROWS:
        return list(range(count))
    return [*range(4), None, *range(count - 3, count)]


def _row(c: Canvas, state: State, seq: int, i: int, block: int, x: float, y: float, middle: float, right: float):
    step, size = state.record, state.record["block_size"]
    computed = step["sequences"].get(seq, {"computed": 0})["computed"]
    now = computed + sum(row["tokens"] for row in step["rows"] if row["seq"] == seq)
    c.text(x + 14, y + 15, str(i), 12, anchor="middle")
    room = right - middle - 40
    end = middle + _slots(c, number_of(state, seq), size, computed - i * size, now - i * size, middle, y + 3, room) + 8
    c.path(f"M{end:.1f} {y + 11:.1f}H{right - 7:.1f}m-4-4l4 4l-4 4", stroke=STRONG, width=1.5)
    shared = step["ref_counts"][block] > 1
    hue = colour(number_of(state, seq))
    c.rect(right + 0.5, y + 1.5, 40, 19, hue, rx=4, stroke=hue, opacity=0.28)
    if shared:
        c.texture(right + 0.5, y + 1.5, 40, 19, "hatch", rx=4)
    c.text(right + 20, y + 15, str(block), 12, bold=True, anchor="middle")


def _slots(c: Canvas, number: int, size: int, done: int, now: int, x: float, y: float, width: float) -> float:
    """A square a slot where they are few, else a bar filled in proportion. Returns the px it took."""
    hue = colour(number)
    if size <= 8:
        w = min(16.0, width / size - 2)
        for slot in range(size):
            left = x + slot * (w + 2)
            if slot < done:
                c.rect(left + 0.5, y + 0.5, w - 1, 15, hue, rx=2, stroke=hue, opacity=0.4)
            elif slot < now:
                c.rect(left + 0.5, y + 0.5, w - 1, 15, hue, rx=2, stroke=hue, opacity=0.2)
                c.texture(left + 0.5, y + 0.5, w - 1, 15, "dots", rx=2)
            else:
                c.rect(left + 0.5, y + 0.5, w - 1, 15, PANEL, rx=2, stroke=LINE)
        return size * (w + 2) - 2
    done, now = (max(0, min(size, value)) for value in (done, now))
    c.rect(x + 0.5, y + 0.5, width - 1, 15, PANEL, rx=2, stroke=LINE)
    if done:
        c.rect(x + 0.5, y + 0.5, (width - 1) * done / size, 15, hue, rx=2, stroke=hue, opacity=0.4)
    if now > done:
        start = x + 0.5 + (width - 1) * done / size
        c.rect(start, y + 0.5, (width - 1) * (now - done) / size, 15, hue, rx=2, stroke=hue, opacity=0.2)
        c.texture(start, y + 0.5, (width - 1) * (now - done) / size, 15, "dots", rx=2)
    return width
