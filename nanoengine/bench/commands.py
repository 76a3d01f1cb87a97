"""``nanoengine bench offline | host | serve``: options, and what they start. Imports nothing heavy by itself."""

from __future__ import annotations

import argparse
import json

from nanoengine.bench.gpu_commands import add_bench_gpu, has_gpu, run_throughput
from nanoengine.bench.serve_command import add_bench_serve


def add_bench(bench: argparse.ArgumentParser) -> None:
    """Add the kinds of measurement to the ``bench`` command."""
    kinds = bench.add_subparsers(title="what to measure", metavar="KIND", required=True)
    _add_offline(kinds)
    _add_host(kinds)
    add_bench_serve(kinds)
    add_bench_gpu(kinds)


def _add_offline(kinds) -> None:
    text = (
        "On a CPU: tokens per second beside Hugging Face generate, same prompts, same run (fp32, greedy). On a GPU: "
        "nano-vllm's workload of 256 requests on random weights, beside the card's roofline and Hugging Face generate "
        "in static batches (--model names a shape)."
    )
    offline = kinds.add_parser("offline", help="tokens per second beside Hugging Face generate", description=text)
    offline.add_argument("--model", help="a folder, a .gguf file, a repo id (default: the embedded model)")
    offline.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 16], metavar="N", help="default: 1 16")
    offline.add_argument("--new-tokens", type=int, default=64, metavar="N", help="tokens a request gets (default: 64)")
    offline.add_argument("--runs", type=int, default=3, metavar="N", help="runs of each after a warm-up (default: 3)")
    offline.add_argument("--threads", type=int, default=2, metavar="N", help="CPU threads of each engine (default: 2)")
    offline.add_argument("--cpu", action="store_true", help="the CPU's measurement also where a GPU is")
    offline.add_argument("--no-hf", action="store_true", help="our engine alone")
    offline.add_argument("--hf-batch", type=int, default=128, metavar="N",
                         help="on a GPU: size of Hugging Face's static batches (default: 128)")  # fmt: skip
    offline.add_argument("--no-first-token", action="store_true", help="do not time fresh processes")
    offline.add_argument("--json", metavar="FILE", help="write all numbers to FILE")
    offline.set_defaults(run=run_offline)


def _add_host(kinds) -> None:
    text = "Host time of a step (schedule + build + postprocess), without a model."
    host = kinds.add_parser("host", help="host time of a step, without a model", description=text)
    host.add_argument("--num-seqs", type=int, default=256, metavar="N", help="decoding sequences (default: 256)")
    host.add_argument("--steps", type=int, default=60, metavar="N", help="steps in a block (default: 60)")
    host.add_argument("--blocks", type=int, default=5, metavar="N", help="blocks of each, interleaved (default: 5)")
    host.add_argument("--no-growth", action="store_true", help="leave out other numbers of sequences and contexts")
    host.add_argument("--json", metavar="FILE", help="write all numbers to FILE")
    host.set_defaults(run=run_host)


def run_offline(args) -> int:
    if not args.cpu and has_gpu():
        return run_throughput(args)
    from nanoengine.bench.offline import Settings, measure, show

    settings = Settings(
        model=args.model, batch_sizes=tuple(args.batch_sizes), new_tokens=args.new_tokens, runs=args.runs,
        threads=args.threads, hf=not args.no_hf, first_token=not args.no_first_token,
    )  # fmt: skip
    return report(args.json, lambda: measure(settings), show)


def run_host(args) -> int:
    from nanoengine.bench.host import measure, show

    options = dict(steps=args.steps, blocks=args.blocks, growth=not args.no_growth)
    return report(args.json, lambda: measure(args.num_seqs, **options), show)


def report(path: str | None, measure, show) -> int:
    if path is None:
        print(show(measure()), flush=True)
        return 0
    with open(path, "a", encoding="utf-8"):  # a folder that is not there: say so before measuring for minutes
        pass
    result = measure()
    print(show(result), flush=True)
    with open(path, "w", encoding="utf-8") as file:
        json.dump(result, file, indent=1)
        file.write("\n")
    return 0
