"""Source code in a lesson, read from the file that runs: it cannot go stale.

``show(Scheduler.schedule)`` shows it, ``ref("nanoengine/engine/scheduler.py:Scheduler.schedule")`` finds it.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nanoengine
from nanoengine.markup import escape

PACKAGE_ROOT = Path(nanoengine.__file__).parents[1]
# Each colour is about as far from white as from black, so that the code reads well on light and dark pages.
COLOURS = {"Keyword": "#0a7cc4", "Operator.Word": "#0a7cc4", "String": "#3d8440", "Comment": "#797979",
           "Number": "#b8600b", "Name.Function": "#9e5fd0", "Name.Class": "#9e5fd0",
           "Name.Decorator": "#b8600b"}  # fmt: skip
_FRAME = (
    "margin:2px 0;padding:6px 8px;border-left:3px solid #0a7cc4;line-height:1.45;white-space:pre;overflow-x:auto;"
    "background:transparent;color:inherit;font-family:var(--jp-code-font-family,monospace)"
)
_MARK = "background:rgba(240,173,0,.16)"  # stronger, a comment is hard to read on a dark page


@dataclass(frozen=True)
class Ref:
    """Where a symbol stands: lines ``first`` (its decorators included) to ``last``; ``line`` is that of its name."""

    file: str  # relative to the project, or a short name for code that is in no file of it
    symbol: str
    line: int
    first: int
    last: int
    path: str  # what linecache reads

    def source(self) -> list[str]:
        linecache.checkcache(self.path)
        return linecache.getlines(self.path)[self.first - 1 : self.last]

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.symbol}".rstrip()


def ref(pointer: str) -> Ref:
    """Resolve ``"nanoengine/folder/file.py:Class.method"``; without ``:symbol`` it is the whole file.

    Raises:
        ValueError: no such file or symbol; the message lists what the file has.
    """
    file, _, symbol = pointer.partition(":")
    path = PACKAGE_ROOT / file
    if not file.startswith("nanoengine/") or not path.is_file():
        raise ValueError(f"{pointer!r}: there is no file {file!r}; write nanoengine/folder/file.py:Symbol")
    return _find(str(path), file, symbol)


def _find(path: str, file: str, symbol: str) -> Ref:
    linecache.checkcache(path)
    lines = linecache.getlines(path)
    node: ast.AST = ast.parse("".join(lines))
    if not symbol:
        return Ref(file, "", 1, 1, len(lines), path)
    for name in symbol.split("."):
        children = {child_name: child for child in ast.iter_child_nodes(node) for child_name in _names(child)}
        if name not in children:
            raise ValueError(f"{file}:{symbol}: there is no {name!r}; it has {', '.join(children) or 'nothing'}")
        node = children[name]
    first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
    return Ref(file, symbol, node.lineno, first, node.end_lineno, path)


def _names(node: ast.AST) -> list[str]:
    if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def locate(obj: Any) -> Ref:
    """Where a function, method, property, class or module was written, in a file or in a cell of the notebook.

    Raises:
        TypeError: it has no Python source.
    """
    if isinstance(obj, Ref):
        return obj
    if isinstance(obj, str):
        return ref(obj)
    if inspect.ismodule(obj):
        path, symbol = getattr(obj, "__file__", None), ""
    else:
        if isinstance(obj, property):
            obj = obj.fget
        obj = inspect.unwrap(getattr(obj, "__func__", obj))
        symbol = getattr(obj, "__qualname__", "").replace("<locals>.", "")
        path = _file_of(obj)
    if not path or not linecache.getlines(path):
        raise TypeError(f"{obj!r} has no Python source to show: pass a function, method, class or module")
    return _find(path, _short(path), symbol)


def _file_of(obj: Any) -> str | None:
    if inspect.isclass(obj):
        module = sys.modules.get(obj.__module__)
        if getattr(module, "__file__", None):
            return module.__file__
        codes = (getattr(member, "__code__", None) for member in vars(obj).values())
        return next((code.co_filename for code in codes if code is not None), None)
    code = getattr(obj, "__code__", None)
    return code.co_filename if code is not None else None


def _short(path: str) -> str:
    full = Path(path)
    if full.is_relative_to(PACKAGE_ROOT):
        return full.relative_to(PACKAGE_ROOT).as_posix()
    parts = full.parts
    if "site-packages" in parts:
        return "/".join(parts[parts.index("site-packages") + 1 :])
    # A cell's name holds a process number, which would differ at each run.
    return full.name if full.is_file() and "ipykernel" not in path else "notebook"


@dataclass(frozen=True)
class Shown:
    """Source as a notebook shows it. ``rows`` are (line number, text, marked)."""

    title: str
    rows: tuple[tuple[int, str, bool], ...]

    def html(self) -> str:
        code = _coloured([text for _, text, _ in self.rows])
        width = len(str(self.rows[-1][0]))
        out = []
        for (number, _, marked), line in zip(self.rows, code, strict=True):
            gutter = f'<span style="color:#797979;user-select:none">{number:{width}} {"▸" if marked else " "} </span>'
            out.append(f'<span style="{_MARK}">{gutter}{line}</span>' if marked else gutter + line)
        return (
            f'<div style="margin:4px 0"><div style="font-size:12px"><code>{escape(self.title)}</code></div>'
            f'<pre style="{_FRAME}">' + "\n".join(out) + "</pre></div>"
        )

    def text(self) -> str:
        width = len(str(self.rows[-1][0]))
        rows = [f"{number:{width}} {'>' if marked else ' '} {line}".rstrip() for number, line, marked in self.rows]
        return "\n".join([self.title, *rows])

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict[str, str]:
        return {"text/html": self.html(), "text/plain": self.text()}

    def __repr__(self) -> str:
        return self.text()


def show(
    obj: Any,
    *,
    lines: tuple[int | str, int | str] | None = None,
    highlight: int | str | Sequence[int | str] = (),
    doc: bool = True,
) -> Shown:
    """The live source of a function, method, class, module, or ``"file:symbol"``, with its line numbers in the file.

    Args:
        lines: only these, first and last: numbers count from 1 at the start of what is shown; a piece of text stands
            for the first line that contains it (of the last: at or after the first), and so survives edits above it.
        highlight: lines to mark, in the same two ways; a text marks every line that contains it.
        doc: False leaves the docstring out.

    Raises:
        ValueError: a line or text is not there. TypeError: ``obj`` has no Python source.
    """
    where = locate(obj)
    source = textwrap.dedent("".join(where.source())).rstrip("\n").split("\n")
    hidden = set() if doc else _docstring_lines(source)
    first, last = 1, len(source)
    if lines is not None:
        first = _line(where, source, lines[0], 1)
        last = _line(where, source, lines[1], first)
    marks = [highlight] if isinstance(highlight, (int, str)) else highlight
    marked = {n for mark in marks for n in _marked(where, source, mark)}
    rows = [
        (where.first + n - 1, source[n - 1], n in marked) for n in range(first, last + 1) if n not in hidden or n == 1
    ]
    return Shown(str(where), tuple(rows))


def _line(where: Ref, source: list[str], wanted: int | str, start: int) -> int:
    if isinstance(wanted, int):
        if not start <= wanted <= len(source):
            raise ValueError(f"{where}: line {wanted} is not in {start}..{len(source)}")
        return wanted
    for number in range(start, len(source) + 1):
        if wanted in source[number - 1]:
            return number
    raise ValueError(f"{where}: no line from {start} on contains {wanted!r}")


def _marked(where: Ref, source: list[str], wanted: int | str) -> list[int]:
    first = _line(where, source, wanted, 1)
    if isinstance(wanted, int):
        return [first]
    return [number for number, line in enumerate(source, 1) if wanted in line]


def _docstring_lines(source: list[str]) -> set[int]:
    tree = ast.parse("\n".join(source))
    node = tree.body[0] if len(tree.body) == 1 and hasattr(tree.body[0], "body") else tree
    start = node.body[0]
    if isinstance(start, ast.Expr) and isinstance(start.value, ast.Constant) and isinstance(start.value.value, str):
        return set(range(start.lineno, start.end_lineno + 1))
    return set()


def _coloured(lines: list[str]) -> list[str]:
    """Each line as HTML. One lexer run over all, because a string or docstring spans lines."""
    from pygments.lexers import PythonLexer
    from pygments.token import string_to_tokentype

    styles = [(string_to_tokentype(name), colour) for name, colour in COLOURS.items()]
    out = [""]
    for kind, value in PythonLexer(stripnl=False, ensurenl=False).get_tokens("\n".join(lines)):
        colour = next((c for token, c in styles if kind in token), None)
        for i, piece in enumerate(value.split("\n")):
            if i:
                out.append("")
            if piece:
                safe = escape(piece, quote=False)
                out[-1] += f'<span style="color:{colour}">{safe}</span>' if colour and not piece.isspace() else safe
    return out[: len(lines)] + [""] * (len(lines) - len(out))
