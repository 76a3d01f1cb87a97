"""Check of ex01a: a step() that keeps one launch in flight and reports two named counts.

The answer runs in a real LLMEngine on SlotRunner, whose right output ``expected_output`` knows from the tokens alone.
A spy around the runner sees when each launch happens and when its result is asked for.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from nanoengine.config import EngineConfig
from nanoengine.course.checks.exercise import Failure, Text, call
from nanoengine.engine.llm_engine import LLMEngine
from nanoengine.engine.protocols import Pending, Runner
from nanoengine.sampling_params import SamplingParams
from nanoengine.sim import SlotRunner, expected_output

VOCAB = 50
KEYS = ("prefill", "decode", "finished")


@dataclass(frozen=True)
class StepCase:
    """One run: requests are (prompt, number of new tokens); end is the model's end token or None."""

    requests: tuple[tuple[tuple[int, ...], int], ...]
    policy: str = "token_budget"
    num_blocks: int = 16
    block_size: int = 4
    budget: int = 16
    max_num_seqs: int = 4
    end: int | None = None

    def fits(self) -> bool:
        """No request is refused for its size."""
        return all(len(prompt) <= self.num_blocks * self.block_size for prompt, _ in self.requests)


class _Pending(Pending):
    def __init__(self, spy: Spy, index: int, inner):
        self.spy, self.index, self.inner = spy, index, inner

    def result(self) -> list[list[int]]:
        self.spy.asked(self.index)
        return self.inner.result()


class Spy(Runner):
    """Stands between an engine and its runner. ``launches``: of each, (prefill tokens, decode tokens)."""

    def __init__(self, runner: SlotRunner):
        self.runner, self.num_blocks, self.block_size = runner, runner.num_blocks, runner.block_size
        self.launches: list[tuple[int, int]] = []
        self.landed: list[int] = []
        self.alone: list[int] = []  # launches whose result was asked for with nothing launched behind them
        self.scheduled_early = False  # schedule() was called where must_land_first() wanted the landing before

    def launch(self, batch):
        lens, samples = batch.query_lens.tolist(), set(batch.sample_rows.tolist())
        decode = sum(n == 1 and row in samples for row, n in enumerate(lens))
        self.launches.append((sum(lens) - decode, decode))
        return _Pending(self, len(self.launches) - 1, self.runner.launch(batch))

    def asked(self, index: int) -> None:
        if index == len(self.launches) - 1:
            self.alone.append(index)
        self.landed.append(index)

    @property
    def in_flight(self) -> int:
        return len(self.launches) - len(self.landed)

    def close(self) -> None:
        self.runner.close()


def run_step(answer, case: StepCase) -> Failure | None:
    """One life of an engine whose step() is the answer."""
    engine, spy = _engine(case)
    seqs = [engine.add_request(list(prompt), SamplingParams(max_tokens=new)) for prompt, new in case.requests]
    plans: list = []
    _watch_schedule(engine, spy, plans)
    limit = 20 + 10 * sum(len(prompt) + new for prompt, new in case.requests)
    for number in range(1, limit + 1):
        if not engine.has_unfinished():
            return _ending(case, engine, seqs)
        failure = _one_call(answer, engine, spy, plans, number)
        if failure is not None:
            return failure
    unfinished = [seq.seq_id for seq in seqs if seq.finish_reason is None]
    return Failure(f"all requests finished within {limit} calls of step()",
                   f"requests {unfinished} unfinished, {spy.in_flight} launches never landed", NEVER_ENDS)  # fmt: skip


def _engine(case: StepCase) -> tuple[LLMEngine, Spy]:
    config = EngineConfig(policy=case.policy, max_num_seqs=case.max_num_seqs, max_num_batched_tokens=case.budget,
                          vocab_size=VOCAB, eos_token_ids=() if case.end is None else (case.end,), watermark=0.0,
                          overlap=1)  # fmt: skip
    spy = Spy(SlotRunner(case.num_blocks, case.block_size, VOCAB, hold_back=True))
    return LLMEngine(config, runner=spy), spy


def _watch_schedule(engine: LLMEngine, spy: Spy, plans: list) -> None:
    schedule = engine.scheduler.schedule

    def watched():
        # the scheduler saves itself with an empty plan, but the rule of the loop is broken all the same
        spy.scheduled_early |= bool(spy.in_flight) and engine.scheduler.must_land_first()
        plans.append(schedule())
        return plans[-1]

    engine.scheduler.schedule = watched


def _one_call(answer, engine: LLMEngine, spy: Spy, plans: list, number: int) -> Failure | None:
    must_land = bool(spy.in_flight) and engine.scheduler.must_land_first()
    alive = list(engine.sequences.values())
    landed, alone = len(spy.landed), len(spy.alone)
    plans.clear()
    report = call(answer, engine)
    where = f"call {number} of step()"
    if spy.scheduled_early:
        return Failure("must_land_first() is True: the launch in flight lands before schedule()",
                       f"{where} called schedule() with a launch in flight", MUST_LAND)  # fmt: skip
    if len(spy.alone) > alone and not must_land and not (plans and not plans[-1].seqs):
        return Failure("the next batch is launched before the result of this one is asked for",
                       f"{where} waited for launch {spy.alone[-1] + 1} with nothing launched behind it",
                       NO_OVERLAP)  # fmt: skip
    if spy.in_flight > 1:
        return Failure("at most 1 launch in flight after step() returns", f"{where} left {spy.in_flight}", TOO_DEEP)
    if len(spy.landed) > landed + 1:
        return Failure("one call lands one launch", f"{where} landed {len(spy.landed) - landed}", TOO_MANY)
    return _report(report, spy, landed, alive, where)


def _report(report, spy: Spy, landed: int, alive: list, where: str) -> Failure | None:
    if not isinstance(report, dict) or set(report) != set(KEYS):
        return Failure(f"a dict with the keys {', '.join(KEYS)}", f"{where} returned {report!r:.120}", SHAPE)
    prefill, decode = spy.launches[spy.landed[-1]] if len(spy.landed) > landed else (0, 0)
    finished = [seq.seq_id for seq in alive if seq.finish_reason is not None]
    want = dict(prefill=prefill, decode=decode, finished=finished)
    got = {**report, "finished": sorted(report["finished"])} if isinstance(report["finished"], list) else report
    if got == want:
        return None
    launched = dict(zip(KEYS, spy.launches[-1], strict=False)) if spy.launches else {}
    early = all(report[key] == launched.get(key) for key in KEYS[:2])
    return Failure(f"{where} reports {want}", f"{report!r:.160}", OTHER_STEP if early else COUNTS)


def _ending(case: StepCase, engine: LLMEngine, seqs: list) -> Failure | None:
    """Everybody is done: the right tokens, nothing queued, nothing held?"""
    manager = engine.block_manager
    ends = frozenset() if case.end is None else frozenset([case.end])
    for seq, (prompt, new) in zip(seqs, case.requests, strict=True):
        room = case.num_blocks * case.block_size + 1 - len(prompt)
        want = expected_output(list(prompt), min(new, room), VOCAB, end_token_ids=ends)
        if seq.output_ids != want:
            return Failure(f"request {seq.seq_id} generates {want}", f"{seq.output_ids}", TOKENS)
    if manager.num_free_blocks != manager.num_blocks or engine.scheduler.running:
        return Failure(f"all {manager.num_blocks} blocks free at the end, nobody running",
                       f"{manager.num_free_blocks} free, {len(engine.scheduler.running)} still running",
                       NOT_GIVEN_BACK)  # fmt: skip
    return None


def random_case(rng: random.Random) -> StepCase:
    size = rng.randint(1, 4)
    requests = tuple((tuple(rng.randrange(VOCAB) for _ in range(rng.randint(1, 9))), rng.randint(1, 6))
                     for _ in range(rng.randint(1, 4)))  # fmt: skip
    longest = -(-max(len(prompt) for prompt, _ in requests) // size)
    return StepCase(requests, rng.choice(("token_budget", "prefill_first")), rng.randint(longest, longest + 6), size,
                    rng.choice((1, 3, 8, 16)), rng.randint(1, 4), rng.choice((None, rng.randrange(VOCAB))))  # fmt: skip


def smaller(case: StepCase) -> Iterator[StepCase]:
    """Fewer requests, shorter prompts, fewer new tokens, smaller token ids; never one that is refused."""
    requests = case.requests
    for i in range(len(requests) if len(requests) > 1 else 0):
        yield replace(case, requests=requests[:i] + requests[i + 1 :])
    for i, (prompt, new) in enumerate(requests):
        cuts = [(prompt[: len(prompt) // 2], new), (prompt[:-1], new)] if len(prompt) > 1 else []
        cuts += [(prompt, new // 2), (prompt, new - 1)] if new > 1 else []
        for cut in cuts:
            yield replace(case, requests=requests[:i] + (cut,) + requests[i + 1 :])
    if case.end is not None:
        yield replace(case, end=None)


def show(case: StepCase) -> str:
    requests = "; ".join(f"{i}: prompt {list(prompt)} + {new} new" for i, (prompt, new) in enumerate(case.requests))
    end = "" if case.end is None else f", end token {case.end}"
    return (f"{requests} ({case.policy}, {case.num_blocks} blocks of {case.block_size}, "
            f"budget {case.budget} tokens, {case.max_num_seqs} sequences{end})")  # fmt: skip


def explain(error: Exception) -> Text | None:
    if isinstance(error, ValueError) and "nobody samples" in str(error):
        return NO_ROWS
    if isinstance(error, RuntimeError) and "before preempting" in str(error):
        return MUST_LAND
    return None


FOUR = (((100 % VOCAB, 1, 2), 4), ((3, 4, 5, 6, 7, 8), 3), ((9,), 5), (tuple(range(20, 31)), 2))
BOUNDARIES = (
    StepCase((((7, 3), 1),)),  # one request, one token: prefill is also its end
    StepCase((((7, 3), 4),)),
    StepCase((((5,), 3),), policy="prefill_first"),
    StepCase((((7, 3), 5), ((1, 2, 3, 4, 5), 5))),  # a mixed step
    StepCase(FOUR),
    StepCase(FOUR, policy="prefill_first"),
    StepCase((((1, 2, 3, 4, 5, 6, 7), 2),), budget=3),  # a prompt in three chunks
    StepCase((((1, 2), 6), ((3, 4), 6)), num_blocks=4, block_size=2),  # somebody must give way
    StepCase((((1, 2), 6), ((3, 4), 6)), num_blocks=4, block_size=2, policy="prefill_first"),
    StepCase((((7, 3), 6), ((1, 2), 6)), end=expected_output([7, 3], 3, VOCAB)[1]),  # one ends while in flight
)

NEVER_ENDS = dict(
    en="Somebody has to land the last launch: when schedule() has nothing to run, a launch may still be in flight.",
    zh="最后一次 launch 也得有人去收:schedule() 没人可跑时,可能还有一步在飞。",
)
NO_OVERLAP = dict(
    en="This is the plain loop of the lesson. Launch first, then land the launch BEFORE it; land alone only if "
    "must_land_first() says so or there is nothing to run.",
    zh="这还是课里那个「等结果」的循环。应该先 launch 这一步,再收**上一步**;只有 must_land_first() 要求、或没人"
    "可跑时,才单独收。",
)
TOO_DEEP = dict(en="One launch in flight, no more: land the oldest as soon as a second one is launched.",
                zh="最多一步在飞:第二步一发出去,就把最早的那步收回来。")  # fmt: skip
TOO_MANY = dict(en="A call that lands two launches cannot report them apart. Land the oldest only.",
                zh="一次调用收两步,就没法分开汇报了。只收最早的那一步。")  # fmt: skip
SHAPE = dict(en="Return the report in every path, zeros and an empty list if nothing landed.",
             zh="每条路径都要返回报告;这次什么都没收到,就返回 0、0 和空列表。")  # fmt: skip
OTHER_STEP = dict(
    en="These are the counts of the batch just launched. Report the one that landed: until its tokens are here, "
    "nothing has been done.",
    zh="这是刚发出去的那一批的数。要汇报的是**收回来**的那一步:token 没到手,活就还没干完。",
)
COUNTS = dict(
    en="decode counts rows that computed one token and got a new one; prefill counts all other tokens; finished "
    "holds "
    "the ids of those that ended. One step may have both kinds.",
    zh="decode 数的是「算了一个 token 并得到一个新 token」的行;其余 token 都算 prefill;finished 是这一步结束的"
    " id。一步里两种可以都有。",
)
TOKENS = dict(en="A wrong token means that KV was read from, or written to, the wrong slot, or a token was lost.",
              zh="token 错了,说明 KV 读错或写错了槽,或者丢了一个 token。")  # fmt: skip
NOT_GIVEN_BACK = dict(en="Who has finished must leave the queues and give its blocks back: scheduler.retire(...).",
                      zh="结束的序列要离开队列、归还块:scheduler.retire(…)。")  # fmt: skip
NO_ROWS = dict(
    en="The newest token of a sequence may still be in flight: it is not in token_ids yet, it lies in the sequence's "
    "row on the device. `engine.build_batch(plan)` gives rows; a batch that stands alone has none.",
    zh="一条序列最新的 token 可能还在飞,token_ids 里还没有,它在设备上这条序列的行里。`engine.build_batch(plan)` 会"
    "分好行;单独排出来的 batch 没有行。",
)
MUST_LAND = dict(
    en="A sequence with a launch in flight cannot be preempted. Ask scheduler.must_land_first() before schedule().",
    zh="还有一步在飞的序列不能被抢占。调用 schedule() 之前,先问 scheduler.must_land_first()。",
)
