"""File names, messages and reports that would lose a class: each submission keeps its row, old reports stay."""

import csv
import importlib
import io
import json
import os
import re
import subprocess
import sys
from xml.etree import ElementTree

import nbformat
import pytest

from nanoengine.course import grade_child, sandbox
from nanoengine.course.exercises import make_exercise
from nanoengine.course.grade import Mark, Row, grade
from nanoengine.course.grade_report import to_csv, to_html, write_reports
from nanoengine.course.handed_in import read_notebook
from nanoengine.course.sandbox import Limits
from nanoengine.course.source import find_sources, read_source
from tests.course_exercises.conftest import ROOT

grade_module = importlib.import_module("nanoengine.course.grade")
SOURCE = read_source(find_sources(ROOT / "exercises" / "src", ["01"])[0])
LIMITS = Limits(seconds=25, cell_seconds=3, memory_gib=1.0)
NAMES = [
    b"\xc0\xee.ipynb",
    "王小明.ipynb".encode(),
    b"a\nb.ipynb",
    b"tab\t.ipynb",
    b"=1+1.ipynb",
    b"bell\x07\x1b[31m.ipynb",
    b"<img src=x onerror=alert(1)>.ipynb",
    "\u202egnp.ipynb".encode(),
    b"\xff\xfe=2.ipynb",
]
C_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.mark.skipif(sys.platform != "linux", reason="file names are bytes on Linux only")
@pytest.mark.parametrize("locale", [{}, C_LOCALE], ids=["utf-8", "C"])
def test_a_class_with_any_file_names_has_all_its_rows(tmp_path, locale):
    folder = os.fsencode(tmp_path / "class")
    os.mkdir(folder)
    text = nbformat.writes(make_exercise(SOURCE, "exercise", "en")).encode()
    for name in NAMES:
        with open(os.path.join(folder, name), "wb") as file:
            file.write(text)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("LC_", "LANG", "PYTHONUTF8"))}
    environment = {**kept, "PYTHONPATH": str(ROOT), **locale}
    command = [sys.executable, "-m", "nanoengine", "course", "grade", "class", "--jobs", "2"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(b": 0/2 (ex01a stub, ex01b stub)") == len(NAMES) and b"\x1b" not in done.stdout
    rows = list(csv.reader(io.StringIO((tmp_path / "grades.csv").read_bytes().decode("utf-8-sig"), newline="")))
    assert [len(row) for row in rows] == [7] * (len(NAMES) + 1)
    shown = {row[0] for row in rows[1:]}
    assert {"\\xc0\\xee.ipynb", "王小明.ipynb", "a\\nb.ipynb", "'=1+1.ipynb", "\\u202egnp.ipynb"} <= shown
    assert len(shown) == len(NAMES)
    page = (tmp_path / "grades.html").read_bytes().decode()
    assert "王小明.ipynb" in page and "<img" not in page and "&lt;img" in page


def test_reports_that_cannot_be_written_are_said_before_the_class_is_graded(tmp_path):
    (tmp_path / "one.ipynb").write_text("{}", encoding="utf-8")
    (tmp_path / "file").write_text("", encoding="utf-8")
    command = [sys.executable, "-m", "nanoengine", "course", "grade", "one.ipynb", "--csv", "file/grades.csv"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, encoding="utf-8")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and "file/grades.csv cannot be written" in done.stderr


def test_old_reports_are_there_until_new_ones_are_made(tmp_path, monkeypatch):
    table, page = tmp_path / "grades.csv", tmp_path / "grades.html"
    for path in (table, page):
        path.write_text("old", encoding="utf-8")
    rows = [Row(tmp_path / "a.ipynb", {"ex01a": Mark("passed", "ok")})]
    monkeypatch.setattr("nanoengine.course.grade_report.to_html", lambda *a, **k: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_reports(rows, table, page)
    assert (table.read_text(encoding="utf-8"), page.read_text(encoding="utf-8")) == ("old", "old")


def test_one_submission_that_trips_the_grader_does_not_take_the_class_with_it(tmp_path, monkeypatch):
    for name in "ab":
        nbformat.write(make_exercise(SOURCE, "exercise", "en"), tmp_path / f"{name}.ipynb")
    real = grade_module.run_child

    def run_child(module, job, limits):
        if bytes.fromhex(json.loads(job)["path"]).endswith(b"b.ipynb"):
            raise RuntimeError("tripped\r=1+1")
        return real(module, job, limits)

    monkeypatch.setattr(grade_module, "run_child", run_child)
    good, bad = grade([tmp_path], limits=LIMITS)
    assert good.marks["ex01a"].verdict == "stub" and bad.marks["ex01a"].verdict == "no result"
    assert bad.notes == ["could not be graded: RuntimeError: tripped\r=1+1"]


def test_results_of_an_unknown_form_are_no_results(tmp_path):
    lines = [{"exercises": ["ex01a", "=x", 3]}, {"exercise": "ex01a", "verdict": "=cmd", "message": "m"},
             {"exercise": ["ex01b"], "verdict": "passed", "message": "m"}, {"note": 5}, {"done": True}]  # fmt: skip
    results = "".join(json.dumps({"nonce": "n", **line}) + "\n" for line in lines).encode()
    row = Row(tmp_path / "a.ipynb")
    grade_module._read_results(row, sandbox.Ended("done", 0, 1.0, results), "n", LIMITS)
    assert row.marks == {"ex01a": Mark("no result", "m")}
    assert "no result" in to_csv([row]) and to_html([row])


class Rude(Exception):
    def __str__(self):
        raise RuntimeError("no text for you")


def test_an_error_is_named_by_its_public_kind_and_need_not_have_a_text():
    unfinished = type("_IncompleteInputError", (SyntaxError,), {})("incomplete input")
    assert grade_child._describe(unfinished, LIMITS) == "SyntaxError: incomplete input"
    assert grade_child._describe(Rude(), LIMITS) == "Rude: (its text raises RuntimeError)"


ODD = ["bad\r=1+1", "a\n=1+1", "nul\0=1", "\u2028=1", "\u0085=1", "\ud800=1", "\r\n@SUM(1)", "  =1+1", "＝1+1",
       "\x1b]0;x\x07"]  # fmt: skip


@pytest.mark.parametrize("odd", ODD)
def test_no_message_makes_a_row_or_a_formula(tmp_path, odd):
    row = Row(tmp_path / f"{odd}.ipynb", {"ex01a": Mark("wrong", odd)}, [odd, f"cell 1: {odd}"])
    text = to_csv([row]).encode("utf-8-sig").decode("utf-8-sig")
    assert len(text.splitlines()) == 2 and text.count("\n") == 2 and "\r" not in text
    for read in (csv.reader(io.StringIO(text, newline="")), csv.reader(text.splitlines())):
        cells = list(read)[1]
        assert len(cells) == 6 and not any(cell.strip().startswith(tuple("=+-@＝")) for cell in cells)
    page = to_html([row]).encode()
    ElementTree.fromstring(re.search(rb"<body>.*</body>", page, re.DOTALL)[0].replace(b"<br>", b"<br/>"))


def test_a_folder_that_cannot_be_read_has_its_row(tmp_path, monkeypatch):
    for name in ("a", "locked"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.ipynb").write_text("{}", encoding="utf-8")
    scandir = os.scandir

    def refuse(path):
        if str(path).endswith("locked"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    assert grade_module.find_submissions([tmp_path]) == [tmp_path / "a" / "x.ipynb", tmp_path / "locked"]
    assert grade_module.find_submissions([tmp_path / "locked"]) == [tmp_path / "locked"]


def test_what_is_no_file_is_said_at_once(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(ValueError, match="a folder, no notebook"):
        read_notebook(str(tmp_path / "folder"))
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe.ipynb")
        with pytest.raises(ValueError, match="no regular file"):
            read_notebook(str(tmp_path / "pipe.ipynb"))
