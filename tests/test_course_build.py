"""The build of lessons, on a small source of its own."""

import base64
import re
import shutil
import textwrap
from xml.etree import ElementTree

import nbformat
import pytest

from nanoengine.course import build, notebook
from nanoengine.course.rules import read_sync, source_problems, stale_cells, unrecorded_cells, updated_record
from nanoengine.course.source import SourceError, read_source

SOURCE = textwrap.dedent('''\
    # %% [markdown] id="title"
    # # A small lesson
    # There are {{ blocks:,}} blocks and $\\frac{{a}}{b}$ of {{ names[0] }}.
    #
    # <!-- zh -->
    # # 小课
    # 共有 {{ blocks:,}} 个块。

    # %% id="env"
    lesson = lambda no, lang: print("lesson", no, lang)
    lesson("01", lang="en")

    # %% id="count"
    blocks = 12 * 1000
    names = ["A", "B"]
    print({"x", "y", "z"}, lesson)

    # %% id="clock" tags=["varies"]
    import time
    time.perf_counter()

    # %% id="widget"
    import ipywidgets
    ipywidgets.IntSlider()

    # %% id="picture"
    from IPython.display import HTML
    HTML('<p>a<svg role="img" width="9" height="9"><title>A &lt; B</title><desc>Two.</desc></svg></p>')
''')


def _write_source(folder):
    src = folder / "lessons" / "src"
    src.mkdir(parents=True)
    (src / "01_small.py").write_text(SOURCE, encoding="utf-8")
    return src.parent


@pytest.fixture
def lessons(tmp_path):
    return _write_source(tmp_path)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    lessons = _write_source(tmp_path_factory.mktemp("built"))
    assert build.main(["--execute", "--lessons", str(lessons)]) == 0
    return lessons


def _source(lessons):
    return read_source(lessons / "src" / "01_small.py")


def _edit(lessons, old, new):
    path = lessons / "src" / "01_small.py"
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")


class TestExecuted:
    """One build with a kernel a language, looked at from several sides."""

    def test_both_languages_are_written_with_the_slugs_as_ids(self, built):
        for path in (built / "01_small.ipynb", built / "zh" / "01_small.ipynb"):
            cells = nbformat.read(path, as_version=4).cells
            assert [c.id for c in cells] == ["title", "env", "count", "clock", "widget", "picture"]

    def test_only_the_lesson_call_differs_in_code(self, built):
        en, zh = (nbformat.read(p, as_version=4) for p in (built / "01_small.ipynb", built / "zh" / "01_small.ipynb"))
        assert zh.cells[1].source.endswith('lesson("01", lang="zh")')
        assert zh.cells[1].outputs[0].text == "lesson 01 zh\n"
        assert [c.source for c in en.cells[2:]] == [c.source for c in zh.cells[2:]]

    def test_computed_numbers_stand_in_the_prose_and_latex_is_left_alone(self, built):
        en, zh = (nbformat.read(p, as_version=4) for p in (built / "01_small.ipynb", built / "zh" / "01_small.ipynb"))
        assert en.cells[0].source == "# A small lesson\nThere are 12,000 blocks and $\\frac{{a}}{b}$ of A."
        assert zh.cells[0].source == "# 小课\n共有 12,000 个块。"

    def test_addresses_widget_ids_and_times_are_not_kept(self, built):
        text = (built / "01_small.ipynb").read_text(encoding="utf-8")
        assert " at 0x…>" in text
        assert "widget-view" not in text
        assert "iopub" not in text

    def test_an_inline_svg_is_saved_as_an_image_with_its_texts(self, built):
        (output,) = nbformat.read(built / "01_small.ipynb", as_version=4).cells[-1].outputs
        pattern = r'<p>a<img alt="(.*)" src="data:image/svg[+]xml;base64,(.*)"></p>'
        alt, address = re.fullmatch(pattern, output.data["text/html"]).groups()
        assert alt == "A &lt; B. Two"
        svg = ElementTree.fromstring(base64.b64decode(address))
        assert svg.tag == "{http://www.w3.org/2000/svg}svg"

    def test_executing_again_changes_no_byte(self, built, tmp_path):
        again = tmp_path / "again"
        shutil.copytree(built, again)
        assert build.main(["--execute", "--lessons", str(again)]) == 0
        for name in ("01_small.ipynb", "zh/01_small.ipynb", "src/01_small.py", "src/zh_sync.json"):
            assert (again / name).read_bytes() == (built / name).read_bytes()

    def test_a_build_without_execution_carries_outputs_and_numbers_over(self, built, tmp_path):
        again = tmp_path / "again"
        shutil.copytree(built, again)
        _edit(again, "# There are", "# Look: there are")
        _edit(again, "# 共有", "# 看,共有")
        _edit(again, 'names = ["A", "B"]', 'names = ["A", "C"]')
        assert build.main(["--lessons", str(again)]) == 0
        before, after = (nbformat.read(root / "01_small.ipynb", as_version=4) for root in (built, again))
        assert "Look: there are 12,000 blocks" in after.cells[0].source
        assert after.cells[2].outputs == []  # its code changed
        assert after.cells[3].outputs == before.cells[3].outputs

    def test_measuring_records_varying_outputs_anew(self, built):
        source, path = _source(built), built / "01_small.ipynb"
        old = nbformat.read(path, as_version=4)
        new = build.build_notebook(source, "en", old, cwd=built, measure=True)
        assert new.cells[3].outputs != old.cells[3].outputs
        assert notebook.differences(old, new) == []

    def test_measuring_one_cell_leaves_the_others(self, built, tmp_path):
        again = tmp_path / "again"
        shutil.copytree(built, again)
        before = nbformat.read(built / "01_small.ipynb", as_version=4)
        varying = before.cells[3].id
        for cell, anew in (("another", False), (varying, True)):
            assert build.main(["--execute", "--measure-cell", cell, "--lessons", str(again)]) == 0
            after = nbformat.read(again / "01_small.ipynb", as_version=4)
            assert (after.cells[3].outputs != before.cells[3].outputs) == anew


def test_a_failing_cell_is_named_and_nothing_is_written(lessons, capsys):
    _edit(lessons, "blocks = 12 * 1000", "blocks = 1 / 0")
    assert build.main(["--execute", "--lessons", str(lessons)]) == 1
    message = capsys.readouterr().err
    assert "cell count" in message
    assert "ZeroDivisionError" in message
    assert not (lessons / "01_small.ipynb").exists()


def test_a_number_that_cannot_be_computed_is_named(lessons, capsys):
    _edit(lessons, "{{ names[0] }}", "{{ nobody }}")
    assert build.main(["--execute", "--lessons", str(lessons)]) == 1
    assert "{{ nobody }} in the prose: NameError" in capsys.readouterr().err


def test_english_edited_alone_makes_the_chinese_stale(lessons, capsys):
    assert build.main(["--lessons", str(lessons)]) == 0
    _edit(lessons, "A small lesson", "A tiny lesson")
    assert build.main(["--lessons", str(lessons)]) == 1
    assert "cell title: the Chinese is older than the English" in capsys.readouterr().err
    assert build.main(["--lessons", str(lessons)]) == 1, "building again must not make it right"
    _edit(lessons, "# # 小课", "# # 微课")
    assert build.main(["--lessons", str(lessons)]) == 0


def test_an_author_can_say_that_the_chinese_still_holds(lessons):
    assert build.main(["--lessons", str(lessons)]) == 0
    _edit(lessons, "A small lesson", "A small  lesson")
    assert build.main(["--lessons", str(lessons), "--zh-still-right", "title"]) == 0
    assert build.main(["--lessons", str(lessons)]) == 0


def test_an_edit_without_a_build_is_seen(lessons):
    source = _source(lessons)
    record = updated_record(source, {})
    assert unrecorded_cells(source, record) == []
    _edit(lessons, "# # 小课", "# # 微课")
    assert unrecorded_cells(_source(lessons), record) == ["title"]
    assert stale_cells(_source(lessons), record) == []
    assert read_sync(lessons / "src" / "none.json") == {}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('id="count"', 'id="env"', "two cells have the id 'env'"),
        ('# %% id="count"', "# %% id=count", "in quotes"),
        ('# %% id="count"', "# %%", "in quotes"),
        ('id="count"', 'id="Count_1"', "small letters"),
    ],
)
def test_a_header_that_breaks_the_format_is_refused(lessons, old, new, message):
    _edit(lessons, old, new)
    with pytest.raises(SourceError, match=message):
        _source(lessons)


def test_a_lesson_without_a_source_is_refused(lessons, capsys):
    assert build.main(["--lessons", str(lessons), "07"]) == 1
    assert "no source for 07" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("# <!-- zh -->\n", "", "Chinese text is missing"),
        ("# There are", "# TODO there are", "unfinished"),
        ("# There are", "# " + "word " * 90, "English words, limit 90"),
        ("# 共有", "# " + "字" * 201, "Chinese characters, limit 200"),
        ("names =", "\n" * 40 + "names =", "lines of code, limit 40"),
        ("names =", "# 名字\nnames =", "comments are English"),
        ("names =", 'lesson("02", lang="en")\nnames =', "exactly one code cell"),
        ('lesson("01", lang="en")', 'lesson("02", lang="en")', 'call lesson("01"'),
        ("# # A small lesson", "# # 小 lesson", "Chinese before the line"),
    ],
)
def test_a_breach_of_the_rules_is_reported(lessons, old, new, message):
    _edit(lessons, old, new)
    assert any(message in problem for problem in source_problems(_source(lessons)))


def test_the_median_code_cell_is_short(lessons):
    for cell in ("blocks =", "import time", "import ipywidgets"):
        _edit(lessons, cell, "1\n" * 8 + cell)
    assert any("median" in problem for problem in source_problems(_source(lessons)))


def test_the_small_source_keeps_the_rules(lessons):
    assert source_problems(_source(lessons)) == []
