"""Check of ex03a: attention with a contiguous KV cache, for chunks of any length. Imports torch only while it runs.

Tokens arrive in chunks; after each the answer's rows are compared with what plain loops over all keys and values so far
give: one query, one head, one key at a time.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from nanoengine.course.checks.exercise import Failure, call

OLD = 7.0  # what lies in slots that nobody has written: finite, and seen at once in any sum


@dataclass(frozen=True)
class AttentionCase:
    """chunks: tokens that arrive together. spare: slots of the cache that stay unused."""

    chunks: tuple[int, ...]
    kv_heads: int = 2
    group: int = 2
    head_dim: int = 4
    spare: int = 3
    seed: int = 0


class PackageAnswers:
    """The package's functions that answer the exercise; looked up when they are needed, as they need torch."""

    def __iter__(self) -> Iterator[Callable]:
        from nanoengine.attention import torch_attention as package

        return iter((package.attend, package.dense_attention, package.TorchAttention.__call__))


def run_attention(answer, case: AttentionCase) -> Failure | None:
    import torch

    make = torch.Generator().manual_seed(case.seed)
    total, heads = sum(case.chunks), case.kv_heads * case.group
    q = torch.randn(total, heads, case.head_dim, generator=make)
    k, v = torch.randn(2, total, case.kv_heads, case.head_dim, generator=make)
    cache = torch.full((2, total + case.spare, case.kv_heads, case.head_dim), OLD)
    scale, start = case.head_dim**-0.5, 0
    for number, n in enumerate(case.chunks, 1):
        new = slice(start, start + n)
        given = [x[new].clone() for x in (q, k, v)]
        got = call(answer, *given, cache, start, scale)
        where = f"chunk {number} ({n} tokens after {start})"
        if not isinstance(got, torch.Tensor) or got.shape != (n, heads, case.head_dim):
            shape = list(got.shape) if isinstance(got, torch.Tensor) else type(got).__name__
            return Failure(f"a tensor of shape {[n, heads, case.head_dim]}", f"{where}: {shape}", SHAPE)
        failure = _cache(cache, k, v, start + n, where)
        if failure is not None:
            return failure
        if got.isnan().any():
            return Failure("numbers", f"{where}: NaN in row {int(got.isnan().nonzero()[0, 0])} of {n}", NAN)
        want = by_hand(q[new], k, v, start, scale, case.group)
        if not torch.allclose(got.float(), torch.tensor(want), atol=1e-4):
            return _difference(got, want, (q[new], k, v, start, scale, case), where)
        start += n
    return None


def by_hand(q, k, v, start, scale, group, *, sees=None, kv_head=None, cache=None, mask=None) -> list:
    """Rows of attention as lists. The keywords stand for what a slip would do instead.

    mask: "zero", a score that may not be seen becomes 0; "late", it is taken out after the softmax.
    """
    keys, values = (x.tolist() for x in ((k, v) if cache is None else cache))
    rows = []
    for i, heads in enumerate(q.tolist()):
        last = start + i + 1 if sees is None else sees(i)
        row = []
        for h, query in enumerate(heads):
            own = h // group if kv_head is None else kv_head(h)
            weights = [math.exp(scale * sum(a * b for a, b in zip(query, keys[t][own], strict=True)))
                       for t in range(last if mask is None else start + len(q))]  # fmt: skip
            if mask == "zero":
                weights[last:] = [1.0] * len(weights[last:])
            total = sum(weights) or 1.0
            if mask == "late":
                weights = weights[:last]
            row.append([sum(w * values[t][own][x] for t, w in enumerate(weights)) / total for x in range(len(query))])
        rows.append(row)
    return rows


def _cache(cache, k, v, known: int, where: str) -> Failure | None:
    import torch

    if not torch.equal(cache[0, :known], k[:known]) or not torch.equal(cache[1, :known], v[:known]):
        return Failure(f"cache[0, :{known}] holds the keys, cache[1, :{known}] the values",
                       f"{where}: it does not", WRITE)  # fmt: skip
    if known < cache.shape[1] and not (cache[:, known:] == OLD).all():
        return Failure(f"nothing is written from slot {known} on", f"{where}: something was", WRITE)
    return None


def _difference(got, want: list, given: tuple, where: str) -> Failure:
    """Which row is wrong, and which known slip gives it."""
    import torch

    q, k, v, start, scale, case = given
    n, length = len(q), start + len(q)
    wrong = (got.float() - torch.tensor(want)).abs().amax(dim=(1, 2)) > 1e-4
    row = int(wrong.nonzero()[0])
    whole = torch.full((2, sum(case.chunks) + case.spare, *k.shape[1:]), OLD)
    whole[0, :length], whole[1, :length] = k[:length], v[:length]
    stale = whole.clone()
    stale[:, start:length] = OLD
    slips = (
        (FUTURE, dict(sees=lambda i: length)),
        (TOP_LEFT, dict(sees=lambda i: i + 1)),
        (NOT_ITSELF, dict(cache=stale)),
        (GROUPS, dict(kv_head=lambda h: h % case.kv_heads)),
        (UNUSED, dict(sees=lambda i: whole.shape[1], cache=whole)),
        (SCALE, dict(scale=1.0)),
        (ZERO, dict(mask="zero")),
        (LATE, dict(mask="late")),
    )
    why = OTHER
    for text, change in slips:
        like = by_hand(q, k, v, start, **{"scale": scale, "group": case.group, **change})
        if torch.allclose(got.float(), torch.tensor(like), atol=1e-4):
            why = text
            break
    numbers = [f"{x:.3f}" for x in want[row][0]]
    return Failure(f"row {row} of {n}, head 0: {', '.join(numbers)}",
                   f"{where}: {', '.join(f'{x:.3f}' for x in got[row, 0].tolist())}", why)  # fmt: skip


def random_case(rng: random.Random) -> AttentionCase:
    chunks = tuple(rng.choice((1, 1, 2, 3, 5)) for _ in range(rng.randint(1, 4)))
    return AttentionCase(chunks, rng.randint(1, 3), rng.randint(1, 3), rng.choice((2, 4)), rng.randint(0, 3),
                         rng.randrange(1000))  # fmt: skip


def smaller(case: AttentionCase) -> Iterator[AttentionCase]:
    """Fewer and shorter chunks, fewer heads."""
    chunks = case.chunks
    for i in range(len(chunks) if len(chunks) > 1 else 0):
        yield replace(case, chunks=chunks[:i] + chunks[i + 1 :])
    for i, n in enumerate(chunks):
        if n > 1:
            yield replace(case, chunks=(*chunks[:i], n - 1, *chunks[i + 1 :]))
    for name in ("kv_heads", "group"):
        if getattr(case, name) > 1:
            yield replace(case, **{name: getattr(case, name) - 1})
    if case.spare:
        yield replace(case, spare=0)


def show(case: AttentionCase) -> str:
    heads = f"{case.kv_heads} KV heads, {case.kv_heads * case.group} query heads, head_dim {case.head_dim}"
    return f"chunks of {list(case.chunks)} tokens, {heads}, cache of {sum(case.chunks) + case.spare} tokens"


BOUNDARIES = (
    AttentionCase((1,), 1, 1),
    AttentionCase((4,), 1, 1),  # a prompt
    AttentionCase((3, 1, 1), 1, 1),  # prompt, decode, decode
    AttentionCase((3, 1), 2, 3, spare=0),  # groups
    AttentionCase((2, 3), 1, 1),  # a chunk with something before it
    AttentionCase((3, 2, 1, 4), 2, 2),
    AttentionCase((1, 1, 1, 1), 3, 1),
)

SHAPE = dict(en="Return one row a new token: [n, heads, head_dim], like q.",
             zh="每个新 token 返回一行:[n, heads, head_dim],和 q 一样。")  # fmt: skip
WRITE = dict(en="Write k and v of the n new tokens to slots start … start + n - 1, in place, and touch nothing else.",
             zh="把 n 个新 token 的 k、v 原地写进 start 到 start + n - 1 号槽,别的都不动。")  # fmt: skip
FUTURE = dict(en="Row i looks at tokens that come after it in the same chunk: it may see start + i + 1 keys, no more.",
              zh="第 i 行看到了同一个 chunk 里排在它后面的 token:它只能看 start + i + 1 个 key。")  # fmt: skip
TOP_LEFT = dict(
    en="The causal mask is aligned at the top left (is_causal=True does that): row i sees the first i + 1 keys. It "
    "must be "
    "shifted by start.",
    zh="因果掩码按左上角对齐了(is_causal=True 就是这样):第 i 行只看到最前面 i + 1 个 key。掩码要错开 start 位。",
)
NOT_ITSELF = dict(en="A token sees itself, too: write before you read.",
                  zh="token 也要看自己:先写再读。")  # fmt: skip
GROUPS = dict(en="Query head h reads KV head h // group: repeat_interleave, not repeat.",
              zh="query head h 读的是 KV head h // group:用 repeat_interleave,不是 repeat。")  # fmt: skip
UNUSED = dict(en="Slots that were never written take part: read the first start + n slots only.",
              zh="没写过的槽也参与了:只读前 start + n 个槽。")  # fmt: skip
SCALE = dict(en="The scores are not multiplied by scale.", zh="打分没有乘 scale。")
NAN = dict(
    en="Some row may see nothing at all: the softmax of -inf alone is NaN. Row i sees start + i + 1 keys, its own "
    "among them: compare positions with <=, not <.",
    zh="有一行什么都看不见:全是 -inf,softmax 出来就是 NaN。第 i 行看 start + i + 1 个 key,包括自己:位置要用 <= 比,"
    "不是 <。",
)
ZERO = dict(en="A score of 0 is not hidden: exp(0) = 1. Put -inf where a row may not look, before the softmax.",
            zh="打分填 0 不等于看不见:exp(0) = 1。不能看的地方,softmax 之前填 -inf。")  # fmt: skip
LATE = dict(en="The mask comes after the softmax, so the weights left do not sum to 1. Put -inf into the scores first.",
            zh="掩码加在 softmax 之后,剩下的权重和不是 1。要先把打分填成 -inf。")  # fmt: skip
OTHER = dict(
    en="Per row and head: softmax over scale × (q · k) of the keys it may see, then that mean of the values. Print the "
    "weights of the smallest case: [heads, n, keys], and over the keys each row sums to 1.",
    zh="逐行逐 head:对它看得见的 key 做 softmax(scale × (q · k)),再对 v 加权平均。把最小用例的权重打印出来:形状是 "
    "[heads, n, keys],每一行沿 key 加起来是 1。",
)
