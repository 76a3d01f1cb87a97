"""The learner's progress: one file that survives crashes, other machines and newer exercises."""

import json
import os
import subprocess
import sys

import pytest

from nanoengine.course import progress
from nanoengine.course.check import CheckFailed, check, hint
from nanoengine.course.status import next_exercise, status_lines
from tests.course_exercises import answers_01
from tests.course_exercises.conftest import ROOT


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


# a file that cannot be written or read


@pytest.fixture
def blocked(tmp_path, monkeypatch):
    """A progress file that nobody can write, root included: its folder is a file."""
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv("NANOENGINE_PROGRESS", str(tmp_path / "file" / "progress.json"))
    return tmp_path / "file" / "progress.json"


@pytest.mark.parametrize(("lang", "words"), [("en", "Progress is not kept."), ("zh", "进度没有保存")])
def test_the_verdict_comes_where_progress_cannot_be_kept(blocked, lang, words, capsys, monkeypatch):
    monkeypatch.setattr("nanoengine.language.current", lang)
    _pass("ex01b")
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("✓ ex01b") and second.startswith(words)
    assert str(blocked) in second and "NANOENGINE_PROGRESS" in second
    with pytest.raises(CheckFailed) as failed:
        check("ex01a", {})
    assert str(failed.value).splitlines()[1].startswith(words)


def test_hints_go_on_where_they_cannot_be_counted(blocked, capsys, monkeypatch):
    monkeypatch.setattr(progress, "_hints_shown", {})
    hint("ex01a")
    hint("ex01a")
    lines = capsys.readouterr().out.splitlines()
    assert [line[:6] for line in lines] == ["Hint 1", "Progre", "Hint 2", "Progre"]


@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied"), OSError(30, "Read-only file system")])
@pytest.mark.parametrize("place", ["locked", "write_whole"])
def test_any_refusal_of_the_system_is_a_line_and_no_exception(path, error, place, monkeypatch, capsys):
    def refuse(*_args, **_kwargs):
        raise error

    monkeypatch.setattr(progress, place, refuse)
    _pass("ex01b")
    assert f"{path} ({error.strerror})" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["", "{", "[]", "\0\0\0", '{"schema": 1, "cards": {"a": 1}}', "[" * 100_000])
def test_a_damaged_file_is_set_aside_and_named(path, text, capsys):
    path.write_text(text, encoding="utf-8")
    path.with_name(".course.json").write_text("{}", encoding="utf-8")
    for number in (1, 2):
        _pass("ex01b")
        shown = capsys.readouterr().out
        aside = path.with_name(f"progress.damaged-{number}.json")
        assert f"{path} was damaged: it is now {aside.name}" in shown
        assert aside.read_text(encoding="utf-8") == text
        assert progress.state(progress.load(path), "ex01b") == "passed"
        path.write_text(text, encoding="utf-8")


def test_a_file_of_a_newer_version_and_one_named_by_mistake_stay_where_they_are(path, tmp_path, capsys, monkeypatch):
    path.write_text('{"schema": 99, "exercises": {}}', encoding="utf-8")
    _pass("ex01b")
    assert "newer nanoengine" in capsys.readouterr().out
    notes = tmp_path / "notes.txt"
    notes.write_text("mine", encoding="utf-8")
    monkeypatch.setenv("NANOENGINE_PROGRESS", str(notes))
    _pass("ex01b")
    assert "Progress is not kept." in capsys.readouterr().out
    assert notes.read_text(encoding="utf-8") == "mine" and "99" in path.read_text(encoding="utf-8")


def test_a_file_with_a_byte_order_mark_is_read(path):
    _pass("ex01b")
    path.write_text(path.read_text(encoding="utf-8"), encoding="utf-8-sig")
    assert progress.state(progress.load(path), "ex01b") == "passed"


_NOTES = """
import sys
from pathlib import Path
from nanoengine.course import progress
for n in range(int(sys.argv[3])):
    assert progress.note("cards", f"{sys.argv[1]}-{n}", {"n": n}, path=Path(sys.argv[2]))
"""


def _kernel(name, path, notes):
    command = [sys.executable, "-c", _NOTES, name, str(path), str(notes)]
    return subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)})


def test_two_kernels_lose_none_of_each_others_notes(path):
    kernels = [_kernel(name, path, 200) for name in "ab"]
    assert [kernel.wait(120) for kernel in kernels] == [0, 0]
    assert len(progress.load(path)["cards"]) == 400


def test_a_kernel_that_is_killed_leaves_a_whole_file_and_no_lock(path):
    kernel = _kernel("a", path, 10_000)
    while not progress.load(path)["cards"]:
        assert kernel.poll() is None
    kernel.kill()
    kernel.wait(30)
    before = len(progress.load(path)["cards"])
    (path.parent / f".{path.name}.tmp-left").write_text("half", encoding="utf-8")
    assert progress.note("cards", "after", {})
    assert len(progress.load(path)["cards"]) == before + 1
    assert {p.name for p in path.parent.iterdir() if p.is_file()} <= {progress.NAME, f".{progress.NAME}.lock"}


def test_a_link_to_the_progress_file_stays_a_link(path, tmp_path):
    real = tmp_path / "real.json"
    path.rename(real)
    path.symlink_to(real)
    assert progress.note("quiz", "01", {"right": 4})
    assert path.is_symlink() and progress.load(real)["quiz"]["01"]["right"] == 4


def test_entries_of_older_versions_are_read(path):
    old = {"ex01a": {"passed_at": "2025-01-01T10:00:00"}, "ex01b": {"attempts": None, "hints": "x"}}
    progress.save(path, {**progress.empty(), "exercises": old, "cards": {"01/step": {"due": "2025-01-01T10:00:00"}}})
    _pass("ex01b")
    assert "1 seen, 1 due" in "\n".join(status_lines(progress.load(path)))
    assert progress.load(path)["exercises"]["ex01b"]["attempts"] == 1
    merged = progress.merge(progress.load(path), {**progress.empty(), "exercises": old, "recall": 3, "quiz": {"01": 1}})
    assert merged["exercises"]["ex01a"]["passed_at"] == "2025-01-01T10:00:00" and merged["quiz"] == {}


def test_the_later_of_two_entries_is_told_by_the_instant_not_by_the_text():
    early, late = {"at": "2026-01-01T09:00:00+08:00"}, {"at": "2026-01-01T02:00:00+00:00"}
    a, b = ({**progress.empty(), "quiz": {"01": entry}} for entry in (early, late))
    assert progress.merge(a, b)["quiz"]["01"] == progress.merge(b, a)["quiz"]["01"] == late
