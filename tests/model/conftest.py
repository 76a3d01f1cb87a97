from pathlib import Path

import pytest
from hypothesis import settings

from nanoengine.loader.embedded import embedded_model_folder
from nanoengine.tokenizer.tokenizer import Tokenizer, load_tokenizer

# A shared machine may stop for longer than hypothesis' 200 ms an example.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")


@pytest.fixture(scope="session")
def embedded_folder() -> Path:
    """From the user's own cache: converted once for all test runs, not once a run."""
    return embedded_model_folder(progress=False)


@pytest.fixture(scope="session")
def smollm(embedded_folder) -> Tokenizer:
    return load_tokenizer(embedded_folder)


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache of this test's own."""
    monkeypatch.setenv("NANOENGINE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"
