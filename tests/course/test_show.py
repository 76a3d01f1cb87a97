"""Live source: the right lines with the right numbers, legible, and never stale."""

import inspect
import re

import pytest

from nanoengine.course import show as module
from nanoengine.course.show import COLOURS, locate, ref, show
from nanoengine.engine.scheduler import Plan, Scheduler
from nanoengine.engine.sequence import Sequence


@pytest.mark.parametrize("obj", [Scheduler.admit_waiting, Scheduler, Plan, Plan.add, Sequence.is_finished.fget, module])
def test_lines_and_numbers_are_those_that_inspect_finds(obj):
    lines, first = inspect.getsourcelines(obj)
    shown = show(obj)
    first = first or 1  # of a module inspect says 0
    assert [number for number, _, _ in shown.rows] == list(range(first, first + len(shown.rows)))
    assert inspect.cleandoc("".join(lines)) == inspect.cleandoc("\n".join(text for _, text, _ in shown.rows))


def test_a_pointer_and_an_object_are_the_same_place():
    assert ref("nanoengine/engine/scheduler.py:Scheduler.admit_waiting") == locate(Scheduler.admit_waiting)
    assert ref("nanoengine/engine/scheduler.py:POLICIES").symbol == "POLICIES"
    assert locate(Sequence.is_finished).symbol == "Sequence.is_finished"
    assert locate(Scheduler(*_parts()).add).symbol == "Scheduler.add"


def _parts():
    from nanoengine.config import EngineConfig
    from nanoengine.engine.block_manager import BlockManager

    return EngineConfig(), BlockManager(4, 4)


@pytest.mark.parametrize(
    ("pointer", "message"),
    [
        ("nanoengine/engine/nope.py:A", "there is no file 'nanoengine/engine/nope.py'"),
        ("tests/conftest.py:_allowed", "write nanoengine/folder/file.py:Symbol"),
        ("nanoengine/engine/scheduler.py:Scheduler.nope", "there is no 'nope'; it has __init__, add"),
    ],
)
def test_a_pointer_to_nothing_is_refused(pointer, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        ref(pointer)


def test_what_has_no_source_is_refused():
    with pytest.raises(TypeError, match="no Python source to show"):
        show(len)


def test_lines_by_text_survive_edits_above_and_missing_ones_are_named():
    shown = show(Scheduler.advance, lines=("for seq", "num_in_flight"))
    assert [text.strip() for _, text, _ in shown.rows] == ["for seq in plan.seqs:", "seq.num_in_flight += 1"]
    assert show(Scheduler.add, lines=(2, 2)).rows[0][1].strip() == "self.waiting.append(seq)"
    with pytest.raises(ValueError, match="no line from 1 on contains 'while'"):
        show(Scheduler.add, lines=("while", "x"))
    with pytest.raises(ValueError, match=r"line 9 is not in 1\.\.2"):
        show(Scheduler.add, lines=(1, 9))


def test_marks_are_shown_by_more_than_colour():
    shown = show(Scheduler.add, highlight="append")
    assert [marked for _, _, marked in shown.rows] == [False, True]
    assert shown.html().count("▸") == 1
    assert " >     self.waiting" in shown.text()
    with pytest.raises(ValueError, match="contains 'nothing here'"):
        show(Scheduler.add, highlight=["append", "nothing here"])


def test_the_docstring_can_be_left_out_and_numbers_stay_true():
    whole, short = show(Scheduler.retire), show(Scheduler.retire, doc=False)
    assert set(short.rows) < set(whole.rows)
    assert not any('"""' in text for _, text, _ in short.rows)


def test_html_holds_exactly_the_text():
    shown = show(Scheduler)
    pre = re.search(r"<pre[^>]*>(.*)</pre>", shown.html(), re.DOTALL)[1]
    plain = re.sub(r"<[^>]+>", "", pre).replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")
    width = len(str(shown.rows[-1][0]))
    assert [line[width + 3 :] for line in plain.split("\n")] == [text for _, text, _ in shown.rows]


def test_an_edited_file_is_read_anew(tmp_path, monkeypatch):
    package = tmp_path / "nanoengine"
    package.mkdir()
    monkeypatch.setattr(module, "PACKAGE_ROOT", tmp_path)
    (package / "a.py").write_text("def f():\n    return 1\n", encoding="utf-8")
    assert str(ref("nanoengine/a.py:f")) == "nanoengine/a.py:1 f"
    (package / "a.py").write_text("# above\n\ndef f():\n    return 22\n", encoding="utf-8")
    assert show("nanoengine/a.py:f").text() == "nanoengine/a.py:3 f\n3   def f():\n4       return 22"


def test_a_cell_of_a_notebook_has_no_process_number_in_its_title():
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell.instance()
    try:
        shell.run_cell("x = 1\nclass Mine:\n    def step(self):\n        return x\n", store_history=True)
        mine = shell.user_ns["Mine"]
        assert show(mine.step).text() == "notebook:3 Mine.step\n3   def step(self):\n4       return x"
        assert show(mine).rows[0][:2] == (2, "class Mine:")
    finally:
        InteractiveShell.clear_instance()


def _luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


@pytest.mark.parametrize("colour", sorted(set(COLOURS.values())))
@pytest.mark.parametrize("page", ["#ffffff", "#111111"])  # JupyterLab's light and dark page
def test_code_is_legible_on_light_and_dark(colour, page):
    low, high = sorted((_luminance(colour), _luminance(page)))
    assert (high + 0.05) / (low + 0.05) >= 4.0  # no colour reaches more than 4.35 on both
