"""What leaves the notebook: stills, a page, Perfetto's file, plots."""

import base64
import gzip
import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest

from nanoengine.viz import History, explain, frame, keyframes, plots, render
from nanoengine.viz.frames import key_steps
from nanoengine.viz.page import trace_html
from nanoengine.viz.perfetto import to_perfetto, trace_events


def images(html):
    """(SVG text, alt text) of each image in an HTML text."""
    found = re.findall(r'<img src="data:image/svg\+xml;base64,([^"]+)" alt="([^"]*)"', html)
    return [(base64.b64decode(data).decode(), alt) for data, alt in found]


def test_importing_and_drawing_needs_no_torch_matplotlib_or_ipywidgets():
    code = """
import sys
for name in ("torch", "matplotlib", "ipywidgets", "IPython"):
    sys.modules[name] = None
from nanoengine import LLMEngine, SamplingParams, record
from nanoengine.config import EngineConfig
from nanoengine.sim import SlotRunner
from nanoengine.viz import keyframes
engine = LLMEngine(EngineConfig(), runner=SlotRunner(8, 4))
engine.add_request([1, 2, 3], SamplingParams(max_tokens=2))
with record(engine) as trace:
    list(engine.run())
print(keyframes(trace).html()[:4])
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.stdout == "<div\n", result.stderr


def test_key_steps_start_with_the_most_telling(eventful):
    history = History(eventful)
    assert key_steps(history, 1) == history.jumps("preempt")[:1]
    assert key_steps(history, 3) == [0, 8, 20]
    assert key_steps(history, 5) == [0, 1, 8, 11, 20]
    assert key_steps(history, 99) == sorted(set(key_steps(history, 99)))
    with pytest.raises(ValueError, match="at least 1"):
        key_steps(history, 0)


def test_a_bundle_holds_whole_pictures_and_a_text(eventful):
    bundle = keyframes(eventful, 3, lang="zh")._repr_mimebundle_()
    assert set(bundle) == {"text/html", "text/plain"}
    pictures = images(bundle["text/html"])
    assert [svg for svg, _ in pictures] == [render(History(eventful).at(i), "zh") for i in (0, 8, 20)]
    assert bundle["text/plain"].splitlines() == [alt for _, alt in pictures]
    # Sanitisers of GitHub and JupyterLab would take these out.
    assert not re.search(r"<(svg|style|script)", bundle["text/html"])


def test_a_frame_is_one_picture(eventful):
    (picture,) = images(frame(eventful, -1, lang="en", panes=["gantt"]).html())
    assert picture[0] == render(History(eventful).at(20), "en", panes=["gantt"])


def test_the_page_holds_every_step_and_names_no_address(eventful, tmp_path):
    page = trace_html(eventful, tmp_path / "run.html", "zh").read_text(encoding="utf-8")
    data = json.loads(gzip.decompress(base64.b64decode(re.search(r'packed = "([^"]+)"', page)[1])))
    history = History(eventful)
    for i, parts in enumerate(data["frames"]):
        svg = render(history.at(i), "zh")
        assert "".join(data["parts"][k] for k in parts) == svg.replace(re.search(r'id="(ne\w+)"', svg)[1], "run")
    assert len(data["frames"]) == len(eventful)
    assert "://" not in page.replace("http://www.w3.org/2000/svg", "")
    assert explain(history.at(8), "zh")[0] in re.search(r'<div id="picture">.*?</div>', page, re.DOTALL)[0]
    assert json.loads(re.search(r"jumps = ({.*?}),", page)[1])["preempt"] == history.jumps("preempt")


def test_the_page_is_the_same_each_time_and_small(long_run, tmp_path):
    one, two = (trace_html(long_run[:80], tmp_path / name, "en") for name in ("1.html", "2.html"))
    assert one.read_bytes() == two.read_bytes()
    assert one.stat().st_size < 150_000


def _check_trace_event(event):
    assert event["ph"] in "XiMC" and isinstance(event["name"], str)
    assert type(event["pid"]) is int and type(event["tid"]) is int
    if event["ph"] == "M":
        assert event["name"] in ("process_name", "thread_name", "thread_sort_index")
        assert set(event["args"]) == {"sort_index" if event["name"].endswith("index") else "name"}
        return
    assert isinstance(event["ts"], (int, float)) and event["ts"] >= 0
    if event["ph"] == "X":
        assert isinstance(event["dur"], (int, float)) and event["dur"] >= 0
    if event["ph"] == "i":
        assert event["s"] in ("g", "p", "t")
    if event["ph"] == "C":
        assert event["args"] and all(isinstance(value, (int, float)) for value in event["args"].values())


def _check_tracks(events):
    """Complete events of one thread nest or follow each other."""
    tracks = {}
    for event in events:
        if event["ph"] == "X":
            tracks.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for spans in tracks.values():
        spans.sort(key=lambda span: (span[0], -span[1]))
        open_spans = []
        for start, end in spans:
            while open_spans and open_spans[-1] <= start + 0.002:  # a thousandth is what is rounded away
                open_spans.pop()
            assert not open_spans or end <= open_spans[-1] + 0.002
            open_spans.append(end)


def test_perfetto_gets_what_the_trace_event_format_asks_for(eventful, tmp_path):
    document = json.loads(to_perfetto(eventful, tmp_path / "run.json").read_text(encoding="utf-8"))
    events = document["traceEvents"]
    for event in events:
        _check_trace_event(event)
    _check_tracks(events)
    assert sum(event["ph"] == "X" and event["pid"] == 1 for event in events) == len(eventful)
    instants = [event["name"] for event in events if event["ph"] == "i"]
    assert sorted(instants) == sorted(event["kind"] for step in eventful for event in step["events"])
    named = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert named == {"steps", *(f"{name} (request {seq})" for seq, name in History(eventful).letters.items())}


def test_steps_in_flight_together_lie_on_two_tracks(eventful):
    steps = [{**step, "seconds": {"at": i * 1.0, "total": 1.5}} for i, step in enumerate(eventful)]
    events = trace_events(steps)
    _check_tracks(events)
    lanes = {event["tid"] for event in events if event["ph"] == "X" and event["pid"] == 1}
    assert lanes == {1, 2}
    first = next(event for event in events if event["ph"] == "X" and event["name"].startswith("step 0"))
    assert (first["ts"], first["dur"]) == (0, 1_500_000)


def test_plots_say_what_they_show_and_are_the_same_each_time(eventful, prefill_first):
    for make in (
        lambda: plots.tokens_per_step(eventful),
        lambda: plots.blocks_in_use({"token_budget": eventful, "prefill_first": prefill_first}),
        lambda: plots.bars({"one": 3, "two": 4.5}, unit="tok/s", title="Speed"),
        lambda: plots.lines(
            [1, 2, 4], {"a": [1, 2, 3], "b": [3, 2, 1]}, xlabel="batch", ylabel="ms", title="T", logx=True
        ),
    ):
        one, two = make(), make()
        assert one.svg() == two.svg() and len(one.svg()) < 40_000
        ET.fromstring(one.svg())
        bundle = one._repr_mimebundle_()
        ((svg, alt),) = images(bundle["text/html"])
        assert svg == one.svg() and alt == bundle["text/plain"] and len(alt) > 20


def test_plots_count_right(eventful):
    total = sum(row["tokens"] for step in eventful for row in step["rows"] if row["kind"] == "prefill")
    assert f"{total} prefill" in plots.tokens_per_step(eventful).alt
    assert "at most 12 of 12" in plots.blocks_in_use(eventful).alt


def test_a_line_chart_can_begin_at_zero():
    values = {"hit rate": [83, 88, 33]}
    cut, whole = (plots.lines([1, 2, 3], values, xlabel="users", ylabel="%", title="hits", from_zero=zero)
                  for zero in (False, True))  # fmt: skip
    assert cut.fig.axes[0].get_ylim()[0] > 20 and whole.fig.axes[0].get_ylim()[0] == 0


def test_labels_a_plot_cannot_write_are_refused():
    with pytest.raises(ValueError, match="may be in no font"):
        plots.bars({"\u0416": 1}, unit="tok/s", title="x")
    with pytest.raises(ValueError, match="alternative text"):
        plots.figure_alt(None, " ")
    with pytest.raises(ValueError, match="at least one bar"):
        plots.bars({}, unit="s", title="x")
