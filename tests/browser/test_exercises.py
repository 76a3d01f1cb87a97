"""An exercise as a learner meets it in JupyterLab: red as it is handed out, wrong, then green."""

import pytest

from nanoengine.course.exercises import exercise_path, make_exercise
from nanoengine.course.source import LANGS, find_sources, read_source
from tests.browser.lab import lab_session
from tests.course_exercises.conftest import ROOT

(PATH,) = find_sources(ROOT / "exercises" / "src", ["01"])
SOURCE = read_source(PATH)
SAYS = {
    "en": ("ex01b: not written yet", "not the query heads", "✓ ex01b passed (50 cases)"),
    "zh": ("ex01b：还没写", "不是 query 头", "✓ ex01b 通过（50 个用例）"),
}


def _run_cell(lab, number, text=None):
    """Run a code cell, with its text replaced first where one is given; its outputs' text."""
    cell = lab.page.locator(".jp-Notebook .jp-CodeCell").nth(number)
    cell.locator(".cm-content").click()
    if text is not None:
        lab.page.keyboard.press("Control+a")
        lab.page.keyboard.insert_text(text)
    before = cell.locator(".jp-InputPrompt").inner_text()
    lab.page.keyboard.press("Control+Enter")
    lab.page.wait_for_function(
        "([n, before]) => { const p = document.querySelectorAll('.jp-Notebook .jp-CodeCell')[n]"
        ".querySelector('.jp-InputPrompt').textContent; return p !== before && /\\d/.test(p); }",
        arg=[number, before],
    )
    return cell.locator(".jp-OutputArea").inner_text()


@pytest.mark.parametrize("lang", LANGS)
def test_an_answer_goes_from_red_to_green(lang, tmp_path):
    red, wrong, green = SAYS[lang]
    code = [cell for cell in make_exercise(SOURCE, "solution", lang).cells if cell.cell_type == "code"]
    numbers = {cell.id: number for number, cell in enumerate(code)}
    answer, check = numbers["ex01b-answer"], numbers["ex01b-check"]
    right = code[answer].source
    with lab_session(exercise_path(ROOT, SOURCE, "exercise", lang)) as lab:
        _run_cell(lab, numbers["env"])
        _run_cell(lab, answer)
        assert red in _run_cell(lab, check)
        _run_cell(lab, answer, right.replace("num_key_value_heads", "num_attention_heads"))
        assert wrong in _run_cell(lab, check)
        lab.screenshot(tmp_path / f"wrong_{lang}.png", whole=False)
        _run_cell(lab, answer, right)
        assert _run_cell(lab, check).strip() == green
        lab.screenshot(tmp_path / f"green_{lang}.png", whole=False)
        assert lab.console_errors == []
