"""Check of ex06b: the order of requests with the most cache hits.

The answer's order is run on the real engine, one request at a time, in a pool that just holds the longest prompt. The
oracle asks another question: over all orders, how much could a pool that never evicts hit? (Dynamic programming over
sets of requests.) A good order needs no such pool.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from nanoengine.config import EngineConfig
from nanoengine.course.checks.exercise import Failure, Text, call
from nanoengine.engine.llm_engine import LLMEngine
from nanoengine.sampling_params import SamplingParams
from nanoengine.sim import SlotRunner


@dataclass(frozen=True)
class OrderCase:
    prompts: tuple[tuple[int, ...], ...]
    block_size: int = 2


def run_order(answer, case: OrderCase) -> Failure | None:
    prompts = [list(prompt) for prompt in case.prompts]
    got = call(answer, prompts, case.block_size)
    if not isinstance(got, (list, tuple)) or sorted(got) != list(range(len(prompts))):
        return Failure(f"the numbers 0 to {len(prompts) - 1}, each once", f"{got!r:.120}", SHAPE)
    if prompts != [list(prompt) for prompt in case.prompts]:
        return Failure("the prompts are left as they are", f"they are now {prompts!r:.100}", CHANGED)
    want, hits = most_hits(case), measured_hits(case, got)
    if hits == want:
        return None
    return Failure(f"{want} tokens from the cache", f"order {list(got)}: {hits} tokens", _why(case, got))


def measured_hits(case: OrderCase, order) -> int:
    """Tokens from the cache on the engine, one request after another."""
    blocks = max(-(-len(prompt) // case.block_size) for prompt in case.prompts)
    config = EngineConfig(max_num_seqs=1, watermark=0.0)
    engine = LLMEngine(config, runner=SlotRunner(blocks, case.block_size))
    for i in order:
        engine.add_request(case.prompts[i], SamplingParams(max_tokens=1))
    for _ in engine.run():
        pass
    return engine.block_manager.num_hit_tokens


def most_hits(case: OrderCase) -> int:
    """The most that any order hits if nothing is ever evicted: the best way into each set of requests."""
    size, prompts = case.block_size, case.prompts
    shared = [[_shared(a, b, size) for b in prompts] for a in prompts]  # of b, once a is cached
    best = {0: 0}
    for done in range(1, 2 ** len(prompts)):
        members = [i for i in range(len(prompts)) if done >> i & 1]
        best[done] = max(
            best[done ^ 1 << last] + max((shared[i][last] for i in members if i != last), default=0)
            for last in members
        )
    return best[2 ** len(prompts) - 1]


def _shared(cached: tuple, new: tuple, size: int) -> int:
    same = 0
    for a, b in zip(cached, new, strict=False):
        if a != b:
            break
        same += 1
    return min(same, len(cached) // size * size, len(new) - 1) // size * size


def _why(case: OrderCase, order) -> Text:
    """Where does the order lose: does a family of prompts come apart, or is a prefix behind its extension?"""
    runs: dict[tuple, list[int]] = {}
    for place, i in enumerate(order):
        prompt = case.prompts[i]
        for end in range(case.block_size, len(prompt) + 1, case.block_size):
            runs.setdefault(prompt[:end], []).append(place)
    split = any(places[-1] - places[0] >= len(places) for places in runs.values())
    return SPLIT if split else BEHIND


def random_case(rng: random.Random) -> OrderCase:
    size, prompts = rng.choice((1, 2, 2, 3)), []
    for _ in range(rng.randint(1, 6)):
        blocks = [rng.randint(1, 2) for _ in range(rng.randint(0, 4))]
        rest = (rng.randint(1, 3),) * rng.randint(0, size - 1)
        prompt = tuple(token for block in blocks for token in [block] * size) + rest
        prompts.append(prompt or (5,))
    return OrderCase(tuple(prompts), size)


def smaller(case: OrderCase) -> Iterator[OrderCase]:
    """Fewer prompts, shorter prompts."""
    prompts = case.prompts
    for i in range(len(prompts) if len(prompts) > 1 else 0):
        yield replace(case, prompts=prompts[:i] + prompts[i + 1 :])
    for i, prompt in enumerate(prompts):
        for cut in (len(prompt) // 2, len(prompt) - 1):
            if cut:
                yield replace(case, prompts=(*prompts[:i], prompt[:cut], *prompts[i + 1 :]))


def show(case: OrderCase) -> str:
    prompts = "\n".join(f"{i}: {list(prompt)}" for i, prompt in enumerate(case.prompts))
    return f"block_size {case.block_size}\n{prompts}"


A, B, C = (1, 1), (2, 2), (3, 3)
BOUNDARIES = (
    OrderCase(((1, 2, 3),)),
    OrderCase((A + (9,), B + (9,), A + (8,), B + (8,))),  # two families, taking turns
    OrderCase((A + B + (9,), A + (9,), A + C + (9,), A + B + C + (9,))),
    OrderCase((A + B + (9,), A + B, A + B + C)),  # a prompt that ends with its block goes before those that go on
    OrderCase((A, A, A + (9,))),
    OrderCase((B + A + (9,), A + B + (9,), B + B + (9,), A + A + (9,), B + A + C + (9,), A + B + C + (9,))),
    OrderCase((A + B + C + (9,), C + (9,), B + (9,), A + B + (7,), A + (7,))),
    OrderCase(((7,), (7, 7), (8, 7), (7, 8, 7)), 1),
    OrderCase(((10, 1), (2, 1), (10, 1, 3), (2, 1, 3))),  # numbers, not texts: 10 and 2
)

SHAPE = dict(en="Return a list of the prompts' numbers in the order in which they shall run; each number once.",
             zh="返回一个列表:按什么顺序跑,写 prompt 的编号,每个编号恰好一次。")  # fmt: skip
CHANGED = dict(en="Sort numbers, not the list that you were given: sorted(range(len(prompts)), key=…).",
               zh="排的是编号,别动传进来的列表:sorted(range(len(prompts)), key=…)。")  # fmt: skip
SPLIT = dict(
    en="Prompts with a common beginning are not next to each other. The pool holds one prompt: what comes between "
    "evicts the "
    "blocks that the next one wanted. Finish a branch of the prefix tree before you begin another.",
    zh="开头相同的 prompt 没挨在一起。池子只装得下一条:中间插进来的,会把下一条要用的块挤掉。前缀树的一个分支跑完,再"
    "换下一个。",
)
BEHIND = dict(
    en="Families are together, but a prompt that is the beginning of another one runs after it. A prompt must "
    "compute its "
    "last token; if it ends with a full block, that block is a hit only for those that come later and go on. "
    "Parents first.",
    zh="同族的挨着了,可有一条 prompt 是另一条的开头,却排在它后面。每条 prompt 都得算自己最后一个 token;要是它恰好在块"
    "尾结束,"
    "这一块只有排在后面、比它长的才用得上。先父后子。",
)
