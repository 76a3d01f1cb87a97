"""What a check of ``nanoengine doctor`` gives back, and what pyproject's requirements say. Needs nothing but Python."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import sys
from dataclasses import dataclass

from nanoengine.shown import quoted

PYTHON = quoted(sys.executable or "python3")
# where a package is not called as it is imported
DISTRIBUTIONS = {"yaml": "PyYAML", "IPython": "ipython", "prometheus_client": "prometheus-client"}


@dataclass(frozen=True)
class Check:
    """One line: status is "ok", "missing" or "problem"; fix says what to type (or that nothing is needed).

    needed: the CPU course cannot run without it. name, needed and seconds are filled in by ``examine``.
    """

    status: str
    detail: str
    fix: str = ""
    name: str = ""
    needed: bool = False
    seconds: float = 0.0


def pip_install(*packages: str, options: str = "") -> str:
    """The command that installs these import names, at the floors of this package."""
    floors = required() | required("serve")
    wanted = [DISTRIBUTIONS.get(name, name) for name in packages]
    parts = [quoted(f"{name}>={floors[name]}") if floors.get(name) else name for name in wanted]
    return " ".join([PYTHON, "-m pip install", *parts, *([options] if options else [])])


def required(extra: str | None = None) -> dict[str, str]:
    """{package: lowest version} of what nanoengine needs, or only its ``extra``; empty if it is not installed."""
    try:
        lines = importlib.metadata.requires("nanoengine") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    marks = (re.search(r"extra == [\"']([\w-]+)", line) for line in lines)
    wanted = [line for line, mark in zip(lines, marks, strict=True) if (mark and mark[1]) == extra]
    matches = (re.match(r"([\w.-]+)\s*>=\s*([\w.]+)", line) for line in wanted)
    return {match[1]: match[2] for match in matches if match}


def version_of(package: str) -> str:
    """The installed version. Errors: ModuleNotFoundError if it cannot be imported from here."""
    if importlib.util.find_spec(package) is None:
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)
    return importlib.metadata.version(DISTRIBUTIONS.get(package, package))


def is_older(version: str, floor: str) -> bool:
    numbers = [[int(n) for n in re.findall(r"\d+", text.partition("+")[0])] for text in (version, floor)]
    return numbers[0] < numbers[1]
