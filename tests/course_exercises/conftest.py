from pathlib import Path

import pytest

from nanoengine import language

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _no_progress_and_no_language_left_behind(tmp_path, monkeypatch):
    """Nothing here may write a learner's progress, nor leave the process in Chinese."""
    monkeypatch.chdir(tmp_path)
    yield
    language.current = "en"
