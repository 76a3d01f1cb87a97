"""One model on 1, 2, ... ranks, same workload: what a rank more brings, and where it brings nothing.

A step then reads 1/k of the weights and of the KV on each GPU, and pays 2 sums of [T, hidden] a layer for it. So
the smaller the model and the batch, the less there is to gain; one stream is measured, too, for that reason.
"""

from __future__ import annotations

import gc
from statistics import median

from nanoengine.bench.gpu import fresh, make_llm, nano_vllm_workload, tell, timed
from nanoengine.bench.machine import describe
from nanoengine.bench.workload import Workload, synthetic

STREAM = Workload("one stream, 128 in, 512 out", [[0] * 128], [512])


def measure(models: list[str], sizes: list[int], runs: int = 3, device: str = "cuda", say=tell, **settings) -> dict:
    """Output tokens per second of each model on each number of ranks; on a CPU with a workload of minutes, not hours.

    Errors: ValueError for sizes that a model or the machine cannot have.
    """
    if device == "cpu":
        settings = {"dtype": "float32", "max_model_len": 512, "num_blocks": 400} | settings
        workloads = [synthetic("8 requests, 20-60 in, 16 out", 8, (20, 60), (16, 16), vocab_size=1000)]
    else:
        workloads = [nano_vllm_workload(), STREAM]
    rows = []
    for model in models:
        for size in sizes:
            rows += _rows(model, size, runs, workloads, say, device=device, **settings)
    return {"schema": 1, "kind": "tensor_parallel", "machine": describe() | _gpus(device), "rows": rows}


def _rows(model: str, size: int, runs: int, workloads: list[Workload], say, **settings) -> list[dict]:
    llm, started = make_llm(model, tensor_parallel_size=size, **settings)
    rows = []
    with llm:
        runner = llm.engine.runner
        facts = getattr(runner, "facts", [])
        ranks = [{"weight_bytes": fact.weight_bytes, "kv_bytes": fact.kv_bytes} for fact in facts]
        for workload in workloads:
            seconds = [timed(llm, fresh_ids(workload, 100 + run, llm)) for run in range(runs + 1)][1:]
            rates = [workload.num_output_tokens / s for s in seconds]
            rows.append({
                "model": f"{model}, random weights", "tensor_parallel_size": size, "workload": workload.name,
                "output_tok_s": round(median(rates), 1), "runs_tok_s": [round(rate, 1) for rate in rates],
                "first_token_s": round(started, 2), "num_blocks": runner.num_blocks, "overlap": llm.engine.overlap,
                "attention": runner.attention.name, "dtype": str(runner.dtype).removeprefix("torch."),
                "graphs": bool(getattr(runner, "graphs", None)), "ranks": ranks,
            })  # fmt: skip
            say(f"{model}, {size} rank(s), {workload.name}: {median(rates):,.1f} tok/s")
    gc.collect()
    return rows


def fresh_ids(workload: Workload, seed: int, llm) -> Workload:
    """Other ids, so that no prefix is cached; none beyond a small model's vocabulary."""
    again, vocabulary = fresh(workload, seed), llm.model_config.vocab_size
    return Workload(again.name, [[token % vocabulary for token in p] for p in again.prompts], again.output_lens)


def _gpus(device: str) -> dict:
    import torch

    if device == "cpu":
        return {"gpus": []}
    return {"gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
            "nccl": ".".join(map(str, torch.cuda.nccl.version()))}  # fmt: skip


def show(result: dict) -> str:
    """The result as a table; the factor is over the fewest ranks of the same model and workload."""
    m = result["machine"]
    lines = [f"{', '.join(m['gpus']) or m['cpu']}, torch {m['versions']['torch']}, {m['date']}",
             f"\n{'model':24}{'ranks':>6}{'tok/s':>12}{'factor':>8}   workload"]  # fmt: skip
    first: dict[tuple, float] = {}
    for row in result["rows"]:
        base = first.setdefault((row["model"], row["workload"]), row["output_tok_s"])
        lines.append(f"{row['model'].partition(',')[0]:24}{row['tensor_parallel_size']:>6}{row['output_tok_s']:12,.1f}"
                     f"{row['output_tok_s'] / base:8.2f}   {row['workload']}")  # fmt: skip
    return "\n".join(lines)
