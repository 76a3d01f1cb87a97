"""Load on an OpenAI-compatible server, ours or another, and what its users would feel.

    open loop     requests come when they come (Poisson, or the times of a trace), however the server does
    closed loop   so many users; each sends the next request when its last one has ended

    TTFT   from when a request was due to its first text       ITL    between two pieces of text
    TPOT   (last text - first) / (output tokens - 1)           e2e    from due to the last byte
    goodput   requests a second that met every bound of the SLO
"""

from __future__ import annotations

import asyncio
import csv
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import httpx

from nanoengine.bench.load import Load
from nanoengine.bench.machine import describe
from nanoengine.bench.serve_client import Target, Timing, ask
from nanoengine.bench.stats import percentile

PERCENTS = (50, 90, 99)


@dataclass(frozen=True)
class Slo:
    """Bounds in seconds that a request must meet to count as good; None: no bound."""

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    def met(self, timing: Timing) -> bool:
        if timing.error is not None:
            return False
        found = {"ttft": timing.ttft, "tpot": timing.tpot or 0.0, "e2e": timing.e2e}
        return all(bound is None or found[name] <= bound for name, bound in vars(self).items())


async def run_load(
    target: Target, load: Load, prompts: Callable[[int], str | list[int]], *, concurrency: int | None = None,
    headers: dict[str, str] | None = None, timeout_s: float = 600.0, transport: httpx.AsyncBaseTransport | None = None,
) -> list[Timing]:  # fmt: skip
    """Send all requests; a Timing each, in their order. prompts: number of a request -> its prompt.

    concurrency: users of a closed loop; for an open loop, connections at most (None: no bound).
    """
    asked = [prompts(i) for i in range(len(load))]  # before the clock starts
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    places = asyncio.Semaphore(concurrency or len(load))
    async with httpx.AsyncClient(headers=headers, timeout=timeout_s, limits=limits, transport=transport) as client:
        began = time.perf_counter()

        async def one(i: int) -> Timing:
            if load.due is not None:
                await asyncio.sleep(load.due[i] - (time.perf_counter() - began))
            async with places:
                now = time.perf_counter() - began
                timing = Timing(due=now if load.due is None else load.due[i], num_prompt=load.input_lens[i])
                await ask(client, target, asked[i], load.output_lens[i], timing, began)
                return timing

        return await asyncio.gather(*(one(i) for i in range(len(load))))


def summarise(timings: list[Timing], slo: Slo) -> dict:
    """Percentiles in milliseconds, rates a second over the time from the first request to the last byte."""
    good = [timing for timing in timings if timing.error is None]
    seconds = max(timing.ended for timing in timings) - min(timing.due for timing in timings)
    return {
        "requests": len(timings),
        "failed": len(timings) - len(good),
        "errors": dict(Counter(timing.error for timing in timings if timing.error is not None)),
        "said": next((timing.said for timing in timings if timing.said), None),
        "without_usage": sum(not timing.has_usage for timing in good),
        "seconds": seconds,
        "requests_per_s": len(good) / seconds,
        "output_tokens_per_s": sum(timing.num_output for timing in good) / seconds,
        "prompt_tokens": sum(timing.num_prompt for timing in good),
        "output_tokens": sum(timing.num_output for timing in good),
        "prompt_tokens_cached": cached_tokens(good),
        "goodput_per_s": sum(map(slo.met, timings)) / seconds,
        "slo_ms": {name: None if bound is None else bound * 1e3 for name, bound in vars(slo).items()},
        "late_ms": max(timing.sent - timing.due for timing in timings) * 1e3,
        "ms": {
            name: {f"p{p}": percentile(found, p) * 1e3 for p in PERCENTS} if found else None
            for name, found in measures(good).items()
        },
    }


def cached_tokens(good: list[Timing]) -> int | None:
    """Prompt tokens that the server's prefix cache had; None if it says so of no request."""
    cached = [timing.num_cached for timing in good if timing.num_cached is not None]
    return sum(cached) if cached else None


def measures(good: list[Timing]) -> dict[str, list[float]]:
    """All values of each measure, in seconds, over requests without an error."""
    return {
        "ttft": [timing.ttft for timing in good],
        "itl": [gap for timing in good for gap in timing.itls],
        "tpot": [timing.tpot for timing in good if timing.tpot is not None],
        "e2e": [timing.e2e for timing in good],
    }


def measure(target: Target, load: Load, prompts, *, slo: Slo | None = None, seed: int = 0, **options) -> dict:
    """Run and summarise; ``timings`` hold each request. Errors: RuntimeError if not one request succeeded."""
    slo = slo or Slo()
    timings = asyncio.run(run_load(target, load, prompts, **options))
    result = {"schema": 1, "kind": "serve", "machine": describe(), "url": target.endpoint, "model": target.model,
              "loop": "closed" if load.due is None else "open", "concurrency": options.get("concurrency"), "seed": seed,
              **summarise(timings, slo), "timings": timings}  # fmt: skip
    if result["failed"] == len(timings):
        said = f"; in words: {result['said']}" if result["said"] else ""
        raise RuntimeError(f"no request succeeded at {target.endpoint}: {result['errors']}{said}")
    result["longer_than_asked"] = sum(timing.error is None and timing.num_output > asked
                                      for timing, asked in zip(timings, load.output_lens, strict=True))  # fmt: skip
    return result


def write_csv(timings: list[Timing], path: str | Path) -> None:
    """One row a request: times in seconds after the start, tokens, error."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(("request", "due_s", "sent_s", "ttft_s", "tpot_s", "e2e_s", "prompt_tokens", "output_tokens",
                       "error"))  # fmt: skip
        for number, timing in enumerate(timings):
            times = [timing.ttft, timing.tpot, timing.e2e] if timing.error is None else [None] * 3
            cells = [None if value is None else round(value, 6) for value in (timing.due, timing.sent, *times)]
            rows.writerow([number, *cells, timing.num_prompt, timing.num_output, timing.error])


def show(result: dict) -> str:
    """The result as a table."""
    lines = [
        f"{result['requests']} requests, {result['loop']} loop, to {result['url']} ({result['model']}); "
        f"{result['failed']} failed{': ' + str(result['errors']) if result['errors'] else ''}.",
        f"{result['seconds']:.1f} s, {result['requests_per_s']:.2f} requests/s, "
        f"{result['output_tokens_per_s']:.1f} output tokens/s "
        f"({result['prompt_tokens']} prompt and {result['output_tokens']} output tokens).",
        "",
        f"{'ms':8}" + "".join(f"{f'p{p}':>10}" for p in PERCENTS),
    ]
    for name, found in result["ms"].items():
        cells = "".join(f"{found[f'p{p}']:10.1f}" for p in PERCENTS) if found else f"{'-':>10}" * len(PERCENTS)
        lines.append(f"{name.upper() if name != 'e2e' else name:8}{cells}")
    lines += ["", _of_the_cache(result)]
    bounds = ", ".join(f"{name} <= {bound:g} ms" for name, bound in result["slo_ms"].items() if bound is not None)
    if bounds:
        lines.append(f"\ngoodput {result['goodput_per_s']:.2f} requests/s ({bounds})")
    if result["failed"] and result["said"]:
        lines.append(f"\nIn words: {result['said']}")
    if result["without_usage"]:
        lines.append(f"\n{result['without_usage']} answers came without usage: their prompt tokens are as asked, their "
                     "output tokens as pieces were counted.")  # fmt: skip
    if result["longer_than_asked"]:
        lines.append(f"\n{result['longer_than_asked']} answers are longer than asked: the server does not know the "
                     "limit by this name; see --limit-name.")  # fmt: skip
    if result["loop"] == "open" and result["late_ms"] > 50:
        lines.append(f"\nThis client sent up to {result['late_ms']:.0f} ms late: it is part of the times above.")
    return "\n".join(lines)


def _of_the_cache(result: dict) -> str:
    """How much of the prompts the server did not compute: to compare two runs, know it."""
    hits, asked, source = result["prompt_tokens_cached"], result["prompt_tokens"], "usage"
    if hits is None and result.get("prefix_cache") is not None:
        counted = result["prefix_cache"]
        hits, asked, source = counted["hits"], counted["queries"], "/metrics"
    if hits is None:
        return "Prefix cache: neither the server's usage nor its /metrics says what it had."
    share = hits / max(asked, 1)
    counts = f"{hits:.0f} of {asked:.0f} prompt tokens ({share:.1%})"
    return f"Prefix cache: {counts}, by the server's {source}."


def plot(result: dict, path: str | Path) -> None:
    """Cumulative distribution of each measure, as a picture whose kind the file's ending says."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.4), layout="constrained")
    axes = figure.subplots(2, 2).flat
    found_by_name = measures([timing for timing in result["timings"] if timing.error is None])
    for axis, (name, found) in zip(axes, found_by_name.items(), strict=True):
        title = "end to end" if name == "e2e" else name.upper()
        axis.set(title=title, xlabel="ms", ylabel="share of all", ylim=(0, 1.02))
        axis.grid(alpha=0.4)
        if found:
            found = sorted(value * 1e3 for value in found)
            axis.step(found, [(i + 1) / len(found) for i in range(len(found))], where="post", color="#0072b2")
            axis.set_xlim(left=0)
        bound = result["slo_ms"].get(name)
        if bound is not None:
            axis.axvline(bound, color="#d55e00", linestyle="--", label="SLO")
            axis.legend(frameon=False)
    figure.savefig(path)
