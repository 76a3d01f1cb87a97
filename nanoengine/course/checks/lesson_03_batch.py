"""Check of ex03b: the batch at which decode stops being bandwidth-bound.

The oracle lists what a step reads and multiplies, tensor by tensor and layer by layer, and looks for the batch by
doubling and then halving. The answer is expected to solve an equation.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction

from nanoengine.course.checks.exercise import Failure, Text, call
from nanoengine.course.checks.lesson_01_ledger import OR, weight_shapes
from nanoengine.model.config import NAMED_CONFIGS, ModelConfig

NEVER = 2**60


@dataclass(frozen=True)
class BatchCase:
    """bandwidth: bytes a second. peak: FLOPs a second."""

    model: str
    bandwidth: int
    peak: int
    context: int


def run_batch(answer, case: BatchCase) -> Failure | None:
    model = NAMED_CONFIGS[case.model]
    want = search(Step(model), case)
    got = call(answer, model, case.bandwidth, case.peak, case.context)
    if got == want and (got is None or float(got).is_integer()):
        return None
    return Failure(f"{want}", f"{got!r:.80}", _why(model, case, got, want))


class Step:
    """What one decode step takes. The switches are what a slip would count instead."""

    def __init__(self, model: ModelConfig, *, width=None, heads=None, embedding=None, factor=1, kv=True, both=True):
        self.model, self.factor, self.kv, self.both = model, factor, kv, both
        self.width = width or (4 if model.dtype == "float32" else 2)
        self.heads = heads or model.num_attention_heads
        shapes = list(weight_shapes(model))
        if embedding is None and not model.tie_word_embeddings:
            shapes = shapes[1:]  # a table to look rows up in: never multiplied, never read as a whole
        self.weights = sum(math.prod(shape) for shape in shapes)

    def bytes(self, batch: int, context: int) -> int:
        numbers = self.weights
        for _layer in range(self.model.num_hidden_layers if self.kv else 0):
            numbers += batch * (1 + self.both) * context * self.model.num_key_value_heads * self.model.head_dim
        return numbers * self.width

    def flops(self, batch: int, context: int) -> int:
        done = 2 * self.weights
        for _layer in range(self.model.num_hidden_layers if self.kv else 0):
            for _product in ("scores", "values"):
                done += 2 * context * self.heads * self.model.head_dim
        return done * batch // self.factor


def search(step: Step, case: BatchCase) -> int | None:
    """The smallest batch whose arithmetic takes at least as long as its bytes."""

    def compute_bound(batch: int) -> bool:
        arithmetic = Fraction(step.flops(batch, case.context), case.peak)
        return arithmetic >= Fraction(step.bytes(batch, case.context), case.bandwidth)

    high = 1
    while not compute_bound(high):
        high *= 2
        if high > NEVER:
            return None
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if compute_bound(middle) else (middle, high)
    return high


def _why(model: ModelConfig, case: BatchCase, got, want) -> Text:
    if want is None:
        return FOREVER
    if got is None:
        return EXISTS
    if not isinstance(got, int | float) or isinstance(got, bool) or got != got or got in (math.inf, -math.inf):
        return TYPE
    slips = (
        (KV, dict(kv=False)),
        (HEADS, dict(heads=model.num_key_value_heads)),
        (EMBEDDING, dict(embedding=True)),
        (WIDTH, dict(width=2)),
        (WIDTH, dict(width=4)),
        (HALF, dict(factor=2)),
        (BOTH, dict(both=False)),
    )
    fit = [text for text, change in slips if got == search(Step(model, **change), case)]
    if got == search(Step(model), replace(case, context=case.context + 1)):
        fit.append(CONTEXT)
    corner = search(Step(model, kv=False), case)
    if not fit and 0 < corner - got <= 1:  # peak / bandwidth, as it is or rounded down
        fit.append(KV)
    if fit:  # two slips may give the same number
        return {lang: joint.join(text[lang] for text in fit) for lang, joint in OR.items()}
    return ROUND if abs(got - want) <= 1 else OTHER


def random_case(rng: random.Random) -> BatchCase:
    bandwidth = rng.choice((50, 272, 448, 1008, 2039, 4280, 8000)) * 10**9
    peak = rng.choice((1, 12, 73, 165, 312, 685, 2250)) * 10**12
    return BatchCase(rng.choice(tuple(NAMED_CONFIGS)), bandwidth, peak, rng.choice((1, 16, 128, 500, 1024, 4096)))


def smaller(case: BatchCase) -> Iterator[BatchCase]:
    """The lesson's model and card, a context at which the slips give numbers far apart."""
    for name, value in (("model", "qwen3-0.6b"), ("bandwidth", 4280 * 10**9), ("peak", 685 * 10**12), ("context", 32)):
        if getattr(case, name) != value:
            yield replace(case, **{name: value})


def show(case: BatchCase) -> str:
    return (f"{case.model}, {case.bandwidth / 1e9:g} GB/s, {case.peak / 1e12:g} TFLOP/s, "
            f"context {case.context}")  # fmt: skip


H200 = (4280 * 10**9, 685 * 10**12)
BOUNDARIES = (
    BatchCase("qwen3-0.6b", *H200, 1),
    BatchCase("qwen3-0.6b", *H200, 32),
    BatchCase("qwen3-0.6b", *H200, 1024),  # never
    BatchCase("smollm2-135m", 50 * 10**9, 10**12, 128),
    BatchCase("tiny-llama", 50 * 10**9, 10**12, 16),  # float32, and a head of its own
    BatchCase("qwen3-8b", *H200, 128),  # a head of its own: the embedding is only looked up
    BatchCase("qwen3-8b", 1008 * 10**9, 165 * 10**12, 16),
    BatchCase("qwen3-8b", *H200, 657),  # just below the context from which there is none: a batch of 126,022
    BatchCase("qwen3-0.6b", 10**15, 10**12, 1024),  # compute-bound from the first sequence on
)

FOREVER = dict(
    en="There is no such batch: each further sequence adds more time for its KV than for its arithmetic. Return None "
    "when the time per sequence says so.",
    zh="没有这样的 batch:每多一条序列,读 KV 多出来的时间比计算多出来的还长。每条序列的时间一比就知道,这时返回 None。",
)
EXISTS = dict(
    en="There is one here: a sequence adds more time for arithmetic than for traffic, so a large enough batch gets "
    "there. A search that gives up too early misses it; an equation does not.",
    zh="这里是有的:每多一条序列,增加的计算时间比搬运时间多,batch 够大就到了。逐个去试,停得太早就会漏掉;解方程不会。",
)
TYPE = dict(en="Return a whole number, or None; not infinity.", zh="返回整数或者 None,不要返回无穷大。")
KV = dict(en="This is the batch for the weights alone. Each sequence also reads its KV, and attends to it.",
          zh="这只算了权重。每条序列还要读自己的 KV,还要对它做注意力。")  # fmt: skip
HEADS = dict(en="KV heads are what is read; the products are made by every query head.",
             zh="读的是 KV head;做乘法的是每一个 query head。")  # fmt: skip
EMBEDDING = dict(
    en="With a head of its own (tie_word_embeddings False) the embedding is only looked up: it is neither multiplied "
    "nor read as a whole.",
    zh="输出头独立时(tie_word_embeddings 为 False),embedding 只是查表:既不参与乘法,也不会整个读一遍。",
)
WIDTH = dict(en="float32 takes 4 bytes a number, bf16 takes 2; that goes for weights and for KV.",
             zh="float32 每个数 4 字节,bf16 是 2;权重和 KV 都一样。")  # fmt: skip
HALF = dict(en="A weight is used for a multiply and an add: 2 FLOPs.",
            zh="一个权重对应一次乘、一次加:2 FLOP。")  # fmt: skip
BOTH = dict(en="K and V are both read: 2 × layers × KV heads × head_dim numbers a token.",
            zh="K 和 V 都要读:每个 token 2 × 层数 × KV head 数 × head_dim 个数。")  # fmt: skip
CONTEXT = dict(en="context counts the new token, too: a sequence attends to context tokens, not to context + 1.",
               zh="context 已经把新 token 算在内:一条序列看 context 个 token,不是 context + 1 个。")  # fmt: skip
ROUND = dict(en="Near: wanted is the smallest whole batch at which arithmetic takes at least as long. Round up, at "
             "least 1.",
             zh="只差一点:要的是计算时间不少于搬运时间的最小整数 batch。向上取整,至少是 1。")  # fmt: skip
OTHER = dict(
    en="Write both times as a + b × batch: bytes are weights + batch × context × KV bytes a token; FLOPs are batch × "
    "(2 × weights + 4 × layers × heads × head_dim × context). Then solve for batch.",
    zh="两个时间都写成 a + b × batch:字节 = 权重 + batch × 上下文 × 每 token KV 字节;FLOP = batch × (2 × 权重数 + 4 "
    "× 层数 × head 数 × head_dim × 上下文)。再解出 batch。",
)
