"""``nanoengine trace view FILE | watch URL``: options, and what they start. Imports nothing heavy by itself."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from nanoengine.server.commands import KEY_VARIABLE
from nanoengine.shown import for_terminal


def add_trace(trace: argparse.ArgumentParser) -> None:
    kinds = trace.add_subparsers(title="what to look at", metavar="KIND", required=True)
    text = "A saved run (Trace.save) as one HTML page."
    view = kinds.add_parser("view", help="a saved run, as one HTML page", description=text)
    view.add_argument("file", metavar="FILE", help="JSONL, as Trace.save writes it")
    view.add_argument("--output", metavar="PAGE", help="where the page goes (default: beside FILE, as .html)")
    _add_common(view)
    view.set_defaults(run=run_view)

    text = "The engine of a running server, step by step, in the browser. The server needs --trace-steps N."
    watch = kinds.add_parser("watch", help="a running server, live", description=text)
    watch.add_argument("url", metavar="URL", nargs="?", default="http://127.0.0.1:8000",
                       help="the server (default: http://127.0.0.1:8000)")  # fmt: skip
    watch.add_argument("--api-key", metavar="KEY", help=f"default: the variable {KEY_VARIABLE}")
    watch.add_argument("--port", type=int, default=0, metavar="N", help="of the page (default: any free one)")
    watch.add_argument("--steps", type=int, default=200, metavar="N", help="steps to keep here (default: 200)")
    _add_common(watch)
    watch.set_defaults(run=run_watch)


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--lang", choices=("en", "zh"), default="en", help="default: en")
    parser.add_argument("--no-open", action="store_true", help="do not open a browser")


def run_view(args) -> int:
    from nanoengine.trace import Trace
    from nanoengine.viz.page import trace_html

    if not Path(args.file).is_file():
        raise ValueError(f"there is no file {args.file}: trace.save(FILE) writes one; trace is what record() gave")
    page = Path(args.output or Path(args.file).with_suffix(".html"))
    trace = Trace.load(args.file)
    try:
        trace_html(trace, page, args.lang)
    except ValueError as error:
        raise ValueError(f"{args.file}: {error}") from None
    except (ArithmeticError, AttributeError, LookupError, TypeError) as error:  # its records contradict each other
        if os.environ.get("NANOENGINE_DEBUG") not in (None, "", "0"):
            raise
        raise ValueError(f"{args.file} is damaged, its steps do not fit together: {error!r}") from None
    print(for_terminal(page), flush=True)
    _open(page.resolve().as_uri(), args)
    return 0


def run_watch(args) -> int:
    from nanoengine.server.watch import Watched, watch

    for name, low, high in (("port", 0, 65535), ("steps", 1, 2000)):
        if not low <= getattr(args, name) <= high:
            raise ValueError(f"--{name} must lie in [{low}, {high}], got {getattr(args, name)}")
    key = args.api_key or os.environ.get(KEY_VARIABLE)

    def ready(url: str) -> None:
        print(f"nanoengine: {url} shows {args.url}; Ctrl-C ends it", file=sys.stderr, flush=True)
        _open(url, args)

    watch(Watched(args.url, api_key=key, size=args.steps, lang=args.lang), port=args.port, ready=ready)
    return 0


def _open(url: str, args) -> None:
    if not args.no_open:
        import webbrowser

        webbrowser.open(url)
