"""``llm = LLM()`` run again in a notebook: the old one gives its memory back before the new one asks for it.

Python makes the new object first and lets go of the old one after. On a GPU the old engine still
holds nearly all memory at that moment, so the same cell would work once and fail ever after.
"""

from __future__ import annotations

import ast
import linecache
import sys
from types import FrameType


def about_to_be_replaced(kind: type, frame: FrameType) -> object | None:
    """The ``kind`` that the notebook line running in ``frame`` is about to put a new one in the place of.

    Only where nothing else can be meant: an IPython cell's own line reads ``name = kind(...)``, name
    holds a ``kind`` now, and no other global name holds the same one. Else None.
    """
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is None or frame.f_globals is not shell.user_ns or frame.f_code.co_name != "<module>":
        return None
    names = _assigned_from(kind.__name__, frame)
    old = frame.f_globals.get(names[0]) if len(names) == 1 else None
    if not isinstance(old, kind):
        return None
    # IPython keeps results under names of its own (_, __, _12): those are no use of it
    holders = [name for name, value in frame.f_globals.items() if value is old and not name.startswith("_")]
    return old if holders == names else None


def _assigned_from(call: str, frame: FrameType) -> list[str]:
    """Names that the running line assigns the value of ``call(...)`` to."""
    try:
        tree = ast.parse("".join(linecache.getlines(frame.f_code.co_filename)))
    except SyntaxError:
        return []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Call):
            continue
        if node.lineno <= frame.f_lineno <= node.end_lineno and ast.unparse(node.value.func).split(".")[-1] == call:
            return [target.id for target in node.targets if isinstance(target, ast.Name)]
    return []
