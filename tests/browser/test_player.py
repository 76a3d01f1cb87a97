"""The player in a real browser: drawn without overlaps, and driven in JupyterLab as a reader would."""

from pathlib import Path

import nbformat
import pytest

from nanoengine.viz import History, render
from tests.browser.lab import browser_page, lab_session
from tests.viz.conftest import EVENTFUL, crowd, run

SETUP = """
from tests.viz.conftest import EVENTFUL, crowd, run
from nanoengine.viz import player
small = dict(num_blocks=12, block_size=4, max_num_batched_tokens=12)
eventful = run(EVENTFUL, **small)
"""
CELLS = [
    SETUP,
    "player(eventful, lang='en')",
    "player(eventful, lang='zh', compare=run(EVENTFUL, policy='prefill_first', **small))",
    "player(eventful, lang='en', start=8, predict=True)",
    "long = dict(num_blocks=64, block_size=4, max_num_batched_tokens=64, max_num_seqs=16)\n"
    "player(run(crowd(24, 5, 60, 60), **long), start=60)",
]
# Pairs of texts that touch, and texts that leave the picture.
CLASHES = """() => [...document.querySelectorAll('svg')].flatMap(svg => {
    const {width, height} = svg.viewBox.baseVal, name = svg.querySelector('title').textContent;
    const texts = [...svg.querySelectorAll('text')].map(t => [t.textContent, t.getBBox()]);
    const out = texts.filter(([, b]) => b.x < 0 || b.y < 0 || b.x + b.width > width || b.y + b.height > height);
    const pairs = texts.flatMap(([s, a], i) => texts.slice(i + 1).filter(([, b]) =>
        Math.min(a.x + a.width, b.x + b.width) - Math.max(a.x, b.x) > 1
        && Math.min(a.y + a.height, b.y + b.height) - Math.max(a.y, b.y) > 4).map(([t]) => [name, s, t]));
    return [...out.map(([s]) => [name, s]), ...pairs];
})"""
# Milliseconds from an event until the changed picture has been painted.
WATCH = """event => {
    window.began = window.painted = null;
    const view = document.querySelectorAll('.jp-CodeCell')[4].querySelector('.widget-html svg').parentElement;
    addEventListener(event, () => { window.began ??= performance.now(); }, {capture: true, once: true});
    new MutationObserver((_, watcher) => {
        watcher.disconnect();
        requestAnimationFrame(() => requestAnimationFrame(() => { window.painted ??= performance.now(); }));
    }).observe(view, {childList: true, subtree: true});
}"""


@pytest.fixture(scope="module")
def states():
    small = {"num_blocks": 12, "block_size": 4, "max_num_batched_tokens": 12}
    many = {"num_blocks": 1000, "block_size": 16, "max_num_batched_tokens": 512, "max_num_seqs": 100}
    histories = [History(run(EVENTFUL, **small)), History(run(EVENTFUL, policy="prefill_first", **small))]
    histories.append(History(run(crowd(100, 0, 300, 40), **many)))
    shown = [h.at(i) for h in histories for i in range(0, len(h), max(1, len(h) // 7))]
    return shown + [histories[0].before(i) for i in range(0, len(histories[0]), 4)]


def test_no_two_texts_overlap_and_none_is_cut(states):
    with browser_page(1280) as page:
        for lang in ("en", "zh"):
            for width in (760, 440):
                page.set_content("".join(render(state, lang, width=width) for state in states))
                assert page.locator("svg").count() == len(states)
                assert page.evaluate(CLASHES) == []


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code) for code in CELLS])
    notebook.metadata["kernelspec"] = {"display_name": "Python 3", "language": "python", "name": "python3"}
    path = tmp_path_factory.mktemp("player") / "player.ipynb"
    nbformat.write(notebook, path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
        with lab_session(path) as session:
            session.run_all()
            session.page.wait_for_selector(".widget-html svg")
            yield session


def _cell(lab, number):
    cell = lab.page.locator(".jp-CodeCell").nth(number)
    cell.scroll_into_view_if_needed()
    return cell


def _wait_for_title(cell, text):
    cell.locator(".widget-html svg title", has_text=text).first.wait_for(state="attached", timeout=15_000)


def _handle(cell):
    return cell.locator(".widget-slider .noUi-handle").first


def test_slider_buttons_jumps_and_choice_of_sequence(lab):
    cell = _cell(lab, 1)
    _wait_for_title(cell, "step 0 of 20")
    _handle(cell).focus()
    lab.page.keyboard.press("ArrowRight")
    _wait_for_title(cell, "step 1 of 20")
    box = _handle(cell).bounding_box()
    lab.page.mouse.move(box["x"] + 5, box["y"] + 5)
    lab.page.mouse.down()
    lab.page.mouse.move(box["x"] + 900, box["y"] + 5, steps=8)
    lab.page.mouse.up()
    _wait_for_title(cell, "step 20 of 20")
    cell.locator('button[title="step back"]').click()
    _wait_for_title(cell, "step 19 of 20")
    _handle(cell).focus()
    lab.page.keyboard.press("Home")
    _wait_for_title(cell, "step 0 of 20")
    cell.locator("select", has_text="preemption").select_option(label="preemption")
    cell.locator('button[title="next"]').click()
    _wait_for_title(cell, "step 8 of 20")
    cell.locator("select", has_text="newest event").select_option(label="C")
    cell.locator("svg text", has_text="Block table of C").wait_for(timeout=5000)
    assert lab.console_errors == []


def test_a_note_beside_the_buttons_does_not_move_the_picture(lab):
    cell = _cell(lab, 1)
    _handle(cell).focus()
    lab.page.keyboard.press("End")
    _wait_for_title(cell, "step 20 of 20")
    before = cell.locator(".widget-html svg").first.bounding_box()
    cell.locator('button[title="next"]').click()
    cell.locator("text=No more of these.").wait_for()
    assert cell.locator(".widget-html svg").first.bounding_box() == before


def test_play_runs_by_itself(lab):
    cell = _cell(lab, 1)
    _handle(cell).focus()
    lab.page.keyboard.press("Home")
    _wait_for_title(cell, "step 0 of 20")
    cell.locator("select", has_text="4×").select_option(label="4×")
    cell.locator('button[title="play"]').click()
    _wait_for_title(cell, "step 20 of 20")
    assert lab.console_errors == []


# Of each thing that can be clicked or typed into, and is seen: what a screen reader calls it.
NAMES = """cell => [...cell.querySelectorAll('.jp-OutputArea button, .jp-OutputArea input, .jp-OutputArea select')]
    .filter(e => e.offsetParent !== null)
    .map(e => e.title || e.getAttribute('aria-label') || e.labels?.[0]?.textContent || e.textContent.trim())"""


@pytest.mark.parametrize("number", [1, 2])
def test_every_control_has_a_name(lab, number):
    names = _cell(lab, number).evaluate(NAMES)
    assert len(names) >= 8 and all(names), names


def test_a_cell_that_is_run_again_leaves_no_timer_behind(lab):
    cell = _cell(lab, 1)
    cell.locator("select", has_text="1×").select_option(label="1×")
    lab.page.evaluate(
        "() => { const real = setTimeout; window.ticks = 0;"
        " window.setTimeout = (f, ms, ...more) => { window.ticks += ms === 800; return real(f, ms, ...more); }; }"
    )
    cell.locator('button[title="play"]').click()
    lab.page.wait_for_function("window.ticks >= 2", timeout=15_000)
    cell.locator(".jp-InputArea-editor").click()
    lab.page.keyboard.press("Control+Enter")
    _wait_for_title(cell, "step 0 of 20")
    lab.page.wait_for_timeout(2000)
    lab.page.evaluate("() => { window.ticks = 0; }")
    lab.page.wait_for_timeout(2500)
    assert lab.page.evaluate("window.ticks") == 0
    _wait_for_title(cell, "step 0 of 20")


def test_two_runs_move_together(lab):
    cell = _cell(lab, 2)
    _handle(cell).focus()
    lab.page.keyboard.press("End")
    _wait_for_title(cell, "22")
    titles = cell.locator(".widget-html svg title").all_text_contents()
    assert len(titles) == 2 and "20" in titles[0] and "22" in titles[1]


def test_predict_then_reveal(lab):
    cell = _cell(lab, 3)
    cell.locator("svg text", has_text="who runs next").wait_for()
    cell.locator("button", has_text="reveal").click()
    _wait_for_title(cell, "Engine, step 8 of 20")
    assert cell.locator("svg text", has_text="who runs next").count() == 0


def test_the_stills_are_hidden_while_the_player_lives(lab):
    images = _cell(lab, 1).locator("img")
    assert images.count() == 3 and not images.first.is_visible()


@pytest.mark.parametrize("event", ["keydown", "click"])
def test_a_step_soon_is_on_the_screen(lab, event):
    """250 ms on an idle machine is the aim (measured: 64-134 ms); this only notices a player that has become slow."""
    cell, took = _cell(lab, 4), []
    for _ in range(9):
        _handle(cell).focus()
        lab.page.evaluate(WATCH, event)
        if event == "keydown":
            lab.page.keyboard.press("ArrowRight")
        else:
            cell.locator('button[title="step forward"]').click()
        lab.page.wait_for_function("window.painted !== null", timeout=5000)
        took.append(lab.page.evaluate("window.painted - window.began"))
    # Neither the median nor the aim: other tests may run on this machine's cores.
    assert sorted(took)[2] <= 1000, took
    assert lab.console_errors == []
