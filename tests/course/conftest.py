"""Results of a test go into its own folder, never into a reader's progress file."""

import pytest

from nanoengine import language


@pytest.fixture(autouse=True)
def progress_file(tmp_path, monkeypatch):
    path = tmp_path / "progress.json"
    monkeypatch.setenv("NANOENGINE_PROGRESS", str(path))
    yield path
    language.current = "en"
