"""``nanoengine bench latency | arrivals | ladder | attention | gemm | step | tp``, and ``bench offline`` on a GPU.

Imports little.
"""

from __future__ import annotations

import itertools

NO_GPU = "this measurement needs a CUDA GPU, and torch sees none (nanoengine doctor says more)"


def add_bench_gpu(kinds) -> None:
    """Add the measurements that need a GPU."""
    latency = kinds.add_parser("latency", help="one stream on a GPU: 128 tokens in, 512 out",
                               description="Tokens per second of one request at a time, random weights.")  # fmt: skip
    latency.add_argument("--runs", type=int, default=3, metavar="N", help="runs after a warm-up (default: 3)")
    latency.set_defaults(run=run_latency)
    arrivals = kinds.add_parser("arrivals", help="requests at random times on a GPU, both policies",
                                description="TTFT and ITL percentiles under Poisson arrivals.")  # fmt: skip
    arrivals.add_argument("--rate", type=float, default=12.0, metavar="R", help="requests a second (default: 12)")
    arrivals.add_argument("--seconds", type=float, default=60.0, metavar="S", help="for how long (default: 60)")
    arrivals.set_defaults(run=run_arrivals)
    ladder = kinds.add_parser("ladder", help="each speed-up of the engine, one after the other, on a GPU",
                              description="The ablation ladder: naive, KV cache, ..., fused kernels.")  # fmt: skip
    ladder.add_argument("--runs", type=int, default=3, metavar="N", help="runs of a quick rung (default: 3)")
    ladder.set_defaults(run=run_ladder)
    attention = kinds.add_parser("attention", help="the decode kernel by itself on a GPU",
                                 description="Memory bandwidth that the paged decode kernel reaches, in each variant "
                                 "that the options name (default: the engine's own).")  # fmt: skip
    attention.add_argument("--tile", type=int, nargs="+", metavar="N", help="keys a program loads at a time")
    attention.add_argument("--warps", type=int, nargs="+", metavar="N", help="warps a program")
    attention.add_argument("--stages", type=int, nargs="+", metavar="N", help="tiles whose loads are in flight")
    attention.add_argument(
        "--extra-splits", "--spare", type=int, nargs="+", metavar="N", help="KV splits beyond one per row"
    )
    attention.add_argument("--ranks", type=int, default=1, metavar="K", help="one of K ranks' KV heads (default: 1)")
    attention.set_defaults(run=run_attention)
    gemm = kinds.add_parser(
        "gemm",
        aliases=["products"],
        help="the GEMMs of a decode step by themselves on a GPU",
        description="Our kernel for few rows beside cuBLAS, microseconds with the norm that follows.",
    )
    gemm.add_argument("--rows", type=int, nargs="+", metavar="N", help="rows of a step (2 to 256)")
    gemm.set_defaults(run=run_gemm)
    step = kinds.add_parser("step", help="decode steps of the engine on a GPU",
                            description="Milliseconds of a decode step, and what bytes allow.")  # fmt: skip
    step.add_argument("--scene", nargs="+", metavar="ROWSxCONTEXT", help="such as 208x715 (default: six of them)")
    step.set_defaults(run=run_step)
    tp = kinds.add_parser("tp", help="one model on 1, 2, ... ranks", description="Tensor parallelism: the "
                          "workload of bench offline and one stream, on each number of GPUs.")  # fmt: skip
    tp.add_argument("--models", nargs="+", default=["qwen3-0.6b", "qwen3-8b"], metavar="SHAPE",
                    help="random weights (default: qwen3-0.6b qwen3-8b)")  # fmt: skip
    tp.add_argument("--sizes", type=int, nargs="+", default=[1, 2], metavar="K", help="ranks (default: 1 2)")
    tp.add_argument("--runs", type=int, default=3, metavar="N", help="runs after a warm-up (default: 3)")
    tp.add_argument("--cpu", action="store_true", help="processes on the CPU")
    tp.add_argument("--json", metavar="FILE", help="write all numbers to FILE")
    tp.set_defaults(run=run_tp)
    for parser in (latency, arrivals, ladder, attention, gemm, step):
        parser.add_argument("--model", default="qwen3-0.6b", metavar="SHAPE", help="random weights (qwen3-0.6b)")
        parser.add_argument("--json", metavar="FILE", help="write all numbers to FILE")


def _need_gpu() -> None:
    if not has_gpu():
        raise ValueError(NO_GPU)


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def run_throughput(args) -> int:
    """``bench offline`` on a GPU: nano-vllm's workload. What was measured is told and kept before transformers begins,
    which takes minutes."""
    from nanoengine.bench.gpu import throughput

    measured = {}

    def ours() -> dict:
        measured.update(throughput(args.model or "qwen3-0.6b", args.runs))
        return measured

    def beside() -> dict:
        from nanoengine.bench.gpu import nano_vllm_workload
        from nanoengine.bench.peers import transformers_beside
        from nanoengine.model.config import NAMED_CONFIGS

        config = NAMED_CONFIGS[args.model or "qwen3-0.6b"]
        return measured | {"beside": transformers_beside(config, nano_vllm_workload(), args.hf_batch)}

    return _measure(args, ours) if args.no_hf else _measure(args, ours) or _measure(args, beside)


def run_latency(args) -> int:
    from nanoengine.bench.gpu import single_stream

    return _measure(args, lambda: single_stream(args.model, args.runs))


def run_arrivals(args) -> int:
    from nanoengine.bench.gpu import arrivals

    return _measure(args, lambda: arrivals(args.model, args.rate, args.seconds))


def run_ladder(args) -> int:
    from nanoengine.bench.ladder import measure

    return _measure(args, lambda: measure(args.model, args.runs))


def run_attention(args) -> int:
    from nanoengine.bench.commands import report

    _need_gpu()
    from nanoengine.bench.attention import measure, show
    from nanoengine.kernels.paged_decode import Tuning

    own = Tuning()
    sizes = itertools.product(args.tile or [own.tile], args.warps or [own.warps], args.stages or [own.stages])
    tunings = [Tuning(*size) for size in sizes]
    return report(args.json, lambda: measure(args.model, tunings, args.extra_splits or [None], ranks=args.ranks), show)


def run_gemm(args) -> int:
    from nanoengine.bench.commands import report

    _need_gpu()
    from nanoengine.bench.gemm import ROWS, measure, show

    return report(args.json, lambda: measure(args.model, args.rows or ROWS), show)


def run_step(args) -> int:
    from nanoengine.bench.commands import report

    _need_gpu()
    from nanoengine.bench.step import SCENES, measure, parse_scene, show

    scenes = [parse_scene(text) for text in args.scene] if args.scene else SCENES
    return report(args.json, lambda: measure(args.model, scenes), show)


def run_tp(args) -> int:
    from nanoengine.bench.commands import report
    from nanoengine.bench.tensor_parallel import measure, show

    if not args.cpu and not has_gpu():
        raise ValueError("this measurement needs CUDA GPUs, and torch sees none; --cpu runs a small one without")
    if args.runs < 1:
        raise ValueError(f"--runs must be at least 1, got {args.runs}")
    device = "cpu" if args.cpu else "cuda"
    return report(args.json, lambda: measure(args.models, args.sizes, args.runs, device), show)


def _measure(args, measure) -> int:
    from nanoengine.bench.commands import report
    from nanoengine.bench.gpu import show

    _need_gpu()
    return report(args.json, measure, show)
