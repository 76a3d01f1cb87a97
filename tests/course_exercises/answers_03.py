"""Answers to the exercises of lesson 03 as learners might write them: right in several shapes, wrong in likely ways.

The solutions in exercises/src are one more right answer each. With a wrong answer stand words of its message.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from nanoengine.attention.torch_attention import dense_attention
from nanoengine.course.checks.lesson_03_batch import BatchCase, Step, search


def by_sdpa(q, k, v, cache, start, scale):
    """Torch's fused attention with a mask of its own."""
    n = q.shape[0]
    cache[:, start : start + n] = torch.stack((k, v))
    keys, values = (x[: start + n].transpose(0, 1) for x in cache)
    mask = torch.ones(n, start + n).tril(start).bool()
    out = F.scaled_dot_product_attention(q.transpose(0, 1)[None], keys[None], values[None], attn_mask=mask, scale=scale,
                                         enable_gqa=True)  # fmt: skip
    return out[0].transpose(0, 1)


def token_by_token(q, k, v, cache, start, scale):
    """No mask at all: each token is a decode step."""
    group, rows = q.shape[1] // k.shape[1], []
    for i in range(len(q)):
        cache[0, start + i], cache[1, start + i] = k[i], v[i]
        heads = []
        for h in range(q.shape[1]):
            weights = torch.softmax(cache[0, : start + i + 1, h // group] @ q[i, h] * scale, 0)
            heads.append(weights @ cache[1, : start + i + 1, h // group])
        rows.append(torch.stack(heads))
    return torch.stack(rows)


def _attention(*, write=True, at=None, first=None, shift=True, causal=True, repeat="interleave", scaled=True, used=True,
               flat=False, hide="before"):  # fmt: skip
    """A cached_attention with one thing done differently."""

    def cached_attention(q, k, v, cache, start, scale):
        n, group = len(q), q.shape[1] // k.shape[1]
        place = start if at is None else at
        length = start + n if used else cache.shape[1]
        old = cache[:, :length].clone()
        if write:
            cache[0, place : place + n], cache[1, place : place + n] = k, v
        keys, values = old if first == "read" else cache[:, :length]
        if repeat == "interleave":
            keys, values = (x.repeat_interleave(group, dim=1) for x in (keys, values))
        else:
            keys, values = (x.repeat(1, group, 1) for x in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", q, keys) * (scale if scaled else 1)
        if causal and used:
            mask = torch.ones(n, length).tril(start if shift else 0)
            if hide == "strict":
                mask = mask.tril(start - 1)
            if hide in ("before", "strict"):
                scores = scores.masked_fill(mask == 0, -torch.inf)
            if hide == "zero":
                scores = scores * mask
        weights = scores.softmax(-1) * (mask if hide == "late" else 1)
        out = torch.einsum("hqk,khd->qhd", weights, values)
        return out.flatten(1) if flat else out

    return cached_attention


def the_lessons(q, k, v, cache, start, scale):
    """my_attention of the lesson, its prompt case written out: right for prompts and for one token."""
    n, group = len(q), q.shape[1] // k.shape[1]
    cache[0, start : start + n], cache[1, start : start + n] = k, v
    keys, values = (k, v) if n > 1 else cache[:, : start + 1]
    keys, values = (x.repeat_interleave(group, dim=1) for x in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", q, keys) * scale
    if n > 1:
        scores = scores.masked_fill(torch.ones(n, n).tril() == 0, -1e9)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)


def asks_the_package(q, k, v, cache, start, scale):
    n = len(q)
    cache[0, start : start + n], cache[1, start : start + n] = k, v
    return dense_attention(q, k, v, None, None, scale)


RIGHT = {"ex03a": {"sdpa": by_sdpa, "token by token": token_by_token, "einsum": _attention()}}
# name -> (answer, verdict, words of its message in English)
WRONG = {
    "ex03a": {
        "no mask": (_attention(causal=False), "wrong", "tokens that come after it"),
        "mask at the top left": (_attention(shift=False), "wrong", "aligned at the top left"),
        "reads before it writes": (_attention(first="read"), "wrong", "write before you read"),
        "forgets to write": (_attention(write=False), "wrong", "Write k and v of the n new tokens"),
        "writes at 0": (_attention(at=0), "wrong", "Write k and v of the n new tokens"),
        "repeat": (_attention(repeat="tile"), "wrong", "repeat_interleave, not repeat"),
        "the whole cache": (_attention(used=False), "wrong", "never written"),
        "no scale": (_attention(scaled=False), "wrong", "not multiplied by scale"),
        "not itself": (_attention(hide="strict"), "wrong", "compare positions with <="),
        "masks with 0": (_attention(hide="zero"), "wrong", "exp(0) = 1"),
        "masks late": (_attention(hide="late"), "wrong", "do not sum to 1"),
        "flat": (_attention(flat=True), "wrong", "one row a new token"),
        "the lesson's": (the_lessons, "wrong", "Print the weights"),
        "asks the package": (asks_the_package, "imported", "dense_attention"),
    }
}


def _batch(*, heads="num_attention_heads", embedding=False, width=None, kv=True, fma=2, never=None, rounding=math.ceil,
           both=2, more=0):  # fmt: skip
    """A turning_batch with one thing done differently."""

    def turning_batch(model, bandwidth, peak, context):
        context += more
        each = width or (4 if model.dtype == "float32" else 2)
        weights = model.num_parameters()
        if not model.tie_word_embeddings and not embedding:
            weights -= model.vocab_size * model.hidden_size
        read = both * model.num_hidden_layers * model.num_key_value_heads * model.head_dim * each * context * kv
        pairs = 2 * fma * model.num_hidden_layers * getattr(model, heads) * model.head_dim * context * kv
        gain = (fma * weights + pairs) / peak - read / bandwidth
        if gain <= 0:
            return never
        return max(1, rounding(weights * each / bandwidth / gain))

    return turning_batch


def by_walking(model, bandwidth, peak, context):
    """Right without an equation: looks at batch after batch, in larger and larger strides, then back."""
    each = {"float32": 4}.get(model.dtype, 2)
    table = 0 if model.tie_word_embeddings else model.vocab_size * model.hidden_size
    n = model.num_parameters() - table
    token = model.kv_bytes_per_token(each)

    def slow(batch):
        moved = n * each + batch * context * token
        done = batch * (2 * n + 4 * model.num_hidden_layers * model.num_attention_heads * model.head_dim * context)
        return moved * peak > done * bandwidth

    if slow(10**15):
        return None
    batch, stride = 0, 2**50
    while stride:
        if slow(batch + stride):
            batch += stride
        stride //= 2
    return batch + 1


def ridge(model, bandwidth, peak, context):
    return math.ceil(peak / bandwidth)


def gives_up(model, bandwidth, peak, context):
    """Tries batch after batch, and takes a large one for none."""
    each = {"float32": 4}.get(model.dtype, 2)
    n = model.num_parameters() - (0 if model.tie_word_embeddings else model.vocab_size * model.hidden_size)
    token = model.kv_bytes_per_token(each)
    done = 2 * n + 4 * model.num_hidden_layers * model.num_attention_heads * model.head_dim * context
    for batch in range(1, 10_000):
        if batch * done * bandwidth >= (n * each + batch * context * token) * peak:
            return batch
    return None


def asks_the_check(model, bandwidth, peak, context):
    return search(Step(model), BatchCase(model.name, bandwidth, peak, context))


RIGHT["ex03b"] = {"floats": _batch(), "walking": by_walking}
WRONG["ex03b"] = {
    "no KV": (_batch(kv=False), "wrong", "the weights alone"),
    "KV heads multiply": (_batch(heads="num_key_value_heads"), "wrong", "every query head"),
    "embedding": (_batch(embedding=True), "wrong", "only looked up"),
    "always two bytes": (_batch(width=2), "wrong", "float32 takes 4 bytes"),
    "one FLOP a weight": (_batch(fma=1), "wrong", "2 FLOPs"),
    "infinity": (_batch(never=math.inf), "wrong", "Return None"),
    "rounds down": (_batch(rounding=math.floor), "wrong", "Round up"),
    "ridge": (ridge, "wrong", "the weights alone"),
    "ridge, a float": (lambda model, bandwidth, peak, context: peak / bandwidth, "wrong", "the weights alone"),
    "K only": (_batch(both=1), "wrong", "K and V are both read"),
    "one token more": (_batch(more=1), "wrong", "counts the new token, too"),
    "gives up": (gives_up, "wrong", "gives up too early"),
    "always None": (lambda *a: None, "wrong", "There is one here"),
    "asks the check": (asks_the_check, "imported", "weight_shapes"),
}
