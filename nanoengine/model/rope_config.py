"""Which rotary embedding a config.json asks for, read as transformers 5 reads it. Needs no
torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nanoengine.model.fields import Fields, warn

_NUMBERS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
_LAYERS = "full_attention"  # the only type of layer that is served
_DEFAULT_THETA = 10000.0  # transformers' own


@dataclass(slots=True, frozen=True)
class Rope:
    """theta: the base. scaling: see ModelConfig.rope_scaling."""

    theta: float
    scaling: dict[str, Any] | None


def read_rope(fields: Fields, model_type: str) -> Rope:
    """From the top level of a config.json.

    ``rope_scaling`` (the older name) is read if it is there, else ``rope_parameters``. Inside,
    ``rope_type`` counts, then ``type``, then "default". ``rope_theta`` inside counts before that at
    the top level, and that before 10000. Parameters for each type of layer: those of
    "full_attention". A key that the type does not read is named in a warning.

    Errors: ValueError naming file and field of what is not supported, missing, or no positive
    finite number.
    """
    rope = _per_layer_type(
        fields, fields.group("rope_scaling") or fields.group("rope_parameters"), model_type
    )
    at_top = fields.values.get("rope_theta", _DEFAULT_THETA)
    if rope is None:
        rope = Fields({}, fields.source)
    theta = rope.number("rope_theta") if "rope_theta" in rope.values else None
    if theta is None:
        theta = fields.number("rope_theta", _DEFAULT_THETA)
    elif at_top not in (None, _DEFAULT_THETA, theta):
        warn(
            f"{fields.source}: {rope.prefix}rope_theta={theta:g} is used, not the "
            f"rope_theta={at_top} of the top level"
        )
    kind = rope.values.get("rope_type", rope.values.get("type", "default"))
    if not isinstance(kind, str) or kind not in _NUMBERS:
        raise ValueError(
            f"{fields.source}: rope type {kind!r:.100} is not supported, only {', '.join(_NUMBERS)}"
        )
    for each in (fields, rope):
        if each.number("partial_rotary_factor", None) not in (None, 1.0):
            raise each.error(
                "partial_rotary_factor",
                f"{each.values['partial_rotary_factor']} is not supported, only 1",
            )
    return Rope(theta, _scaling(fields, rope, kind))


def _per_layer_type(fields: Fields, rope: Fields | None, model_type: str) -> Fields | None:
    groups = (
        []
        if rope is None
        else [name for name, value in rope.values.items() if isinstance(value, Mapping)]
    )
    if not groups:
        return rope
    if _LAYERS not in groups or set(rope.values) != set(groups) or model_type == "llama":
        raise rope.error(
            groups[0],
            f"is not supported: one set of numbers for all layers is read, or '{_LAYERS}' "
            "of a Qwen model with nothing but types of layers beside it",
        )
    return rope.group(_LAYERS)


def _scaling(fields: Fields, rope: Fields, kind: str) -> dict[str, Any] | None:
    known = {*_NUMBERS[kind], "rope_type", "type", "rope_theta", "partial_rotary_factor"}
    unread = [
        name for name, value in rope.values.items() if name not in known and value is not None
    ]
    if unread:
        names = ", ".join(rope.prefix + name for name in unread)
        warn(f"{fields.source}: rope type {kind!r} does not read {names}")
    if kind == "default":
        return None
    numbers: dict[str, Any] = {"rope_type": kind}
    for name in _NUMBERS[kind]:
        owner = rope
        if (
            name == "original_max_position_embeddings"
        ):  # it counts at the top level first; else it is the model's own
            owner = next((each for each in (fields, rope) if name in each.values), rope)
            if name not in owner.values:
                numbers[name] = fields.integer("max_position_embeddings")
                continue
        numbers[name] = owner.number(name)
    if kind == "llama3" and numbers["high_freq_factor"] <= numbers["low_freq_factor"]:
        low = numbers["low_freq_factor"]
        raise rope.error(
            "high_freq_factor",
            f"must be more than low_freq_factor={low:g}, got {numbers['high_freq_factor']:g}",
        )
    return numbers
