"""The second cell of every lesson: is everything here that the lesson needs, and in which language do we speak?

``lesson("01", lang="en")`` prints one line and returns a ``Lesson``. Pictures, quiz and checks that are called
without a language use the one set here.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import sys
from dataclasses import dataclass

import nanoengine
from nanoengine import language
from nanoengine.course.typography import printed
from nanoengine.shown import quoted

LANGS = ("en", "zh")
MIN_PYTHON = (3, 11)
# Distribution and import name are equal for all of these.
BASE_PACKAGES = ("numpy", "xxhash", "ipywidgets", "matplotlib")
# Lessons 04-09 run on sim.SlotRunner, which computes tokens without a model.
LESSONS_WITHOUT_TORCH = ("04", "05", "06", "07", "08", "09")
NUMBERS = tuple(f"{n:02d}" for n in range(1, 19))

_TEXT = printed(
    {
        "en": {
            "lesson": "Lesson {no}",
            "ready": "ready",
            "threads": "{n} CPU threads",
            "no_torch": "no torch needed",
            "python": "Python {have} is too old: lesson {no} needs {need} or newer.",
            "missing": "Lesson {no} needs {names}, not installed in the Python of this kernel.",
            "do": "Type in a terminal:  {command}\nthen restart the kernel (menu Kernel, Restart Kernel).",
        },
        "zh": {
            "lesson": "第 {no} 课",
            "ready": "就绪",
            "threads": "CPU {n} 线程",
            "no_torch": "不需要 torch",
            "python": "Python {have} 太旧:第 {no} 课需要 {need} 或更新版本。",
            "missing": "第 {no} 课需要 {names},但这个内核的 Python 里没有安装。",
            "do": "在终端里输入:  {command}\n然后重启内核(菜单 Kernel → Restart Kernel)。",
        },
    }
)

# The one piece of module state in the package: a notebook is one reader in one language, and passing the language
# to every picture would put an argument into each cell that says nothing about engines.


class LessonNotReady(RuntimeError):
    """Something is missing; the message says what to type. A notebook shows the message without a traceback."""

    def _render_traceback_(self) -> list[str]:
        return str(self).splitlines()


@dataclass(frozen=True)
class Lesson:
    """What the check found. ``device`` is ``"cpu"``, a CUDA device's name, or None where torch is not needed."""

    no: str
    lang: str
    device: str | None
    line: str

    def _ipython_display_(self) -> None:
        """The line was printed already; as the last value of a cell the object adds nothing."""


def current_lang() -> str:
    """The language of the lesson that is open in this kernel, ``"en"`` before any was opened."""
    return language.current


def lesson(no: str, *, lang: str = "en", torch: bool = True) -> Lesson:
    """Check the environment for a lesson, print one line about it, remember the language.

    Args:
        no: two digits, ``"01"`` to ``"18"``.
        lang: ``"en"`` or ``"zh"``.
        torch: False where this notebook needs none although its lesson does (exercises on ``sim.SlotRunner``).

    Raises:
        ValueError: there is no such lesson or language.
        LessonNotReady: Python is too old or a package is missing.
    """
    if no not in NUMBERS:
        raise ValueError(f"lesson {no!r} does not exist; lessons are {NUMBERS[0]!r} to {NUMBERS[-1]!r}")
    if lang not in LANGS:
        raise ValueError(f"lang is {lang!r}; the lessons speak {' and '.join(map(repr, LANGS))}")
    text = _TEXT[lang]
    with_torch = torch and no not in LESSONS_WITHOUT_TORCH
    _check_python(no, text)
    _check_packages(no, text, with_torch)
    device = _device() if with_torch else None
    language.current = lang
    found = Lesson(no, lang, device, _line(no, text, device))
    print(found.line)
    return found


def _check_python(no: str, text: dict[str, str]) -> None:
    if sys.version_info < MIN_PYTHON:
        need = ".".join(map(str, MIN_PYTHON))
        problem = text["python"].format(no=no, have=platform.python_version(), need=need)
        raise LessonNotReady(problem + "\n" + text["do"].format(command="make setup PYTHON=python3.11"))


def _check_packages(no: str, text: dict[str, str], with_torch: bool) -> None:
    needed = (*BASE_PACKAGES, "torch") if with_torch else BASE_PACKAGES
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        problem = text["missing"].format(no=no, names=", ".join(missing))
        command = f"{quoted(sys.executable)} -m pip install {' '.join(missing)}"
        raise LessonNotReady(problem + "\n" + text["do"].format(command=command))


def _device() -> str:
    import torch  # only lessons that use it pay for its import

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def _line(no: str, text: dict[str, str], device: str | None) -> str:
    if device is None:
        engine = [text["no_torch"]]
    else:
        shown = text["threads"].format(n=os.cpu_count()) if device == "cpu" else device
        engine = [f"torch {importlib.metadata.version('torch')}", shown]
    parts = [
        text["lesson"].format(no=no),
        f"nanoengine {nanoengine.__version__}",
        f"Python {platform.python_version()}",
        *engine,
        text["ready"],
    ]
    return " · ".join(parts)
