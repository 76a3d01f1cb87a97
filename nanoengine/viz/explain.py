"""Why a step is as it is, in sentences; and the whole state in one paragraph (the text form of a picture)."""

from __future__ import annotations

from collections import Counter
from itertools import groupby

from nanoengine.viz.state import State
from nanoengine.viz.words import LABELS, label, listing, sentence

# Most telling first.
_INTEREST = ("preempt", "hit", "abort", "finish", "admit", "chunk", "blocked", "arrive")


def explain(state: State, lang: str = "en") -> list[str]:
    """Sentences that say why this step is as it is, the most telling first; at least one."""
    if state.asking:
        return [_asking(state, lang)]
    found = [(event["kind"], key, values) for event in state.record["events"] for key, values in [_event(state, event)]]
    found += _chunks(state)
    blocked = _blocked(state)
    if blocked is not None:
        found.append(("blocked", *blocked))
    if not any(kind not in ("blocked", "arrive", "chunk") for kind, _, _ in found):
        found.insert(0, ("admit", *_steady(state)))
    found.sort(key=lambda item: _INTEREST.index(item[0]))
    return _merged(found, lang)


def _event(state: State, event: dict) -> tuple[str, dict]:
    """The sentence's key and values; ValueError for a kind that has none."""
    kind, values = event["kind"], {**event, "who": [event["seq"]]}
    if kind == "hit":
        kind = "hit_own" if event["own"] else "hit_others"
    elif kind == "preempt":
        kind = "preempt_self" if event["needed_by"] == event["seq"] else "preempt"
        values["needed_by"] = state.letters[event["needed_by"]]
    elif kind == "finish":
        kind = f"finish_{event['reason']}"
    values["who"] = [state.letters[event["seq"]]]
    return kind, values


def _chunks(state: State) -> list[tuple[str, str, dict]]:
    found = []
    for row in state.record["rows"]:
        wanted = state.record["sequences"][row["seq"]]["total"] - row["start"]
        if row["tokens"] < wanted:
            values = {"who": [state.letters[row["seq"]]], "tokens": row["tokens"], "wanted": wanted}
            found.append(("chunk", "chunk", values))
    return found


def _blocked(state: State) -> tuple[str, dict] | None:
    """Why the first in the waiting queue was not admitted, from what the step shows."""
    step = state.record
    if not step["waiting"]:
        return None
    head, free = step["waiting"][0], len(step["free"])
    need = -(-step["sequences"].get(head, {"total": 1})["total"] // step["block_size"])
    spent = sum(row["tokens"] for row in step["rows"])
    values = {"who": [state.letters[head]], "need": need, "free": free, "slots": step["max_num_seqs"],
              "budget": step["max_num_batched_tokens"]}  # fmt: skip
    if any(event["kind"] == "preempt" for event in step["events"]):
        return "blocked_preempt", values
    if len(step["running"]) >= step["max_num_seqs"]:
        return "blocked_slots", values
    if spent >= step["max_num_batched_tokens"]:
        return "blocked_budget", values
    return ("blocked_blocks" if need > free else "blocked_policy"), values


def _steady(state: State) -> tuple[str, dict]:
    rows = state.record["rows"]
    kinds = Counter(row["kind"] for row in rows)
    prefill = sum(row["tokens"] for row in rows if row["kind"] == "prefill")
    values = {"rows": len(rows), "running": len(state.record["running"]), "tokens": prefill, "prefill": prefill,
              "decode": kinds["decode"], "who": []}  # fmt: skip
    if not kinds["prefill"]:
        return ("steady_decode" if len(rows) == len(state.record["running"]) else "steady_part"), values
    return ("steady_mixed" if kinds["decode"] else "steady_prefill"), values


def _asking(state: State, lang: str) -> str:
    names = {key: listing(lang, [state.letters[seq] for seq in state.record[key]]) for key in ("waiting", "running")}
    return sentence(lang, "asking", free=len(state.record["free"]), **names)


def _merged(found: list[tuple[str, str, dict]], lang: str) -> list[str]:
    """Neighbours that arrive, or are admitted, together share a sentence."""
    sentences = []
    for key, group in groupby(found, key=lambda item: item[1]):
        items = [values for _, _, values in group]
        if key in ("arrive", "admit") and len(items) > 1:
            who = [name for values in items for name in values["who"]]
            blocks = sum(values.get("blocks", 0) for values in items)
            sentences.append(sentence(lang, f"{key}_many", who=listing(lang, who), blocks=blocks))
        else:
            sentences += [sentence(lang, key, **{**v, "who": listing(lang, v["who"])}) for v in items]
    return sentences


def title(state: State, lang: str) -> str:
    return label(lang, "title_asking" if state.asking else "title", step=state.index, last=state.extent.steps - 1)


def describe(state: State, lang: str = "en") -> str:
    """The state in one paragraph: what a screen reader says, and what stands where no picture can."""
    step, names, marks = state.record, state.letters, LABELS[lang]
    facts = [(key, listing(lang, [names[seq] for seq in step[key]])) for key in ("waiting", "running")]
    if state.ended:
        facts.append(("finished", listing(lang, [names[seq] for seq, _ in state.ended])))
    if step["rows"]:
        rows = [f"{names[row['seq']]} {label(lang, row['kind'])} {row['tokens']}" for row in step["rows"]]
        used = sum(row["tokens"] for row in step["rows"])
        total = label(lang, "batch_of", used=used, budget=step["max_num_batched_tokens"])
        facts.append(("batch", listing(lang, rows) + marks["open"] + total + marks["close"]))
    facts.append(("pool", pool_counts(state, lang)))
    said = [title(state, lang) + marks["stop"], *(text + marks["join"] for text in explain(state, lang))]
    said += [label(lang, key) + marks["colon"] + text + marks["stop"] for key, text in facts]
    return "".join(said).strip()


def pool_counts(state: State, lang: str) -> str:
    step = state.record
    cached, free = len(step["cached_free"]), len(step["free"])
    return label(lang, "pool_counts", used=step["num_blocks"] - free, cached=cached, free=free - cached)
