"""Tokens per second beside Hugging Face generate: same prompts, same run, same number of tokens.

Each engine lives in a process of its own (worker.py). They take turns, so that what else the
machine does falls on both alike, and while one works the other sleeps. Medians of some runs after
a warm-up each. Both are greedy in fp32 and ignore end tokens, so they generate equally many tokens,
and should generate the same ones: where they do not is reported.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from statistics import median

from nanoengine.bench.machine import describe, load_average
from nanoengine.bench.workload import Workload, text_workload

NAMES = {"ours": "nanoengine", "hf": "Hugging Face"}
# What a user would type; the clock runs from before the process starts to when it says "token".
FIRST_TOKEN = {
    "ours": """
import torch; torch.set_num_threads({threads})
from nanoengine import LLM, SamplingParams
llm = LLM({model!r}, device="cpu", dtype="float32")
next(iter(llm.stream({prompt!r}, SamplingParams(temperature=0, max_tokens=2))))
print("token", flush=True)
""",
    "hf": """
import torch; torch.set_num_threads({threads})
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained({model!r})
model = AutoModelForCausalLM.from_pretrained({model!r}, dtype=torch.float32)
model.generate(**tokenizer({prompt!r}, return_tensors="pt"), do_sample=False, max_new_tokens=1)
print("token", flush=True)
""",
}


@dataclass(frozen=True)
class Settings:
    """model: as LLM takes it; hf: measure Hugging Face, too; first_token: time fresh processes.

    Errors: ValueError for counts below 1.
    """

    model: str | None = None
    batch_sizes: tuple[int, ...] = (1, 16)
    new_tokens: int = 64
    runs: int = 3
    threads: int = 2
    hf: bool = True
    first_token: bool = True

    def __post_init__(self) -> None:
        for name in ("new_tokens", "runs", "threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not self.batch_sizes or min(self.batch_sizes) < 1:
            raise ValueError(f"batch_sizes must be at least 1 each, got {list(self.batch_sizes)}")


class Worker:
    """The other end of worker.py."""

    def __init__(self, name: str, model: str, threads: int):
        command = [sys.executable, "-m", "nanoengine.bench.worker", name, model, str(threads)]
        self.name = name
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8", env=environment(threads)
        )
        self._read()

    def ask(self, **request) -> dict:
        print(json.dumps(request), file=self.process.stdin, flush=True)
        return self._read()

    def _read(self) -> dict:
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{NAMES[self.name]}: its process ended with code {self.process.wait()}")
        answer = json.loads(line)
        if "error" in answer:
            self.close()
            raise RuntimeError(f"{NAMES[self.name]}: {answer['error']}")
        return answer

    def close(self) -> None:
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()


def environment(threads: int) -> dict[str, str]:
    """For both engines alike. PYTHONDONTWRITEBYTECODE would add seconds to each import of torch."""
    env = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    return env | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}


def measure(settings: Settings) -> dict:
    """All figures as JSON types. Takes minutes on a CPU.

    Errors: ValueError, OSError for a model that cannot be had; RuntimeError if an engine fails.
    """
    from nanoengine.loader.resolve import resolve_model
    from nanoengine.tokenizer.tokenizer import load_tokenizer

    folder = resolve_model(settings.model).folder
    tokenizer = load_tokenizer(folder)
    workload = text_workload(tokenizer.encode, max(settings.batch_sizes), settings.new_tokens)
    result = {"schema": 1, "kind": "offline", "machine": describe(), "settings": asdict(settings),
              "model": folder.name, "workload": _about(workload)}  # fmt: skip
    names = ["ours", "hf"] if settings.hf else ["ours"]
    workers: list[Worker] = []
    try:
        for name in names:
            workers.append(Worker(name, str(folder), settings.threads))
        result["results"] = [row for size in settings.batch_sizes for row in _batch(workers, workload, size, settings)]
        result["peak_mib"] = {worker.name: worker.ask(peak=True)["peak_mib"] for worker in workers}
    finally:
        for worker in workers:
            worker.close()
    result["ratios"] = ratios(result["results"])
    if settings.first_token:
        result["first_token_s"] = _first_tokens(names, str(folder), settings)
    result["machine"]["load_average_after"] = load_average()
    return result


def _batch(workers: list[Worker], workload: Workload, size: int, settings: Settings) -> list[dict]:
    """One row an engine for a batch of the first ``size`` prompts; the engines take turns."""
    prompts, n = workload.prompts[:size], settings.new_tokens
    seconds: dict[str, list[float]] = {worker.name: [] for worker in workers}
    tokens: dict[str, list[list[int]]] = {}
    for worker in workers:
        worker.ask(prompts=prompts, new_tokens=min(n, 4))  # warm-up
    for _ in range(settings.runs):
        for worker in workers:
            answer = worker.ask(prompts=prompts, new_tokens=n)
            seconds[worker.name].append(answer["seconds"])
            tokens[worker.name] = answer["tokens"]
            print(f"{NAMES[worker.name]}, batch {size}: {answer['seconds']:.2f} s", file=sys.stderr, flush=True)
    rows = []
    for name, runs in seconds.items():
        generated = sum(map(len, tokens[name]))
        row = {"engine": name, "batch_size": size, "seconds": runs, "generated_tokens": generated,
               "tokens_per_s": generated / median(runs)}  # fmt: skip
        if name != "ours":
            row["agreement"] = agreement(tokens["ours"], tokens[name])
        rows.append(row)
    return rows


def agreement(ours: list[list[int]], theirs: list[list[int]]) -> dict:
    """How many requests got equal tokens; for each other one, where the first difference is."""
    differ = []
    for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if a != b:
            shorter = min(len(a), len(b))
            differ.append({"request": index, "at": next((i for i in range(shorter) if a[i] != b[i]), shorter)})
    return {"requests": len(ours), "equal": len(ours) - len(differ), "differ": differ}


def ratios(rows: list[dict]) -> dict[str, float]:
    """Our tokens/s over Hugging Face's at the same batch size (padded), and over its single stream."""
    speed = {(row["engine"], row["batch_size"]): row["tokens_per_s"] for row in rows}
    found = {}
    for (engine, size), ours in speed.items():
        if engine != "ours":
            continue
        if ("hf", size) in speed:
            found[f"batch {size} / hf batch {size}"] = ours / speed["hf", size]
        if size != 1 and ("hf", 1) in speed:
            found[f"batch {size} / hf batch 1"] = ours / speed["hf", 1]
    return found


def _first_tokens(names: list[str], model: str, settings: Settings) -> dict[str, list[float]]:
    """Seconds from the start of a fresh process to its first token, in turn, after one that warms the cache."""
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(settings.runs + 1):
        for name in names:
            code = FIRST_TOKEN[name].format(model=model, prompt="The capital of France is", threads=settings.threads)
            taken = time_to_token(code, settings.threads)
            if turn:
                seconds[name].append(taken)
    return seconds


def time_to_token(code: str, threads: int) -> float:
    """Seconds until ``python -c code`` prints "token". RuntimeError with its last line if it does not."""
    began = time.perf_counter()
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    text = {"encoding": "utf-8", "errors": "replace"}
    with subprocess.Popen([sys.executable, "-c", code], env=environment(threads), **pipes, **text) as process:
        line = process.stdout.readline()
        taken = time.perf_counter() - began
        _, errors = process.communicate()
    if line.strip() != "token":
        raise RuntimeError((errors.strip().splitlines() or ["the process said nothing"])[-1])
    return taken


def _about(workload: Workload) -> dict:
    return {"name": workload.name, "requests": len(workload.prompts), "input_lens": [len(p) for p in workload.prompts],
            "output_lens": workload.output_lens}  # fmt: skip


def show(result: dict) -> str:
    """The result as a table."""
    m, s = result["machine"], result["settings"]
    lines = [
        f"{result['model']}, fp32, greedy, {s['new_tokens']} new tokens a request, {s['threads']} threads, "
        f"medians of {s['runs']}",
        f"{m['cpu']}, {m['cores']} cores, torch {m['versions']['torch']}, "
        f"transformers {m['versions']['transformers']}, "
        f"load average {m['load_average']} before and {m['load_average_after']} after",
        f"\n{'':14}{'batch':>6}{'tok/s':>9}   seconds of each run",
    ]
    for row in result["results"]:
        runs = " ".join(f"{seconds:.2f}" for seconds in row["seconds"])
        lines.append(f"{NAMES[row['engine']]:14}{row['batch_size']:>6}{row['tokens_per_s']:9.1f}   {runs}")
    lines += [""] + [f"ours {name}: {ratio:.2f}x" for name, ratio in result["ratios"].items()]
    lines += [_agreement_line(row) for row in result["results"] if "agreement" in row]
    for name, seconds in result.get("first_token_s", {}).items():
        runs = " ".join(f"{value:.2f}" for value in seconds)
        lines.append(f"{NAMES[name]}: process start to first token {median(seconds):.2f} s ({runs})")
    lines += [f"{NAMES[name]}: peak memory {mib} MiB" for name, mib in result["peak_mib"].items()]
    return "\n".join(lines)


def _agreement_line(row: dict) -> str:
    a = row["agreement"]
    where = "".join(f"; request {d['request']} differs from token {d['at']} on" for d in a["differ"])
    return f"batch {row['batch_size']}: {a['equal']} of {a['requests']} requests got Hugging Face's tokens{where}"
