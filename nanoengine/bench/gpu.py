"""Benchmarks on a GPU: nano-vllm's own workload, one stream, requests that arrive at random times.

Random weights of a named shape: speed does not depend on what the weights say. Every result is a dict with
machine, date, workload and figures, ready for JSON.
"""

from __future__ import annotations

import gc
import random
import sys
import time
from datetime import date
from statistics import median

from nanoengine.bench.roofline import decode_seconds, find_card, workload_seconds
from nanoengine.bench.stats import percentile
from nanoengine.bench.workload import Workload
from nanoengine.sampling_params import SamplingParams


def nano_vllm_workload(seed: int = 0, num_requests: int = 256) -> Workload:
    """256 prompts of 100-1024 random ids up to 10,000 and 100-1024 output tokens each, drawn as nano-vllm's bench.py
    (bb823b3) draws them. Drawn before an engine is built: one that uses Python's random state would change it."""
    draw = random.Random(seed)
    prompts = [[draw.randint(0, 10000) for _ in range(draw.randint(100, 1024))] for _ in range(num_requests)]
    return Workload("nano-vllm bench.py", prompts, [draw.randint(100, 1024) for _ in range(num_requests)])


def fresh(workload: Workload, seed: int) -> Workload:
    """The same lengths with other ids, so that a prefix cache from the run before finds nothing."""
    draw = random.Random(seed)
    prompts = [[draw.randint(0, 10000) for _ in prompt] for prompt in workload.prompts]
    return Workload(workload.name, prompts, workload.output_lens)


def machine() -> dict:
    """Name of the card, versions, and the day."""
    import torch

    today = date.today().isoformat()
    return {"machine": f"one {torch.cuda.get_device_name()}", "torch": torch.__version__, "date": today}


def tell(text: str) -> None:
    """Progress, beside what is measured."""
    print(text, file=sys.stderr, flush=True)


def make_llm(model: str = "qwen3-0.6b", **settings):
    """An LLM with random weights on the GPU, warmed up with one prompt; and the seconds until its first token."""
    from nanoengine.llm import LLM

    start = time.perf_counter()
    llm = LLM(model, load_format="dummy", **{"device": "cuda", "max_model_len": 4096} | settings)
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2, detokenize=False, ignore_eos=True), use_tqdm=False)
    return llm, time.perf_counter() - start


def timed(llm, workload: Workload, temperature: float = 0.6) -> float:
    """Seconds that ``llm`` needs for the workload."""
    params = [SamplingParams(temperature=temperature, ignore_eos=True, max_tokens=n, detokenize=False)
              for n in workload.output_lens]  # fmt: skip
    gc.collect()  # what earlier runs left is not this run's to clean up
    start = time.perf_counter()
    outputs = llm.generate(workload.prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    if [len(out.token_ids) for out in outputs] != workload.output_lens:
        raise RuntimeError("the engine generated other numbers of tokens than the workload asks for")
    return seconds


def throughput(model: str = "qwen3-0.6b", runs: int = 3, **settings) -> dict:
    """Output tokens per second on nano-vllm's workload: ``runs`` runs after a warm-up run, fresh prompts in each."""
    workload = nano_vllm_workload()
    llm, started = make_llm(model, **settings)
    with llm:
        seconds = [timed(llm, fresh(workload, 100 + run)) for run in range(runs + 1)][1:]
        config, facts = llm.model_config, _facts(llm)
    rates = [workload.num_output_tokens / s for s in seconds]
    return machine() | {
        "workload": f"{workload.name}: {len(workload.prompts)} requests, {workload.num_input_tokens} tokens in, "
        f"{workload.num_output_tokens} out, temperature 0.6",
        "model": f"{model}, random weights", "settings": facts, "output_tok_s": round(median(rates), 1),
        "runs_tok_s": [round(rate, 1) for rate in rates], "first_token_s": round(started, 2),
        "ceiling": _ceiling(workload, config, median(rates)),
    }  # fmt: skip


def single_stream(model: str = "qwen3-0.6b", runs: int = 3, prompt_len: int = 128, output_len: int = 512,
                  **settings) -> dict:  # fmt: skip
    """Output tokens per second of one request at a time."""
    shape = Workload(f"one stream, {prompt_len} in, {output_len} out", [[0] * prompt_len], [output_len])
    llm, started = make_llm(model, **settings)
    with llm:
        seconds = [timed(llm, fresh(shape, run)) for run in range(runs + 1)][1:]
        config, facts = llm.model_config, _facts(llm)
    rates = [output_len / s for s in seconds]
    return machine() | {
        "workload": shape.name, "model": f"{model}, random weights", "settings": facts,
        "output_tok_s": round(median(rates), 1), "runs_tok_s": [round(rate, 1) for rate in rates],
        "first_token_s": round(started, 2), "ceiling": _ceiling(shape, config, median(rates)),
    }  # fmt: skip


def arrivals(model: str = "qwen3-0.6b", rate: float = 12.0, seconds: float = 60.0, policies=("token_budget",
             "prefill_first"), **settings) -> dict:  # fmt: skip
    """Requests of nano-vllm's sizes at Poisson times: TTFT and ITL percentiles of each policy, in milliseconds.

    rate: requests per second. TTFT: arrival to first token; ITL: time between two tokens of one request.
    """
    rows = []
    for policy in policies:
        llm, _ = make_llm(model, policy=policy, **settings)
        with llm:
            rows.append({"policy": policy} | _arrive(llm, rate, seconds))
    name = f"Poisson arrivals, {rate:g} requests a second for {seconds:g} s, 100-1024 tokens in and out"
    return machine() | {"workload": name, "model": f"{model}, random weights", "rows": rows,
                        "output_tok_s": rows[0]["output_tok_s"]}  # fmt: skip


def _arrive(llm, rate: float, seconds: float) -> dict:
    draw = random.Random(1)
    pool, due, at = nano_vllm_workload(seed=1), [], 0.0
    while (at := at + draw.expovariate(rate)) < seconds:
        due.append(at)
    engine, start, waiting = llm.engine, time.perf_counter(), 0
    arrived: dict[int, float] = {}
    last: dict[int, float] = {}
    ttft, itl, tokens = [], [], 0
    while waiting < len(due) or engine.has_unfinished():
        now = time.perf_counter() - start
        while waiting < len(due) and due[waiting] <= now:
            k = waiting % len(pool.prompts)
            params = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=pool.output_lens[k], detokenize=False)
            seq = engine.add_request([draw.randint(0, 10000) for _ in pool.prompts[k]], params)
            arrived[seq.seq_id] = due[waiting]
            waiting += 1
        if not engine.has_unfinished():
            time.sleep(max(0.0, due[waiting] - now))
            continue
        out, now = engine.step(), time.perf_counter() - start
        for seq, new in zip(out.seqs, out.new_tokens, strict=True):
            if new:
                tokens += len(new)
                (ttft if seq.seq_id not in last else itl).append(now - last.get(seq.seq_id, arrived[seq.seq_id]))
                last[seq.seq_id] = now
    spent = time.perf_counter() - start
    figures = {"requests": len(due), "output_tok_s": round(tokens / spent, 1)}
    for name, values in (("ttft_ms", ttft), ("itl_ms", itl)):
        figures[name] = {f"p{p}": round(1e3 * percentile(values, p), 2) for p in (50, 90, 99)}
    return figures


def _facts(llm) -> dict:
    runner = llm.engine.runner
    dtype, graphs = str(runner.dtype).removeprefix("torch."), bool(getattr(runner, "graphs", None))
    return {"attention": runner.attention.name, "block_size": runner.block_size, "num_blocks": runner.num_blocks,
            "dtype": dtype, "overlap": llm.engine.overlap, "graphs": graphs,
            "fused_kernels": llm.config.fused_kernels}  # fmt: skip


def _ceiling(workload: Workload, config, rate: float) -> dict | None:
    import torch

    card = find_card(torch.cuda.get_device_name())
    if card is None:
        return None
    best = workload.num_output_tokens / workload_seconds(config, card, workload)
    step = decode_seconds(config, card, [len(prompt) for prompt in workload.prompts])
    return {"card": card.name, "bandwidth": card.bandwidth, "flops": card.flops, "output_tok_s": round(best, 1),
            "first_step_ms": round(1e3 * step, 3), "percent": round(100 * rate / best, 1)}  # fmt: skip


def show(result: dict) -> str:
    """The result in a few lines."""
    lines = [f"{result['machine']}, {result['date']}: {result['model']}", f"  {result['workload']}"]
    if "runs_tok_s" in result:
        lines.append(f"  {result['output_tok_s']:,.1f} output tok/s (median of {result['runs_tok_s']}), "
                     f"first token {result['first_token_s']} s after the start of loading")  # fmt: skip
    ceiling = result.get("ceiling")
    if ceiling:
        lines.append(f"  roofline of a {ceiling['card']} ({ceiling['bandwidth'] / 1e12:g} TB/s): "
                     f"{ceiling['output_tok_s']:,.0f} tok/s; reached {ceiling['percent']} %")  # fmt: skip
    beside = result.get("beside")
    if beside:
        lines.append(f"  transformers {beside['transformers']}, static batches of {beside['batch_size']}: "
                     f"{beside['output_tok_s']:,.1f} output tok/s in {beside['seconds']} s "
                     f"({beside['tokens_in_vain']:,} more tokens computed in vain); we are "
                     f"{result['output_tok_s'] / beside['output_tok_s']:.1f} times as fast")  # fmt: skip
    for row in result.get("rows", []):
        lines.append("  " + ", ".join(f"{key} {value}" for key, value in row.items()))
    return "\n".join(lines)
