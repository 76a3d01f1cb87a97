"""Watches an answer run: does it call the package's own answer, and in which of its lines did it fail?"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from nanoengine.course.checks.exercise import call

_PACKAGE = str(Path(__file__).resolve().parents[1])


@contextmanager
def uses(forbidden: Iterable[Callable]) -> Iterator[list[str]]:
    """Collect the names of the ``forbidden`` functions that an answer is, copies, or calls in the block.

    Only calls made on the answer's behalf count (below ``call`` on the stack), so that an engine or an oracle of the
    check itself may use them. A copy of the source, compiled anew, is recognised by its bytecode.
    """
    found: list[str] = []
    names = {_fingerprint(function.__code__): function.__qualname__ for function in forbidden}
    if not names:
        yield found
        return

    def profile(frame, event, _argument):
        if event == "call" and not found:
            name = names.get(_fingerprint(frame.f_code))
            if name is not None and _below_call(frame):
                found.append(name)

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        yield found
    finally:
        sys.setprofile(before)


def _fingerprint(code) -> tuple:
    return code.co_code, code.co_names


def _below_call(frame) -> bool:
    while frame is not None:
        if frame.f_code is call.__code__:
            return True
        frame = frame.f_back
    return False


def own_line(error: Exception) -> str:
    """``line 7: the code`` of the innermost frame outside the package; empty if there is none."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith((_PACKAGE, "<frozen", "<string>")) and "site-packages" not in frame.filename:
            return f"in {frame.name}(), line {frame.lineno}: {frame.line}"
    return ""
