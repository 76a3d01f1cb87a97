"""The command line: each command, what is refused and how, and ends that nobody asked for."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

import nanoengine
from nanoengine import cli
from nanoengine.cli import main
from nanoengine.conversation import converse

TINY = ["--model", "tiny-llama", "--load-format", "dummy", "--max-model-len", "256"]
ENDLESS = ["--ignore-eos", "--max-tokens", "100000", "--model", "tiny-llama", "--load-format", "dummy"]


def _start(*arguments, **options):
    return subprocess.Popen(
        [sys.executable, "-m", "nanoengine", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"}, **{"stdin": subprocess.DEVNULL} | options,
    )  # fmt: skip


def _stdin(monkeypatch, text: str, tmp_path) -> None:
    file = tmp_path / "stdin"
    file.write_text(text, encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", file.open(encoding="utf-8"))


def test_version(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"nanoengine {nanoengine.__version__}\n"


@pytest.mark.parametrize("command", ["", "generate", "chat", "doctor", "bench", "bench offline", "bench host"])
def test_help_of_each_command(command, capsys):
    with pytest.raises(SystemExit) as end:
        main([*command.split(), "--help"])
    assert end.value.code == 0
    assert f"usage: nanoengine {command}".strip() in capsys.readouterr().out


def test_nothing_heavy_is_imported_before_a_command_needs_it():
    heavy = ("torch", "numpy", "transformers", "tokenizers", "matplotlib")
    code = f"import sys, nanoengine.cli as c; c.make_parser(); sys.exit(str(set(sys.modules) & set({heavy})))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.stderr.strip() == "set()"


def test_generate_streams_the_text_that_llm_gives(capsys):
    assert main(["generate", "hello", *TINY, "--max-tokens", "9"]) == 0
    with nanoengine.LLM("tiny-llama", load_format="dummy", max_model_len=256) as llm:
        params = nanoengine.SamplingParams(temperature=0, max_tokens=9)
        text = llm.generate("hello", params, use_tqdm=False)[0].text
    assert capsys.readouterr().out == text + "\n"


def test_several_prompts_keep_their_order_and_heads(capsys):
    assert main(["generate", "b", "a", "b", *TINY, "--max-tokens", "5"]) == 0
    out = capsys.readouterr().out
    heads = [line for line in out.splitlines() if line.startswith("--- ")]
    assert heads == ["--- 1: b", "--- 2: a", "--- 3: b"]
    first, last = out.split("--- 1: b\n")[1].split("--- 2: a\n")[0], out.split("--- 3: b\n")[1]
    assert first == last != ""


def test_json_is_one_object_a_request(capsys, monkeypatch, tmp_path):
    _stdin(monkeypatch, "one\n\ntwo\r\n", tmp_path)
    options = ["--max-tokens", "4", "--logprobs", "2", "--ignore-eos", "--policy", "prefill_first", "--block-size", "4"]
    assert main(["generate", "zero", "-", *TINY, *options, "--no-prefix-cache", "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(entry["index"], entry["prompt"]) for entry in found] == [(0, "zero"), (1, "one"), (2, "two")]
    for entry in found:
        assert len(entry["token_ids"]) == len(entry["logprobs"]) == 4
        assert entry["finish_reason"] == "length"
        assert entry["num_prompt_tokens"] == len(entry["prompt"])
        assert 0 < entry["seconds"]["first_token"] <= entry["seconds"]["finished"]


def test_options_reach_engine_and_request(monkeypatch):
    made = {}

    class Spy:
        def __init__(self, model, **settings):
            made.update(model=model, **settings)
            raise ValueError("enough seen")

    monkeypatch.setattr("nanoengine.llm.LLM", Spy)
    given = ["--model", "m", "--device", "cpu", "--dtype", "float32", "--block-size", "8", "--policy", "prefill_first"]
    assert main(["generate", "x", *given, "--no-prefix-cache", "--kv-cache-gib", "0.5"]) == 2
    assert made == {"model": "m", "device": "cpu", "dtype": "float32", "block_size": 8, "policy": "prefill_first",
                    "kv_cache_gib": 0.5, "enable_prefix_caching": False}  # fmt: skip
    args = cli.make_parser().parse_args(["generate", "x", "--stop", "a", "--stop", "b", "--seed", "7", "--top-k", "3"])
    params = cli._sampling_params(args, cli.GENERATE_DEFAULTS)
    assert (params.stop, params.seed, params.top_k, params.temperature) == (("a", "b"), 7, 3, 0.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "x", "--temperature", "-1"], "temperature must lie in"),
        (["generate", "x", "--max-tokens", "0"], "max_tokens must be at least 1, got 0"),
        (["generate", "x", "--stop", ""], "stop must be"),
        (["generate"], "no prompt"),
        (["generate", "", *TINY], "prompt is empty"),
        (["generate", "x", "--model", "no/such/folder/at/all"], "no such folder or file"),
        (["generate", "x", "--load-format", "gguf"], "load_format must be one of auto, dummy"),
        (["generate", "x", *TINY, "--policy", "lifo"], "policy must be one of token_budget, prefill_first"),
        (["generate", "x" * 300, *TINY], "max_model_len=256"),
        (["chat", "hi", *TINY, "--dtype", "int4"], "dtype must be one of"),
        (["bench", "host", "--steps", "0"], "steps must be at least 1, got 0"),
        (["bench", "host", "--json", "no/such/folder/x.json"], "no/such/folder/x.json"),
        (["bench", "offline", "--runs", "0"], "runs must be at least 1, got 0"),
    ],
)
def test_bad_values_are_one_line_and_exit_code_2(arguments, message, capsys, monkeypatch):
    monkeypatch.delenv("NANOENGINE_DEBUG", raising=False)
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("nanoengine: ")
    assert error.count("\n") == 1
    assert "Traceback" not in error


@pytest.mark.parametrize(
    "arguments",
    [[], ["genrate"], ["generate", "x", "--max-tokens", "many"], ["generate", "x", "--no-such"], ["bench"],
     ["chat", "a", "b"], ["bench", "offline", "--batch-sizes"]],
)  # fmt: skip
def test_a_bad_command_line_is_one_line_and_exit_code_2(arguments, capsys):
    with pytest.raises(SystemExit) as end:
        main(arguments)
    error = capsys.readouterr().err
    assert end.value.code == 2
    assert error.count("\n") == 1
    assert "--help" in error


def test_a_missing_package_sends_to_the_doctor(monkeypatch, capsys):
    monkeypatch.delenv("NANOENGINE_DEBUG", raising=False)
    monkeypatch.delitem(sys.modules, "nanoengine.llm", raising=False)
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    assert main(["generate", "x"]) == 1
    assert capsys.readouterr().err == "nanoengine: the package tqdm is missing; type: nanoengine doctor\n"


def test_debug_shows_the_traceback(monkeypatch):
    monkeypatch.setenv("NANOENGINE_DEBUG", "1")
    with pytest.raises(ValueError, match="max_tokens"):
        main(["generate", "x", "--max-tokens", "0"])


def test_closed_stdin_is_no_prompt_and_no_question(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["generate", "-"]) == 2
    assert "no prompt" in capsys.readouterr().err
    assert main(["chat", *TINY]) == 0
    assert capsys.readouterr().out == ""


def test_stdin_closed_by_the_shell():
    script = f"exec '{sys.executable}' -m nanoengine generate - <&-"
    found = subprocess.run(["sh", "-c", script], capture_output=True, text=True)
    assert (found.returncode, found.stderr.count("\n")) == (2, 1)


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_characters_that_a_terminal_does_not_have_become_question_marks(encoding):
    code = "import sys; from nanoengine import cli; cli._sampling_params = lambda *a: print('\\u4e2d') or exit(0)"
    found = subprocess.run([sys.executable, "-c", f"{code}; cli.main(['generate', 'x'])"], capture_output=True,
                           env={**os.environ, "PYTHONIOENCODING": encoding, "PYTHONUTF8": "0"})  # fmt: skip
    assert found.stdout.decode("utf-8").strip() == {"ascii": "?", "utf-8": "中"}[encoding], found.stderr


def test_a_reader_that_goes_away_is_no_error():
    with _start("generate", "x", *ENDLESS) as process:
        assert process.stdout.read(1)
        process.stdout.close()
        errors = process.stderr.read()
        assert process.wait(60) == 141
    assert errors == ""


def test_ctrl_c_ends_generate_without_a_traceback():
    with _start("generate", "x", *ENDLESS) as process:
        assert process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors == "\n"


class _Scripted:
    """Answers each conversation with its number of messages; a question "stop" is interrupted, "long" refused."""

    class model_config:
        name = "scripted"

    def __init__(self):
        self.asked = []

    def stream_chat(self, messages, params):
        question = messages[-1]["content"]
        if question == "long":
            raise ValueError("prompt has too many tokens")
        self.asked.append([message["content"] for message in messages])
        return self._answer(question, len(messages))

    def _answer(self, question, count):
        yield type("Output", (), {"delta": f"answer{count}", "error": None})
        if question == "stop":
            raise KeyboardInterrupt


def _conversation(monkeypatch, tmp_path, text, first=()):
    _stdin(monkeypatch, text, tmp_path)
    llm = _Scripted()
    converse(llm, None, list(first), "HELP")
    return llm.asked


def test_a_conversation_remembers_resets_and_ends(monkeypatch, tmp_path, capsys):
    system = [{"role": "system", "content": "S"}]
    asked = _conversation(monkeypatch, tmp_path, "a\n\n  b \n/reset\nc\n/nonsense\n/quit\nd\n", system)
    assert asked == [["S", "a"], ["S", "a", "answer2", "b"], ["S", "c"]]
    assert capsys.readouterr().out == "answer2\nanswer4\n(new conversation)\nanswer2\nHELP.\n"


def test_ctrl_c_ends_the_answer_and_what_was_said_counts(monkeypatch, tmp_path, capsys):
    asked = _conversation(monkeypatch, tmp_path, "stop\nb\n")
    assert asked == [["stop"], ["stop", "answer1", "b"]]
    assert capsys.readouterr().out == "answer1 (stopped)\nanswer3\n"


def test_what_cannot_be_served_is_told_and_forgotten(monkeypatch, tmp_path, capsys):
    assert _conversation(monkeypatch, tmp_path, "a\nlong\nb\n") == [["a"], ["a", "answer1", "b"]]
    assert capsys.readouterr().err == "nanoengine: prompt has too many tokens (/reset forgets the conversation)\n"


def test_a_terminal_is_asked_and_ctrl_c_and_ctrl_d_are_understood(monkeypatch, capsys):
    lines = iter(["a", KeyboardInterrupt, "b", EOFError])

    def typed(prompt):
        line = next(lines)
        if isinstance(line, str):
            return line
        raise line

    class Terminal:
        isatty = staticmethod(lambda: True)

    monkeypatch.setattr(sys, "stdin", Terminal)
    monkeypatch.setattr("builtins.input", typed)
    llm = _Scripted()
    converse(llm, None, [], "HELP")
    assert llm.asked == [["a"], ["a", "answer1", "b"]]
    assert capsys.readouterr().out == "scripted. HELP.\nanswer1\n\nHELP.\nanswer3\n\n"


def test_chat_with_the_embedded_model_by_a_pipe():
    began = time.monotonic()
    with _start("chat", "--max-tokens", "6", "--temperature", "0", stdin=subprocess.PIPE) as process:
        out, errors = process.communicate("What is the capital of France?\n/reset\n/quit\n", timeout=300)
    assert process.returncode == 0, errors
    assert out == "The capital of France is Paris\n(new conversation)\n", time.monotonic() - began


def test_chat_with_one_question(capsys):
    assert main(["chat", "hello", *TINY, "--max-tokens", "3", "--ignore-eos", "--system", "S"]) == 0
    assert capsys.readouterr().out.endswith("\n")


@pytest.mark.parametrize("as_json", [False, True])
def test_a_prompt_without_a_token_to_draw_is_told_on_stderr_and_by_the_exit_code(monkeypatch, capsys, as_json):
    from nanoengine.llm import LLM

    class Poisoned(LLM):
        def __init__(self, *arguments, **settings):
            super().__init__(*arguments, **settings)
            self.engine.runner.model.embed_tokens.weight.data[ord("!")] = float("nan")

    monkeypatch.setattr("nanoengine.llm.LLM", Poisoned)
    options = ["--max-tokens", "3", "--ignore-eos", *(["--json"] if as_json else [])]
    assert main(["generate", "good", "bad!", *TINY, *options]) == 1
    told = capsys.readouterr()
    assert "nanoengine: prompt 2 ended with an error: non-finite logits" in told.err and "prompt 1" not in told.err
    if as_json:
        good, bad = map(json.loads, told.out.splitlines())
        assert (good["finish_reason"], bad["finish_reason"]) == ("length", "error") and "error" not in good
        assert "non-finite" in bad["error"]
