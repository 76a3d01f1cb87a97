"""``nanoengine serve``: options, and what they start. Imports nothing heavy by itself."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from nanoengine.shown import visible

KEY_VARIABLE = "NANOENGINE_API_KEY"


def add_serve(serve: argparse.ArgumentParser, load) -> None:
    """Add the options of the server; ``load(args)`` makes the LLM."""
    group = serve.add_argument_group("server")
    group.add_argument("--host", default="127.0.0.1", help="default: 127.0.0.1, this machine only")
    group.add_argument("--port", type=int, default=8000, metavar="N", help="default: 8000; 0 takes any free one")
    group.add_argument("--served-model-name", metavar="NAME", help="what clients call it (default: its own name)")
    group.add_argument("--api-key", metavar="KEY",
                       help=f"refuse clients without it; better in the variable {KEY_VARIABLE}")  # fmt: skip
    group.add_argument("--max-waiting", type=int, default=256, metavar="N",
                       help="requests beyond a full batch that may wait; then 429 (default: 256)")  # fmt: skip
    group.add_argument("--max-body-bytes", type=int, default=4 * 2**20, metavar="N", help="default: 4 MiB; then 413")
    group.add_argument("--request-timeout", type=float, default=600.0, metavar="S",
                       help="seconds that a request may take (default: 600)")  # fmt: skip
    group.add_argument("--grace", type=float, default=30.0, metavar="S",
                       help="seconds that running requests get at the end (default: 30)")  # fmt: skip
    group.add_argument("--cors-origin", action="append", default=[], metavar="ORIGIN",
                       help="pages of this origin (https://app.example.org, or * for all) may read "
                            "answers; give it again for more (default: none, so that no page you "
                            "visit can use your model)")  # fmt: skip
    group.add_argument("--keep-alive", type=float, default=120.0, metavar="S",
                       help="seconds that an idle connection is kept; let it be more than a proxy "
                            "in front keeps it (default: 120)")  # fmt: skip
    group.add_argument("--trace-steps", type=int, default=0, metavar="N",
                       help="keep so many steps for `nanoengine trace watch` (default: 0, off)")  # fmt: skip
    group.add_argument("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    serve.set_defaults(run=lambda args: run_serve(args, load))


def run_serve(args, load) -> int:
    try:
        from nanoengine.server.app import Settings, make_app
        from nanoengine.server.browsers import check_origin
        from nanoengine.server.run import listen, serve
    except ModuleNotFoundError as error:
        raise RuntimeError(f"the package {error.name} is missing; type: pip install -e '.[serve]'") from None
    _check(args)
    origins = tuple(map(check_origin, args.cors_origin))
    key = _key(args)
    sock = listen(args.host, args.port)  # before the model: a port that is taken shall not cost its loading
    with sock, load(args) as llm:
        settings = Settings(
            # bytes of a file name that are no text would be no JSON
            model_name=visible(args.served_model_name or model_name(getattr(args, "model", None))),
            api_key=key, max_waiting=args.max_waiting, max_body_bytes=args.max_body_bytes,
            request_timeout_s=args.request_timeout, trace_steps=args.trace_steps, grace_s=args.grace,
            cors_origins=origins, keep_alive_s=args.keep_alive,
        )  # fmt: skip
        app = make_app(llm.engine, llm.tokenizer, settings, on_thread_start=_thread_setup(llm))
        host, port = sock.getsockname()[:2]
        host = f"[{host}]" if ":" in host else host
        print(f"nanoengine: {settings.model_name} on http://{host}:{port}/v1", file=sys.stderr, flush=True)
        if key is None and args.host not in ("127.0.0.1", "::1", "localhost"):
            print("nanoengine: no API key is set: whoever reaches this address may use it", file=sys.stderr, flush=True)
        serve(app, sock, log_level=args.log_level)
    return 0


def model_name(model: str | None) -> str:
    """A name for clients: the last part of a path or repo id, without .gguf."""
    if model is None:
        return "smollm2-135m-instruct"
    return Path(model).name.removesuffix(".gguf") or model


def _thread_setup(llm):
    """CUDA keeps its current device per thread: the engine's thread needs the one that the model is on."""
    device = getattr(llm.engine.runner, "device", None)
    if getattr(device, "type", "cpu") != "cuda" or device.index is None:
        return None
    import torch

    return lambda: torch.cuda.set_device(device)


def _check(args) -> None:
    for name, low, high in (("port", 0, 65535), ("max_waiting", 0, 10**6), ("max_body_bytes", 1000, 2**31),
                            ("request_timeout", 0.1, 1e6), ("grace", 0, 1e5), ("trace_steps", 0, 2000),
                            ("keep_alive", 1, 1e5)):  # fmt: skip
        value = getattr(args, name)
        if not low <= value <= high:
            raise ValueError(f"--{name.replace('_', '-')} must lie in [{low}, {high}], got {value}")
    if not args.host.strip():  # to the system an empty name is every address of this machine
        raise ValueError("--host must not be empty; 0.0.0.0 listens on every address")
    if args.served_model_name is not None and not args.served_model_name.strip():
        raise ValueError("--served-model-name must not be empty")


def _key(args) -> str | None:
    """The API key, None for none. ValueError for one that no client could send: that is no key, and not no lock."""
    where, key = "--api-key", args.api_key
    if key is None:
        where, key = f"the variable {KEY_VARIABLE}", os.environ.get(KEY_VARIABLE)
    if key is not None and (key != key.strip() or not key.isprintable() or not key):
        raise ValueError(f"{where} must hold visible characters, without a space at either end: {len(key)} given; "
                         "leave it out altogether to let everyone in")  # fmt: skip
    return key
