"""The command line, `nanoengine COMMAND`. Imports torch only when a model is loaded."""

from __future__ import annotations

import argparse
import json
import os
import sys
from contextlib import closing

from nanoengine import __version__
from nanoengine.bench.commands import add_bench
from nanoengine.config import BACKENDS, DTYPES, POLICIES
from nanoengine.course.cli import add_course
from nanoengine.jsonl import json_line
from nanoengine.server.commands import add_serve
from nanoengine.server.trace_command import add_trace

# Options that go into LLM(...) and SamplingParams(...) as they are, if they were given: (name, type, help).
# The classes check the values, so that the command line and Python refuse the same things in the same words.
ENGINE_OPTIONS = [
    ("model", str, "a folder, a .gguf file, or a Hugging Face repo id (default: the embedded SmolLM2-135M-Instruct)"),
    ("load_format", str, "auto, or dummy: random weights for a named shape such as tiny-llama"),
    ("tokenizer", str, "a folder with a tokenizer.json, where the model's own is not wanted"),
    ("device", str, "auto, cpu, cuda, cuda:1 (default: auto)"),
    ("dtype", str, f"{', '.join(DTYPES)} (default: auto; float32 on a CPU)"),
    ("attention", str, f"{', '.join(BACKENDS)} (default: auto)"),
    ("policy", str, f"{' or '.join(POLICIES)} (default: {POLICIES[0]})"),
    ("block_size", int, "tokens in one KV block"),
    ("num_blocks", int, "blocks in the KV pool (default: what fits)"),
    ("kv_cache_gib", float, "memory for KV on a CPU, in GiB"),
    ("max_model_len", int, "prompt plus answer, in tokens (default: what the model was trained for)"),
    ("max_num_seqs", int, "sequences in one batch at most"),
    ("max_num_batched_tokens", int, "tokens computed in one step at most"),
    ("max_mixed_prefill_tokens", int, "of those, prompts' beside decodes (default: 64 on a CPU)"),
    ("overlap", int, "steps in flight while the host prepares the next one: 0 or 1"),
    ("tensor_parallel_size", int, "GPUs (or processes on a CPU) that share the model"),
]
SAMPLING_OPTIONS = [
    ("max_tokens", int, "tokens to generate at most"),
    ("min_tokens", int, "tokens before which it cannot end"),
    ("temperature", float, "0 is greedy"),
    ("top_p", float, "keep the likeliest tokens whose probabilities sum to this"),
    ("top_k", int, "keep the k likeliest tokens"),
    ("min_p", float, "drop tokens less likely than this times the likeliest"),
    ("repetition_penalty", float, "above 1 makes tokens that were seen less likely"),
    ("presence_penalty", float, "subtracted once from tokens already generated"),
    ("frequency_penalty", float, "subtracted for each time a token was generated"),
    ("seed", int, "makes sampling repeatable"),
]
GENERATE_DEFAULTS = {"max_tokens": 64, "temperature": 0.0}
CHAT_DEFAULTS = {"max_tokens": 256, "temperature": 0.2, "top_p": 0.9}  # as the embedded model's card advises

CHAT_HELP = "/reset forgets the conversation, /quit ends (Ctrl-D too), Ctrl-C stops an answer"


class Parser(argparse.ArgumentParser):
    """argparse, but an error is one line and says where help is."""

    def error(self, message: str):
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def main(argv: list[str] | None = None) -> int:
    """Run one command; the exit code: 0 done, 1 something does not work here, 2 bad input, 130 Ctrl-C.

    NANOENGINE_DEBUG=1 shows the traceback of an error instead of one line.
    """
    for stream in (sys.stdout, sys.stderr):  # a terminal without UTF-8 shows '?' rather than ending the program
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    parser = make_parser()
    args = parser.parse_args(argv)
    try:
        code = args.run(args)
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader of our output has gone, as in `| head`
        _drop_stdout()
        return 141
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except (ValueError, OSError) as error:
        return _fail(error, 2)
    except (RuntimeError, ImportError) as error:
        return _fail(error, 1)


def make_parser() -> Parser:
    parser = Parser(prog="nanoengine", description="A small, real LLM inference engine.")
    parser.add_argument("--version", action="version", version=f"nanoengine {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    generate = commands.add_parser("generate", help="complete prompts", description="Complete prompts.")
    generate.add_argument("prompts", nargs="*", metavar="PROMPT", help="text; - reads one prompt a line from stdin")
    generate.add_argument("--json", action="store_true", help="print one JSON object a request")
    _add_sampling(generate, GENERATE_DEFAULTS)
    _add_engine(generate)
    generate.set_defaults(run=run_generate)

    chat = commands.add_parser("chat", help="talk to a model", description=f"Talk to a model. {CHAT_HELP}.")
    chat.add_argument("question", nargs="?", help="ask this and end; without it, a conversation")
    chat.add_argument("--system", metavar="TEXT", help="system message")
    _add_sampling(chat, CHAT_DEFAULTS)
    _add_engine(chat)
    chat.set_defaults(run=run_chat)

    serve = commands.add_parser("serve", help="OpenAI-compatible HTTP server", description="OpenAI-compatible server.")
    add_serve(serve, _load)
    _add_engine(serve)

    doctor = commands.add_parser("doctor", help="what works here, and what to type for what does not")
    doctor.add_argument("--json", action="store_true", help="print one JSON object")
    doctor.set_defaults(run=run_doctor)
    add_bench(commands.add_parser("bench", help="measure"))
    add_trace(commands.add_parser("trace", help="look at a run: saved, or of a running server"))
    add_course(commands.add_parser("course", help="the lessons: start, check, grade, interview"))
    return parser


def run_generate(args) -> int:
    prompts = _prompts(args.prompts)
    params = _sampling_params(args, GENERATE_DEFAULTS)
    failed = 0
    with _load(args) as llm:
        if args.json:
            for out in llm.generate(prompts, params, use_tqdm=sys.stderr is not None and sys.stderr.isatty()):
                failed += _tell_error(out)
                print(json_line(_as_json(out)), flush=True)
        else:
            failed = _print_in_order(llm.stream(prompts, params), prompts)
    return 1 if failed else 0


def run_chat(args) -> int:
    from nanoengine.conversation import answer, converse

    params = _sampling_params(args, CHAT_DEFAULTS)
    messages = [{"role": "system", "content": args.system}] if args.system else []
    with _load(args) as llm:
        if args.question is None:
            converse(llm, params, messages, CHAT_HELP)
        else:
            answer(llm, params, [*messages, {"role": "user", "content": args.question}])
    return 0


def run_doctor(args) -> int:
    from nanoengine.doctor import as_json, can_run_course, examine, show

    if args.json:
        checks = list(examine())
        print(json.dumps(as_json(checks), indent=2))
    else:
        checks = show(examine())
    return 0 if can_run_course(checks) else 1


def _load(args):
    """The LLM that the options ask for."""
    from nanoengine.llm import LLM

    names = [name for name, *_ in ENGINE_OPTIONS] + ["enable_prefix_caching"]
    settings = {name: getattr(args, name) for name in names if hasattr(args, name)}
    return LLM(settings.pop("model", None), **settings)


def _sampling_params(args, defaults: dict):
    from nanoengine.sampling_params import SamplingParams

    given = {name: getattr(args, name) for name, *_ in SAMPLING_OPTIONS if hasattr(args, name)}
    flags = {"stop": args.stop, "ignore_eos": args.ignore_eos, "logprobs": getattr(args, "logprobs", None)}
    return SamplingParams(**defaults | given | flags)


def _prompts(given: list[str]) -> list[str]:
    """Each argument is a prompt; "-" stands for the lines of stdin."""
    prompts: list[str] = []
    for text in given:
        lines = (line.rstrip("\r\n") for line in sys.stdin or ()) if text == "-" else (text,)
        prompts += [line for line in lines if line or text != "-"]
    if not prompts:
        raise ValueError("no prompt: give one in quotes, or - to read one a line from stdin")
    return prompts


def _print_in_order(stream, prompts: list[str]) -> int:
    """Print the first unfinished request as it grows; what others gain meanwhile follows in its turn.

    Returns how many ended with an error, which stderr names.
    """
    waiting, done, turn, failed = [""] * len(prompts), set(), 0, 0
    with closing(stream):
        _head(prompts, turn)
        for out in stream:
            waiting[out.index] += out.delta
            done |= {out.index} if out.finished else set()
            failed += _tell_error(out)
            while turn < len(prompts) and (waiting[turn] or turn in done):
                print(waiting[turn], end="", flush=True)
                waiting[turn] = ""
                if turn not in done:
                    break
                print(flush=True)
                turn += 1
                _head(prompts, turn)
    return failed


def _tell_error(out) -> bool:
    if out.error is not None:
        text = f"nanoengine: prompt {out.index + 1} ended with an error: {out.error}"
        print(text, file=sys.stderr, flush=True)
    return out.error is not None


def _head(prompts: list[str], index: int) -> None:
    if 1 < len(prompts) and index < len(prompts):
        print(f"--- {index + 1}: {prompts[index]}", flush=True)


def _as_json(out) -> dict:
    times = out.metrics
    seconds = {name: round(times[name] - times["arrival"], 6) for name in ("first_token", "finished") if name in times}
    names = ("index", "prompt", "text", "token_ids", "finish_reason", "stop_reason", "num_cached_tokens")
    # JSON has no -inf, the logprob of a token that the model rules out; the number is the server's
    logprobs = out.logprobs and [
        {i: max(value, -9999.0) for i, value in entry.items()} for entry in out.logprobs
    ]
    error = {} if out.error is None else {"error": out.error}
    more = {"logprobs": logprobs, "num_prompt_tokens": len(out.prompt_token_ids), "seconds": seconds}
    return {name: out[name] for name in names} | error | more


def _add_sampling(parser: Parser, defaults: dict) -> None:
    group = parser.add_argument_group("sampling")
    for name, kind, text in SAMPLING_OPTIONS:
        text += f" (default: {defaults[name]})" if name in defaults else ""
        _add(group, name, kind, text)
    group.add_argument("--stop", action="append", metavar="TEXT", help="text that ends the answer; may be repeated")
    group.add_argument("--ignore-eos", action="store_true", help="the model's end tokens do not end it")
    if defaults is GENERATE_DEFAULTS:
        _add(group, "logprobs", int, "with --json: the N likeliest tokens at each position")


def _add_engine(parser: Parser) -> None:
    group = parser.add_argument_group("engine")
    for name, kind, text in ENGINE_OPTIONS:
        _add(group, name, kind, text)
    group.add_argument("--no-prefix-cache", dest="enable_prefix_caching", action="store_false",
                       default=argparse.SUPPRESS, help="compute shared prompt beginnings again")  # fmt: skip


def _add(group, name: str, kind: type, text: str) -> None:
    group.add_argument(f"--{name.replace('_', '-')}", type=kind, default=argparse.SUPPRESS, help=text,
                       metavar={str: "NAME", int: "N", float: "X"}[kind])  # fmt: skip


def _fail(error: Exception, code: int) -> int:
    if os.environ.get("NANOENGINE_DEBUG") not in (None, "", "0"):
        raise error
    if isinstance(error, ModuleNotFoundError) and error.name:
        package = error.name.partition(".")[0]
        print(f"nanoengine: the package {package} is missing; type: nanoengine doctor", file=sys.stderr)
    else:
        print(f"nanoengine: {error or type(error).__name__}", file=sys.stderr)
    return code


def _drop_stdout() -> None:
    """Point stdout at nothing, or Python complains again when it flushes at exit."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(devnull, sys.stdout.fileno())
    except (OSError, ValueError, AttributeError):  # stdout is not a file (a test's, or closed)
        pass
    finally:
        os.close(devnull)

