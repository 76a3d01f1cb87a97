"""A trace record that comes from a file or another process: is it one? ``trace`` says what its fields mean."""

from __future__ import annotations

from typing import Any

_COUNTS = ("step", "max_num_seqs", "max_num_batched_tokens", "num_blocks", "block_size")
_ID_LISTS = ("waiting", "running", "ref_counts", "free", "cached_free", "slot_mapping")
_ROW = ("seq", "start", "tokens", "context")
_SEQUENCE = ("prompt", "total", "computed", "cached")
# What an event holds beside its kind, its sequence and its reason in words.
_EVENTS = {
    "arrive": ("prompt",),
    "admit": ("blocks",),
    "hit": ("tokens",),
    "preempt": ("needed_by", "blocks", "computed"),
    "finish": ("generated",),
    "abort": (),
}


def from_json(step: dict[str, Any]) -> dict[str, Any]:
    """The record with its ids as ints, as ``Trace`` has it; it must have all fields.

    Raises:
        ValueError: a field holds something else than it should; the message names it.
    """
    for name in ("sequences", "block_tables"):
        _need(isinstance(step[name], dict) and all(str(key).isdecimal() for key in step[name]), name, "ids as keys")
        step[name] = {int(key): value for key, value in step[name].items()}
    for name in _COUNTS:
        _need(_is_count(step[name]), name, "a whole number")
    _need(isinstance(step["policy"], str), "policy", "a name")
    for name in _ID_LISTS:
        _need(_is_counts(step[name], least=-1 if name == "slot_mapping" else 0), name, "a list of whole numbers")
    _need(len(step["ref_counts"]) == step["num_blocks"] > 0, "ref_counts", "a number for each of num_blocks")
    for name in ("free", "cached_free"):
        _need(all(block < step["num_blocks"] for block in step[name]), name, "blocks below num_blocks")
    for seq, entry in step["sequences"].items():
        _need(_has_counts(entry, _SEQUENCE), f"sequences[{seq}]", ", ".join(_SEQUENCE))
    for seq, table in step["block_tables"].items():
        whole = _is_counts(table) and all(block < step["num_blocks"] for block in table)
        _need(whole, f"block_tables[{seq}]", "blocks below num_blocks")
    _check_lists(step)
    seconds = step["seconds"]
    times = isinstance(seconds, dict) and all(type(seconds.get(name)) in (int, float) for name in ("at", "total"))
    _need(times, "seconds", "at and total")
    return step


def _check_lists(step: dict[str, Any]) -> None:
    for name in ("rows", "events"):
        _need(isinstance(step[name], list), name, "a list")
    known = step["sequences"]
    for i, row in enumerate(step["rows"]):
        right = _has_counts(row, _ROW) and row.get("kind") in ("prefill", "decode") and _is_counts(row.get("new"))
        _need(right, f"rows[{i}]", f"kind, new, {', '.join(_ROW)}")
        _need(row["seq"] in known, f"rows[{i}]", "a sequence that is in sequences")
    for name in ("waiting", "running"):
        _need(all(seq in known for seq in step[name]), name, "sequences that are in sequences")
    for i, event in enumerate(step["events"]):
        kind = event.get("kind") if isinstance(event, dict) else None
        needed = _EVENTS.get(kind) if isinstance(kind, str) else None
        _need(needed is not None and _has_counts(event, ("seq", *needed)), f"events[{i}]", "a kind and its numbers")
        _need(kind != "hit" or isinstance(event.get("own"), bool), f"events[{i}]", "own as true or false")
        _need(kind != "finish" or event.get("reason") in ("stop", "length"), f"events[{i}]", "reason stop or length")


def _need(right: bool, name: str, what: str) -> None:
    if not right:
        raise ValueError(f"{name} must hold {what}")


def _is_count(value: Any, least: int = 0) -> bool:
    return type(value) is int and value >= least


def _is_counts(value: Any, least: int = 0) -> bool:
    return isinstance(value, list) and all(_is_count(item, least) for item in value)


def _has_counts(value: Any, names: tuple[str, ...]) -> bool:
    return isinstance(value, dict) and all(_is_count(value.get(name)) for name in names)
