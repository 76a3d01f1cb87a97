"""The slides in Chromium, from a file and without a network: they turn, fit and speak to the teacher."""

from base64 import b64encode

import nbformat
import pytest

from nanoengine.course.reveal import load_reveal
from nanoengine.course.slides import to_page
from tests.browser.lab import browser_page

_SVG = '<svg xmlns="http://www.w3.org/2000/svg" width="760" height="830"><rect width="760" height="830"/></svg>'
_PICTURE = f'<img alt="a step" src="data:image/svg+xml;base64,{b64encode(_SVG.encode()).decode()}">'
_FOLDS = f"<details><summary>Step 9: the end.</summary>{_PICTURE}</details>" * 2
_STILLS = f'<div class="stills"><div>{_PICTURE}</div>{_FOLDS}<p><small>Static pictures.</small></p></div>'


def _notebook():
    made = nbformat.v4.new_notebook()
    for number in range(3):
        meta = {"slideshow": {"slide_type": "slide"}}
        made.cells.append(nbformat.v4.new_markdown_cell(f"## Slide {number}", id=f"s{number}", metadata=meta))
        code = "\n".join(f"x_{line} = {line}  # {'long ' * 12}" for line in range(20))
        made.cells.append(nbformat.v4.new_code_cell(code, id=f"c{number}", metadata={}))
    player = nbformat.v4.new_code_cell("", id="player", metadata={"slideshow": {"slide_type": "slide"}})
    player.outputs = [nbformat.v4.new_output("display_data", data={"text/html": _STILLS})]
    made.cells.append(player)
    return made


@pytest.fixture
def page(tmp_path):
    path = tmp_path / "slides.html"
    path.write_text(to_page(_notebook(), "en", None, load_reveal()), encoding="utf-8")
    with browser_page() as page:
        page.errors, page.asked = [], []
        page.on("console", lambda m: page.errors.append(m.text) if m.type == "error" else None)
        page.on("pageerror", lambda error: page.errors.append(str(error)))
        page.on("request", lambda request: page.asked.append(request.url))
        page.goto(path.as_uri())
        page.wait_for_function("window.Reveal && Reveal.isReady()")
        yield page


def test_the_slides_turn_and_ask_nobody_for_anything(page):
    assert page.evaluate("Reveal.getTotalSlides()") == 4
    page.keyboard.press("ArrowRight")
    page.wait_for_function("Reveal.getIndices().h === 1")
    assert page.locator("section.present h2:visible").inner_text() == "Slide 1"
    assert [url for url in page.asked if not url.startswith(("file:", "data:"))] == []
    assert page.errors == []


def test_nothing_sticks_out_of_the_slide(page):
    wide = page.evaluate(
        "[...document.querySelectorAll('section.present section, section.present')]"
        ".filter(s => s.scrollWidth > s.clientWidth + 1).length"
    )
    assert wide == 0


def test_a_folded_picture_opens_beside_the_open_one_and_fits(page):
    page.evaluate("Reveal.slide(3)")
    page.wait_for_function("Reveal.getIndices().h === 3")
    slide = page.locator("section.present:not(.stack)").last
    slide.locator("summary").first.click()
    first, second = (slide.locator("img").nth(i).bounding_box() for i in (0, 1))
    assert second["x"] >= first["x"] + first["width"] and second["y"] < first["y"] + first["height"] / 4
    assert slide.evaluate("s => s.scrollHeight - s.clientHeight") <= 1


def test_s_opens_the_speakers_view(page):
    with page.expect_popup() as popup:
        page.keyboard.press("s")
    popup.value.wait_for_selector(".speaker-controls-notes, #speaker-controls", state="attached")
