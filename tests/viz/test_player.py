"""The player without a browser: what its widgets hold after each action. tests/browser drives it in JupyterLab."""

import re

import pytest
from IPython.core.formatters import format_display_data
from ipywidgets import HTML, BoundedIntText, Button, Checkbox, Dropdown, IntSlider, Output, Play, ToggleButton

from nanoengine.viz import History, describe, keyframes, player, render

from .test_export import images


def _title(svg):
    return re.search(r"<title[^>]*>([^<]*)", svg)[1]


def _walk(widget):
    yield widget
    for child in getattr(widget, "children", ()):
        yield from _walk(child)


def _shown(view):
    return _title(view.views[0].value)


def test_it_is_made_of_a_slider_a_play_button_and_html_without_output_widgets(eventful):
    widgets = list(_walk(player(eventful, lang="en").widget))
    for wanted in (IntSlider, Play, HTML):
        assert any(isinstance(widget, wanted) for widget in widgets)
    assert not any(isinstance(widget, Output) for widget in widgets)


def test_the_slider_chooses_the_step(eventful):
    view = player(eventful, lang="en")
    for step in (0, 8, 20):
        view.slider.value = step
        assert _shown(view) == f"Engine, step {step} of 20"


def test_buttons_step_and_stop_at_the_ends(eventful):
    view = player(eventful, lang="en", start=19)
    view.forward.click()
    assert view.step == 20 and view.forward.disabled
    view.forward.click()
    assert view.step == 20
    view.back.click()
    assert view.step == 19 and not view.forward.disabled
    view.step = 0
    assert view.back.disabled


def test_jumps_go_to_every_event_in_turn_and_say_when_there_is_none(eventful):
    view = player(eventful, lang="en")
    view.kind.value = "preempt"
    seen = []
    for _ in range(4):
        view.go.click()
        seen.append(view.step)
    preemptions = History(eventful).jumps("preempt")
    assert seen == [*preemptions, preemptions[-1]]
    assert view.note.value == "No more of these."
    assert view.jump("preempt", -1) and view.step == preemptions[-2]
    assert view.note.value == ""


def test_speed_sets_the_interval(eventful):
    view = player(eventful, lang="en")
    view.speed.label = "4×"
    assert view.play.interval == 200


def test_the_block_table_follows_the_choice(eventful):
    view = player(eventful, lang="en", start=8)
    assert "Block table of A" in view.views[0].value
    view.sequence.value = "C"
    assert "Block table of C" in view.views[0].value


def test_predict_hides_the_step_until_it_is_revealed(eventful):
    view = player(eventful, lang="en", start=8, predict=True)
    assert "who runs next" in view.views[0].value and "gives back" not in view.views[0].value
    view.reveal.click()
    assert "gives back" in view.views[0].value and view.reveal.disabled
    view.forward.click()
    assert "who runs next" in view.views[0].value and not view.reveal.disabled
    view.predict.value = False
    assert "who runs next" not in view.views[0].value


def test_two_runs_move_together_at_one_scale(eventful, prefill_first):
    view = player(eventful, lang="en", compare=prefill_first, labels=("budget", "phases"))
    view.step = 22
    assert [_title(html.value) for html in view.views] == ["Engine, step 20 of 20", "Engine, step 22 of 22"]
    heights = {re.search(r' height="(\d+)"', html.value)[1] for html in view.views}
    assert len(heights) == 1
    assert "phases" in str([widget.value for widget in _walk(view.widget) if isinstance(widget, HTML)])


def test_ids_of_pictures_on_one_page_differ(eventful):
    views = [player(eventful, lang="en").views[0], *player(eventful, lang="en", compare=eventful).views]
    ids = [re.search(r' id="(ne[\w-]+)"', html.value)[1] for html in views]
    assert len(set(ids)) == 3


def test_the_cell_holds_the_widget_and_its_stills(eventful):
    live, still = player(eventful, lang="zh").bundles()
    assert set(live) == {"application/vnd.jupyter.widget-view+json", "text/plain"}
    assert live["text/plain"] == describe(History(eventful).at(0), "zh")
    assert set(still) == {"text/html", "text/plain"}
    shown = [svg for svg, _ in images(still["text/html"])]
    assert sorted(shown) == sorted(render(History(eventful).at(i), "zh") for i in (0, 8, 20))
    assert _title(shown[0]).startswith("\u5f15\u64ce\u7b2c 8 "), "the most telling picture is open, and first"
    assert still["text/html"].count("<details>") == 2
    assert still["text/plain"] == keyframes(eventful, lang="zh").text()


def test_the_stills_are_hidden_only_while_the_widget_is_there(eventful):
    view = player(eventful, lang="en")
    _, still = view.bundles()
    name = re.match(r'<div class="([\w-]+)">', still["text/html"])[1]
    assert view.note_style.value == f"<style>.{name}{{display:none}}</style>"
    assert "<style" not in still["text/html"]


def test_a_second_build_gives_the_same_stills(eventful):
    assert player(eventful, lang="en").bundles()[1] == player(eventful, lang="en").bundles()[1]


def test_it_shows_both_outputs_when_it_is_a_cells_value(eventful, monkeypatch):
    shown = []
    monkeypatch.setattr("IPython.display.display", lambda bundle, raw: shown.append(bundle))
    format_display_data(player(eventful, lang="en"))
    assert [sorted(bundle)[0] for bundle in shown] == ["application/vnd.jupyter.widget-view+json", "text/html"]


def test_without_a_language_it_speaks_the_lessons(eventful, monkeypatch):
    monkeypatch.setattr("nanoengine.language.current", "zh")
    assert player(eventful).lang == "zh"
    monkeypatch.setattr("nanoengine.language.current", "en")
    assert player(eventful).lang == "en"


def test_wrong_arguments_are_refused(eventful):
    with pytest.raises(IndexError, match="start is 21, and the run has 21 steps"):
        player(eventful, start=21)
    with pytest.raises(ValueError, match="choose some of"):
        player(eventful, panes=["batches"])
    with pytest.raises(ValueError, match="lang is"):
        player(eventful, lang="fr")
    with pytest.raises(ValueError, match="the trace is empty"):
        player([])


def _names(widget):
    return [getattr(w, "tooltip", "") or getattr(w, "description", "") for w in _walk(widget) if _is_control(w)]


def _is_control(widget):
    return isinstance(widget, (Button, ToggleButton, Checkbox, Dropdown, BoundedIntText))


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_each_control_has_a_name_and_the_nameless_buttons_of_play_are_not_shown(eventful, lang):
    view = player(eventful, lang=lang)
    assert len(_names(view.widget)) == 10 and all(_names(view.widget))
    assert view.play.layout.display == "none"
    assert any(isinstance(widget, BoundedIntText) for widget in _walk(view.widget))


def test_play_is_a_button_that_says_what_it_does(eventful):
    view = player(eventful, lang="en", start=3)
    toggle = next(widget for widget in _walk(view.widget) if isinstance(widget, ToggleButton))
    assert (toggle.tooltip, toggle.icon) == ("play", "play")
    view.play.playing = True
    assert (toggle.tooltip, toggle.icon) == ("pause", "pause")
    view.play.playing = False
    assert (toggle.tooltip, toggle.icon) == ("play", "play")


def test_one_player_plays_a_new_one_and_one_that_is_started_stop_the_others(eventful):
    first = player(eventful, lang="en")
    first.play.playing = True
    second = player(eventful, lang="en")  # as when the cell is run again
    assert not first.play.playing
    second.play.playing = True
    first.play.playing = True
    assert first.play.playing and not second.play.playing


def test_the_names_of_two_runs_are_text(eventful):
    hostile = "<img src=x onerror=alert(1)>"
    view = player(eventful, compare=eventful, labels=(hostile, "x"), lang="en")
    shown = "".join(widget.value for widget in _walk(view.widget) if isinstance(widget, HTML))
    assert hostile not in shown and "&lt;img" in shown
    assert hostile not in view.bundles()[1]["text/html"]
