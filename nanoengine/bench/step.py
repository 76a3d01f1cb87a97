"""Decode steps by themselves: milliseconds that a step of so many rows takes in the engine, and what bytes allow.

A kernel that is fast alone may not be so among others (registers, caches, gaps): this is where it shows.
"""

from __future__ import annotations

import random
import time
from statistics import median

from nanoengine.bench.gpu import machine, make_llm, tell
from nanoengine.bench.roofline import decode_seconds, find_card
from nanoengine.sampling_params import SamplingParams

SCENES = ((256, 660), (208, 715), (104, 1100), (48, 1400), (16, 1500), (1, 400))


def parse_scene(text: str) -> tuple[int, int]:
    """ "16x1500" -> (16, 1500). Errors: ValueError that shows the form."""
    rows, _, context = text.partition("x")
    if not (rows.isdecimal() and context.isdecimal() and int(rows) >= 1 and int(context) >= 2):
        raise ValueError(f"a scene is ROWSxCONTEXT, such as 16x1500 (a context of 2 or more), got {text!r}")
    return int(rows), int(context)


def contexts_of(rows: int, context: int) -> list[int]:
    """Lengths between half of ``context`` and one and a half of it, the same each time."""
    draw = random.Random(rows)
    return [draw.randint(context // 2, context * 3 // 2) for _ in range(rows)]


def measure(model: str = "qwen3-0.6b", scenes=SCENES, steps: int = 40, say=tell, **settings) -> dict:
    """The median of ``steps`` decode steps of each scene: (rows, mean context). settings: of the engine.

    Errors: ValueError for a scene that one batch, max_model_len or the KV pool cannot hold.
    """
    llm, _ = make_llm(model, **{"enable_prefix_caching": False} | settings)
    rows = []
    with llm:
        about = machine()
        card = find_card(about["machine"])
        for count, context in scenes:
            lens = contexts_of(count, context)
            _check(llm, lens, steps)
            took = seconds_of_steps(llm, lens, steps)
            row = {"rows": count, "context": context, "step_ms": round(1e3 * took, 3)}
            if card is not None:
                seen = [n + steps // 2 for n in lens]
                least = decode_seconds(llm.model_config, card, seen, llm.engine.runner.dtype.itemsize)
                row |= {"least_ms": round(1e3 * least, 3), "percent": round(100 * least / took, 1)}
            rows.append(row)
            say(", ".join(f"{key} {value}" for key, value in row.items()))
    return about | {"workload": "decode steps in the engine: rows, mean context", "output_tok_s": None,
                    "model": f"{model}, random weights", "rows": rows}  # fmt: skip


def seconds_of_steps(llm, lens: list[int], steps: int) -> float:
    """The median; the requests are gone afterwards."""
    engine, draw = llm.engine, random.Random(0)
    params = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=llm.config.max_model_len, detokenize=False)
    seqs = [engine.add_request([draw.randint(0, 999) for _ in range(n)], params) for n in lens]
    while any(seq.num_computed_tokens <= seq.num_prompt_tokens + 2 for seq in seqs):  # until all have been decoding
        engine.step()
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - start)
    for seq in seqs:
        engine.abort(seq)
    while engine.has_unfinished():
        engine.step()
    return median(times)


def _check(llm, lens: list[int], steps: int) -> None:
    """Nothing may end or be preempted while it is measured."""
    config, runner = llm.config, llm.engine.runner
    more = steps + 8 + 2 * -(-sum(lens) // config.max_num_batched_tokens)  # the first rows decode while others start
    blocks = sum(-(-(n + more) // runner.block_size) for n in lens)
    name = f"{len(lens)} rows of up to {max(lens)} tokens"
    if len(lens) > config.max_num_seqs:
        raise ValueError(f"{name}: a batch holds max_num_seqs={config.max_num_seqs} rows")
    if max(lens) + more > config.max_model_len:
        raise ValueError(f"{name}, {more} steps: longer than max_model_len={config.max_model_len}")
    if blocks > runner.num_blocks:
        raise ValueError(f"{name}, {more} steps: {blocks} KV blocks are needed, there are {runner.num_blocks}")


def show(result: dict) -> str:
    """A line a scene."""
    lines = [f"{result['machine']}, {result['date']}: {result['model']}", "rows  context   ms/step  bytes allow"]
    for row in result["rows"]:
        least = f"{row['least_ms']:10.3f} ({row['percent']:.0f} %)" if "least_ms" in row else ""
        lines.append(f"{row['rows']:4} {row['context']:8} {row['step_ms']:9.3f}  {least}")
    return "\n".join(lines)
