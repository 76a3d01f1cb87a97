"""The file of the engine's step stays small enough to be read in one lesson."""

from __future__ import annotations

import ast
from pathlib import Path

import nanoengine.engine.llm_engine as llm_engine
from nanoengine.engine.llm_engine import LLMEngine

SOURCE = Path(llm_engine.__file__).read_text(encoding="utf-8")


def test_the_file_is_below_100_lines_none_of_them_crammed():
    lines = SOURCE.splitlines()
    assert len(lines) < 100
    assert max(map(len, lines)) <= 120 and not any(";" in line.split("#")[0] for line in lines if '"' not in line)


def test_the_step_and_its_loop_are_in_it():
    methods = {node.name for node in ast.walk(ast.parse(SOURCE)) if isinstance(node, ast.FunctionDef)}
    assert {"step", "run", "add_request", "abort", "has_unfinished"} <= methods
    for name in ("step", "run"):
        assert getattr(LLMEngine, name).__code__.co_filename == llm_engine.__file__


def test_the_step_reads_schedule_run_postprocess_in_this_order():
    step = SOURCE[SOURCE.index("def step") : SOURCE.index("def _land")]
    places = [
        step.index(word) for word in (".schedule()", "self.build_batch(", ".launch(", ".advance(", "self._land()  # 3")
    ]
    assert places == sorted(places)
