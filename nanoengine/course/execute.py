"""Executes a notebook in a fresh kernel and computes the numbers that its prose asks for."""

from __future__ import annotations

import ast
import os
import re
import tempfile
from pathlib import Path

from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat import NotebookNode

from nanoengine.course.notebook import fill_values, normalise, value_fields

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
CELL_TIMEOUT = 300  # seconds; a whole lesson is to stay under 60 on an idle machine, this is for a busy one


class LessonFailed(RuntimeError):
    """A cell raised, or a number for the prose could not be computed; the message names the cell."""


def execute(
    notebook: NotebookNode,
    cwd: Path,
    env: dict[str, str] | None = None,
    *,
    may_raise: frozenset[str] = frozenset(),
) -> None:
    """Run all code cells in place, fill the prose and normalise the outputs.

    Args:
        notebook: as ``make_notebook`` returns it.
        cwd: the folder the kernel runs in.
        env: additions to the kernel's environment.
        may_raise: ids of cells whose error is kept as their output (the checks of an exercise not yet written).

    Raises:
        LessonFailed: another cell raised (its traceback is in the message) or a ``{{ field }}`` has no value.
    """
    with tempfile.TemporaryDirectory() as ipython_dir:
        client = NotebookClient(
            notebook,
            timeout=CELL_TIMEOUT,
            kernel_name="python3",
            record_timing=False,
            store_widget_state=False,
            coalesce_streams=True,
            extra_arguments=["--log-level=40"],  # its warning about loopback without encryption helps no author
            resources={"metadata": {"path": str(cwd)}},
        )
        with client.setup_kernel(env=_kernel_env(ipython_dir, env or {})):
            _run_cells(client, notebook, may_raise)
            fill_values(notebook, _compute(client, value_fields(notebook)))
    normalise(notebook)


def _kernel_env(ipython_dir: str, extra: dict[str, str]) -> dict[str, str]:
    # The author's IPython profile must not leak in, sets must print in the same order at each build,
    # and no process may be told to compile torch's sources anew.
    env = {**os.environ, "IPYTHONDIR": ipython_dir, "PYTHONHASHSEED": "0", **extra}
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    return env


def _run_cells(client: NotebookClient, notebook: NotebookNode, may_raise: frozenset[str]) -> None:
    for index, cell in enumerate(notebook.cells):
        try:
            client.execute_cell(cell, index)
        except CellExecutionError as error:
            if cell.id in may_raise:
                continue
            raise LessonFailed(f"cell {cell.id}: {_COLOUR.sub('', str(error))}") from None


def _compute(client: NotebookClient, fields: list[str]) -> dict[str, str]:
    """Each field as the kernel formats it once all cells have run."""
    if not fields:
        return {}
    # A field is the inside of an f-string's braces, so {{ blocks:,}} groups thousands.
    expressions = {field: "f" + repr("{" + field + "}") for field in fields}
    request = client.kc.execute("", silent=True, store_history=False, user_expressions=expressions)
    results = client.wait_for_reply(request)["content"]["user_expressions"]
    values = {}
    for field, result in results.items():
        if result["status"] != "ok":
            raise LessonFailed(f"{{{{ {field} }}}} in the prose: {result['ename']}: {result['evalue']}")
        values[field] = ast.literal_eval(result["data"]["text/plain"])
    return values
