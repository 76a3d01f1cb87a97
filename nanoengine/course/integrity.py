"""Notices when a notebook changes the package that is to judge it, and puts it back."""

from __future__ import annotations

import sys
from types import FunctionType, ModuleType
from typing import Any

_PREFIX = "nanoengine"
# What a lesson's cells change by right: the reader's language, how many hints were given.
_ALLOWED = {("nanoengine.language", "current"), ("nanoengine.course.progress", "_hints_shown")}
_ABSENT = object()


class Snapshot:
    """The modules, classes, functions and tables of the package as they are now.

    It sees what a learner can reach by assignment; it is no proof against one who searches the interpreter's frames.
    """

    def __init__(self) -> None:
        self._modules: dict[str, ModuleType] = {}
        self._tables: list[tuple[str, Any, dict[str, Any]]] = []  # (name, module or class, its attributes)
        self._codes: list[tuple[str, FunctionType, tuple]] = []
        self._dicts: list[tuple[str, dict, dict]] = []
        for name, module in list(sys.modules.items()):
            if name.split(".")[0] == _PREFIX:
                self._modules[name] = module
                self._remember(name, module, seen=set())

    def _remember(self, name: str, owner: Any, seen: set[int]) -> None:
        attributes = {k: v for k, v in vars(owner).items() if not _own_business(owner, k)}
        self._tables.append((name, owner, attributes))
        home = owner.__name__ if isinstance(owner, ModuleType) else owner.__module__
        for key, value in attributes.items():
            if getattr(value, "__module__", home) != home and not isinstance(value, dict) or id(value) in seen:
                continue
            seen.add(id(value))
            value = getattr(value, "__func__", value)
            if isinstance(value, type):
                self._remember(f"{name}.{key}", value, seen)
            elif isinstance(value, FunctionType):
                self._codes.append((f"{name}.{key}", value, _code(value)))
            elif type(value) is dict and (home, key) not in _ALLOWED:
                self._dicts.append((f"{name}.{key}", value, dict(value)))

    def restore(self) -> list[str]:
        """Put everything back; the names of what had been changed."""
        changed = [name for name, module in self._modules.items() if sys.modules.get(name) is not module]
        sys.modules.update(self._modules)
        for name, function, code in self._codes:
            if _code(function) != code:
                function.__code__, function.__defaults__, function.__kwdefaults__ = code
                changed.append(name)
        for name, owner, attributes in self._tables:
            for key, value in attributes.items():
                if vars(owner).get(key, _ABSENT) is not value:
                    setattr(owner, key, value)
                    changed.append(f"{name}.{key}")
        for name, table, before in self._dicts:
            if table.keys() != before.keys() or any(table[key] is not before[key] for key in before):
                table.clear()
                table.update(before)
                changed.append(name)
        return changed


def _own_business(owner: Any, key: str) -> bool:
    """Attributes that Python itself keeps, submodules that are imported later, and what may change."""
    return key.startswith("__") and key not in ("__init__", "__eq__", "__call__") or (owner.__name__, key) in _ALLOWED


def _code(function: FunctionType) -> tuple:
    return function.__code__, function.__defaults__, function.__kwdefaults__
