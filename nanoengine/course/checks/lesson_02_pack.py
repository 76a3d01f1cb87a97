"""Check of ex02b: q, k and v of a checkpoint in one matrix.

The oracle never builds the matrix: it multiplies by each part alone and compares what comes out of one product. All
numbers are whole, so that the comparison is exact.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from nanoengine.course.checks.exercise import Failure, Text, call

PARTS = ("q_proj", "k_proj", "v_proj")


@dataclass(frozen=True)
class PackCase:
    """Layer ``layer`` of a checkpoint whose tensors come in the order of ``seed``.

    drop: the name's end of a tensor that is not there. short: one that has a row too few.
    """

    heads: int
    kv_heads: int
    dim: int
    hidden: int
    layer: int = 0
    bias: bool = False
    drop: str = ""
    short: str = ""
    seed: int = 0

    def prefix(self, layer: int) -> str:
        return f"model.layers.{layer}.self_attn."

    def rows(self, part: str) -> int:
        return (self.heads if part == "q_proj" else self.kv_heads) * self.dim

    def tensors(self) -> list[tuple[str, np.ndarray]]:
        rng = np.random.default_rng(self.seed)
        found = []
        for layer in (self.layer, self.layer + 1, self.layer * 10 + 3):
            for part in PARTS:
                found.append((f"{part}.weight", layer, (self.rows(part), self.hidden)))
                if self.bias:
                    found.append((f"{part}.bias", layer, (self.rows(part),)))
            found.append(("o_proj.weight", layer, (self.hidden, self.heads * self.dim)))
        result = []
        for name, layer, shape in found:
            if layer == self.layer and name == self.drop:
                continue
            cut = layer == self.layer and name == self.short
            value = rng.integers(-9, 10, shape).astype(np.float64)
            result.append((self.prefix(layer) + name, value[:-1] if cut else value))
        random.Random(self.seed).shuffle(result)
        return result


def run_pack(answer, case: PackCase) -> Failure | None:
    tensors = case.tensors()
    broken = case.drop or case.short
    try:
        got = call(answer, iter(tensors), case.layer, case.heads, case.kv_heads, case.dim)
    except ValueError as error:
        if not broken:
            return Failure("(weight, bias)", f"ValueError: {error}", WHOLE)
        named = broken in str(error)
        return None if named else Failure(_refusal(broken), f"ValueError: {error}", NAME)
    except KeyError as error:
        if not case.drop:
            raise  # the check says in which line
        return Failure(_refusal(broken), f"KeyError: {error}", MISSING)
    if broken:
        return Failure(_refusal(broken), _described(got), MISSING if case.drop else SHORT)
    rows = sum(map(case.rows, PARTS))
    if not (isinstance(got, tuple) and len(got) == 2):
        return Failure("(weight, bias)", _described(got), PAIR)
    if getattr(got[0], "shape", None) != (rows, case.hidden):
        want = f"(weight [{rows}, {case.hidden}], {f'bias [{rows}]' if case.bias else None})"
        return Failure(want, _described(got), SHAPE)
    if (got[1] is None) == case.bias or (case.bias and getattr(got[1], "shape", None) != (rows,)):
        return Failure(f"bias [{rows}]" if case.bias else "bias None", _described(got), BIAS)
    return _compare(case, dict(tensors), *got)


def _compare(case: PackCase, tensors: dict[str, np.ndarray], weight: np.ndarray, bias) -> Failure | None:
    x = np.random.default_rng(case.seed + 1).integers(1, 9, case.hidden).astype(np.float64)
    y, start = weight @ x + (0 if bias is None else bias), 0
    wanted = product_by_parts(case, tensors, x)
    for part, want in wanted.items():
        out = y[start : start + len(want)]
        if not np.array_equal(out, want):
            moved = sorted(y.tolist()) == sorted(np.concatenate(list(wanted.values())).tolist())
            rows = weight[start : start + len(want)]
            bias_only = case.bias and np.array_equal(rows, tensors[f"{case.prefix(case.layer)}{part}.weight"])
            why = ORDER if moved else BIAS_ROWS if bias_only else OTHER
            where = dict(en=f"rows {start}… give {part}: ", zh=f"第 {start} 行起是 {part}:")
            return Failure({lang: said + f"{want[:3].tolist()}" for lang, said in where.items()},
                           f"{out[:3].tolist()}", why)  # fmt: skip
        start += len(want)
    return None


def product_by_parts(case: PackCase, tensors: dict[str, np.ndarray], x: np.ndarray) -> dict[str, np.ndarray]:
    """What each of the three layers gives alone, row by row."""
    result = {}
    for part in PARTS:
        name = case.prefix(case.layer) + part
        bias = tensors.get(f"{name}.bias", np.zeros(case.rows(part)))
        rows = zip(tensors[f"{name}.weight"], bias, strict=True)
        result[part] = np.array([float(np.dot(row, x) + b) for row, b in rows])
    return result


def _refusal(name: str) -> Text:
    return dict(en=f"ValueError that names {name}", zh=f"ValueError,消息里有 {name}")


def _described(got) -> str:
    """As numpy would write it, which needs no language."""
    if isinstance(got, tuple):
        return f"({', '.join(_described(item) for item in got)})"[:160]
    return f"ndarray {list(got.shape)}" if isinstance(got, np.ndarray) else f"{got!r:.80}"


def random_case(rng: random.Random) -> PackCase:
    kv_heads, bias = rng.randint(1, 3), rng.random() < 0.4
    drop = short = ""
    if rng.random() < 0.25:
        name = rng.choice(PARTS) + (".bias" if bias and rng.random() < 0.5 else ".weight")
        drop, short = (name, "") if rng.random() < 0.6 else ("", name)
    return PackCase(kv_heads * rng.randint(1, 3), kv_heads, rng.randint(1, 3), rng.randint(1, 4), rng.randint(0, 3),
                    bias, drop, short, rng.randint(0, 999))  # fmt: skip


def smaller(case: PackCase) -> Iterator[PackCase]:
    if case.kv_heads > 1:
        yield replace(case, kv_heads=1, heads=case.heads // case.kv_heads)
    if case.heads > case.kv_heads:
        yield replace(case, heads=case.heads - case.kv_heads)
    for name, least in (("dim", 1), ("hidden", 1), ("layer", 0)):
        if getattr(case, name) > least:
            yield replace(case, **{name: getattr(case, name) - 1})
    if case.bias and not (case.drop + case.short).endswith(".bias"):
        yield replace(case, bias=False)


def show(case: PackCase) -> Text:
    sizes = f"heads {case.heads}, kv_heads {case.kv_heads}, head_dim {case.dim}, "
    sizes += f"hidden {case.hidden}, layer {case.layer}"
    facts = [
        (case.bias, ", with biases", ",有偏置"),
        (case.drop, f", without {case.drop}", f",缺 {case.drop}"),
        (case.short, f", {case.short} with a row too few", f",{case.short} 少一行"),
    ]
    en, zh = ("".join(fact[i] for fact in facts if fact[0]) for i in (1, 2))
    return dict(en=sizes + en, zh=sizes + zh)


def explain(error: Exception) -> Text | None:
    return NO_KEY if isinstance(error, KeyError) else None


BOUNDARIES = (
    PackCase(2, 2, 1, 2),  # no groups
    PackCase(4, 2, 2, 3),  # GQA
    PackCase(3, 1, 2, 2),  # one KV head
    PackCase(4, 2, 2, 3, bias=True),
    PackCase(2, 1, 1, 2, layer=1),  # layer 1 beside layers 2 and 13
    PackCase(2, 1, 2, 2, drop="k_proj.weight"),
    PackCase(2, 1, 2, 2, bias=True, drop="v_proj.bias"),
    PackCase(2, 1, 2, 2, short="v_proj.weight"),
    PackCase(1, 1, 1, 1, seed=5),
)

WHOLE = dict(
    en="This layer is complete: all three weights are there, q with heads × head_dim rows, k and v with "
    "kv_heads × head_dim. (`tensors` can be walked through only once.)",
    zh="这一层是完整的:三个权重都在,q 有 heads × head_dim 行,k、v 各有 kv_heads × head_dim 行。"
    "(`tensors` 只能走一遍。)",
)
NAME = dict(
    en="Right to raise. Say in the message which tensor is missing or wrong, as `k_proj.weight`.",
    zh="该抛错,抛得对。在消息里说清是哪个张量缺了或不对,例如 `k_proj.weight`。",
)
NO_KEY = dict(
    en="All tensors of this layer came, and yet the name was not found. `tensors` can be walked through only once: "
    "collect in one pass. Else compare the name letter by letter.",
    zh="这一层的张量都来了,名字却没找到。`tensors` 只能走一遍:一遍就要收齐。要不然就逐字核对名字。",
)
PAIR = dict(
    en="Return two things: weight and bias, in this order. Without biases the second is None.",
    zh="要返回两样东西:先 weight,后 bias。没有偏置时,第二样是 None。",
)
MISSING = dict(
    en="A tensor never came. Raise ValueError with its name: an engine that goes on reads whatever lies in memory.",
    zh="有一个张量没来。抛 ValueError,写明是哪个:装作没事接着跑,那几行读到的就是内存垃圾。",
)
SHORT = dict(
    en="A part has too few rows for its heads × head_dim. Everything behind it would slip: raise ValueError "
    "with its name.",
    zh="有一部分的行数不等于 头数 × head_dim。后面的全都会错位:抛 ValueError,写明是哪个。",
)
SHAPE = dict(
    en="Stack along the rows (axis 0): weight has (heads + 2 × kv_heads) × head_dim rows. K and V have "
    "kv_heads, not heads.",
    zh="沿着行(第 0 轴)摞:weight 有 (heads + 2 × kv_heads) × head_dim 行。K 和 V 是 kv_heads 个头,不是 heads 个。",
)
BIAS = dict(
    en="The bias is one row of numbers as long as weight has rows if the checkpoint has biases, and None if it "
    "has none.",
    zh="checkpoint 有偏置,就返回和 weight 行数一样长的一行;没有,就返回 None。",
)
ORDER = dict(
    en="The right rows in the wrong place: q, then k, then v, in whatever order they came.",
    zh="行是对的,位置不对:先 q,再 k,再 v,和到来的顺序无关。",
)
BIAS_ROWS = dict(
    en="The weights are right, the biases are not: they go in the same order, q, k, v.",
    zh="权重对,偏置不对:偏置也按 q、k、v 的顺序放。",
)
OTHER = dict(
    en="These are not the rows of this layer. Compare the whole prefix, with the dots: layer 1 is not layer 11.",
    zh="这不是这一层的行。要比整个前缀,连点一起比:第 1 层不是第 11 层。",
)
