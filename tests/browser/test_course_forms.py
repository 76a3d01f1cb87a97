"""Quiz, recall, hunt and cards in a real JupyterLab: the still form before a kernel ran, then the live one."""

import json

import nbformat
import pytest

from tests.browser.lab import lab_session

FORMS = ("quiz", "recall", "hunt", "cards")


def _notebook(path, outputs):
    cells = ["from nanoengine.notebook import cards, hunt, lesson, quiz, recall\nlesson('04', lang='zh')"]
    cells += [f"{name}('01')" for name in FORMS]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c, id=f"c{i}") for i, c in enumerate(cells)])
    notebook.metadata["kernelspec"] = {"display_name": "Python 3", "language": "python", "name": "python3"}
    for cell, output in zip(notebook.cells[1:], outputs, strict=False):
        cell.outputs, cell.execution_count = [output], 1
    nbformat.write(notebook, path)
    return path


@pytest.fixture
def progress_file(tmp_path, monkeypatch):
    monkeypatch.setenv("NANOENGINE_PROGRESS", str(tmp_path / "progress.json"))
    return tmp_path / "progress.json"


def _still_forms():
    from nanoengine import notebook

    for name in FORMS:
        bundle = getattr(notebook, name)("01", lang="zh").bundles()[1]
        yield nbformat.v4.new_output("display_data", data=bundle)


def test_a_reader_unfolds_the_still_forms_then_answers_and_is_recorded(tmp_path, progress_file):
    from nanoengine.course.record import load

    questions = load("01").quiz
    with lab_session(_notebook(tmp_path / "forms.ipynb", _still_forms()), fresh=False, dark=True) as lab:
        for number in range(1, 5):  # nothing ran yet: the notebook is not trusted, and its HTML sanitised
            details = lab.page.locator(".jp-Cell").nth(number).locator("details").first
            before = details.bounding_box()["height"]
            details.locator("summary").click()
            assert details.bounding_box()["height"] > before
        assert "A. 整个 batch 的前向" in lab.page.locator(".jp-Cell").nth(1).inner_text()

        lab.run_all()
        cell = lab.page.locator(".jp-Cell").nth(1)
        boxes, buttons, first = cell.locator("input[type=checkbox]"), cell.locator('button:has-text("提交")'), 0
        for number, question in enumerate(questions):
            wrong = set(range(len(question.options))) - question.right
            for option in sorted(question.right if number else wrong)[: 1 if len(question.right) == 1 else None]:
                boxes.nth(first + option).check()
            first += len(question.options)
            buttons.nth(number).click()
            cell.locator(f'b:text-is("{"答对了。" if number else "不对。"}")').first.wait_for(timeout=10000)
        cell.locator("text=答对 4/5：过关。").wait_for(timeout=10000)
        assert not cell.locator("details").first.is_visible()  # the live form hides the still one

        clock = lab.page.locator(".jp-Cell").nth(2)
        clock.locator("button").first.click()  # the clock ticks in the page
        clock.locator("text=/还剩 2:5/").wait_for(timeout=10000)
        hunt = lab.page.locator(".jp-Cell").nth(3)
        hunt.locator('button:has-text("看源码")').first.click()
        hunt.locator("pre:has-text('▸')").wait_for(timeout=10000)
        card = lab.page.locator(".jp-Cell").nth(4)
        card.locator('button:has-text("30 秒答法")').click()
        card.locator('button:has-text("轻松")').click()
        card.locator("text=/天后再复习/").wait_for(timeout=10000)
        assert lab.errors() == [] and lab.console_errors == []
    saved = json.loads(progress_file.read_text(encoding="utf-8"))
    assert (saved["quiz"]["01"]["right"], saved["quiz"]["01"]["passed"]) == (4, True)
    assert list(saved["cards"]) == ["01/what-happens-in-each-step"]
