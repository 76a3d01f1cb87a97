"""Check of ex01b: the KV ledger of any model on any card.

The oracle fills the card: it lists every weight tensor's shape, lays K and V down layer by layer, and hands out blocks
until nothing fits. The answer is expected to divide.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction

from nanoengine.course.checks.exercise import Failure, Text, call
from nanoengine.model.config import NAMED_CONFIGS, ModelConfig

KEYS = ("blocks", "tokens", "sequences")
UNITS = {"GB": 10**9, "GiB": 2**30}
WEIGHTS_DO_NOT_FIT = "ValueError: the weights do not fit"


@dataclass(frozen=True)
class LedgerCase:
    """model: a name in NAMED_CONFIGS. gpu: as "12 GB" or "12 GiB"."""

    model: str
    gpu: str
    utilization: float
    block_size: int
    max_model_len: int


def run_ledger(answer, case: LedgerCase) -> Failure | None:
    model = NAMED_CONFIGS[case.model]
    want = fill_the_card(model, case)
    try:
        got = call(answer, model, case.gpu, case.utilization, case.block_size, case.max_model_len)
    except ValueError as error:
        if want is None:
            return None
        return Failure(f"{want}", f"ValueError: {error}", FITS)
    if want is None:
        return Failure(WEIGHTS_DO_NOT_FIT, f"{got!r:.160}", NO_ROOM)
    if not isinstance(got, dict) or set(got) != set(KEYS):
        return Failure(f"a dict with the keys {', '.join(KEYS)}", f"{got!r:.160}", SHAPE)
    if got == want and all(float(value).is_integer() for value in got.values()):
        return None
    return Failure(f"{want}", f"{got}", _likely(model, case, got, want))


def fill_the_card(model: ModelConfig, case: LedgerCase) -> dict[str, int] | None:
    """What fits, found by filling; None if the weights do not."""
    width = 4 if model.dtype == "float32" else 2
    left = card_bytes(case.gpu) * Fraction(str(case.utilization))
    for shape in weight_shapes(model):
        left -= math.prod(shape) * width
    if left < 0:
        return None
    block = 0
    for _layer in range(model.num_hidden_layers):
        for _k_or_v in range(2):
            block += math.prod((case.block_size, model.num_key_value_heads, model.head_dim)) * width
    blocks = _how_often(left, block)
    needed = len(range(0, case.max_model_len, case.block_size))  # blocks of a full sequence
    return dict(blocks=blocks, tokens=blocks * case.block_size, sequences=_how_often(blocks, needed))


def _how_often(room, size: int) -> int:
    """How many times ``size`` can be taken from ``room``: piles twice as large each time, then back down."""
    count, pile = 0, 1
    while pile * size <= room:
        pile *= 2
    while pile:
        if pile * size <= room:
            room, count = room - pile * size, count + pile
        pile //= 2
    return count


def card_bytes(gpu: str) -> int:
    amount, unit = re.fullmatch(r"([\d.]+) (GB|GiB)", gpu).groups()
    return int(Fraction(amount) * UNITS[unit])


def weight_shapes(model: ModelConfig) -> Iterator[tuple[int, ...]]:
    """The shape of every weight tensor of the decoder."""
    h, d = model.hidden_size, model.head_dim
    q, kv = model.num_attention_heads * d, model.num_key_value_heads * d
    yield (model.vocab_size, h)
    if not model.tie_word_embeddings:
        yield (model.vocab_size, h)
    yield (h,)
    for _layer in range(model.num_hidden_layers):
        yield from [(q, h), (kv, h), (kv, h), (h, q), (h,), (h,)]
        yield from [(model.intermediate_size, h), (model.intermediate_size, h), (h, model.intermediate_size)]
        if model.qk_norm:
            yield from [(d,), (d,)]
        if model.attention_bias or model.qkv_bias:
            yield from [(q,), (kv,), (kv,)]
        if model.attention_bias:
            yield (h,)
        if model.mlp_bias:
            yield from [(model.intermediate_size,), (model.intermediate_size,), (h,)]


def _likely(model: ModelConfig, case: LedgerCase, got: dict, want: dict) -> Text:
    """Which known slip gives this number, if one does."""
    if got["blocks"] == want["blocks"]:
        return PARTIAL if got["tokens"] == want["tokens"] else SHAPE
    other = case.gpu.replace("GiB", "GB") if "GiB" in case.gpu else case.gpu.replace("GB", "GiB")
    swapped = fill_the_card(model, replace(case, gpu=other))
    if swapped is not None and got["blocks"] == swapped["blocks"]:
        return UNITS_SWAPPED
    ratio = got["blocks"] / want["blocks"] if want["blocks"] else 0.0
    fit = [why for factor, why in _slips(model) if ratio and abs(ratio / factor - 1) < 0.02 + 1.5 / want["blocks"]]
    return {lang: joint.join(why[lang] for why in fit) for lang, joint in OR.items()} if fit else BUDGET


def _slips(model: ModelConfig) -> Iterator[tuple[float, Text]]:
    group = model.num_attention_heads / model.num_key_value_heads
    width = model.hidden_size / model.num_attention_heads / model.head_dim
    yield 2.0, HALF
    if group != 1:
        yield 1 / group, QUERY_HEADS
    if width != 1:
        yield 1 / width, HEAD_DIM


def random_case(rng: random.Random) -> LedgerCase:
    amount, unit = rng.choice((1, 2, 4, 8, 12, 16, 24, 40, 80, 141)), rng.choice(("GB", "GiB"))
    return LedgerCase(rng.choice(tuple(NAMED_CONFIGS)), f"{amount} {unit}", rng.choice((0.5, 0.8, 0.9, 0.95, 1.0)),
                      rng.choice((1, 8, 16, 256)), rng.choice((1, 100, 2048, 4096, 32768)))  # fmt: skip


def smaller(case: LedgerCase) -> Iterator[LedgerCase]:
    """Rounder numbers, the model of the lesson."""
    for name, value in (("model", "qwen3-0.6b"), ("gpu", "12 GB"), ("utilization", 1.0), ("block_size", 256),
                        ("max_model_len", 4096)):  # fmt: skip
        if getattr(case, name) != value:
            yield replace(case, **{name: value})


def show(case: LedgerCase) -> str:
    return (f"{case.model}, {case.gpu}, utilization {case.utilization}, block_size {case.block_size}, "
            f"max_model_len {case.max_model_len}")  # fmt: skip


BOUNDARIES = (
    LedgerCase("qwen3-0.6b", "12 GB", 0.9, 256, 4096),  # the lesson's card
    LedgerCase("qwen3-0.6b", "12 GiB", 0.9, 256, 4096),
    LedgerCase("qwen3-0.6b", "12 GB", 0.9, 16, 4096),
    LedgerCase("qwen3-0.6b", "12 GB", 0.9, 256, 1000),  # a full sequence needs four blocks, the last one not full
    LedgerCase("smollm2-135m", "8 GiB", 0.9, 16, 8192),  # 9 query heads, 3 KV heads
    LedgerCase("tiny-llama", "1 GB", 0.5, 16, 2048),  # float32: four bytes
    LedgerCase("qwen3-8b", "24 GB", 0.9, 16, 40960),  # holds one full sequence less than it seems
    LedgerCase("qwen3-8b", "16 GB", 0.9, 16, 4096),  # the weights do not fit
    LedgerCase("qwen3-0.6b", "1.2 GB", 1.0, 256, 4096),  # the weights fit, no block does
    LedgerCase("qwen3-8b", "20 GB", 0.9, 256, 40960),  # blocks, but not one full sequence
)

OR = dict(en=" Or: ", zh=" 或者:")  # two slips may give the same number
FITS = dict(en="The weights do fit here. Zero blocks is an answer, not an error.",
            zh="这里权重装得下。0 个块是答案,不是错误。")  # fmt: skip
NO_ROOM = dict(
    en="The weights alone are larger than the budget. A negative or zero number of blocks hides that: raise "
    "ValueError.",
    zh="光权重就超出了预算。返回负数或 0 会把问题藏起来:请抛 ValueError。",
)
SHAPE = dict(en="Return a dict of three whole numbers; tokens = blocks x block_size.",
             zh="返回三个整数的字典;tokens = blocks × block_size。")  # fmt: skip
PARTIAL = dict(
    en="blocks and tokens are right. A sequence owns whole blocks: its last one may be part empty, and nobody "
    "else can "
    "use the rest. Count blocks a sequence, then divide blocks.",
    zh="blocks 和 tokens 都对。但序列占的是整块:最后一块可能不满,剩下的别人也用不了。先算一条要几块,再用块数去除。",
)
UNITS_SWAPPED = dict(en="GB is 10**9 bytes, GiB is 2**30: this number comes out when the two are taken for each other.",
                     zh="GB 是 10**9 字节,GiB 是 2**30:把两者当成一回事,正好得到这个数。")  # fmt: skip
HALF = dict(en="Twice too many blocks: a token keeps K and V, and bf16 takes two bytes (float32 four).",
            zh="块数多了一倍:每个 token 要存 K 和 V 两份,bf16 占两个字节(float32 四个)。")  # fmt: skip
QUERY_HEADS = dict(en="The cache holds the KV heads, not the query heads: num_key_value_heads.",
                   zh="缓存里存的是 KV 头,不是 query 头:num_key_value_heads。")  # fmt: skip
HEAD_DIM = dict(en="head_dim is a field of its own: hidden_size / num_attention_heads is something else in this model.",
                zh="head_dim 是单独的字段:在这个模型里,hidden_size / num_attention_heads 是另一个数。")  # fmt: skip
BUDGET = dict(
    en="Budget = card x utilization; weights come off that; what is left is cut into blocks of block_size x KV "
    "bytes a "
    "token, rounded down. Print each of these numbers.",
    zh="预算 = 显存 × 利用率;减去权重;剩下的按「block_size × 每 token KV 字节」切块,向下取整。把这几个数都打印出"
    "来看看。",
)
