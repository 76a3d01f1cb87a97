"""/trace and what `trace watch` makes of it; `trace view`."""

import json
import threading
import urllib.error
import urllib.request

import pytest

from nanoengine.cli import main
from nanoengine.sampling_params import SamplingParams
from nanoengine.server.watch import PageServer, Watched
from nanoengine.trace import FIELDS, record
from nanoengine.viz.state import History
from tests.server.conftest import ask, make_engine, running, until


@pytest.fixture
def traced():
    engine = make_engine(num_blocks=12)
    with running(engine, trace_steps=20) as server:
        yield server


def test_trace_keeps_the_last_steps_and_numbers_them_from_the_start(traced):
    with traced.client() as client:
        assert client.get("/trace").json() == {"last": -1, "steps": []}
        for i in range(6):
            ask(client, prompt=[i] * 7, max_tokens=10)
        until(lambda: traced.is_idle)
        found = client.get("/trace").json()
        assert found["last"] == traced.stats.steps - 1 == 59
        assert [step["step"] for step in found["steps"]] == list(range(40, 60))
        newer = client.get("/trace", params={"after": 55}).json()["steps"]
        assert [step["step"] for step in newer] == [56, 57, 58, 59]
        for bad in ("x", "1.5", "--1", "9" * 30):
            assert client.get("/trace", params={"after": bad}).status_code == 400
    assert len(traced.service.trace._seen) <= 1  # nothing grows with the number of requests


def test_every_window_of_a_run_can_be_drawn(traced):
    watched = Watched(traced.url, size=7)
    assert watched.frame(0) is None
    assert watched.state() == {"first": None, "last": None, "error": None}
    shown = set()
    with traced.client() as client:
        for i in range(8):
            ask(client, prompt=[[i] * 9, [i + 1] * 3], max_tokens=6)
            watched.poll()
            state = watched.state()
            assert state["last"] - state["first"] <= 6
            for step in range(state["first"] - 1, state["last"] + 2):  # the nearest at hand, where it is not
                shown.add(watched.frame(step))
    assert len(shown) > 30
    assert all(svg.startswith("<svg") for svg in shown)


def test_letters_stay_with_their_sequence(traced):
    watched = Watched(traced.url, size=5)
    with traced.client() as client:
        for i in range(4):
            ask(client, prompt=[i], max_tokens=8)
        watched.poll()
        assert "D" in watched.frame(10**6)
        assert watched._history.letters == {3: "D"}


def test_a_server_started_anew_begins_again():
    engine = make_engine()
    with running(engine, trace_steps=50) as server, server.client() as client:
        ask(client, max_tokens=30)
        watched = Watched(f"{server.url}/v1/")
        watched.poll()
        assert watched.state()["last"] == 29
        server.service.trace.window, server.service.trace.steps = [], []
        server.service.trace.count = 0
        ask(client, max_tokens=5)
        watched.poll()
        assert watched.state() == {"first": 0, "last": 4, "error": None}


def test_what_cannot_be_watched_says_why(slots, capsys):
    assert main(["trace", "watch", slots.url, "--no-open"]) == 2
    assert "start the server with --trace-steps N" in capsys.readouterr().err
    assert main(["trace", "watch", "http://127.0.0.1:9", "--no-open"]) == 2
    assert "does not answer" in capsys.readouterr().err
    assert main(["trace", "watch", "ftp://x", "--no-open"]) == 2
    assert "http://127.0.0.1:8000" in capsys.readouterr().err
    with running(make_engine(), trace_steps=5, api_key="k") as server:
        with pytest.raises(ValueError, match="API key"):
            Watched(server.url).poll()
        Watched(server.url, api_key="k").poll()


def test_the_page_answers_only_by_its_own_name(traced):
    watched = Watched(traced.url, lang="zh")
    with traced.client() as client:
        ask(client, max_tokens=4)
    watched.poll()
    with PageServer(watched) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            with urllib.request.urlopen(server.url) as answer:
                assert "正在运行的引擎" in answer.read().decode()
            with urllib.request.urlopen(f"{server.url}state") as answer:
                assert json.load(answer) == {"first": 0, "last": 3, "error": None}
            with urllib.request.urlopen(f"{server.url}frame?step=2") as answer:
                assert answer.read().decode() == watched.frame(2)
            other = urllib.request.Request(f"{server.url}state", headers={"Host": "evil.example"})
            with pytest.raises(urllib.error.HTTPError, match="403"):
                urllib.request.urlopen(other)
        finally:
            server.shutdown()


def test_view_writes_a_page_beside_the_file(tmp_path, capsys):
    engine = make_engine()
    engine.add_request([1, 2, 3], SamplingParams(max_tokens=4))
    with record(engine) as trace:
        list(engine.run())
    trace.save(tmp_path / "run.jsonl")
    assert main(["trace", "view", str(tmp_path / "run.jsonl"), "--no-open"]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "run.html")
    assert "<svg" in (tmp_path / "run.html").read_text(encoding="utf-8")
    assert len(History(trace)) == 4
    assert main(["trace", "view", str(tmp_path / "none.jsonl"), "--no-open"]) == 2


def _saved(tmp_path):
    engine = make_engine()
    for prompt in ([1, 2, 3], [4] * 9):
        engine.add_request(prompt, SamplingParams(max_tokens=4))
    with record(engine) as trace:
        list(engine.run())
    return trace.save(tmp_path / "run.jsonl")


def _damaged(tmp_path, change):
    path = _saved(tmp_path)
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    change(records)
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


FIELD_VALUES = [None, "x", -1, 10**9, [], {}, [None], {"0": None}, [{}], [-5], {"999": [3]}, True, 1.5]


@pytest.mark.parametrize("value", FIELD_VALUES, ids=repr)
def test_a_damaged_field_is_one_line_that_names_the_file(tmp_path, capsys, value):
    for name in FIELDS:
        path = _damaged(tmp_path, lambda records, name=name: records[1].update({name: value}))
        code = main(["trace", "view", str(path), "--no-open"])
        lines = capsys.readouterr().err.splitlines()
        assert code in (0, 2), (name, lines)
        assert (len(lines), code) in ((0, 0), (1, 2)) and all(str(path) in line for line in lines), (name, lines)


@pytest.mark.parametrize("part", ["rows", "events"])
@pytest.mark.parametrize("value", [None, "x", -1, 999, [], {}], ids=repr)
def test_a_damaged_row_or_event_is_one_line_too(tmp_path, capsys, part, value):
    first = json.loads(_saved(tmp_path).read_text(encoding="utf-8").splitlines()[0])
    for name in first[part][0]:
        path = _damaged(tmp_path, lambda records, name=name: records[0][part][0].update({name: value}))
        code = main(["trace", "view", str(path), "--no-open"])
        lines = capsys.readouterr().err.splitlines()
        assert (len(lines), code) in ((0, 0), (1, 2)), (name, lines)


@pytest.mark.parametrize("data", [b"", b"\x00\xff", b"\x1f\x8b\x08", b"[" * 100_000, b"PK\x03\x04"])
def test_what_is_no_trace_at_all_is_one_line(tmp_path, capsys, data):
    (tmp_path / "run.jsonl").write_bytes(data)
    assert main(["trace", "view", str(tmp_path / "run.jsonl"), "--no-open"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
