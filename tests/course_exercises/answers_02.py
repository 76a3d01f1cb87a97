"""Answers to the exercises of lesson 02 as learners might write them: right in several shapes, wrong in likely ways."""

from __future__ import annotations

import math

import numpy as np


def _move(by=lambda old, new, i: new[i] - old[i], *, pairs="neighbours", power=2.0):
    """move_keys with one thing done differently, number by number."""

    def move_keys(keys, old, new, theta):
        out, d = keys.copy(), keys.shape[-1]
        for i in range(len(keys)):
            for j in range(d // 2):
                a, b = (2 * j, 2 * j + 1) if pairs == "neighbours" else (j, j + d // 2)
                angle = by(old, new, i) * theta ** (-power * j / d)
                out[i, :, a] = keys[i, :, a] * math.cos(angle) - keys[i, :, b] * math.sin(angle)
                out[i, :, b] = keys[i, :, b] * math.cos(angle) + keys[i, :, a] * math.sin(angle)
        return out

    return move_keys


def back_and_forth(keys, old, new, theta):
    """Turns back to position 0, then to the new one, each pair as a complex number."""
    d = keys.shape[-1]
    pairs = keys[..., 0::2] + 1j * keys[..., 1::2]
    speed = theta ** (-np.arange(0, d, 2) / d)
    pairs = pairs * np.exp(-1j * np.outer(old, speed))[:, None] * np.exp(1j * np.outer(new, speed))[:, None]
    return np.stack((pairs.real, pairs.imag), -1).reshape(keys.shape)


def in_place(keys, old, new, theta):
    keys[...] = back_and_forth(keys, old, new, theta)
    return keys


def changes_positions(keys, old, new, theta):
    new -= old
    return back_and_forth(keys, np.zeros_like(new), new, theta)


def _parts(keys, old, new, theta):
    angles = (new - old)[:, None] * theta ** (-np.arange(0, keys.shape[-1], 2) / keys.shape[-1])
    return np.cos(angles)[:, None], np.sin(angles)[:, None], keys[..., 0::2], keys[..., 1::2]


def two_halves(keys, old, new, theta):
    """Takes neighbours out, and puts the two results one behind the other."""
    c, s, a, b = _parts(keys, old, new, theta)
    return np.concatenate((a * c - b * s, b * c + a * s), -1)


def first_overwritten(keys, old, new, theta):
    c, s, _, _ = _parts(keys, old, new, theta)
    out = keys.copy()
    out[..., 0::2] = out[..., 0::2] * c - out[..., 1::2] * s
    out[..., 1::2] = out[..., 1::2] * c + out[..., 0::2] * s
    return out


def no_head_axis(keys, old, new, theta):
    c, s, a, b = _parts(keys, old, new, theta)
    c, s = c[:, 0], s[:, 0]
    return np.stack((a * c - b * s, b * c + a * s), -1).reshape(*np.broadcast(a, c).shape[:2], -1)


def the_lessons_rope(keys, old, new, theta):
    """The lesson's cell, translated to numpy, called with the new positions."""
    half = keys.shape[-1] // 2
    angles = new[:, None] * theta ** (-np.arange(half) / half)
    c, s = np.cos(angles)[:, None], np.sin(angles)[:, None]
    a, b = keys[..., :half], keys[..., half:]
    return np.concatenate((a * c - b * s, b * c + a * s), -1)


def asks_the_check(keys, old, new, theta):
    from nanoengine.course.checks.lesson_02_rope import turned

    return turned(keys, new - old, theta)


RIGHT = {"ex02a": {"number by number": _move(), "back and forth": back_and_forth}}
# name -> (answer, verdict, words of its message in English)
WRONG = {
    "ex02a": {
        "as they came": (lambda keys, old, new, theta: keys.copy(), "wrong", "still turned for the old positions"),
        "the new position": (_move(lambda old, new, i: new[i]), "wrong", "rotations add up"),
        "back to 0": (_move(lambda old, new, i: -old[i]), "wrong", "turned back to position 0"),
        "backwards": (_move(lambda old, new, i: old[i] - new[i]), "wrong", "Turned the other way"),
        "by the row": (_move(lambda old, new, i: i), "wrong", "You took the row for the position"),
        "new is the row": (_move(lambda old, new, i: i - old[i]), "wrong", "You took the row for the position"),
        "one shift for all": (_move(lambda old, new, i: new[0] - old[0]), "wrong", "moved by the same distance"),
        "the last one's shift": (_move(lambda old, new, i: new[-1] - old[-1]), "wrong", "moved by the same distance"),
        "halves": (_move(pairs="halves"), "wrong", "neighbours (2j, 2j + 1) are a pair"),
        "the lesson's rope": (the_lessons_rope, "wrong", "rotations add up"),
        "two halves": (two_halves, "wrong", "not into two halves"),
        "first overwritten": (first_overwritten, "wrong", "from the old a and b"),
        "no axis for heads": (no_head_axis, "wrong", "axis of length 1"),
        "half the exponent": (_move(power=1.0), "wrong", "The exponent is"),
        "in place": (in_place, "wrong", "The input was changed"),
        "positions in place": (changes_positions, "wrong", "The input was changed"),
        "a list": (lambda keys, old, new, theta: keys.tolist(), "wrong", "Return a new numpy array"),
        "asks the check": (asks_the_check, "imported", "turned"),
    }
}


def _pack(order="qkv", *, dot=True, check=True, names=True, bias=True, arrival=False, bias_order=None, kv=True):
    """pack_qkv with one thing done differently."""

    def pack_qkv(tensors, layer, heads, kv_heads, head_dim):
        prefix, found = f"model.layers.{layer}" + ("." if dot else ""), {}
        for name, value in tensors:
            leaf = ".".join(name.rsplit(".", 2)[1:])
            if name.startswith(prefix) and leaf[0] in "qkv":
                found[leaf] = value
        rows = {"q": heads * head_dim, "k": kv_heads * head_dim, "v": kv_heads * head_dim}
        kinds = ["weight"] + ["bias"] * any(name.endswith("bias") for name in found)
        for kind in kinds if check else ():
            for part in "qkv":
                name = f"{part}_proj.{kind}"
                if name not in found or len(found[name]) != rows[part]:
                    raise ValueError(f"bad {name}" if names else "bad tensor")
        parts = [name[0] for name in found if name.endswith("weight")] if arrival else order
        weight = np.vstack([found[f"{part}_proj.weight"] for part in parts if f"{part}_proj.weight" in found])
        if "bias" not in kinds or not bias:
            return weight, None
        there = [f"{part}_proj.bias" for part in (bias_order or order)]
        return weight, np.hstack([found[name] for name in there if name in found])

    return pack_qkv


def into_place(tensors, layer, heads, kv_heads, head_dim):
    """Copies each tensor to its rows as it comes."""
    sizes = {"q": heads * head_dim, "k": kv_heads * head_dim, "v": kv_heads * head_dim}
    start = {"q": 0, "k": sizes["q"], "v": sizes["q"] + sizes["k"]}
    packed, came = {}, {"weight": set(), "bias": set()}
    for name, value in tensors:
        words = name.split(".")
        if words[2] != str(layer) or words[4] == "o_proj":
            continue
        part, kind = words[4][0], words[5]
        if value.shape[0] != sizes[part]:
            raise ValueError(f"{words[4]}.{kind} has {value.shape[0]} rows")
        out = packed.setdefault(kind, np.empty((sum(sizes.values()), *value.shape[1:])))
        out[start[part] : start[part] + sizes[part]] = value
        came[kind].add(part)
    for kind, parts in came.items():
        if kind == "weight" or parts:
            for part in set("qkv") - parts:
                raise ValueError(f"{part}_proj.{kind} is missing")
    return packed["weight"], packed.get("bias")


def q_rows_for_all(tensors, layer, heads, kv_heads, head_dim):
    """Repeats K and V for each query head."""
    weight, bias = _pack()(tensors, layer, heads, kv_heads, head_dim)
    q, k, v = np.split(weight, [heads * head_dim, (heads + kv_heads) * head_dim])
    return np.vstack([q, *[np.tile(x, (heads // kv_heads, 1)) for x in (k, v)]]), bias


def walks_twice(tensors, layer, heads, kv_heads, head_dim):
    names = [f"model.layers.{layer}.self_attn.{part}_proj.weight" for part in "qkv"]
    return np.vstack([dict(tensors)[name] for name in names]), None


def key_error(tensors, layer, heads, kv_heads, head_dim):
    """Right where all is there, but a hole is a KeyError."""
    found = dict(tensors)
    names = [f"model.layers.{layer}.self_attn.{part}_proj." for part in "qkv"]
    bias = np.hstack([found[n + "bias"] for n in names]) if any(n + "bias" in found for n in names) else None
    return np.vstack([found[n + "weight"] for n in names]), bias


def asks_the_checks_product(tensors, layer, heads, kv_heads, head_dim):
    from nanoengine.course.checks.lesson_02_pack import PackCase, product_by_parts

    found = dict(tensors)
    product_by_parts(PackCase(heads, kv_heads, head_dim, 2, layer), found, np.ones(2))
    return _pack()(found.items(), layer, heads, kv_heads, head_dim)


RIGHT["ex02b"] = {"stacked": _pack(), "copied into place": into_place}
WRONG["ex02b"] = {
    "as they come": (_pack(arrival=True), "wrong", "in whatever order they came"),
    "k first": (_pack("kqv"), "wrong", "q, then k, then v"),
    "layer 1 and 11": (_pack(dot=False), "wrong", "layer 1 is not layer 11"),
    "no checks": (_pack(check=False), "wrong", "A tensor never came"),
    "nameless": (_pack(names=False), "wrong", "Say in the message which tensor"),
    "bias forgotten": (_pack(bias=False), "wrong", "The bias is one row of numbers"),
    "biases in another order": (_pack(bias_order="vkq"), "wrong", "they go in the same order"),
    "K for each query head": (q_rows_for_all, "wrong", "K and V have kv_heads, not heads"),
    "only the weight": (lambda *args: _pack()(*args)[0], "wrong", "Return two things"),
    "walks twice": (walks_twice, "wrong", "collect in one pass"),
    "KeyError": (key_error, "wrong", "ValueError that names k_proj.weight"),
    "asks the check": (asks_the_checks_product, "imported", "product_by_parts"),
}
