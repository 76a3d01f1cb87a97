"""Runs to draw: a tiny pool in which everything happens, a middling one, and one too large for a picture."""

from __future__ import annotations

import random

import pytest

from nanoengine import LLMEngine, SamplingParams, record
from nanoengine.config import EngineConfig
from nanoengine.sim import SlotRunner

SHARED = list(range(100, 108))
# (prompt, max_tokens, step of arrival)
EVENTFUL = [
    ([*SHARED, 1], 12, 0),
    (list(range(200, 205)), 14, 0),
    ([*SHARED, *range(300, 306)], 10, 1),
    ([*SHARED, 9], 8, 3),
    (list(range(400, 413)), 5, 4),
]


def run(requests, *, num_blocks, block_size, abort_at=None, **settings):
    """The trace of a SlotRunner run in which requests arrive at given steps."""
    config = EngineConfig(watermark=0, **settings)
    engine = LLMEngine(config, runner=SlotRunner(num_blocks, block_size))
    pending, step, last = list(requests), 0, None
    with record(engine) as trace:
        while pending or engine.has_unfinished():
            while pending and pending[0][2] <= step:
                prompt, max_tokens, _ = pending.pop(0)
                last = engine.add_request(prompt, SamplingParams(max_tokens=max_tokens))
            if step == abort_at:
                engine.abort(last)
            if engine.has_unfinished():
                engine.step()
            step += 1
    return trace


def crowd(count, gap, longest, max_new, seed=0):
    """Random requests, two in five of which begin alike."""
    rng = random.Random(seed)
    begin = [rng.randrange(900) for _ in range(32)]
    requests = []
    for i in range(count):
        prompt = [rng.randrange(900) for _ in range(rng.randint(3, longest))]
        head = begin if rng.random() < 0.4 else []
        requests.append((head + prompt, rng.randint(3, max_new), i * gap))
    return requests


@pytest.fixture(scope="session")
def eventful():
    """12 blocks of 4, 5 requests: chunks, hits, shared blocks, preemptions, ends, an idle budget."""
    return run(EVENTFUL, num_blocks=12, block_size=4, max_num_batched_tokens=12)


@pytest.fixture(scope="session")
def prefill_first():
    return run(EVENTFUL, num_blocks=12, block_size=4, max_num_batched_tokens=12, policy="prefill_first")


@pytest.fixture(scope="session")
def long_run():
    """At least 200 steps, 64 blocks."""
    trace = run(crowd(24, 5, 60, 60), num_blocks=64, block_size=4, max_num_batched_tokens=64, max_num_seqs=16)
    assert len(trace) >= 200
    return trace


@pytest.fixture(scope="session")
def huge():
    """1,000 blocks, 100 requests."""
    requests = crowd(100, 0, 300, 40)
    return run(requests, num_blocks=1000, block_size=16, max_num_batched_tokens=512, max_num_seqs=100)
