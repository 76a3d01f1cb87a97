"""Skips are claims about the machine, so each must be on the list below; any other skip is a failure."""

import os
import re
from fnmatch import fnmatch

import pytest

# (test id pattern, pattern of the reason, why this skip is right)
ALLOWED_SKIPS = [
    ("tests/gpu/*", r"no CUDA GPU", "CI has no GPU; the figures of a GPU run are recorded with the machine's name"),
    ("tests/gpu/test_parallel.py*", r"fewer than 2 CUDA GPUs", "most machines have one GPU or none"),
    ("tests/gpu/*", r"flash-attn is not installed", "the flash backend is optional, and must be built on the machine"),
    ("tests/kernels/test_bounds.py", r"a GPU is there", "it tests the checks in Triton's interpreter, which CI uses"),
    ("tests/kernels/test_product_choice.py", r"a GPU is there", "it notes addresses in Triton's interpreter"),
    ("*", r"triton is not installed", "Triton exists for Linux only; make setup installs it there"),
]
if not os.environ.get("CI"):
    ALLOWED_SKIPS.append(("tests/browser/*", r"no Chromium", "a reader's machine may have none; .ci/run installs it"))


def _allowed(nodeid: str, reason: str) -> bool:
    return any(fnmatch(nodeid, where) and re.search(why, reason) for where, why, _ in ALLOWED_SKIPS)


def _fail_unlisted_skip(report) -> None:
    if not report.skipped or hasattr(report, "wasxfail"):
        return
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    if not _allowed(report.nodeid, reason):
        report.outcome = "failed"
        report.longrepr = f"{report.nodeid}: {reason!r} is not in ALLOWED_SKIPS of tests/conftest.py"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    _fail_unlisted_skip(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    report = yield
    _fail_unlisted_skip(report)
    return report
