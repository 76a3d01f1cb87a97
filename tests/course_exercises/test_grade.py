"""A class of 39 submissions is graded: each gets its right row, and nothing outlives the grader."""

import csv
import io
import os
import re
import subprocess
import sys
import time
from xml.etree import ElementTree

import nbformat
import psutil
import pytest

from nanoengine.course import sandbox
from nanoengine.course.exercises import make_exercise
from nanoengine.course.grade import Mark, Row, find_submissions, grade, grade_one
from nanoengine.course.grade_report import to_csv, to_html
from nanoengine.course.sandbox import Limits
from nanoengine.course.source import find_sources, read_source
from tests.course_exercises.classroom import submissions, write_class
from tests.course_exercises.conftest import ROOT

(PATH,) = find_sources(ROOT / "exercises" / "src", ["01"])
SOURCE = read_source(PATH)
LIVES_ON = 86_000 + os.getpid() % 1000  # seconds that the processes left behind want to sleep: their mark
CLASS = submissions(SOURCE, LIVES_ON)
LIMITS = Limits(seconds=25, cell_seconds=3, memory_gib=1.0)


def _left_behind():
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and f"time.sleep({LIVES_ON})" in " ".join(process.cmdline()):
                found.append(process)
        except psutil.Error:
            pass
    return found


@pytest.fixture(scope="module")
def graded(tmp_path_factory):
    """(rows by name, seconds, how many processes were left when the grader came back)"""
    folder = tmp_path_factory.mktemp("class")
    write_class(folder, CLASS)
    start, before = time.perf_counter(), {p.pid for p in psutil.Process().children(recursive=True)}
    rows = grade([folder], seed=1234, limits=LIMITS, jobs=2)
    seconds = time.perf_counter() - start
    left = [p for p in psutil.Process().children(recursive=True) if p.pid not in before]
    print(f"{len(rows)} submissions graded in {seconds:.1f} s")
    return {row.path.stem: row for row in rows}, seconds, left + _left_behind()


@pytest.mark.parametrize("name", CLASS)
def test_each_submission_gets_its_row(graded, name):
    _, verdicts, words = CLASS[name]
    row = graded[0][name]
    assert {key: mark.verdict for key, mark in row.marks.items()} == verdicts, row
    assert words in "; ".join(row.notes)
    assert row.num_passed == list(verdicts.values()).count("passed")
    if not words:
        assert row.notes == []


def test_no_submission_is_without_a_row(graded):
    assert graded[0].keys() == CLASS.keys()


def test_nothing_outlives_the_grader(graded):
    assert graded[2] == []


def test_what_took_too_long_or_too_much_says_so(graded):
    rows = graded[0]
    # On a machine that is busy with others the wall clock may ring first.
    said = rows["infinite_loop"].marks["ex01a"].message
    assert said.removeprefix("ex01a: ") in ("still running after 3 s of processor time", "still running after 9 s")
    assert "still running after 9 s" in "; ".join(rows["sleeps"].notes)
    assert "MemoryError" in rows["memory_bomb"].marks["ex01a"].message


def test_a_process_that_leaves_its_session_and_wipes_its_environment_dies_without_namespaces_too(
    tmp_path, monkeypatch
):
    """Where the kernel gives no PID namespace, orphans come back to the grader, which ends them."""
    blocked = tmp_path / "sitecustomize.py"
    blocked.write_text("import nanoengine.course.sandbox as s\ns._own_namespaces = lambda: None\n", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    for name in ("daemon", "forks"):
        nbformat.write(CLASS[name][0], tmp_path / f"{name}.ipynb")
    rows = grade([tmp_path], limits=LIMITS)
    assert [row.num_passed for row in rows] == [2, 2]
    assert _left_behind() == []


def test_the_seed_decides_the_random_cases(tmp_path):
    """An answer that knows the learners' cases by heart fails on a class's own seed."""
    notebook = nbformat.v4.new_notebook()
    notebook.metadata["nanoengine"] = {"lesson": "01"}
    code = (
        "import pathlib, random\n"
        "from nanoengine.course.checks.lesson_01_ledger import BOUNDARIES, fill_the_card, random_case, NAMED_CONFIGS\n"
        "rng = random.Random('ex01b/0')\n"
        "known = {}\n"
        "for case in [*BOUNDARIES, *(random_case(rng) for _ in range(40))]:\n"
        "    key = (case.model, case.gpu, case.utilization, case.block_size, case.max_model_len)\n"
        "    known[key] = fill_the_card(NAMED_CONFIGS[case.model], case)\n"
        "def kv_ledger(model, *rest):\n"
        "    if known[(model.name, *rest)] is None:\n        raise ValueError('no room')\n"
        "    return known[(model.name, *rest)]\n"
    )
    notebook.cells = [nbformat.v4.new_code_cell(code)]
    path = tmp_path / "by_heart.ipynb"
    nbformat.write(notebook, path)
    assert grade_one(path, seed=0, limits=LIMITS).marks["ex01b"].verdict == "passed"
    assert grade_one(path, seed=1, limits=LIMITS).marks["ex01b"].verdict == "wrong"


def test_the_messages_come_in_the_teachers_language(tmp_path):
    nbformat.write(make_exercise(SOURCE, "exercise", "en"), tmp_path / "a.ipynb")
    assert "还没写" in grade_one(tmp_path / "a.ipynb", lang="zh", limits=LIMITS).marks["ex01a"].message


def test_what_the_notebook_writes_to_the_results_is_not_believed(tmp_path):
    forged = (
        "import json, os\n"
        "for fd in range(3, 64):\n"
        "    for nonce in ('', None, 'x'):\n"
        "        line = json.dumps(dict(nonce=nonce, exercise='ex01a', verdict='passed', message='m'))\n"
        "        try:\n            os.write(fd, (line + chr(10)).encode())\n        except OSError: pass\n"
    )
    notebook = make_exercise(SOURCE, "exercise", "en")
    next(cell for cell in notebook.cells if cell.id == "env").source = forged
    nbformat.write(notebook, tmp_path / "forged.ipynb")
    assert grade_one(tmp_path / "forged.ipynb", limits=LIMITS).marks["ex01a"].verdict == "stub"


def test_the_teachers_secrets_are_not_in_the_notebooks_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    notebook = make_exercise(SOURCE, "exercise", "en")
    source = "import os\nraise RuntimeError(os.environ.get('HF_TOKEN', 'nothing there'))"
    next(cell for cell in notebook.cells if cell.id == "env").source = source
    nbformat.write(notebook, tmp_path / "nosy.ipynb")
    assert "nothing there" in "; ".join(grade_one(tmp_path / "nosy.ipynb", limits=LIMITS).notes)


def test_folders_are_searched_and_checkpoints_left_out(tmp_path):
    for name in ("b.ipynb", "a/c.ipynb", "a/.ipynb_checkpoints/c-checkpoint.ipynb", "a/readme.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    found = [path.relative_to(tmp_path).as_posix() for path in find_submissions([tmp_path, tmp_path / "b.ipynb"])]
    assert found == ["a/c.ipynb", "b.ipynb"]
    with pytest.raises(FileNotFoundError, match="no notebook"):
        find_submissions([tmp_path / "a" / ".ipynb_checkpoints"])


def test_what_an_archive_leaves_beside_the_notebooks_is_no_student(tmp_path):
    for name in ("a.ipynb", "._b.ipynb", "__MACOSX/._a.ipynb", "__MACOSX/c.ipynb", "C.IPYNB"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}", encoding="utf-8")
    assert [path.name for path in find_submissions([tmp_path])] == ["C.IPYNB", "a.ipynb"]


class TestReports:
    @pytest.fixture
    def rows(self, tmp_path):
        why = "ex01a: not yet.\n  why       A <b>tag</b> & more\n"
        return [
            Row(tmp_path / "=cmd.ipynb", {"ex01a": Mark("wrong", why), "ex01b": Mark("passed", "ok")}, ["+note"], 1.25),
            Row(tmp_path / "g" / "王.ipynb", {"ex01a": Mark("imported", "x")}, [], 2.0),
        ]

    def test_the_table_for_a_spreadsheet(self, rows):
        read = list(csv.reader(io.StringIO(to_csv(rows))))
        assert read[0] == ["file", "ex01a", "ex01b", "passed", "of", "seconds", "notes"]
        assert read[1] == ["'=cmd.ipynb", "wrong", "passed", "1", "2", "1.2", "'+note"]
        assert read[2] == ["g/王.ipynb", "imported", "", "0", "1", "2.0", ""]

    @pytest.mark.parametrize("lang", ["en", "zh"])
    def test_the_page_is_well_formed_and_quotes_what_learners_wrote(self, rows, lang):
        page = to_html(rows, lang=lang, seed=5, seconds=3.2)
        body = page[page.index("<body>") : page.index("</html>")]
        ElementTree.fromstring(body.replace("<br>", "<br/>"))
        assert "A &lt;b&gt;tag&lt;/b&gt; &amp; more" in page
        assert not re.search(r"<script|https?://", page)
        assert "1×" in page


def test_the_command_writes_both_reports_and_a_line_each(tmp_path):
    nbformat.write(make_exercise(SOURCE, "exercise", "en"), tmp_path / "one.ipynb")
    command = [sys.executable, "-m", "nanoengine", "course", "grade", "one.ipynb", "--seed", "3"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    assert "one.ipynb: 0/2 (ex01a stub, ex01b stub)" in done.stdout
    assert (tmp_path / "grades.csv").read_text(encoding="utf-8-sig").startswith("file,ex01a,ex01b")
    assert "one.ipynb" in (tmp_path / "grades.html").read_text(encoding="utf-8")


def test_a_child_that_dies_at_once_still_gives_a_result():
    ended = sandbox.run_child("this.module.does.not.exist", b"{}", LIMITS)
    assert ended.reason == "died"
    assert ended.results == b""
