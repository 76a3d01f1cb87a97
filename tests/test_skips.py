"""The rule of conftest.py, tried on small test files in a pytest of their own."""

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

CONFTEST = Path(__file__).with_name("conftest.py").read_text(encoding="utf-8")


@pytest.fixture
def outcome_of(pytester):
    def run(body: str) -> dict[str, int]:
        pytester.makeconftest(CONFTEST)
        pytester.makepyfile(body)
        return pytester.runpytest_inprocess("-p", "no:cacheprovider").parseoutcomes()

    return run


def test_an_unlisted_skip_fails(outcome_of):
    assert outcome_of("import pytest\ndef test_a(): pytest.skip('no time')\ndef test_b(): pass") == {
        "failed": 1,
        "passed": 1,
    }


def test_an_unlisted_skip_of_a_whole_module_fails(outcome_of):
    assert outcome_of("import pytest\npytest.importorskip('no_such_module')\ndef test_a(): pass") == {"errors": 1}


def test_a_listed_skip_stays_a_skip(outcome_of):
    assert outcome_of("import pytest\ndef test_a(): pytest.skip('triton is not installed')") == {"skipped": 1}
