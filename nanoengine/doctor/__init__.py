"""``nanoengine doctor``: what works here, and what to type for what does not. Needs nothing but Python.

A check is a function that returns a Check. One that raises becomes a line, too: nothing that is
wrong with a machine may end in a stack dump. The model runs in a process of its own, because a
broken torch can kill a process or hang.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator

import nanoengine
from nanoengine.doctor import course, machine, serving
from nanoengine.doctor.check import Check, pip_install

# name, needed for the CPU course, check
CHECKS: list[tuple[str, bool, Callable[[], Check]]] = [
    ("python", True, machine.python),
    ("machine", False, machine.machine),
    ("packages", False, course.packages),
    ("torch", True, machine.torch),
    ("device", True, machine.device),
    ("gpu", False, machine.gpu),
    ("parallel", False, machine.parallel),
    ("attention", True, machine.attention),
    ("triton", False, machine.triton),
    ("flash-attn", False, machine.flash_attn),
    ("cache", True, course.cache),
    ("model", True, course.model),
    ("generation", True, course.generation),
    ("tokenizer", True, course.tokenizer),
    ("jupyterlab", True, course.package("jupyterlab")),
    ("ipykernel", True, course.package("ipykernel")),
    ("ipywidgets", True, course.package("ipywidgets")),
    ("nbval", False, course.package("nbval")),
    ("transformers", False, course.package("transformers")),
    ("serve", False, serving.serve),
    ("index", False, course.index),
]
SYMBOLS = {"ok": "ok     ", "missing": "missing", "problem": "PROBLEM"}


def examine(checks: Iterable[tuple[str, bool, Callable[[], Check]]] = tuple(CHECKS)) -> Iterator[Check]:
    """Run the checks, one by one; a check that raises yields a 'problem', a missing package 'missing'."""
    for name, needed, check in checks:
        began = time.monotonic()
        try:
            result = check()
        except (Exception, SystemExit) as error:
            result = _raised(error)
        yield dataclasses.replace(result, name=name, needed=needed, seconds=time.monotonic() - began)


def _raised(error: BaseException) -> Check:
    if os.environ.get("NANOENGINE_DEBUG") not in (None, "", "0"):
        traceback.print_exception(error, file=sys.stderr)
    if isinstance(error, ModuleNotFoundError) and error.name:
        package = error.name.partition(".")[0]
        return Check("missing", f"the package {package} is not installed", pip_install(package))
    first_line = (str(error).strip() or "no message").splitlines()[0]
    return Check("problem", f"{type(error).__name__}: {first_line}", "make setup")


def can_run_course(checks: Iterable[Check]) -> bool:
    """True if nothing is wrong that the CPU course needs."""
    return all(check.status == "ok" or not check.needed for check in checks)


def show(checks: Iterable[Check]) -> list[Check]:
    """Print a line a check as it comes, what to type below it, and a last line that sums up."""
    began, seen = time.monotonic(), []
    for check in checks:
        seen.append(check)
        print(f"{SYMBOLS[check.status]}  {check.name:<12} {check.detail}", flush=True)
        if check.fix:
            print(f"{'':22}-> {check.fix}", flush=True)
    print(f"\n{_summary(seen)} ({time.monotonic() - began:.0f} s)", flush=True)
    return seen


def as_json(checks: list[Check]) -> dict:
    """All of it as JSON types."""
    return {
        "nanoengine": nanoengine.__version__,
        "can_run_cpu_course": can_run_course(checks),
        "checks": [dataclasses.asdict(check) | {"seconds": round(check.seconds, 2)} for check in checks],
    }


def _summary(checks: list[Check]) -> str:
    wrong = [check.name for check in checks if check.needed and check.status != "ok"]
    if wrong:
        return f"The CPU course cannot run yet: see {', '.join(wrong)}."
    return "The CPU course can run."
