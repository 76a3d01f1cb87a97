import pytest

from tests.browser.lab import find_browser


@pytest.fixture(scope="session", autouse=True)
def _browser():
    if find_browser() is None:
        pytest.skip("no Chromium on this machine")
