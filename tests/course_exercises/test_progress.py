"""The learner's progress: one file that survives crashes, other machines and newer exercises."""

import json

import pytest

from nanoengine.course import progress
from nanoengine.course.check import CheckFailed, check, hint
from nanoengine.course.status import next_exercise, status_lines
from tests.course_exercises import answers_01


@pytest.fixture
def path(tmp_path, monkeypatch):
    """A work folder in which the learner's kernel runs."""
    made = tmp_path / "work" / progress.NAME
    progress.save(made, progress.empty())
    (made.parent / "exercises").mkdir()
    monkeypatch.chdir(made.parent / "exercises")
    return made


def _pass(exercise_id):
    check(exercise_id, {"step": answers_01.RIGHT["ex01a"]["goes on"], "kv_ledger": answers_01.RIGHT["ex01b"]["float"]})


def test_a_check_records_attempts_and_the_pass(path):
    with pytest.raises(CheckFailed):
        check("ex01a", {})
    assert progress.state(progress.load(path), "ex01a") == "tried"
    _pass("ex01a")
    entry = progress.load(path)["exercises"]["ex01a"]
    assert (entry["attempts"], entry["source"]) == (2, progress.source_hash("ex01a"))
    assert progress.state(progress.load(path), "ex01a") == "passed"


def test_without_a_file_nothing_is_written(tmp_path):
    _pass("ex01b")
    assert list(tmp_path.rglob("*")) == []


def test_a_failed_check_after_a_pass_does_not_take_it_back(path):
    _pass("ex01a")
    with pytest.raises(CheckFailed):
        check("ex01a", {})
    assert progress.state(progress.load(path), "ex01a") == "passed"


def test_an_exercise_that_changed_after_the_pass_is_seen(path, monkeypatch):
    _pass("ex01a")
    monkeypatch.setattr(progress, "source_hash", lambda exercise_id: "another form")
    data = progress.load(path)
    assert progress.state(data, "ex01a") == "changed"
    assert next_exercise(data).id == "ex01a"
    assert "changed since you passed" in "\n".join(status_lines(data))


def test_the_hash_covers_task_and_stub_but_not_the_solution(tmp_path, monkeypatch):
    src = tmp_path / "exercises" / "src"
    src.mkdir(parents=True)
    (tmp_path / "lessons" / "src").mkdir(parents=True)
    monkeypatch.setenv("NANOENGINE_COURSE", str(tmp_path))
    text = '# %% [markdown] id="ex01a"\n# Task\n\n# %% id="ex01a-answer"\n# --- stub\na\n# --- solution\nb\n'

    def hashed(changed):
        (src / "01_x.py").write_text(changed, encoding="utf-8")
        return progress.source_hash("ex01a")

    first = hashed(text)
    assert hashed(text.replace("\nb\n", "\nc\n")) == first
    assert hashed(text + '\n# %% id="ex01b-answer"\nother\n') == first
    assert hashed(text.replace("Task", "Another task")) != first
    assert hashed(text.replace("\na\n", "\nd\n")) != first
    assert progress.source_hash("ex02a") is None


def test_hints_come_one_by_one_and_are_counted(path, capsys):
    for _ in range(4):
        hint("ex01a")
    lines = capsys.readouterr().out.splitlines()
    assert [line[:13] for line in lines] == ["Hint 1 of 3: ", "Hint 2 of 3: ", "Hint 3 of 3: ", "Hint 1 of 3: "]
    assert progress.load(path)["exercises"]["ex01a"]["hints"] == 4


def test_hints_come_one_by_one_without_a_file(capsys, monkeypatch):
    monkeypatch.setattr(progress, "_hints_shown", {})
    hint("ex01b")
    hint("ex01b")
    assert [line[:6] for line in capsys.readouterr().out.splitlines()] == ["Hint 1", "Hint 2"]


def _entry(at, **more):
    return {"at": at, "passed_at": None, "source": None, "attempts": 1, "hints": 0, **more}


def test_files_of_two_machines_are_merged():
    laptop, desk = progress.empty(), progress.empty()
    laptop["exercises"] = {"ex01a": _entry("2026-01-02", passed_at="2026-01-02", source="h1", attempts=3)}
    desk["exercises"] = {"ex01a": _entry("2026-01-05", attempts=1, hints=2), "ex01b": _entry("2026-01-01")}
    laptop["cards"] = {"01/a": {"at": "2026-02-01", "due": "x"}}
    desk["cards"] = {"01/a": {"at": "2026-02-02", "due": "y"}}
    desk["recall"] = {"01": {"at": "2026-01-01", "level": "good"}}
    merged = progress.merge(laptop, desk)
    joined = merged["exercises"]["ex01a"]
    assert (joined["passed_at"], joined["source"], joined["attempts"], joined["hints"]) == ("2026-01-02", "h1", 3, 2)
    assert merged["exercises"]["ex01b"] == desk["exercises"]["ex01b"]
    assert merged["cards"]["01/a"]["due"] == "y"
    assert merged["recall"] == desk["recall"]
    assert progress.merge(desk, laptop) == merged
    assert progress.merge(merged, laptop) == progress.merge(merged, merged) == merged


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is damaged"),
        ("[]", "no progress file"),
        ('{"schema": 99}', "newer nanoengine"),
        ('{"schema": 1, "exercises": []}', "is damaged"),
        ('{"schema": 1, "cards": {"a": 1}}', "is damaged"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_and_left_alone(path, text, message):
    path.write_text(text, encoding="utf-8")
    with pytest.raises(progress.ProgressError, match=message) as caught:
        progress.load(path)
    assert str(path) in str(caught.value)
    assert path.read_text(encoding="utf-8") == text


def test_a_write_that_fails_half_way_leaves_the_old_file(path, monkeypatch):
    before = path.read_text(encoding="utf-8")
    monkeypatch.setattr(progress.os, "replace", lambda *a: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        progress.save(path, {**progress.empty(), "quiz": {"01": {"at": "x"}}})
    assert path.read_text(encoding="utf-8") == before
    assert [p.name for p in path.parent.iterdir() if p.is_file()] == [progress.NAME]


def test_another_programs_progress_file_is_not_ours(tmp_path, monkeypatch):
    (tmp_path / "progress.json").write_text(json.dumps({"percent": 3}))
    assert progress.find(tmp_path) is None
    monkeypatch.setenv("NANOENGINE_PROGRESS", str(tmp_path / "mine.json"))
    assert progress.find(tmp_path) == tmp_path / "mine.json"
    assert progress.note("quiz", "01", {"right": 4})
    assert progress.load(tmp_path / "mine.json")["quiz"]["01"]["right"] == 4


def test_the_status_names_every_exercise_with_its_state(path):
    _pass("ex01a")
    progress.note("quiz", "01", {"right": 4, "of": 5, "passed": True})
    progress.note("cards", "01/step", {"due": "2000-01-01T00:00:00+00:00"})
    lines = "\n".join(status_lines(progress.load(path)))
    assert "Lesson 01 · quiz 4 of 5" in lines
    assert "✓ ex01a" in lines and "1 attempt" in lines
    assert "○ ex01b" in lines
    assert "1 seen, 1 due" in lines
    assert next_exercise(progress.load(path)).id == "ex01b"
