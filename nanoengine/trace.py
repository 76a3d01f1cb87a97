"""What happened in each step, as plain data: the one source of player, plots and exports.

    with record(llm) as trace:
        llm.generate(...)
    trace.save("run.jsonl")

A record (one step) is a dict of JSON types:
    schema       1
    step         0, 1, 2, ... within this trace
    policy, max_num_seqs, max_num_batched_tokens, num_blocks, block_size
    waiting      ids in queue order, after scheduling        running      ids in order of admission
    rows         one per sequence in the batch: {"seq", "kind": "prefill" | "decode", "start", "tokens",
                 "context", "new": [ids]}; start = tokens computed before, context = start + tokens
    sequences    {id: {"prompt": n, "total": n, "computed": n, "cached": n}} of all unfinished, after scheduling
    block_tables {id: [block, ...]}     ref_counts [num_blocks]
    free         free blocks, the next to be taken first    cached_free  those that still hold a known content
    slot_mapping slot of each computed token, rows end to end
    events       {"kind": "arrive" | "admit" | "hit" | "preempt" | "finish" | "abort", "seq": id, ...,
                 "why": one English sentence}
    graph_bucket padded number of tokens of the CUDA graph, or null
    seconds      {"at": when the batch was built, on the trace's clock; "total": from then until its tokens are written}
Ids in JSON keys are strings; ``Trace.load`` makes them ints again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nanoengine.trace_record import from_json

SCHEMA = 1
FIELDS = (
    "schema", "step", "policy", "max_num_seqs", "max_num_batched_tokens", "num_blocks", "block_size", "waiting",
    "running", "rows", "sequences", "block_tables", "ref_counts", "free", "cached_free", "slot_mapping", "events",
    "graph_bucket", "seconds",
)  # fmt: skip


class Trace:
    """A list of step records that is also an engine's observer."""

    def __init__(self, steps: list[dict] | None = None):
        self.steps: list[dict] = steps if steps is not None else []
        self._clock = time.perf_counter
        self._began: float | None = None
        self._seen: set[int] = set()
        self._alive: dict[int, Any] = {}
        self._open: list[dict] = []  # records of steps in flight

    def __len__(self) -> int:
        return len(self.steps)

    def __getitem__(self, index):
        return self.steps[index]

    def __iter__(self) -> Iterator[dict]:
        return iter(self.steps)

    # observer: the engine calls these two, around launching and after landing

    def before(self, engine, plan, batch) -> dict:
        """The state in which the batch runs: after scheduling, before its tokens are known."""
        now = self._clock()
        if self._began is None:
            self._began = now
        manager, scheduler = engine.block_manager, engine.scheduler
        events = self._left_over(engine) + self._changes(engine)
        events += [{**event, "why": why(event)} for event in plan.events]
        ref_counts, free, cached_free = _pool(manager, engine.sequences.values())
        record = {
            "schema": SCHEMA,
            "step": None,
            "policy": engine.config.policy,
            "max_num_seqs": engine.config.max_num_seqs,
            "max_num_batched_tokens": engine.config.max_num_batched_tokens,
            "num_blocks": manager.num_blocks,
            "block_size": manager.block_size,
            "waiting": [seq.seq_id for seq in scheduler.waiting],
            "running": [seq.seq_id for seq in scheduler.running],
            "rows": [_row(seq) for seq in plan.seqs],
            "sequences": {seq.seq_id: _progress(seq) for seq in engine.sequences.values()},
            "block_tables": {s.seq_id: list(s.block_table) for s in engine.sequences.values() if s.block_table},
            "ref_counts": ref_counts,
            "free": free,
            "cached_free": cached_free,
            "slot_mapping": batch.slot_mapping.tolist(),
            "events": events,
            "graph_bucket": None,
            "seconds": {"at": now - self._began},
        }
        self._open.append(record)
        return record

    def after(self, engine, step, output) -> None:
        """The step has landed: its tokens, and who ended."""
        record = step.record
        if not self._open or record is not self._open[0]:  # launched before this trace began to watch
            return
        self._open.pop(0)
        for row, tokens in zip(record["rows"], output.new_tokens, strict=True):
            row["new"] = [int(token) for token in tokens]
        record["events"] += self._changes(engine)
        record["graph_bucket"] = step.pending.graph_bucket
        record["seconds"]["total"] = self._clock() - self._began - record["seconds"]["at"]
        record["step"] = len(self.steps)
        self.steps.append(record)

    def _changes(self, engine) -> list[dict]:
        """Who came and who ended since the last look."""
        events = []
        for seq_id, seq in engine.sequences.items():
            if seq_id not in self._seen:
                self._seen.add(seq_id)
                self._alive[seq_id] = seq
                events.append({"kind": "arrive", "seq": seq_id, "prompt": seq.num_prompt_tokens})
        for seq_id in [i for i, seq in self._alive.items() if seq.finish_reason is not None]:
            seq = self._alive.pop(seq_id)
            if seq.finish_reason == "abort":
                events.append({"kind": "abort", "seq": seq_id})
            else:
                error = {"error": seq.error} if seq.finish_reason == "error" else {}
                events.append({"kind": "finish", "seq": seq_id, "reason": seq.finish_reason,
                               "generated": seq.num_output_tokens, **error})  # fmt: skip
        return [{**event, "why": why(event)} for event in events]

    def _left_over(self, engine) -> list[dict]:
        """Arrivals and ends noted in steps that failed and so left no record."""
        lost = self._open[: len(self._open) - len(engine.in_flight)]
        del self._open[: len(lost)]
        return [
            event for record in lost for event in record["events"] if event["kind"] in ("arrive", "abort", "finish")
        ]

    # files

    def save(self, path: str | Path) -> Path:
        """One JSON object a line."""
        path = Path(path)
        path.write_text("".join(json.dumps(step) + "\n" for step in self.steps), encoding="utf-8")
        return path

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Read what ``save`` wrote. ValueError naming the line that is no record of this schema."""
        steps = []
        for number, line in enumerate(Path(path).read_bytes().splitlines(), 1):
            try:
                step = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path}, line {number} is not JSON: {error}") from None
            if not isinstance(step, dict) or step.get("schema") != SCHEMA:
                raise ValueError(f"{path}, line {number} is no trace record of schema {SCHEMA}")
            missing = [name for name in FIELDS if name not in step]
            if missing:
                raise ValueError(f"{path}, line {number} is damaged: it lacks {', '.join(missing)}")
            try:
                steps.append(from_json(step))
            except ValueError as error:
                raise ValueError(f"{path}, line {number} is damaged: {error}") from None
        return cls(steps)


@contextmanager
def record(engine) -> Iterator[Trace]:
    """Watch an LLM or an LLMEngine while the block runs."""
    engine = getattr(engine, "engine", engine)
    trace, before = Trace(), engine.observer
    engine.observer = trace
    try:
        yield trace
    finally:
        engine.observer = before


def _pool(manager, seqs) -> tuple[list[int], list[int], list[int]]:
    """Ref counts, free blocks and cached free ones; a block manager of your own may not tell them."""
    if not hasattr(manager, "ref_counts"):
        counts = [0] * manager.num_blocks
        for seq in seqs:
            for block in seq.block_table:
                counts[block] += 1
        return counts, [block for block, count in enumerate(counts) if not count], []
    free = list(manager.free_blocks)
    return list(manager.ref_counts), free, [block for block in free if manager.is_cached(block)]


def _row(seq) -> dict:
    n, start = seq.num_scheduled_tokens, seq.num_computed_tokens
    decodes = start >= (seq.num_prompt_tokens if n == 1 else seq.num_prefill_tokens)
    kind = "decode" if decodes else "prefill"
    return {"seq": seq.seq_id, "kind": kind, "start": seq.num_computed_tokens, "tokens": n,
            "context": seq.num_computed_tokens + n, "new": []}  # fmt: skip


def _progress(seq) -> dict:
    return {"prompt": seq.num_prompt_tokens, "total": seq.num_tokens, "computed": seq.num_computed_tokens,
            "cached": seq.num_cached_tokens}  # fmt: skip


def why(event: dict) -> str:
    """An event in one English sentence."""
    seq = event["seq"]
    match event["kind"]:
        case "arrive":
            return f"Request {seq} arrives with {event['prompt']} prompt tokens and waits."
        case "admit":
            return f"Sequence {seq} starts: a slot is free and its {event['blocks']} blocks fit."
        case "hit":
            whose = "its own earlier blocks" if event["own"] else "blocks that others computed"
            return f"Sequence {seq} finds {event['tokens']} tokens in the prefix cache ({whose}): not computed again."
        case "preempt":
            return (
                f"No free block is left for sequence {event['needed_by']}. Sequence {seq}, the last admitted, "
                f"gives back {event['blocks']} blocks and waits; its {event['computed']} computed tokens "
                "will be computed again."
            )
        case "finish":
            reason = {"stop": "an end token or stop string", "length": "its length limit",
                      "error": f"an error ({event.get('error')})"}[event["reason"]]  # fmt: skip
            return f"Sequence {seq} ends by {reason} after {event['generated']} tokens; its blocks are free."
        case "abort":
            return f"Sequence {seq} was aborted; its blocks are free."
    raise ValueError(f"unknown event kind {event['kind']!r}")
