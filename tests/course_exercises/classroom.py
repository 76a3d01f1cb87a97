"""Makes the submissions of a class: notebooks as learners hand them in, from the best to the worst."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from nanoengine.course.exercises import make_exercise
from nanoengine.course.source import LessonSource

EMPTY = {"stub": "stub", "no": "no result", "miss": "missing", "w": "wrong", "ok": "passed", "im": "imported"}

# A step that is right by the book would be 20 lines; the class only needs it once, from the solution.
LOOP = "def step(engine):\n    while True:\n        pass\n"
BOMB = "def step(engine):\n    hoard = []\n    while True:\n        hoard.append(bytearray(50_000_000))\n"
IMPORTS = (
    "from nanoengine.engine.llm_engine import LLMEngine\n"
    "def step(engine):\n    out = LLMEngine.step(engine)\n"
    "    return {'prefill': out.num_prefill_tokens, 'decode': out.num_decode_tokens,\n"
    "            'finished': [seq.seq_id for seq in out.finished]}\n"
)
FORK = "import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', 'import time; time.sleep({seconds})'])\n"
DAEMON = (
    "import os, sys\n"
    "if os.fork() == 0:\n"
    "    os.setsid()\n"
    "    if os.fork() == 0:\n"
    "        os.execve(sys.executable, [sys.executable, '-c', 'import time; time.sleep({seconds})'], {{}})\n"
    "    os._exit(0)\n"
)
TAMPER = (
    "import nanoengine.course.check as c, nanoengine.course.checks.lesson_01_step as s\n"
    "c.examine = lambda *a, **k: c.Result('passed', 'ok', 1)\n"
    "s.expected_output = lambda *a, **k: []\n"
    "c._try = lambda *a, **k: (None, None)\n"
)


def submissions(source: LessonSource, seconds: int) -> dict[str, tuple[object, dict[str, str], str]]:
    """name -> (notebook or text, verdicts, words in a note). ``seconds`` marks the processes that try to live on."""
    stub, solved = make_exercise(source, "exercise", "en"), make_exercise(source, "solution", "en")
    good = _answers(solved)
    half = _with(stub, {"ex01b-answer": good["ex01b-answer"]})
    shouting = _with(half, {"ex01a-check": 'print("✓ ex01a passed (50 cases)")'})
    both_ok = {"ex01a": "passed", "ex01b": "passed"}
    only_b = {"ex01a": "stub", "ex01b": "passed"}
    lost = {"ex01a": "no result", "ex01b": "no result"}
    text = nbformat.writes(solved)
    return {
        "perfect": (solved, both_ok, ""),
        "stub": (stub, {"ex01a": "stub", "ex01b": "stub"}, ""),
        "half": (half, only_b, ""),
        "chinese": (make_exercise(source, "solution", "zh"), both_ok, ""),
        "syntax_error": (_with(solved, {"ex01a-answer": "def step(engine:\n"}), {"ex01a": "missing", "ex01b": "passed"},
                         "SyntaxError"),
        "infinite_loop": (_with(solved, {"ex01a-answer": LOOP}), {"ex01a": "wrong", "ex01b": "passed"}, ""),
        "loop_in_a_cell": (_with(solved, {"ex01a-answer": good["ex01a-answer"] + "\nwhile True: pass\n"}), both_ok,
                           "still running after"),
        "stubborn_loop": (_with(solved, {"ex01b-answer": "import signal\nsignal.setitimer(signal.ITIMER_REAL, 0)\n"
                                         "signal.setitimer(signal.ITIMER_PROF, 0)\n"
                                         "while True: pass\n"}),
                          {"ex01a": "passed", "ex01b": "no result"}, "stopped after"),
        "sleeps": (_with(solved, {"ex01a-answer": good["ex01a-answer"] + "\nimport time\ntime.sleep(1e6)\n"}), both_ok,
                   "still running after"),
        "memory_bomb": (_with(solved, {"ex01a-answer": BOMB}), {"ex01a": "wrong", "ex01b": "passed"}, ""),
        "os_exit": (_with(solved, {"ex01b-answer": "import os\nos._exit(0)\n"}),
                    {"ex01a": "passed", "ex01b": "no result"}, "ended in cell"),
        "rebinds_check": (_with(half, {"env": "check = lambda *a, **k: print('passed')"}), only_b, ""),
        "imports": (_with(solved, {"ex01a-answer": IMPORTS}), {"ex01a": "imported", "ex01b": "passed"}, ""),
        "deleted_cells": (_without(solved, "ex01a-check", "ex01b-check", "ex01a-answer"),
                          {"ex01a": "missing", "ex01b": "passed"}, ""),
        "duplicated_cells": (_doubled(solved, "ex01a-answer", "ex01a-check", "ex01b-check"), both_ok, ""),
        "renamed_by_张三 (1)": (solved, both_ok, ""),
        "no_metadata": (_bare(solved), both_ok, ""),
        "outputs_of_another_run": (_outputs_of(solved, stub), {"ex01a": "stub", "ex01b": "stub"}, ""),
        "prints_the_line": (shouting, only_b, ""),
        "forks": (_with(solved, {"env": FORK.format(seconds=seconds)}), both_ok, ""),
        "daemon": (_with(solved, {"env": DAEMON.format(seconds=seconds)}), both_ok, ""),
        "tampers": (_with(stub, {"env": TAMPER}), {"ex01a": "stub", "ex01b": "stub"}, "changed the package"),
        "network": (_with(stub, {"env": "import socket\nsocket.create_connection(('127.0.0.1', 9), 1)"}),
                    {"ex01a": "stub", "ex01b": "stub"}, "Error"),
        "input": (_with(solved, {"env": "input()"}), both_ok, "cell 1"),
        "not_json": ("this was a notebook", lost, "not JSON (line 1: "),
        "json_but_no_notebook": ('{"nbformat": 4}', lost, "no list of cells"),
        "cut_off": (text[: len(text) // 2], lost, "cut off after"),
        "empty": ("", lost, "the file is empty (0 bytes)"),
        "cut_in_a_character": (b'{"cells": ["\xe2', lost, "in the middle of a character"),
        "utf_16": (text.encode("utf-16"), lost, "is UTF-16 text"),
        "utf_16_without_a_mark": (text.encode("utf-16-le"), lost, "is UTF-16 text"),
        "utf_32": (text.encode("utf-32"), lost, "is UTF-32 text"),
        "gbk": (json.dumps({"cells": ["分页注意力"]}, ensure_ascii=False).encode("gbk"), lost, "is GBK"),
        "bytes": (b"\x80\x81\x00\xff", lost, "not UTF-8 (byte 0 is 0x80)"),
        "zip": (b"PK\x03\x04rest", lost, "a zip archive"),
        "login_page": ("<!DOCTYPE html><html></html>", lost, "a page of HTML"),
        "blank": (" \n", lost, "the file is empty"),
        "with_a_mark": (text.encode("utf-8-sig"), both_ok, ""),
        "nbformat_3": (nbformat.v3.nbjson.writes(nbformat.convert(copy.deepcopy(_bare(solved)), 3)), both_ok, ""),
    }  # fmt: skip


def write_class(folder: Path, made: dict[str, tuple[object, dict[str, str], str]]) -> None:
    """One file a submission, some of them in folders of their own, as a learning platform delivers them."""
    for number, (name, (notebook, _, _)) in enumerate(made.items()):
        path = folder / (f"group {number % 3}/{name}.ipynb" if number % 2 else f"{name}.ipynb")
        path.parent.mkdir(parents=True, exist_ok=True)
        text = notebook if isinstance(notebook, (str, bytes)) else nbformat.writes(notebook)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())


def _answers(notebook: NotebookNode) -> dict[str, str]:
    return {cell.id: cell.source for cell in notebook.cells}


def _with(notebook: NotebookNode, sources: dict[str, str]) -> NotebookNode:
    made = copy.deepcopy(notebook)
    for cell in made.cells:
        cell.source = sources.get(cell.id, cell.source)
    return made


def _without(notebook: NotebookNode, *ids: str) -> NotebookNode:
    made = copy.deepcopy(notebook)
    made.cells = [cell for cell in made.cells if cell.id not in ids]
    return made


def _doubled(notebook: NotebookNode, *ids: str) -> NotebookNode:
    made = copy.deepcopy(notebook)
    made.cells = [again for cell in made.cells for again in ([cell, copy.deepcopy(cell)] if cell.id in ids else [cell])]
    for number, cell in enumerate(made.cells):
        cell["id"] = f"c{number}"  # as an editor that renews ids
    return made


def _bare(notebook: NotebookNode) -> NotebookNode:
    made = copy.deepcopy(notebook)
    made.metadata = nbformat.from_dict({})
    for number, cell in enumerate(made.cells):
        cell["id"], cell.metadata = f"c{number}", nbformat.from_dict({})
    return made


def _outputs_of(run: NotebookNode, notebook: NotebookNode) -> NotebookNode:
    """The stub with what a friend's checks printed."""
    made = copy.deepcopy(notebook)
    for cell in made.cells:
        if cell.id.endswith("-check"):
            line = f"✓ {cell.id[:5]} passed (50 cases)\n"
            cell.outputs, cell.execution_count = [nbformat.v4.new_output("stream", text=line)], 7
    return made
