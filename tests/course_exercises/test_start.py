"""Handing out and taking back: a learner's work is never lost, and the commands say what they did."""

import json
import shutil

import nbformat
import pytest

from nanoengine import cli
from nanoengine.cli import make_parser
from nanoengine.course import progress
from nanoengine.course.start import StartError, beside, content, notebook_of, reset, start
from tests.course_exercises.conftest import ROOT

NAME = "exercises/01_ninety_lines.ipynb"


@pytest.fixture
def course(tmp_path, monkeypatch):
    """A copy of the course with one lesson and its exercises: what is counted does not change with each new lesson."""
    course, others = tmp_path / "course", "0[2-9]*"
    for folder in ("exercises", "solutions"):
        shutil.copytree(ROOT / folder, course / folder, ignore=shutil.ignore_patterns(others, "1*"))
    (course / "lessons" / "src").mkdir(parents=True)
    shutil.copyfile(course / NAME, course / "lessons" / "01_ninety_lines.ipynb")
    monkeypatch.setenv("NANOENGINE_COURSE", str(course))
    return course


@pytest.fixture
def work(tmp_path):
    return tmp_path / "work"


def _outcomes(copied, work):
    return {c.path.relative_to(work).as_posix(): c.outcome for c in copied}


def _write(path, source, cell_id="ex01a-answer"):
    notebook = nbformat.read(path, as_version=4)
    next(cell for cell in notebook.cells if cell.id == cell_id).source = source
    nbformat.write(notebook, path)


def _cell(path, cell_id="ex01a-answer"):
    return next(cell.source for cell in nbformat.read(path, as_version=4).cells if cell.id == cell_id)


def test_a_first_start_copies_one_language_and_makes_the_progress_file(course, work):
    copied = start(course, work)
    assert _outcomes(copied, work) == {"lessons/01_ninety_lines.ipynb": "new", NAME: "new"}
    assert (work / NAME).read_bytes() == (course / NAME).read_bytes()
    assert progress.load(work / progress.NAME) == progress.empty()
    assert _outcomes(start(course, work, "zh"), work) == {"exercises/zh/01_ninety_lines.ipynb": "new"}


def test_a_second_start_keeps_what_was_written_and_brings_what_is_new(course, work):
    start(course, work)
    _write(work / NAME, "mine")
    assert _outcomes(start(course, work), work)[NAME] == "kept"
    _write(course / NAME, "newer stub")
    _write(course / "lessons" / "01_ninety_lines.ipynb", "newer lesson")
    outcomes = _outcomes(start(course, work), work)
    assert outcomes == {"lessons/01_ninety_lines.ipynb": "updated", NAME: "beside"}
    assert _cell(work / NAME) == "mine"
    assert _cell(beside(work / NAME)) == "newer stub"
    assert _outcomes(start(course, work), work)[NAME] == "kept"


def test_running_a_notebook_is_no_change_of_it(course, work):
    start(course, work)
    notebook = nbformat.read(work / NAME, as_version=4)
    next(c for c in notebook.cells if c.cell_type == "code").outputs = [nbformat.v4.new_output("stream", text="ran")]
    nbformat.write(notebook, work / NAME)
    _write(course / NAME, "newer stub")
    assert _outcomes(start(course, work), work)[NAME] == "updated"


def test_without_the_record_every_difference_is_the_learners(course, work):
    start(course, work)
    (work / ".course.json").write_text("damaged")
    _write(course / NAME, "newer stub")
    before = content(work / NAME)
    assert _outcomes(start(course, work), work)[NAME] == "beside"
    assert content(work / NAME) == before


def test_the_courses_own_folder_is_no_work_folder(course):
    for folder in (course, course / "exercises"):
        with pytest.raises(StartError, match="choose another folder"):
            start(course, folder)


def test_reset_of_an_exercise_puts_its_stub_back_and_keeps_a_copy(course, work):
    start(course, work)
    _write(work / NAME, "mine")
    _write(work / NAME, "mine, too", "ex01b-answer")
    progress.note("exercises", "ex01a", {"attempts": 1}, path=work / progress.NAME)
    done, kept = reset(course, work, "ex01a")
    assert _cell(work / NAME) == _cell(course / NAME)
    assert _cell(work / NAME, "ex01b-answer") == "mine, too"
    assert [_cell(copy) for copy in kept] == ["mine"]
    assert done == [work / NAME]
    assert progress.load(work / progress.NAME)["exercises"] == {}
    _write(work / NAME, "again")
    assert reset(course, work, "ex01a")[1] != kept


def test_reset_of_a_lesson_puts_its_notebooks_back(course, work):
    start(course, work)
    _write(work / NAME, "mine")
    done, kept = reset(course, work, "01")
    assert (work / NAME).read_bytes() == (course / NAME).read_bytes()
    assert (done, [_cell(copy) for copy in kept]) == ([work / NAME], ["mine"])


def test_reset_of_a_cell_that_is_gone_says_what_to_do(course, work):
    start(course, work)
    notebook = json.loads((work / NAME).read_text(encoding="utf-8"))
    notebook["cells"] = notebook["cells"][:2]
    (work / NAME).write_text(json.dumps(notebook))
    with pytest.raises(StartError, match="course reset 01"):
        reset(course, work, "ex01a")
    with pytest.raises(StartError, match="nanoengine course start"):
        reset(course, work, "ex09a")


def test_the_language_changed_last_is_the_one_in_use(course, work):
    start(course, work)
    start(course, work, "zh")
    _write(work / NAME, "mine")
    assert notebook_of(work, "ex01a") == work / NAME


class TestCommands:
    @pytest.fixture
    def run(self, course, work, capsys):
        def run(*words, code=0):
            assert cli.main(["course", *words, "--work", str(work)]) == code
            return capsys.readouterr().out

        return run

    def test_a_learners_way(self, run, work):
        assert f"{NAME}: new" in run("start")
        assert run("start", "--quiet") == ""
        assert f"open {work / NAME}" in run("next")
        assert "not written yet" in run("check", "ex01a", code=1)
        _write(work / NAME, _cell(ROOT / "solutions" / "01_ninety_lines.ipynb"))
        assert run("check", "ex01a") == "✓ ex01a passed (50 cases)\n"
        assert "✓ ex01a" in run("status")
        assert run("next").startswith("ex01b: The KV ledger of any card · 任意一张卡的 KV 账\n")
        assert run("hint", "ex01b", "-L", "zh").startswith("提示 1/3：")
        assert run("hint", "ex01b").startswith("Hint 2 of 3:")
        assert "put back; what you had is 01_ninety_lines.before-reset-1.ipynb" in run("reset", "ex01a")
        assert "○ ex01a" in run("status")
        assert "as they were handed out" in run("reset", "ex01a")

    def test_progress_goes_to_another_machine_and_back(self, run, tmp_path, work):
        run("start")
        progress.note("exercises", "ex01b", {"passed_at": "2026-01-01", "attempts": 2}, path=work / progress.NAME)
        run("export", "progress", str(tmp_path / "taken.json"))
        progress.save(work / progress.NAME, progress.empty())
        run("merge", str(tmp_path / "taken.json"))
        assert progress.load(work / progress.NAME)["exercises"]["ex01b"]["attempts"] == 2

    def test_errors_are_one_line(self, course, work, capsys):
        for words, message in (
            (["check", "ex88a"], "no exercise 'ex88a'"),
            (["check", "ex01a"], "type `nanoengine course start`"),
            (["merge", "nowhere.json"], "nowhere.json does not exist"),
        ):
            assert cli.main(["course", *words, "--work", str(work)]) == 2
            error = capsys.readouterr().err
            assert message in error and error.count("\n") == 1


def test_the_work_folder_is_found_from_below_it(course, work, monkeypatch, capsys):
    start(course, work)
    monkeypatch.chdir(work / "exercises")
    assert cli.main(["course", "status"]) == 0
    assert str(work / progress.NAME) in capsys.readouterr().out

    def test_a_file_name_in_an_advice_is_quoted(self, run, tmp_path):
        run("start")
        shown = run("export", "progress", str(tmp_path / "my $(x) progress.json"))
        assert "nanoengine course merge 'my $(x) progress.json'" in shown

    def test_a_folder_that_cannot_be_written_is_one_line_that_says_what_to_type(self, course, tmp_path, capsys):
        (tmp_path / "file").write_text("", encoding="utf-8")
        assert cli.main(["course", "start", "--work", str(tmp_path / "file" / "work")]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "cannot be written" in line and "--work FOLDER" in line

    def test_a_damaged_progress_file_is_set_aside_and_named(self, run, work):
        run("start")
        (work / progress.NAME).write_text("{", encoding="utf-8")
        assert f"{work / progress.NAME} was damaged: it is now progress.damaged-1.json" in run("status")
        assert "was damaged" not in run("status")
        assert progress.find(work) == work / progress.NAME, "the next pass is recorded"
        run("hint", "ex01a")
        assert progress.load(work / progress.NAME)["exercises"]["ex01a"]["hints"] == 1

    @pytest.mark.parametrize(("said", "lang"), [("zh", "zh"), ("de", "en"), ("", "en")])
    def test_a_variable_l_that_is_no_language_is_none(self, said, lang, monkeypatch):
        monkeypatch.setenv("L", said)
        assert make_parser().parse_args(["course", "hint", "ex01a"]).lang == lang
