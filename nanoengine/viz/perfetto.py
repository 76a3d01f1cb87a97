"""A trace as Trace Event JSON, which ui.perfetto.dev and chrome://tracing open.

The format: Trace Event Format (Google, docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU).
Times are microseconds; complete events of one thread must not overlap except by nesting.
"""

from __future__ import annotations

import json
from collections.abc import Sequence as Steps
from pathlib import Path

from nanoengine.viz.state import History, Run

ENGINE, REQUESTS = 1, 2  # process ids: one group of tracks each


def to_perfetto(trace: Steps[dict] | History, path: str | Path) -> Path:
    """Write the run for Perfetto: a track of steps, counters, and a track per request. Returns the path.

    Raises:
        ValueError: the trace is empty.
    """
    path = Path(path)
    document = {"displayTimeUnit": "ms", "traceEvents": trace_events(trace)}
    path.write_text(json.dumps(document, ensure_ascii=False) + "\n", encoding="utf-8")
    return path


def trace_events(trace: Steps[dict] | History) -> list[dict]:
    """The events: metadata ("M"), complete ("X"), instant ("i") and counter ("C"), in order of time."""
    history = trace if isinstance(trace, History) else History(trace)
    starts = [_us(step["seconds"]["at"]) for step in history.steps]
    ends = [start + _us(step["seconds"].get("total", 0.0)) for start, step in zip(starts, history.steps, strict=True)]
    steps, lanes = _steps(history, starts, ends)
    timed = steps + _counters(history, starts) + _requests(history, starts, ends) + _instants(history, starts, ends)
    return _metadata(history, lanes) + sorted(timed, key=lambda event: event["ts"])


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _steps(history: History, starts: list[float], ends: list[float]) -> tuple[list[dict], int]:
    """Steps in flight at the same time lie on different tracks. Returns the events and the number of tracks."""
    events, busy_until = [], []
    for step, start, end in zip(history.steps, starts, ends, strict=True):
        lane = next((i for i, until in enumerate(busy_until) if until <= start), len(busy_until))
        busy_until[lane : lane + 1] = [end]
        kinds = sorted({row["kind"] for row in step["rows"]}, reverse=True)
        args = {
            "tokens": sum(row["tokens"] for row in step["rows"]),
            "sequences": len(step["rows"]),
            "waiting": len(step["waiting"]),
            "graph_bucket": step["graph_bucket"],
        }
        name = f"step {step['step']}: {' + '.join(kinds)}"
        events.append({"name": name, "cat": "step", "ph": "X", "ts": start, "dur": round(end - start, 3),
                       "pid": ENGINE, "tid": lane + 1, "args": args})  # fmt: skip
    return events, len(busy_until)


def _counters(history: History, starts: list[float]) -> list[dict]:
    events = []
    for step, start in zip(history.steps, starts, strict=True):
        used = step["num_blocks"] - len(step["free"])
        tokens = {kind: sum(row["tokens"] for row in step["rows"] if row["kind"] == kind)
                  for kind in ("prefill", "decode")}  # fmt: skip
        queues = {name: len(step[name]) for name in ("running", "waiting")}
        for name, args in (("KV blocks in use", {"blocks": used}), ("tokens a step", tokens), ("queues", queues)):
            events.append({"name": name, "ph": "C", "ts": start, "pid": ENGINE, "tid": 0, "args": args})
    return events


def _requests(history: History, starts: list[float], ends: list[float]) -> list[dict]:
    events = []
    for tid, seq in enumerate(history.letters, 1):
        runs = history.runs[seq]
        for i, run in enumerate(runs):
            after = runs[i + 1] if i + 1 < len(runs) else None
            end = _end(run, after, starts, ends)
            args = {"first step": run.first, "last step": run.last}
            events.append({"name": run.phase, "cat": "request", "ph": "X", "ts": starts[run.first],
                           "dur": round(end - starts[run.first], 3), "pid": REQUESTS, "tid": tid,
                           "args": args})  # fmt: skip
    return events


def _end(run: Run, after: Run | None, starts: list[float], ends: list[float]) -> float:
    """A phase lasts until the next one begins; the last one until its step has landed."""
    if after is not None:
        return starts[after.first]
    return ends[run.last]


def _instants(history: History, starts: list[float], ends: list[float]) -> list[dict]:
    tids = {seq: tid for tid, seq in enumerate(history.letters, 1)}
    events = []
    for i, step in enumerate(history.steps):
        for event in step["events"]:
            at = ends[i] if event["kind"] == "finish" else starts[i]
            events.append({"name": event["kind"], "cat": "event", "ph": "i", "s": "t", "ts": at, "pid": REQUESTS,
                           "tid": tids[event["seq"]], "args": {"why": event["why"]}})  # fmt: skip
    return events


def _metadata(history: History, lanes: int) -> list[dict]:
    def named(what: str, pid: int, tid: int, **args) -> dict:
        return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": args}

    events = [named("process_name", ENGINE, 0, name="engine"), named("process_name", REQUESTS, 0, name="requests")]
    events += [
        named("thread_name", ENGINE, i + 1, name=f"steps {i + 1}" if lanes > 1 else "steps") for i in range(lanes)
    ]
    for tid, (seq, name) in enumerate(history.letters.items(), 1):
        events.append(named("thread_name", REQUESTS, tid, name=f"{name} (request {seq})"))
        events.append(named("thread_sort_index", REQUESTS, tid, sort_index=tid))
    return events
