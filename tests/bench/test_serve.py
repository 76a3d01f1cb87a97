"""bench serve: when requests are sent, what is measured, and other servers' answers."""

import csv
import json
import time

import httpx
import pytest

from nanoengine.bench.load import Load, drawn, id_prompt, read_trace, text_prompt
from nanoengine.bench.serve import Slo, measure, show, summarise
from nanoengine.bench.serve_client import Target, Timing
from nanoengine.bench.serve_metrics import between, read_cache
from nanoengine.cli import main
from tests.server.conftest import make_engine, running

# sent late; texts at 1.2, 1.3 and 1.7 s; five tokens
TIMING = Timing(due=1.0, sent=1.1, chunks=[1.2, 1.3, 1.7], ended=1.8, num_prompt=3, num_output=5)


def test_times_of_a_request():
    assert TIMING.ttft == pytest.approx(0.2)  # from when it was due
    assert TIMING.itls == pytest.approx([0.1, 0.4])
    assert TIMING.tpot == pytest.approx(0.5 / 4)
    assert TIMING.e2e == pytest.approx(0.8)
    assert Timing(due=0, chunks=[1.0], ended=1.0, num_output=1).tpot is None


@pytest.mark.parametrize(
    ("slo", "met"),
    [(Slo(), True), (Slo(ttft=0.21), True), (Slo(ttft=0.19), False), (Slo(tpot=0.12), False), (Slo(e2e=0.79), False),
     (Slo(ttft=0.21, tpot=0.13, e2e=0.81), True)],
)  # fmt: skip
def test_goodput_counts_what_meets_every_bound(slo, met):
    failed = Timing(due=0.0, sent=0.0, ended=2.0, error="HTTP 429")
    found = summarise([TIMING, failed], slo)
    assert found["goodput_per_s"] == pytest.approx(met / 2)
    assert (found["requests"], found["failed"], found["errors"]) == (2, 1, {"HTTP 429": 1})
    assert found["output_tokens_per_s"] == pytest.approx(5 / 2)
    assert found["late_ms"] == pytest.approx(100)
    assert found["ms"]["itl"] == pytest.approx({"p50": 100, "p90": 400, "p99": 400})


def test_arrivals_are_a_poisson_process_of_that_rate():
    load = drawn(4000, (3, 9), (2, 5), rate=20.0, seed=1)
    gaps = [b - a for a, b in zip(load.due, load.due[1:], strict=False)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(1 / 20, rel=0.06)
    assert sum(gap > mean for gap in gaps) / len(gaps) == pytest.approx(0.368, abs=0.03)  # e**-1: exponential
    assert (min(load.input_lens), max(load.input_lens), min(load.output_lens), max(load.output_lens)) == (3, 9, 2, 5)
    assert load == drawn(4000, (3, 9), (2, 5), rate=20.0, seed=1) != drawn(4000, (3, 9), (2, 5), rate=20.0, seed=2)
    assert drawn(5, (1, 1), (1, 1), rate=None).due is None


def test_prompts_have_their_length_and_differ():
    assert len(text_prompt(40, 1).split()) == 40
    assert text_prompt(40, 1) == text_prompt(40, 1) != text_prompt(40, 2)
    assert len(id_prompt(9, 0, 50)) == 9
    assert max(id_prompt(500, 0, 50)) < 50


def test_a_trace_of_lengths(tmp_path):
    file = tmp_path / "trace.jsonl"
    file.write_text('{"input_len": 5, "output_len": 2, "at": 3.5}\n\n{"input_len": 6, "output_len": 1, "at": 3.0}\n')
    assert read_trace(file) == Load([6, 5], [1, 2], [0.0, 0.5])
    file.write_text('{"input_len": 5, "output_len": 2}\n')
    assert read_trace(file) == Load([5], [2], None)
    assert read_trace(file, rate=3.0).due == [0.0]
    for text in ("{", "[]", '{"input_len": 5}', '{"input_len": 0, "output_len": 1}',
                 '{"input_len": 1, "output_len": 1, "at": -1}',
                 '{"input_len": 1, "output_len": 1, "at": "x"}'):  # fmt: skip
        file.write_text(text)
        with pytest.raises(ValueError, match="line 1"):
            read_trace(file)
    file.write_text("")
    with pytest.raises(ValueError, match="no line"):
        read_trace(file)


def test_open_loop_against_our_server_from_the_command_line(tmp_path, capsys):
    files = {name: tmp_path / f"out.{name}" for name in ("csv", "svg", "json")}
    with running(make_engine()) as server:
        options = ["--url", f"{server.url}/v1", "--num-requests", "12", "--rate", "60", "--input-len", "3", "9",
                   "--output-len", "5", "5", "--vocab-size", "250", "--slo-ttft", "10000", "--ignore-eos"]  # fmt: skip
        files_given = ["--csv", str(files["csv"]), "--plot", str(files["svg"]), "--json", str(files["json"])]
        assert main(["bench", "serve", *options, *files_given]) == 0
        asked = sum(drawn(12, (3, 9), (5, 5), rate=60.0).input_lens)
    result = json.loads(files["json"].read_text())
    assert (result["requests"], result["failed"], result["output_tokens"], result["loop"]) == (12, 0, 60, "open")
    assert result["prompt_tokens"] == asked
    assert result["goodput_per_s"] == pytest.approx(result["requests_per_s"])
    assert result["seconds"] >= drawn(12, (3, 9), (5, 5), rate=60.0).due[-1]
    rows = list(csv.DictReader(files["csv"].open()))
    assert [row["output_tokens"] for row in rows] == ["5"] * 12
    assert files["svg"].read_text().lstrip().startswith("<?xml")
    assert "goodput" in capsys.readouterr().out


def _served(capsys, *options, **settings):
    """Run the command against one server, twice: (prompts asked, what was printed) of each."""
    engine, runs = make_engine(**settings), []
    add, asked = engine.add_request, []
    engine.add_request = lambda ids, *args, **kwargs: asked.append(tuple(ids)) or add(ids, *args, **kwargs)
    with running(engine) as server:
        for _ in range(2):
            asked.clear()
            size = ["--num-requests", "6", "--output-len", "2", "2", "--input-len", "16", "40"]
            assert main(["bench", "serve", "--url", f"{server.url}/v1", *size, *options]) == 0
            runs.append((list(asked), capsys.readouterr().out))
    return runs


@pytest.mark.parametrize("options", [["--vocab-size", "250"], [], ["--chat"], ["--warm-up", "0"]])
def test_the_prefix_cache_knows_no_prompt_of_a_run_beforehand(options, capsys):
    """Neither from the warm-up nor from the run before with the same seed."""
    runs = _served(capsys, "--seed", "3", *options)
    asked = [prompt for prompts, _ in runs for prompt in prompts]
    assert len(set(asked)) == len(asked) == 2 * (6 if "--warm-up" in options else 8)
    if "--chat" not in options:  # there the template's first words are the same
        # a block is 4 tokens; words are few, so some begin alike, but a run asked twice would have half
        assert len({prompt[:4] for prompt in asked}) > len(asked) // 2
    if "--vocab-size" in options:
        assert sorted(map(len, runs[0][0])) == sorted(map(len, runs[1][0]))  # lengths are the seed's
        assert all("Prefix cache: 0 of " in out for _, out in runs)


def test_the_same_prompts_can_be_asked_again_and_the_hits_are_said(capsys):
    (first, said), (second, said_again) = _served(capsys, "--same-prompts", "--vocab-size", "250")
    assert sorted(first) == sorted(second)
    assert len(set(first)) == 8  # the warm-up has its own all the same
    tokens = sum(drawn(6, (16, 40), (2, 2), rate=None).input_lens)
    assert f"Prefix cache: 0 of {tokens} prompt tokens (0.0%), by the server's usage" in said
    hits = int(said_again.partition("Prefix cache: ")[2].split()[0])
    assert hits > 0.8 * tokens


METRICS = """# HELP vllm:prefix_cache_hits_total hits
vllm:prefix_cache_queries_total{model_name="m",engine="0"} %s
vllm:prefix_cache_queries_total{model_name="m",engine="1"} 50.0
vllm:prefix_cache_hits_total{model_name="m",engine="0"} %s
"""


def test_hits_are_read_from_metrics_where_usage_does_not_tell_them():
    texts = iter([METRICS % (100.0, 10.0), METRICS % (300.0, 60.0), METRICS % (20.0, 0.0), "nothing"])
    transport = httpx.MockTransport(lambda request: httpx.Response(200, text=next(texts)))
    before, after, anew, none = (read_cache("http://x/v1", {}, transport) for _ in range(4))
    assert between(before, after) == {"hits": 50.0, "queries": 200.0}
    assert between(after, anew) is between(before, none) is none is None
    assert read_cache("http://x/v1", {}, httpx.MockTransport(lambda request: httpx.Response(404))) is None
    result = measure(Target("http://x/v1", "m"), Load([1], [4]), lambda i: "a", transport=_answering(TOKEN, END))
    assert "neither the server's usage nor its /metrics" in show(result)
    assert "50 of 200 prompt tokens (25.0%), by the server's /metrics" in show(
        result | {"prefix_cache": between(before, after)})  # fmt: skip


def test_closed_loop_keeps_so_many_in_the_air():
    engine = make_engine()
    engine.runner.delay = 0.005
    with running(engine) as server:
        target = Target(f"{server.url}/v1", "tiny", chat=True)
        result = measure(target, drawn(9, (2, 4), (6, 6), rate=None), lambda i: text_prompt(2, i), concurrency=3)
    times = [(timing.sent, timing.ended) for timing in result["timings"]]
    in_the_air = [sum(sent <= now < ended for sent, ended in times) for now, _ in times]
    assert max(in_the_air) == 3
    assert result["failed"] == 0
    assert result["loop"] == "closed"
    assert "TTFT" in show(result)


def _answering(*lines: str, status: int = 200) -> httpx.MockTransport:
    return httpx.MockTransport(lambda request: httpx.Response(status, text="".join(f"{line}\n\n" for line in lines)))


TOKEN = 'data: {"choices": [{"delta": {"content": "a"}}]}'
END = 'data: {"choices": [{"delta": {}, "finish_reason": "length"}]}'
USAGE = 'data: {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3}}'
STRANGE = ("[1]", '{"prompt_tokens": null, "completion_tokens": null}',
           '{"prompt_tokens": "7", "completion_tokens": NaN}',
           '{"prompt_tokens": 7, "completion_tokens": -3}')  # fmt: skip
LAST = USAGE.replace("[]", '[{"text": "", "finish_reason": "stop"}]')


@pytest.mark.parametrize(
    ("lines", "tokens"),
    [([TOKEN, END, "data: [DONE]"], None), ([": comment", TOKEN, END, "data: [DONE]"], None),
     ([TOKEN, END, USAGE, "data: [DONE]"], (7, 3)), ([TOKEN, LAST], (7, 3)),  # transformers: no [DONE]
     ([TOKEN, 'data: {"choices": null}', END], None),
     *(([TOKEN, END, f'data: {{"choices": [], "usage": {usage}}}'], None) for usage in STRANGE)],
)  # fmt: skip
def test_answers_of_other_servers(lines, tokens):
    load, target = Load([1, 1], [4, 4]), Target("http://x/v1", "m", chat=True)
    result = measure(target, load, lambda i: "a", transport=_answering(*lines))
    prompt, output = tokens or (1, 1)  # without usage: as asked, and chunks are counted
    assert (result["failed"], result["prompt_tokens"], result["output_tokens"]) == (0, 2 * prompt, 2 * output)
    assert result["without_usage"] == (0 if tokens else 2)
    assert ("without usage" in show(result)) is not bool(tokens)
    assert result["longer_than_asked"] == 0


@pytest.mark.parametrize(
    ("lines", "error"),
    [([TOKEN], "was cut"), ([TOKEN, "data: [DONE]"], "was cut"),  # llama-cpp-python, when the next request comes
     ([END, "data: [DONE]"], "no text"), (["data: ?"], "not an object"),
     ([TOKEN, 'data: {"error": {"code": "shutting_down"}}'], "shutting_down"),
     ([TOKEN, 'data: {"error": "out of memory"}'], "out of memory"), ([TOKEN, "data: [1]"], "not an object"),
     ([TOKEN, 'data: {"choices": [1]}'], "not an object"), (['data: {"choices": 5}'], "not an object"),
     (["data: " + "[" * 200_000], "not an object")],
)  # fmt: skip
def test_answers_that_are_failures(lines, error):
    with pytest.raises(RuntimeError, match=error):
        measure(Target("http://x/v1", "m", chat=True), Load([1, 1], [4, 4]), lambda i: "a",
                transport=_answering(*lines))  # fmt: skip


def test_an_event_may_hold_what_other_readers_split_lines_at():
    token = TOKEN.replace('"a"', '"a\u2028b\x85c\u2029"')
    result = measure(Target("http://x/v1", "m", chat=True), Load([1], [4]), lambda i: "a",
                     transport=_answering(token, token, END))  # fmt: skip
    assert (result["failed"], result["output_tokens"]) == (0, 2)


@pytest.mark.parametrize("end", ["\n\n", "\r\n\r\n", "\r\r"])
def test_events_come_in_any_pieces_with_any_end_of_line(end):
    data = end.join([TOKEN, TOKEN, END, "data: [DONE]", ""]).encode()

    async def pieces():
        for byte in data:
            yield bytes([byte])

    transport = httpx.MockTransport(lambda request: httpx.Response(200, content=pieces()))
    result = measure(Target("http://x/v1", "m", chat=True), Load([1], [4]), lambda i: "a", transport=transport)
    assert (result["failed"], result["output_tokens"]) == (0, 2)


def test_a_limit_that_the_server_does_not_know_is_said():
    bodies = []

    def answer(request):
        bodies.append(json.loads(request.content))
        return httpx.Response(200, text="\n\n".join([TOKEN] * 5 + [END]))

    target = Target("http://x/v1", "m", limit_name="max_completion_tokens")
    result = measure(target, Load([1], [4]), lambda i: "a", transport=httpx.MockTransport(answer))
    assert bodies[0]["max_completion_tokens"] == 4
    assert "max_tokens" not in bodies[0]
    assert result["longer_than_asked"] == 1
    assert "--limit-name" in show(result)


@pytest.mark.parametrize(
    ("body", "said"),
    [('{"error": {"message": "no such\\nfield"}}', "no such field"), ('{"detail": "Unexpected fields"}', "Unexpected"),
     ('{"error": "busy"}', "busy"), ("<html>bad gateway", "bad gateway"), ('{"detail": [{"loc": ["n"]}]}', "loc"),
     ("[]", "")],
)  # fmt: skip
def test_a_refusal_comes_with_the_words_of_the_server(body, said):
    transport = httpx.MockTransport(lambda request: httpx.Response(422, text=body))
    with pytest.raises(RuntimeError, match="HTTP 422") as error:
        measure(Target("http://x/v1", "m"), Load([1], [4]), lambda i: "a", transport=transport)
    assert said in str(error.value)


def test_a_server_that_refuses_or_is_not_there(capsys):
    with pytest.raises(RuntimeError, match="HTTP 429"):
        measure(Target("http://x/v1", "m"), Load([1], [1]), lambda i: "a", transport=_answering(status=429))
    assert main(["bench", "serve", "--url", "http://127.0.0.1:9/v1"]) == 2
    assert "--url end in /v1" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options",
    [["--rate", "0"], ["--num-requests", "0"], ["--input-len", "5", "2"], ["--concurrency", "0"],
     ["--chat", "--vocab-size", "5"], ["--trace", "no_such_file"], ["--timeout", "0"], ["--slo-ttft", "nan"],
     ["--warm-up", "-1"], ["--url", "127.0.0.1:9/v1"], ["--api-key", "schl\u00fcssel"], ["--plot", "a.xyz"]],
)  # fmt: skip
def test_bad_options_are_refused_before_anything_is_sent(options, capsys):
    began = time.monotonic()
    assert main(["bench", "serve", "--url", "http://127.0.0.1:9/v1", *options]) == 2
    assert "Is the server there" not in capsys.readouterr().err
    assert time.monotonic() - began < 20  # the client waits 30 s for a server
