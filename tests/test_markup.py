"""Text that reaches a page is shown, never obeyed: one function escapes it, for every module."""

import ast
import importlib
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from nanoengine.course.ask import ask
from nanoengine.course.grade import Mark, Row
from nanoengine.course.grade_report import to_html
from nanoengine.course.show import show
from nanoengine.markup import escape
from nanoengine.server.watch_page import page as watch_page
from nanoengine.viz import frame, keyframes, player
from nanoengine.viz.page import trace_html
from nanoengine.viz.plots import bars, lines
from nanoengine.viz.shapes import shape_flow
from tests.viz.conftest import EVENTFUL, run

ROOT = Path(__file__).parents[1]
HOSTILE = "</title></svg><img src=x onerror=alert(1)>\"'&<script>alert(2)</script>"
LIVE = re.compile(r"<img src=x|<script>alert|</svg><img")


def test_no_other_module_escapes_on_its_own():
    found = []
    for path in sorted((ROOT / "nanoengine").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = {alias.name for alias in node.names} if isinstance(node, ast.ImportFrom) else set()
            if isinstance(node, ast.ImportFrom) and node.module in ("html", "xml.sax.saxutils"):
                found += [path.name] if names & {"escape", "quoteattr"} else []
            if isinstance(node, ast.Attribute) and node.attr == "escape" and getattr(node.value, "id", "") == "html":
                found.append(path.name)
    assert found == ["markup.py"]


def test_an_escaped_text_is_well_formed_wherever_it_stands():
    odd = HOSTILE + "".join(map(chr, range(32))) + "\x7f\x9f\ud800\ufffe\u2028"
    tree = ElementTree.fromstring(f'<p title="{escape(odd)}">{escape(odd, quote=False)}</p>')
    assert tree.get("title").startswith(HOSTILE) and tree.text.startswith(HOSTILE)
    assert "\\x00" in tree.text and "\\ud800" in tree.text


def _trace():
    small = dict(num_blocks=12, block_size=4, max_num_batched_tokens=12)
    steps = list(run(EVENTFUL, **small))
    for step in steps:
        step["policy"] = HOSTILE
        for event in step["events"]:
            event["why"] = HOSTILE
    return steps


def _player():
    made = player(_trace(), compare=_trace(), labels=(HOSTILE, HOSTILE))
    shown = [widget.value for widget in _walk(made.widget) if type(widget).__name__ == "HTML"]
    return "".join([*shown, *(b["text/html"] for b in made.bundles() if "text/html" in b)])


def _walk(widget):
    yield widget
    for child in getattr(widget, "children", ()):
        yield from _walk(child)


def _shown_source():
    importlib.import_module("linecache").cache["hostile.py"] = (1, None, [f"x = {HOSTILE!r}\n"], "hostile.py")
    module = type(re)("hostile")
    module.__file__ = "hostile.py"
    return show(module).html()


def _report():
    rows = [Row(Path(f"{HOSTILE.replace('/', '|')}.ipynb"), {"ex01a": Mark("wrong", HOSTILE)}, [HOSTILE], 1.0)]
    return to_html(rows) + to_html(rows, lang="zh")


MAKERS = {
    "player": _player,
    "frame": lambda: frame(_trace(), 3)._repr_mimebundle_()["text/html"],
    "keyframes": lambda: keyframes(_trace()).html() + "".join(keyframes(_trace()).svgs()),
    "bars": lambda: _plot(bars({HOSTILE: 1.0}, unit=HOSTILE, title=HOSTILE)),
    "lines": lambda: _plot(lines([1, 2], {HOSTILE: [1, 2]}, xlabel=HOSTILE, ylabel=HOSTILE, title=HOSTILE)),
    "shape_flow": lambda: _plot(shape_flow([(HOSTILE, (2, 3))])),
    "watch_page": lambda: watch_page("en", HOSTILE),
    "ask": lambda: ask(HOSTILE).html(),
    "show": _shown_source,
    "report": _report,
}


def _plot(plot):
    return plot.svg() + plot._repr_mimebundle_()["text/html"]


@pytest.mark.parametrize("name", MAKERS)
def test_no_public_function_lets_a_text_become_markup(name):
    assert not LIVE.search(MAKERS[name]())


def test_the_page_of_a_run_is_not_ended_by_its_texts(tmp_path):
    text = trace_html(_trace(), tmp_path / "run.html", "en").read_text(encoding="utf-8")
    assert not LIVE.search(text) and text.count("</script>") == 1
