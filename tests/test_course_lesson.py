"""The environment check that opens each lesson."""

import importlib.util
import subprocess
import sys

import pytest

from nanoengine import language
from nanoengine.course import lesson as module
from nanoengine.course.lesson import LessonNotReady, current_lang, lesson


@pytest.fixture(autouse=True)
def _language_back():
    yield
    language.current = "en"


def test_it_prints_one_line_in_the_language_asked_for(capsys):
    assert lesson("04", lang="zh").device is None
    line = capsys.readouterr().out
    assert line.startswith("第 04 课 · nanoengine ")
    assert line.endswith("就绪\n")
    assert line.count("\n") == 1
    assert current_lang() == "zh"


@pytest.mark.parametrize(("no", "lang", "named"), [("00", "en", "'00'"), ("1", "en", "'1'"), ("01", "fr", "'fr'")])
def test_an_unknown_lesson_or_language_is_named(no, lang, named):
    with pytest.raises(ValueError, match=named):
        lesson(no, lang=lang)


def test_a_missing_package_comes_with_the_command(monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "xxhash" else real(name))
    with pytest.raises(LessonNotReady, match=r"-m pip install xxhash\n") as caught:
        lesson("04")
    assert caught.value._render_traceback_() == str(caught.value).splitlines()
    assert current_lang() == "en"


def test_an_old_python_comes_with_the_command(monkeypatch):
    monkeypatch.setattr(module, "MIN_PYTHON", (9, 9))
    with pytest.raises(LessonNotReady, match=r"9\.9[\s\S]*make setup"):
        lesson("04")


def test_a_lesson_without_torch_does_not_import_it():
    code = "import sys; from nanoengine.course.lesson import lesson; lesson('04'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_a_lesson_with_torch_names_the_device(capsys):
    device = lesson("01").device
    assert device is not None
    assert "torch " in capsys.readouterr().out
