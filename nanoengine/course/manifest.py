"""Symbols of nano-vllm and vLLM that the course cites, at fixed versions: ``manifest.yaml`` is the one list.

``python -m nanoengine.course.manifest FOLDER…`` looks them up in unpacked sources (a folder holds ``nanovllm/`` or
``vllm/``), for whoever changes a version.
"""

from __future__ import annotations

import ast
import sys
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import yaml

from nanoengine.course.text import Text

FILE = Path(__file__).with_name("manifest.yaml")


@dataclass(frozen=True)
class Cited:
    """One symbol of another engine and a fact about it in our own words."""

    engine: str  # "nano-vllm" or "vLLM"
    version: str
    at: str  # file:symbol
    fact: Text


@lru_cache(maxsize=1)
def manifest() -> dict[str, Cited]:
    """All cited symbols by file:symbol.

    Raises:
        ValueError: an entry is incomplete or stands twice.
    """
    found: dict[str, Cited] = {}
    for engine, part in yaml.safe_load(FILE.read_text(encoding="utf-8")).items():
        for at, fact in part["symbols"].items():
            if at in found or not at.startswith(part["package"] + "/") or set(fact) != {"en", "zh"}:
                rule = f"must stand once, under {part['package']}/, with en and zh"
                raise ValueError(f"{FILE.name}: {engine}: {at}: {rule}")
            found[at] = Cited(engine, str(part["version"]), at, Text(fact["en"], fact["zh"]))
    return found


def missing_symbols(folder: Path) -> list[str]:
    """Cited symbols that the unpacked source below ``folder`` does not have; only packages it holds are looked at."""
    missing = []
    for at in manifest():
        file, _, symbol = at.partition(":")
        if not (folder / file.partition("/")[0]).is_dir():
            continue
        path = folder / file
        if not path.is_file() or not _defines(ast.parse(path.read_text(encoding="utf-8")), symbol.split(".")):
            missing.append(at)
    return missing


def _defines(node: ast.AST, names: list[str]) -> bool:
    if not names:
        return True
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return any(
        isinstance(child, kinds) and child.name == names[0] and _defines(child, names[1:])
        for child in ast.iter_child_nodes(node)
    )


def main(folders: list[str]) -> int:
    """Exit status 1 if a cited symbol is missing."""
    missing = [at for folder in folders for at in missing_symbols(Path(folder))]
    for at in missing:
        print(f"not there: {at}", file=sys.stderr)
    print(f"{len(manifest())} symbols cited, {len(missing)} missing")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
