"""Makes notebooks out of a source, and keeps what is committed of them free of chance.

A committed notebook holds its outputs, so that it can be read where nothing runs. What would change at each build
is taken out (widget ids, memory addresses, time stamps) or kept as recorded (cells tagged ``varies``).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import nbformat
from nbformat import NotebookNode

from nanoengine.course.source import VARIES, LessonSource
from nanoengine.course.static import freeze_pictures

WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
_ADDRESS = re.compile(r"\b0x[0-9a-f]{6,16}\b")
# {{ name }} or {{ expression:format }}. The first blank is needed: LaTeX has {{a}} without it.
_VALUE = re.compile(r"\{\{ ([^{}]+?) ?\}\}")
# Not compared: a PNG depends on the machine's fonts and libraries.
_BINARY = ("image/png", "image/jpeg")


def make_notebook(source: LessonSource, lang: str) -> NotebookNode:
    """The notebook of one language, not executed, with ``{{ }}`` still in its prose."""
    notebook = nbformat.v4.new_notebook()
    notebook.metadata = nbformat.from_dict(
        {
            "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
            "language_info": {"name": "python", "file_extension": ".py", "mimetype": "text/x-python"},
            "nanoengine": {"lang": lang, "lesson": source.number, "values": {}},
        }
    )
    for cell in source.cells:
        new = nbformat.v4.new_code_cell if cell.kind == "code" else nbformat.v4.new_markdown_cell
        metadata: dict[str, Any] = {"slideshow": {"slide_type": _slide_type(cell.text(lang), cell.tags)}}
        if cell.tags:
            metadata["tags"] = list(cell.tags)
        notebook.cells.append(new(cell.text(lang), id=cell.id, metadata=metadata))
    return notebook


def _slide_type(text: str, tags: tuple[str, ...]) -> str:
    """A heading opens a slide, a smaller one a slide below it; the rest stays on the slide it follows."""
    if "notes" in tags:
        return "notes"
    heading = re.match(r"#{1,6} ", text)
    if heading is None:
        return "-"
    return "slide" if len(heading[0]) <= 3 else "subslide"


def value_fields(notebook: NotebookNode) -> list[str]:
    """The distinct fields ``name`` or ``expression:format`` that the prose asks for, in order."""
    found = (field for cell in notebook.cells if cell.cell_type == "markdown" for field in _VALUE.findall(cell.source))
    return list(dict.fromkeys(found))


def fill_values(notebook: NotebookNode, values: dict[str, str]) -> None:
    """Put the values into the prose and record them; a field without a value stays as it is."""
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = _VALUE.sub(lambda m: values.get(m[1], m[0]), cell.source)
    notebook.metadata["nanoengine"]["values"] = nbformat.from_dict(dict(sorted(values.items())))


def normalise(notebook: NotebookNode) -> None:
    """Take out of an executed notebook what would differ at the next execution of the same code."""
    notebook.metadata.pop("widgets", None)  # ids without state, with which GitHub refuses the notebook
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = [kept for kept in map(_normal_output, cell.outputs) if kept is not None]


def _normal_output(output: NotebookNode) -> NotebookNode | None:
    """The output without chance in it, or None for a widget that has no static form beside it."""
    if output.output_type == "stream":
        output.text = _ADDRESS.sub("0x…", output.text)
        return output
    data = output.get("data")
    if data is None:
        return output
    if data.pop(WIDGET_VIEW, None) is not None and set(data) <= {"text/plain"}:
        return None
    for mime, value in data.items():
        if mime.startswith("text/") and isinstance(value, str):
            data[mime] = _ADDRESS.sub("0x…", value)
    freeze_pictures(data)
    return output


def keep_recorded(
    notebook: NotebookNode, recorded: NotebookNode | None, *, only_varying: bool, but: frozenset[str] = frozenset()
) -> None:
    """Take over recorded outputs of cells whose code is unchanged: of those tagged ``varies``, or of all.

    but: ids of cells that keep their new ones.
    """
    if recorded is None:
        return
    old = {cell.id: cell for cell in recorded.cells if cell.cell_type == "code"}
    for cell in notebook.cells:
        before = old.get(cell.id)
        if cell.cell_type != "code" or before is None or before.source != cell.source or cell.id in but:
            continue
        if not only_varying or VARIES in cell.metadata.get("tags", ()):
            cell.outputs, cell.execution_count = before.outputs, before.execution_count


def differences(left: NotebookNode, right: NotebookNode, *, outputs: bool = True) -> list[str]:
    """Where two notebooks differ in what a rebuild must leave equal, a sentence each.

    Cells, sources, metadata and, where ``outputs``, the textual outputs of cells not tagged ``varies``.
    """
    if [c.id for c in left.cells] != [c.id for c in right.cells]:
        return [f"cell ids differ: {[c.id for c in left.cells]} and {[c.id for c in right.cells]}"]
    found = []
    for a, b in zip(left.cells, right.cells, strict=True):
        if (a.cell_type, a.source, a.metadata) != (b.cell_type, b.source, b.metadata):
            found.append(f"cell {a.id}: its source or metadata differs")
        elif outputs and a.cell_type == "code" and VARIES not in a.metadata.get("tags", ()):
            shown = [[_comparable(output) for output in cell.outputs] for cell in (a, b)]
            if shown[0] != shown[1]:
                found.append(f"cell {a.id}: its output differs (tag it varies if it must): {_difference(*shown)}")
    return found


def _difference(left: list, right: list) -> str:
    """Both outputs from shortly before the place where they part."""
    a, b = str(left), str(right)
    start = max(0, next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), 0) - 40)
    return f"…{a[start : start + 200]} and …{b[start : start + 200]}"


def _comparable(output: NotebookNode) -> dict[str, Any]:
    plain = {key: value for key, value in output.items() if key not in ("execution_count", "metadata")}
    if "data" in plain:
        plain["data"] = {mime: v for mime, v in plain["data"].items() if mime not in _BINARY}
    return plain


def read_notebook(path: Path) -> NotebookNode | None:
    """The notebook at ``path``, or None where there is none yet."""
    return nbformat.read(path, as_version=4) if path.exists() else None


def write_notebook(notebook: NotebookNode, path: Path) -> None:
    """Write in a fixed form: keys sorted, one blank of indent, one newline at the end."""
    nbformat.validate(notebook)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(nbformat.writes(notebook).rstrip("\n") + "\n", encoding="utf-8")
