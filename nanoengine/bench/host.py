"""Host time of a step: everything but the model.

A runner without a model returns one and the same token for every row, so what is left of a step
is the engine's own work. A stopwatch around the scheduler and the runner splits it:

    schedule   scheduler.schedule()
    build      from there to runner.launch: the batch is laid out
    (launch    the runner's own time, not counted)
    advance    scheduler.advance()
    land       the rest of step(): tokens appended, ends looked for, full blocks committed

All scenarios live at once and take turns in short blocks, so that a machine with other work
disturbs all of them alike. Beside the time on the wall stands the processor time of this thread
("cpu"), which other work lengthens far less.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from statistics import median

from nanoengine.bench.machine import describe, load_average
from nanoengine.bench.stats import summarise
from nanoengine.config import EngineConfig
from nanoengine.engine.llm_engine import LLMEngine
from nanoengine.engine.protocols import Pending, Runner
from nanoengine.engine.scheduler import POLICIES
from nanoengine.sampling_params import SamplingParams

BLOCK_SIZE = 16
PARTS = ("schedule", "build", "advance", "land")
TOKEN, EOS = 97, 2  # "a" of the byte tokenizer, and an end token that never comes
GROWTH = [(16, 100), (64, 100), (256, 100), (1024, 100), (256, 1000), (256, 10_000)]  # sequences, context
PENALTIES = "repetition, presence and frequency penalties cost no host time here: they are in the sampler"


class NullPending(Pending):
    def __init__(self, rows: list[list[int]], logprobs):
        self._rows, self.logprobs = rows, logprobs

    def result(self) -> list[list[int]]:
        return self._rows


class NullRunner(Runner):
    """No model: each row that samples gets TOKEN. logprobs: report so many a token."""

    def __init__(self, num_blocks: int, logprobs: int = 0):
        self.num_blocks, self.block_size = num_blocks, BLOCK_SIZE
        self.began = self.ended = self.cpu = 0.0
        self._entry = {TOKEN + i: -1.0 - i for i in range(logprobs)}

    def launch(self, batch) -> NullPending:
        self.began, cpu = time.perf_counter(), time.thread_time()
        rows: list[list[int]] = [[] for _ in batch.seqs]
        for row in batch.sample_rows.tolist():
            rows[row] = [TOKEN]
        pending = NullPending(rows, [[self._entry] for _ in rows] if self._entry else None)
        self.cpu = time.thread_time() - cpu
        self.ended = time.perf_counter()
        return pending

    def close(self) -> None:
        pass


@dataclass(slots=True)
class Stopwatch:
    """Put around a scheduler's two calls; everything else is the scheduler's own."""

    scheduler: object
    schedule_began: float = 0.0
    schedule_ended: float = 0.0
    advance_began: float = 0.0
    advance_ended: float = 0.0

    def __getattr__(self, name: str):
        return getattr(self.scheduler, name)

    def schedule(self):
        self.schedule_began = time.perf_counter()
        plan = self.scheduler.schedule()
        self.schedule_ended = time.perf_counter()
        return plan

    def advance(self, plan) -> None:
        self.advance_began = time.perf_counter()
        self.scheduler.advance(plan)
        self.advance_ended = time.perf_counter()


@dataclass
class Scenario:
    """One engine in steady decoding. settings: of the engine; params: of each request."""

    name: str
    num_seqs: int = 256
    context: int = 100
    settings: dict = field(default_factory=dict)
    params: dict = field(default_factory=dict)
    observer: Callable[[], object] | None = None
    detokenizer: Callable[[SamplingParams], object] | None = None
    blocks: list[list[dict[str, float]]] = field(default_factory=list)

    def start(self, steps: int) -> None:
        """Make the engine and compute the prompts; it can then decode ``steps`` steps and no request ends."""
        params = SamplingParams(**{"max_tokens": None} | self.params)
        length = self.context + BLOCK_SIZE + steps + 8
        config = EngineConfig(**{
            "max_num_seqs": self.num_seqs, "max_num_batched_tokens": 2**31 - 1, "max_model_len": length + BLOCK_SIZE,
            "eos_token_ids": (EOS,), "watermark": 0.0, "policy": "token_budget"} | self.settings)  # fmt: skip
        self.runner = NullRunner(self.num_seqs * (length // BLOCK_SIZE + 2), self.params.get("logprobs", 0))
        self.engine = LLMEngine(config, runner=self.runner, observer=self.observer and self.observer())
        self.watch = self.engine.scheduler = Stopwatch(self.engine.scheduler)
        for i in range(self.num_seqs):
            # not all at the same place of a block: as many sequences need a new one in each step
            prompt = [i + 300] * (self.context + i % BLOCK_SIZE)
            detokenizer = self.detokenizer(params) if self.detokenizer else None
            self.engine.add_request(prompt, params, detokenizer=detokenizer)
        for _ in range(3):  # the prompts, and two steps to get steady
            self.engine.step()

    def run_block(self, steps: int) -> None:
        self.blocks.append([self._step() for _ in range(steps)])

    def _step(self) -> dict[str, float]:
        """Seconds of one step, whole (without the runner) and by part."""
        watch, runner = self.watch, self.runner
        began, cpu = time.perf_counter(), time.thread_time()
        self.engine.step()
        cpu, ended = time.thread_time() - cpu - runner.cpu, time.perf_counter()
        schedule = watch.schedule_ended - watch.schedule_began
        build = runner.began - watch.schedule_ended
        advance = watch.advance_ended - watch.advance_began
        total = ended - began - (runner.ended - runner.began)
        return {"step": total, "cpu": cpu, "schedule": schedule, "build": build, "advance": advance,
                "land": total - schedule - build - advance}  # fmt: skip

    def report(self) -> dict:
        """Milliseconds: median, p90 and best block of the step, and medians of its processor time and its parts."""
        blocks = [[step["step"] * 1e3 for step in block] for block in self.blocks]
        steps = [step for block in self.blocks for step in block]
        medians = {name: median(step[name] for step in steps) * 1e3 for name in ("cpu", *PARTS)}
        return {"name": self.name, "num_seqs": self.num_seqs, "context": self.context, **summarise(blocks),
                "cpu": medians.pop("cpu"), "parts": medians}  # fmt: skip


def features(num_seqs: int) -> Iterator[Scenario]:
    """The base, and what each dearer feature adds to it."""
    from nanoengine.trace import Trace

    yield Scenario("base", num_seqs)
    yield Scenario("observer (Trace)", num_seqs, observer=Trace)
    yield Scenario("detokeniser", num_seqs, detokenizer=_detokenizer())
    yield Scenario("stop strings", num_seqs, params={"stop": ["###", "User:"]}, detokenizer=_detokenizer())
    yield Scenario("logprobs=5", num_seqs, params={"logprobs": 5})
    yield Scenario("overlap=1", num_seqs, settings={"overlap": 1})
    yield Scenario("prefix cache off", num_seqs, settings={"enable_prefix_caching": False})
    for policy in POLICIES:
        if policy != "token_budget":
            yield Scenario(f"policy {policy}", num_seqs, settings={"policy": policy})


def _detokenizer() -> Callable[[SamplingParams], object]:
    from nanoengine.tokenizer.detokenizer import IncrementalDetokenizer
    from nanoengine.tokenizer.tokenizer import byte_tokenizer

    tokenizer = byte_tokenizer(1024)
    return lambda params: IncrementalDetokenizer(tokenizer, stop=params.stop)


def measure(num_seqs: int = 256, *, steps: int = 60, blocks: int = 5, growth: bool = True) -> dict:
    """Measure base and features, then growth with sequences and context; all figures are milliseconds.

    Errors: ValueError for counts below 1.
    """
    for name, value in (("num_seqs", num_seqs), ("steps", steps), ("blocks", blocks)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    result = {"schema": 1, "kind": "host", "machine": describe(), "steps": steps, "blocks": blocks, "unit": "ms",
              "notes": [PENALTIES]}  # fmt: skip
    reports = _interleaved(list(features(num_seqs)), steps, blocks)
    for report in reports:
        report["over_base"] = report["median"] - reports[0]["median"]
        report["cpu_over_base"] = report["cpu"] - reports[0]["cpu"]
    result["features"] = reports
    if growth:
        scenarios = [Scenario("growth", count, context) for count, context in GROWTH]
        result["growth"] = _interleaved(scenarios, steps, blocks)
    result["machine"]["load_average_after"] = load_average()
    return result


def _interleaved(scenarios: list[Scenario], steps: int, blocks: int) -> list[dict]:
    for scenario in scenarios:
        scenario.start(steps * (blocks + 1))
        scenario.run_block(steps)
        scenario.blocks.clear()  # warm now
    gc.collect()
    gc.freeze()  # a collection in one scenario's turn shall not walk over what the others hold
    try:
        for _ in range(blocks):
            for scenario in scenarios:
                scenario.run_block(steps)
    finally:
        gc.unfreeze()
    return [scenario.report() for scenario in scenarios]


def show(result: dict) -> str:
    """The result as two tables."""
    m, heads = result["machine"], "".join(f"{part:>9}" for part in PARTS)
    columns = f"{'median':>8}{'p90':>8}{'best':>8}{'cpu':>8}"
    lines = [
        f"Host time of a decode step in ms. {m['cpu']}, {m['cores']} cores, Python {m['python']}, "
        f"load average {m['load_average']} before and {m['load_average_after']} after.",
        f"{result['blocks']} blocks of {result['steps']} steps of each, in turn. best: least of the blocks' medians.",
        "cpu: processor time of the thread. over: what the median gained over the base, on the wall and cpu.",
        f"\n{'':22}{columns}{'over':>9}{'cpu':>8}  {heads}",
    ]
    for row in result["features"]:
        over = f"{row['over_base']:+9.3f}{row['cpu_over_base']:+8.3f}"
        lines.append(f"{row['name']:22}{_numbers(row)}{over}  {_parts(row)}")
    if "growth" in result:
        lines.append(f"\n{'sequences':>11}{'context':>11}{columns}{'':19}{heads}")
        lines += [
            f"{row['num_seqs']:>11}{row['context']:>11}{_numbers(row)}{'':19}{_parts(row)}" for row in result["growth"]
        ]
    return "\n".join([*lines, "", *result["notes"]])


def _numbers(row: dict) -> str:
    return "".join(f"{row[name]:8.3f}" for name in ("median", "p90", "best_block_median", "cpu"))


def _parts(row: dict) -> str:
    return "".join(f"{row['parts'][part]:9.3f}" for part in PARTS)
