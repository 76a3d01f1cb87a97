"""Answers to the exercises of lesson 02 as learners might write them: right in several shapes, wrong in likely ways."""

from __future__ import annotations

import math

import numpy as np


def _rope(place=lambda start, i: start + i, *, pairs="halves", sign=1, power=2.0):
    """rope_chunk with one thing done differently, number by number."""

    def rope_chunk(x, start, theta):
        out, half = x.copy(), x.shape[-1] // 2
        for i in range(len(x)):
            for j in range(half):
                a, b = (j, j + half) if pairs == "halves" else (2 * j, 2 * j + 1)
                angle = sign * place(start, i) * theta ** (-power * j / x.shape[-1])
                out[i, :, a] = x[i, :, a] * math.cos(angle) - x[i, :, b] * math.sin(angle)
                out[i, :, b] = x[i, :, b] * math.cos(angle) + x[i, :, a] * math.sin(angle)
        return out

    return rope_chunk


def by_matrices(x, start, theta):
    """Each row times its own rotation matrix."""
    d = x.shape[-1]
    half, out = d // 2, np.empty_like(x)
    for i, row in enumerate(x):
        c, s = (f((start + i) * theta ** (-np.arange(half) / half)) for f in (np.cos, np.sin))
        matrix = np.block([[np.diag(c), -np.diag(s)], [np.diag(s), np.diag(c)]])
        out[i] = row @ matrix.T
    return out


def in_place(x, start, theta):
    x[...] = by_matrices(x, start, theta)
    return x


def cut_as_neighbours(x, start, theta):
    """Takes pairs (2j, 2j + 1) out, and puts the two results one behind the other."""
    out = _rope(pairs="neighbours")(x, start, theta)
    return np.concatenate((out[..., 0::2], out[..., 1::2]), -1)


def half_overwritten(x, start, theta):
    out, half = x.copy(), x.shape[-1] // 2
    angles = (start + np.arange(len(x)))[:, None] * theta ** (-np.arange(half) / half)
    c, s = np.cos(angles)[:, None], np.sin(angles)[:, None]
    out[..., :half] = out[..., :half] * c - out[..., half:] * s
    out[..., half:] = out[..., half:] * c + out[..., :half] * s
    return out


def no_head_axis(x, start, theta):
    half = x.shape[-1] // 2
    angles = (start + np.arange(len(x)))[:, None] * theta ** (-np.arange(half) / half)
    c, s, a, b = np.cos(angles), np.sin(angles), x[..., :half], x[..., half:]
    return np.concatenate((a * c - b * s, b * c + a * s), -1)


def asks_the_check(x, start, theta):
    from nanoengine.course.checks.lesson_02_rope import turned

    return turned(x, start, theta)


RIGHT = {"ex02a": {"number by number": _rope(), "matrices": by_matrices}}
# name -> (answer, verdict, words of its message in English)
WRONG = {
    "ex02a": {
        "from zero": (_rope(lambda start, i: i), "wrong", "row i of a chunk stands at start + i"),
        "one too far": (_rope(lambda start, i: start + i + 1), "wrong", "one position off"),
        "all at start": (_rope(lambda start, i: start), "wrong", "Each row has its own position"),
        "neighbours": (_rope(pairs="neighbours"), "wrong", "You paired neighbours"),
        "cut as neighbours": (cut_as_neighbours, "wrong", "You paired neighbours"),
        "half overwritten": (half_overwritten, "wrong", "from the old a and b"),
        "no axis for heads": (no_head_axis, "wrong", "an axis of length 1"),
        "backwards": (_rope(sign=-1), "wrong", "Turned the other way round"),
        "half the exponent": (_rope(power=1.0), "wrong", "The exponent is"),
        "in place": (in_place, "wrong", "The input was changed"),
        "a list": (lambda x, start, theta: x.tolist(), "wrong", "Return a new array"),
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
