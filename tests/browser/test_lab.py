"""The browser helper itself: it must see an error in a notebook, or its other tests could not fail."""

from __future__ import annotations

import nbformat

from tests.browser.lab import lab_session


def test_an_error_in_a_cell_is_seen(tmp_path):
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1 / 0")], metadata=kernel)
    nbformat.write(notebook, tmp_path / "broken.ipynb")
    with lab_session(tmp_path / "broken.ipynb") as lab:
        lab.run_all()
        assert any("ZeroDivisionError" in text for text in lab.errors())
