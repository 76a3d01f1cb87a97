"""Check of ex04b: who is admitted by static reservation and by blocks, and what lies empty.

The oracle seats requests in a pool of single slots and counts which of them hold a token. The answer is expected to
compute.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from nanoengine.course.checks.exercise import Failure, Text, call

KEYS = ("static", "paged")


@dataclass(frozen=True)
class WasteCase:
    """requests: (prompt tokens, generated so far, max_tokens), in order of arrival."""

    requests: tuple[tuple[int, int, int], ...]
    pool_slots: int
    size: int


def run_waste(answer, case: WasteCase) -> Failure | None:
    want = seated(case)
    got = call(answer, [tuple(request) for request in case.requests], case.pool_slots, case.size)
    if not isinstance(got, dict) or set(got) != set(KEYS) or not all(_pair(got[key]) for key in KEYS):
        return Failure(f"{want}", f"{got!r:.160}", SHAPE)
    got = {key: tuple(int(n) for n in got[key]) for key in KEYS}
    return None if got == want else Failure(f"{want}", f"{got}", _likely(case, got, want))


def _pair(value) -> bool:
    try:
        return len(value) == 2 and all(float(n).is_integer() for n in value)
    except (TypeError, ValueError):
        return False


def seated(case: WasteCase, newest: int = 0, *, overtake: bool = False, ownerless: bool = False) -> dict:
    """The right answer, by seating; or the answer with a slip: the newest token counted as if its KV were there,
    requests that overtake one that does not fit, free slots counted as empty."""
    pools = {"static": case.pool_slots, "paged": case.pool_slots // case.size * case.size}
    return {key: _seat(case, slots, key == "paged", newest, overtake, ownerless) for key, slots in pools.items()}


def _seat(case: WasteCase, slots: int, blocks: bool, newest: int, overtake: bool, ownerless: bool) -> tuple[int, int]:
    pool = ["free"] * slots
    admitted = 0
    for prompt, generated, most in case.requests:
        written = range(prompt + generated - 1 + newest)
        owned = len(written) if blocks else prompt + most - 1 + newest
        while blocks and owned % case.size:
            owned += 1
        free = [i for i, state in enumerate(pool) if state == "free"]
        if len(free) < owned and overtake:
            continue
        if len(free) < owned:
            break
        for i, slot in enumerate(free[:owned]):
            pool[slot] = "token" if i in written else "empty"
        admitted += 1
    return admitted, pool.count("empty") + (pool.count("free") if ownerless else 0)


def _likely(case: WasteCase, got: dict, want: dict) -> Text:
    """Which known slip gives these numbers, if one does."""
    slips = ((NEWEST, dict(newest=1)), (QUEUE, dict(overtake=True)), (EMPTY, dict(ownerless=True)))
    for why, slip in slips:
        if all(got[key] in (want[key], seated(case, **slip)[key]) for key in KEYS):
            return why
    if got["static"] == want["static"]:
        return BLOCKS
    return STATIC if got["paged"] == want["paged"] else EMPTY


def random_case(rng: random.Random) -> WasteCase:
    requests = []
    for _ in range(rng.randint(0, 6)):
        most = rng.randint(1, 30)
        requests.append((rng.randint(1, 30), rng.randint(1, most), most))
    return WasteCase(tuple(requests), rng.randint(1, 120), rng.choice((1, 2, 3, 4, 8, 16)))


def smaller(case: WasteCase) -> Iterator[WasteCase]:
    """Fewer requests, smaller numbers in each."""
    requests = case.requests
    for i in range(len(requests)):
        yield replace(case, requests=requests[:i] + requests[i + 1 :])
    for i, (prompt, generated, most) in enumerate(requests):
        cuts = [(prompt - 1, generated, most)] if prompt > 1 else []
        cuts += [(prompt, generated - 1, most)] if generated > 1 else []
        cuts += [(prompt, generated, most - 1)] if most > generated else []
        for cut in cuts:
            yield replace(case, requests=requests[:i] + (cut,) + requests[i + 1 :])


def show(case: WasteCase) -> str:
    return f"requests {list(case.requests)}, pool of {case.pool_slots} slots, block_size {case.size}"


A_TO_D = ((10, 12, 12), (6, 12, 12), (14, 6, 6), (20, 6, 6))
BOUNDARIES = (
    WasteCase(A_TO_D, 48, 4),  # the running example, all at their end
    WasteCase(((10, 1, 12), (6, 1, 12), (14, 1, 6), (20, 1, 6)), 48, 4),  # ... and just after their prefill
    WasteCase(((10, 3, 12), (6, 3, 12)), 48, 4),  # 12 tokens have KV: three blocks, to the brim
    WasteCase(((10, 4, 12),), 48, 4),  # one more opens a block
    WasteCase(((4, 1, 1),), 4, 4),  # exactly one block
    WasteCase(((5, 1, 1),), 4, 4),  # one token too many
    WasteCase(((30, 1, 30), (1, 1, 1)), 20, 4),  # the first does not fit: nobody overtakes it
    WasteCase(((3, 1, 4), (3, 1, 4), (3, 1, 4)), 11, 4),  # 11 slots are two blocks
    WasteCase(((3, 2, 8), (5, 1, 2)), 30, 1),  # block size 1: nothing lies empty
    WasteCase((), 48, 4),
)

SHAPE = dict(en='Return {"static": (admitted, empty), "paged": (admitted, empty)}, four whole numbers.',
             zh='返回 {"static": (进来几个, 空几个槽), "paged": (进来几个, 空几个槽)},四个整数。')  # fmt: skip
NEWEST = dict(
    en="One token too many: the newest token was only sampled, its KV is written in the next step. KV exists for "
    "prompt + generated - 1 tokens; and the last of max_tokens never needs a slot.",
    zh="多算了一个 token:最新的那个只是采出来,KV 下一步才写。有 KV 的是 prompt + generated - 1 个;max_tokens 里的最后"
    "一个永远不需要槽。",
)
BLOCKS = dict(
    en="A request owns whole blocks, rounded up; the pool has pool_slots // block_size of them. A request that "
    "just fills its last block needs no further one, and the newest token needs no slot yet.",
    zh="一个请求占的是整块,向上取整;池子一共 pool_slots // block_size 块。最后一块正好写满,就不用再多一块;最新的 token "
    "还不用槽。",
)
STATIC = dict(
    en="Static reservation keeps room for the longest answer from the start: prompt + max_tokens - 1 slots, "
    "whatever was "
    "generated so far.",
    zh="静态预留一开始就按最长的答案留:prompt + max_tokens - 1 个槽,不管现在生成了几个。",
)
EMPTY = dict(
    en="Empty are the slots that admitted requests own and that hold no token's KV now. Free slots that nobody "
    "owns do not "
    "count, nor do requests that still wait.",
    zh="空槽只数**进来了的**请求占着、现在却没放 token 的槽。没人占的空闲槽不算,还在等的请求也不算。",
)
QUEUE = dict(
    en="First come, first served: the first that does not fit waits, and everybody behind it waits too.",
    zh="先来先服务:第一个放不下的要等,排在它后面的也都得等。",
)
