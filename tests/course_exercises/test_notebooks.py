"""Every committed exercise and solution is what its source builds, keeps the rules, and runs offline as it must."""

import re
import subprocess
import sys

import nbformat
import pytest

from nanoengine.course.build import SYNC_FILE
from nanoengine.course.exercises import (
    KINDS,
    build_exercise,
    exercise_path,
    exercise_problems,
    main,
    make_exercise,
    variant,
)
from nanoengine.course.grade import grade_one
from nanoengine.course.notebook import differences, read_notebook
from nanoengine.course.rules import read_sync, stale_cells, unrecorded_cells
from nanoengine.course.sandbox import Limits
from nanoengine.course.source import LANGS, SourceError, find_sources, read_source
from tests.course_exercises.conftest import ROOT

SOURCES = [read_source(path) for path in find_sources(ROOT / "exercises" / "src")]
BUILT = [(source, kind, lang) for source in SOURCES for kind in KINDS for lang in LANGS]
OFFLINE = {"PYTHONPATH": str(ROOT / "tests" / "offline"), "HF_HUB_OFFLINE": "1", "PIP_NO_INDEX": "1"}


def _names(parameter):
    return getattr(parameter, "name", parameter)


@pytest.fixture(params=SOURCES, ids=_names)
def source(request):
    return request.param


def test_no_notebook_is_without_a_source():
    built = {exercise_path(ROOT, *which) for which in BUILT}
    found = {path for kind in ("exercises", "solutions") for path in (ROOT / kind).rglob("*.ipynb")}
    assert {path for path in found if ".ipynb_checkpoints" not in path.parts} == built


def test_the_source_keeps_the_rules(source):
    assert exercise_problems(source) == []
    record = read_sync(ROOT / "exercises" / "src" / SYNC_FILE)[source.name]
    assert stale_cells(source, record) == []
    assert unrecorded_cells(source, record) == [], "run make exercises"


@pytest.mark.parametrize(("source", "kind", "lang"), BUILT, ids=_names)
def test_the_committed_notebook_has_the_cells_of_its_source(source, kind, lang):
    recorded = read_notebook(exercise_path(ROOT, source, kind, lang))
    assert recorded is not None, "run make exercises"
    assert differences(make_exercise(source, kind, lang), recorded, outputs=False) == []


@pytest.mark.parametrize(("source", "kind", "lang"), BUILT, ids=_names)
def test_learners_start_with_clean_checks_and_solutions_show_green_ones(source, kind, lang):
    for cell in read_notebook(exercise_path(ROOT, source, kind, lang)).cells:
        if cell.cell_type == "code" and "check" in cell.metadata.get("tags", ()):
            texts = [output.get("text", "?") for output in cell.outputs]
            word = {"en": "passed", "zh": "通过"}[lang]
            pattern = rf"✓ {cell.id[:5]} {word}.*\n"
            assert texts == [] if kind == "exercise" else re.fullmatch(pattern, "".join(texts))


def test_the_stub_and_the_solution_differ_in_answer_cells_alone(source):
    stub, solved = variant(source, "exercise"), variant(source, "solution")
    differing = {a.id for a, b in zip(stub.cells, solved.cells, strict=True) if a != b}
    assert differing == {cell.id for cell in source.cells if "answer" in cell.tags}
    assert not any("NotImplementedError" in cell.en for cell in solved.cells)
    assert not any("# ---" in cell.en for cell in (*stub.cells, *solved.cells))


def test_hints_are_folded_in_the_notebook(source):
    for lang, word in (("en", "Hint"), ("zh", "提示")):
        text = "\n".join(cell.source for cell in make_exercise(source, "exercise", lang).cells)
        assert "<!-- hints" not in text
        assert len(re.findall(rf"<details><summary>{word} [123]</summary>\n\n", text)) == text.count("</details>") == 6


# The Chinese solution differs in one argument; the stub is executed in English only.
EXECUTED = [(s, kind, lang) for s, kind, lang in BUILT if lang == "en" or (kind == "solution" and s.number == "01")]


@pytest.mark.parametrize(("source", "kind", "lang"), EXECUTED, ids=_names)
def test_it_runs_offline_and_gives_what_is_committed(source, kind, lang, tmp_path):
    """A stub's checks fail as not written, and no other cell does: build_exercise raises otherwise."""
    recorded = read_notebook(exercise_path(ROOT, source, kind, lang))
    executed = build_exercise(source, kind, lang, recorded, cwd=tmp_path, env=OFFLINE)
    assert differences(recorded, executed) == []


def test_nbval_gives_the_verdicts_of_the_grader(source, tmp_path):
    """`pytest --nbval-lax` on an exercise notebook, half of it solved: its failing cells are the failing checks."""
    stub, solved = (make_exercise(source, kind, "en") for kind in KINDS)
    right = {cell.id: cell.source for cell in solved.cells}
    done = next(cell for cell in reversed(stub.cells) if "answer" in cell.metadata.get("tags", ()))
    done.source = right[done.id]
    path = tmp_path / "half.ipynb"
    nbformat.write(stub, path)
    marks = grade_one(path, limits=Limits(seconds=60)).marks
    command = [sys.executable, "-m", "pytest", "--nbval-lax", "--nbval-cell-timeout=60", "-p", "no:cacheprovider", "-q"]
    run = subprocess.run([*command, str(path)], cwd=tmp_path, capture_output=True, text=True, encoding="utf-8")
    failed = {name for name in marks if re.search(rf"\b{name}: not written yet", run.stdout)}
    assert failed == {name for name, mark in marks.items() if mark.verdict != "passed"}
    assert len(failed) == len(marks) - 1
    code_cells = sum(cell.cell_type == "code" for cell in stub.cells)
    assert f"{len(failed)} failed, {code_cells - len(failed)} passed" in run.stdout


SMALL = """\
# %% [markdown] id="title"
# # Small
# <!-- hints ex01a -->
#
# <!-- zh -->
# # 小
# <!-- hints ex01a -->

# %% id="env"
lesson = lambda *a, **k: None
lesson("01", lang="en")

# %% id="ex01a-answer" tags=["answer"]
# --- stub
def step(engine):
    raise NotImplementedError("ex01a")
# --- solution
def step(engine):
    return 1

# %% id="ex01a-check" tags=["check"]
check("ex01a", globals())
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('raise NotImplementedError("ex01a")', "pass", "the stub of cell ex01a-answer must raise"),
        ('check("ex01a", globals())', 'check("ex01b", globals())', 'is: check("ex01a", globals())'),
        ("# <!-- hints ex01a -->\n#\n", "#\n", "into the English and the Chinese"),
        (' tags=["check"]', "", "tagged check"),
    ],
)
def test_a_breach_of_the_rules_is_reported(tmp_path, old, new, message):
    assert old in SMALL
    path = tmp_path / "01_small.py"
    path.write_text(SMALL.replace(old, new), encoding="utf-8")
    assert any(message in problem for problem in exercise_problems(read_source(path)))


def test_an_answer_cell_needs_both_forms(tmp_path):
    path = tmp_path / "01_small.py"
    path.write_text(SMALL.replace("# --- solution\n", ""), encoding="utf-8")
    with pytest.raises(SourceError, match="# --- solution"):
        variant(read_source(path), "exercise")


def test_a_build_refuses_a_stub_that_fails_in_another_way(tmp_path, capsys):
    src = tmp_path / "exercises" / "src"
    src.mkdir(parents=True)
    (src / "01_small.py").write_text(SMALL.replace('lesson("01", lang="en")\n', 'lesson("01", lang="en")\n1 / 0\n'))
    assert main(["--execute", "--root", str(tmp_path)]) == 1
    assert "cell env" in capsys.readouterr().err
    (src / "01_small.py").write_text(SMALL.replace("lesson = ", "check = lambda *a: 1 / 0\nlesson = "))
    assert main(["--execute", "--root", str(tmp_path)]) == 1
    assert "must fail as not written" in capsys.readouterr().err
    assert not (tmp_path / "exercises" / "01_small.ipynb").exists()
