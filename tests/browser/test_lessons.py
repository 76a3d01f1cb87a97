"""Lesson 01 as a reader meets it: opened in JupyterLab, run from top to bottom, in both languages."""

from pathlib import Path

import pytest

from nanoengine.course.build import notebook_path
from nanoengine.course.source import LANGS, find_sources, read_source
from tests.browser.lab import lab_session

LESSONS = Path(__file__).parents[2] / "lessons"


@pytest.mark.parametrize("lang", LANGS)
def test_lesson_01_runs_from_top_to_bottom(lang, tmp_path):
    (path,) = find_sources(LESSONS / "src", ["01"])
    with lab_session(notebook_path(LESSONS, read_source(path), lang)) as lab:
        lab.run_all()
        lab.screenshot(tmp_path / f"lesson01_{lang}.png")
        assert lab.errors() == []
        assert lab.not_run() == 0
        assert lab.console_errors == []
