"""What a measurement was made on."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
from pathlib import Path


def describe() -> dict:
    """Date, CPU, cores, load and versions, as JSON types: goes into every report."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "load_average": load_average(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "versions": {name: _version(name) for name in ("nanoengine", "torch", "transformers", "numpy")},
    }


def cpu_model() -> str:
    """The CPU's name, as far as the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def load_average() -> float | None:
    """Processes that wanted to run, mean of the last minute; None where the system does not count them."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
