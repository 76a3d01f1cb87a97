"""The house: folders stand on floors, and an import never goes up a floor or round in a circle."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import nanoengine

PACKAGE = Path(nanoengine.__file__).parent

# From the ground up. A folder, or a file at the top, may import what stands on lower floors.
FLOORS = [
    {"checks", "language", "shown"},
    {"config", "sampling_params"},
    {"engine"},
    {"packing", "jsonl", "markup", "interrupt"},
    {"kernels"},
    {"attention"},
    {"model"},
    {"loader", "tokenizer"},
    {"worker"},
    {"parallel"},
    {"runners", "outputs", "prompts", "rebinding", "own_loop"},
    {"llm"},
    {"sim", "trace", "trace_record", "conversation"},
    {"viz"},
    {"server"},
    {"bench"},
    {"doctor"},
    {"course"},
    {"cli", "notebook", "__main__"},
]
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
WITHOUT_TORCH = {"checks", "config", "sampling_params", "engine", "sim", "trace", "viz"}
HEAVY = {"torch", "triton", "transformers", "safetensors"}


def imports(source: str) -> Iterator[tuple[str, int, bool]]:
    """(module, line, at module level) of each import of ``source``."""
    tree = ast.parse(source)
    top = {id(node) for node in tree.body}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno, id(node) in top) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
            if node.module == "nanoengine":
                names = [f"nanoengine.{alias.name}" for alias in node.names]
            yield from ((name, node.lineno, id(node) in top) for name in names)


def room_of(module: str) -> str | None:
    """The folder, or the file at the top, of one of our modules; None for others' and for the package itself."""
    parts = module.split(".")
    return parts[1] if parts[0] == "nanoengine" and len(parts) > 1 and parts[1] in FLOOR else None


def upward(files: dict[str, str]) -> list[str]:
    """Imports from a floor to one above it. files: path below the package -> source."""
    found = []
    for path, source in files.items():
        room = path.split("/")[0].removesuffix(".py")
        if room == "__init__":
            continue
        for module, line, _ in imports(source):
            other = room_of(module)
            if other is not None and FLOOR[other] > FLOOR[room]:
                found.append(f"{path}:{line} ({room}) imports {module} ({other})")
    return found


def circles(files: dict[str, str]) -> list[str]:
    """Pairs of rooms that import each other."""
    arrows = set()
    for path, source in files.items():
        room = path.split("/")[0].removesuffix(".py")
        for module, _, _ in imports(source):
            other = room_of(module)
            if other is not None and other != room and room != "__init__":
                arrows.add((room, other))
    return sorted(f"{a} <-> {b}" for a, b in arrows if a < b and (b, a) in arrows)


@pytest.fixture(scope="module")
def files() -> dict[str, str]:
    return {
        path.relative_to(PACKAGE).as_posix(): path.read_text(encoding="utf-8")
        for path in PACKAGE.rglob("*.py")
    }


def test_every_folder_and_file_has_a_floor(files):
    rooms = {path.split("/")[0].removesuffix(".py") for path in files} - {"__init__"}
    assert rooms == set(FLOOR)


def test_no_import_goes_up_a_floor(files):
    assert upward(files) == []


def test_no_two_rooms_import_each_other(files):
    assert circles(files) == []


def test_an_arrow_up_and_a_circle_are_found():
    planted = {
        "engine/batch.py": "def f():\n    from nanoengine.worker.inputs import StepInputs\n",
        "worker/inputs.py": "from nanoengine.engine.batch import Batch\n",
    }
    assert upward(planted) == [
        "engine/batch.py:2 (engine) imports nanoengine.worker.inputs (worker)"
    ]
    assert circles(planted) == ["engine <-> worker"]


def test_the_lower_rooms_import_no_torch(files):
    found = [
        f"{path}:{line} imports {module}"
        for path, source in files.items()
        if path.split("/")[0].removesuffix(".py") in WITHOUT_TORCH
        for module, line, at_top in imports(source)
        if at_top and module.split(".")[0] in HEAVY
    ]
    assert found == []
