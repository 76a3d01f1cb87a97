"""``nanoengine bench serve``: options, and what they start. Imports nothing heavy by itself."""

from __future__ import annotations

import dataclasses
import json
import os
import secrets

KEY_VARIABLE = "OPENAI_API_KEY"


def add_bench_serve(kinds) -> None:
    text = "Load on any OpenAI-compatible server: TTFT, ITL, TPOT and end-to-end times, goodput under an SLO."
    serve = kinds.add_parser("serve", help="load on an OpenAI-compatible server", description=text)
    serve.add_argument("--url", default="http://127.0.0.1:8000/v1", help="default: http://127.0.0.1:8000/v1")
    serve.add_argument("--model", metavar="NAME", help="default: the first that the server lists")
    serve.add_argument("--api-key", metavar="KEY", help=f"default: the variable {KEY_VARIABLE}")
    serve.add_argument("--chat", action="store_true", help="ask /chat/completions instead of /completions")
    serve.add_argument("--timeout", type=float, default=600.0, metavar="S", help="without a byte (default: 600)")

    serve.add_argument("--limit-name", default="max_tokens", choices=("max_tokens", "max_completion_tokens"),
                       help="what the server calls the limit of an answer (default: max_tokens)")  # fmt: skip

    load = serve.add_argument_group("load")
    load.add_argument("--rate", type=float, metavar="X", help="open loop: requests a second, Poisson")
    load.add_argument("--concurrency", type=int, metavar="N",
                      help="closed loop: users (default: 8); with --rate, connections at most")  # fmt: skip
    load.add_argument("--num-requests", type=int, default=64, metavar="N", help="default: 64")
    load.add_argument("--input-len", type=int, nargs=2, default=(32, 128), metavar=("LEAST", "MOST"),
                      help="words of each prompt, or tokens with --vocab-size (default: 32 128)")  # fmt: skip
    load.add_argument("--output-len", type=int, nargs=2, default=(16, 64), metavar=("LEAST", "MOST"),
                      help="tokens of each answer at most (default: 16 64)")  # fmt: skip
    load.add_argument("--trace", metavar="FILE", help="JSONL of input_len, output_len and perhaps at (seconds)")
    load.add_argument("--vocab-size", type=int, metavar="N", help="send random token ids below N instead of words")
    load.add_argument("--ignore-eos", action="store_true", help="answers of full length, where the server knows this")
    load.add_argument("--seed", type=int, default=0, metavar="N",
                      help="of lengths and arrivals (default: 0)")  # fmt: skip
    load.add_argument("--same-prompts", action="store_true",
                      help="prompts by the seed, too; without it each run has its own, since "
                           "a server's prefix cache knows those of the run before")  # fmt: skip
    load.add_argument("--warm-up", type=int, default=2, metavar="N",
                      help="requests before, not counted, with prompts of their own "
                           "(default: 2)")  # fmt: skip

    out = serve.add_argument_group("result")
    for name, what in (("ttft", "to the first token"), ("tpot", "a token after it"), ("e2e", "in all")):
        out.add_argument(f"--slo-{name}", type=float, metavar="MS", help=f"goodput counts at most so many ms {what}")
    out.add_argument("--csv", metavar="FILE", help="one row a request")
    out.add_argument("--plot", metavar="FILE", help="distributions, as .svg, .png or .pdf")
    out.add_argument("--json", metavar="FILE", help="all numbers")
    serve.set_defaults(run=run_serve)


def run_serve(args) -> int:
    from nanoengine.bench import serve
    from nanoengine.bench.load import id_prompt, text_prompt
    from nanoengine.bench.serve_client import Target
    from nanoengine.bench.serve_metrics import between, read_cache

    load = _load(args)
    _check(args)
    slo = serve.Slo(*(None if ms is None else ms / 1e3 for ms in (args.slo_ttft, args.slo_tpot, args.slo_e2e)))
    for path in filter(None, (args.csv, args.plot, args.json)):
        with open(path, "a", encoding="utf-8"):  # a folder that is not there: say so before measuring for minutes
            pass
    key = args.api_key or os.environ.get(KEY_VARIABLE)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    model = args.model or first_model(args.url, headers)
    target = Target(args.url, model, args.chat, {"ignore_eos": True} if args.ignore_eos else {},
                    args.limit_name)  # fmt: skip

    # a prefix cache shall know nothing of what is measured, from the warm-up or a run before
    run = f"{args.seed}" if args.same_prompts else f"{args.seed} {secrets.token_hex(8)}"

    def prompts(part: str):
        def prompt(number: int):
            if args.vocab_size is not None:
                return id_prompt(load.input_lens[number], number, args.vocab_size, f"{run} {part}")
            return text_prompt(load.input_lens[number], number, f"{run} {part}")

        return prompt

    concurrency = args.concurrency or (8 if load.due is None else None)
    options = dict(headers=headers, timeout_s=args.timeout, seed=args.seed)
    if args.warm_up > 0:
        warm = dataclasses.replace(load, input_lens=load.input_lens[: args.warm_up],
                                   output_lens=load.output_lens[: args.warm_up], due=None)  # fmt: skip
        serve.measure(target, warm, prompts("warm-up"), concurrency=1, **options)
    before = read_cache(args.url, headers)
    options |= {"slo": slo, "concurrency": concurrency}
    result = serve.measure(target, load, prompts("measured"), **options)
    result["prefix_cache"] = between(before, read_cache(args.url, headers))
    result["same_prompts"] = args.same_prompts
    print(serve.show(result), flush=True)
    _write(args, result)
    return 0


def first_model(url: str, headers: dict[str, str]) -> str:
    """The first name that the server's /models lists. ValueError that says what the server did instead."""
    import httpx

    address = url.rstrip("/") + "/models"
    try:
        response = httpx.get(address, headers=headers, timeout=30)
        return response.raise_for_status().json()["data"][0]["id"]
    except httpx.InvalidURL as error:
        raise ValueError(f"{url}: {error}") from None
    except httpx.HTTPError as error:
        raise ValueError(f"{address}: {error}. Is the server there, and does --url end in /v1?") from None
    except (ValueError, KeyError, IndexError, TypeError):
        raise ValueError(f"{address} lists no models: give --model") from None


def _load(args):
    from nanoengine.bench.load import drawn, read_trace

    if args.chat and args.vocab_size is not None:
        raise ValueError("--vocab-size sends token ids, and --chat takes text: leave one of them out")
    if args.vocab_size is not None and args.vocab_size < 1:
        raise ValueError(f"--vocab-size must be at least 1, got {args.vocab_size}")
    if args.concurrency is not None and args.concurrency < 1:
        raise ValueError(f"--concurrency must be at least 1, got {args.concurrency}")
    if args.trace is not None:
        return read_trace(args.trace, rate=args.rate, seed=args.seed)
    return drawn(args.num_requests, tuple(args.input_len), tuple(args.output_len), rate=args.rate, seed=args.seed)


def _check(args) -> None:
    """What would else be found out after minutes, or by every request alone."""
    for name in ("timeout", "slo_ttft", "slo_tpot", "slo_e2e"):
        value = getattr(args, name)
        if value is not None and not 0 < value < float("inf"):
            raise ValueError(f"--{name.replace('_', '-')} must be above 0, got {value:g}")
    if args.warm_up < 0:
        raise ValueError(f"--warm-up must be at least 0, got {args.warm_up}")
    if not args.url.startswith(("http://", "https://")):
        raise ValueError(f"--url must begin with http:// or https://, got {args.url!r}")
    key = args.api_key or os.environ.get(KEY_VARIABLE) or ""
    if not (key.isascii() and (key.isprintable() or not key)) or key != key.strip():
        raise ValueError(f"the API key (--api-key, or {KEY_VARIABLE}) must hold visible ASCII characters, without a "
                         "space at either end")  # fmt: skip
    if args.plot:
        from matplotlib.backend_bases import FigureCanvasBase

        kind = os.path.splitext(args.plot)[1][1:].lower()
        if kind not in FigureCanvasBase.get_supported_filetypes():
            raise ValueError(f"--plot {args.plot}: a file ending in .svg, .png or .pdf is wanted")


def _write(args, result: dict) -> None:
    from nanoengine.bench import serve

    if args.csv:
        serve.write_csv(result["timings"], args.csv)
    if args.plot:
        serve.plot(result, args.plot)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(result | {"timings": [dataclasses.asdict(t) for t in result["timings"]]}, file)
            file.write("\n")
