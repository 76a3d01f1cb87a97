"""The SVG: whole, legible, the same for the same state, quick."""

import copy
import re
import time
import xml.etree.ElementTree as ET

import pytest

from nanoengine.trace import Trace
from nanoengine.viz import PANES, History, explain, render, snapshot
from nanoengine.viz.svg import NEUTRAL, fit, text_width, wrap

SVG = "{http://www.w3.org/2000/svg}"
LANGS = ("en", "zh")


def _texts(root):
    return list(root.iter(f"{SVG}text"))


def _all_pictures(*traces):
    for trace in traces:
        history = History(trace)
        for i in range(0, len(history), 1 if len(history) < 40 else 29):
            for lang in LANGS:
                for state in (history.at(i), history.before(i)):
                    yield state, render(state, lang)


@pytest.fixture(scope="module")
def pictures(eventful, prefill_first, long_run, huge):
    return list(_all_pictures(eventful, prefill_first, long_run, huge))


def test_same_in_same_out(eventful):
    state = snapshot(eventful, 8)
    kept = copy.deepcopy(state)
    assert render(state, "zh") == render(state, "zh") == render(kept, "zh")
    assert state == kept


def test_a_saved_trace_gives_the_same_picture(eventful, tmp_path):
    loaded = Trace.load(eventful.save(tmp_path / "run.jsonl"))
    assert render(snapshot(loaded, 8)) == render(snapshot(eventful, 8))


def test_times_do_not_show(eventful):
    steps = copy.deepcopy(eventful.steps)
    for step in steps:
        step["seconds"] = {"at": 1.0, "total": 2.0}
    assert render(snapshot(steps, 8)) == render(snapshot(eventful, 8))


def test_each_is_well_formed_and_stands_alone(pictures):
    for _, svg in pictures:
        root = ET.fromstring(svg)
        assert root.tag == f"{SVG}svg" and root.get("role") == "img"
        assert "http" not in svg.replace("http://www.w3.org/2000/svg", "")
        assert "<script" not in svg and "<image" not in svg


def test_title_and_description_are_named_and_in_the_language(eventful):
    for lang, word in (("en", "Waiting: "), ("zh", "\u7b49\u5f85\uff1a")):
        root = ET.fromstring(render(snapshot(eventful, 8), lang))
        by_id = {element.get("id"): element for element in root.iter() if element.get("id")}
        title, desc = (by_id[name] for name in root.get("aria-labelledby").split())
        assert (title.tag, desc.tag) == (f"{SVG}title", f"{SVG}desc")
        assert "8" in title.text and word in desc.text


def test_ids_are_unique_within_and_between_pictures(eventful):
    seen = set()
    for i in range(len(eventful)):
        for lang in LANGS:
            for uid in ("left", "right"):
                svg = render(snapshot(eventful, i), lang, uid=uid)
                ids = re.findall(r' id="([^"]+)"', svg)
                assert len(ids) == len(set(ids)) and not seen & set(ids)
                seen |= set(ids)
                assert set(re.findall(r"url\(#([^)]+)\)", svg)) <= set(ids)


def test_no_text_is_smaller_than_11_px_or_outside(pictures):
    for state, svg in pictures:
        root = ET.fromstring(svg)
        width = float(root.get("width"))
        assert float(root.get("font-size")) >= 11
        for text in _texts(root):
            size = float(text.get("font-size", root.get("font-size")))
            assert size >= 11, text.text
            w = text_width(text.text, size)
            left = float(text.get("x")) - {"middle": w / 2, "end": w}.get(text.get("text-anchor"), 0)
            assert left >= 0 and left + w <= width, (state.index, text.text)
            assert 0 < float(text.get("y")) < float(root.get("height"))


def test_every_letter_of_the_state_is_shown(eventful, prefill_first):
    for trace in (eventful, prefill_first):
        for i in range(len(trace)):
            shown = {text.text for text in _texts(ET.fromstring(render(snapshot(trace, i))))}
            assert set("ABCDE") <= shown


def test_the_pool_shows_owner_and_ref_count_of_each_block(eventful):
    letters = History(eventful).letters
    for i, step in enumerate(eventful):
        wrote = snapshot(eventful, i).wrote
        texts = [text.text for text in _texts(ET.fromstring(render(snapshot(eventful, i), panes=["pool"])))]
        expected = []
        for block in range(12):
            names = "".join(letters[seq] for seq, table in sorted(step["block_tables"].items()) if block in table)
            whose = [letters[wrote[block]]] if block in step["cached_free"] else []
            expected += [str(block), str(step["ref_counts"][block]), names] if names else [str(block), *whose]
        start = texts.index("KV pool") + 2
        assert texts[start : start + len(expected)] == expected


def test_shared_and_cached_blocks_are_marked_by_more_than_colour(eventful):
    for i, step in enumerate(eventful):
        svg = render(snapshot(eventful, i), panes=["pool"])
        # One more of each stands in the key.
        assert len(re.findall(r'fill="url\(#\w+-hatch\)"', svg)) == sum(n > 1 for n in step["ref_counts"]) + 1
        assert svg.count('stroke-dasharray="4 3"') == len(step["cached_free"])


def test_the_block_table_is_the_chosen_sequences(eventful):
    step = eventful[8]
    for name, seq in (("A", 0), ("C", 2)):
        root = ET.fromstring(render(snapshot(eventful, 8), panes=["table"], selected=name))
        texts = [text.text for text in _texts(root)]
        assert f"Block table of {name}" in texts
        table = step["block_tables"][seq]
        start = texts.index("block") + 1
        assert texts[start : start + 2 * len(table)] == [str(v) for pair in enumerate(table) for v in pair]
    assert render(snapshot(eventful, 8), selected="C") == render(snapshot(eventful, 8), selected=2)


def test_asking_gives_nothing_away(eventful):
    history = History(eventful)
    for i in range(len(history)):
        svg = render(history.before(i))
        assert "who runs next" in svg
        told = explain(history.at(i))
        assert told and not any(sentence in svg for sentence in told)
        root = ET.fromstring(svg)
        assert not [t.text for t in _texts(root) if re.match(r"(prefill|decode) \d", t.text)]


def test_a_crowd_is_summarised_and_what_is_left_out_is_said(huge):
    history = History(huge)
    full = next(i for i, step in enumerate(huge) if len(step["running"]) > 50)
    svg = render(history.at(full))
    assert "ref counts are left out" in svg and re.search(r"Not drawn: \d+ more", svg) and re.search(r"\+\d+<", svg)
    assert len(svg) < 120_000


@pytest.mark.parametrize("theme", ["light", "dark", "auto"])
def test_themes(eventful, theme):
    svg = render(snapshot(eventful, 8), theme=theme)
    assert ("<style>" in svg) == (theme == "auto")
    attributes = set(re.findall(r'(?:fill|stroke)="(#\w{6})"', svg))
    for light, dark in NEUTRAL.values():
        # Without its style sheet the picture is the light one.
        assert (dark if theme != "dark" else light) not in attributes
    if theme == "auto":
        assert "prefers-color-scheme:dark" in svg and "[data-jp-theme-light=false]" in svg


def _contrast(one, other):
    def luminance(colour):
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        r, g, b = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", [0, 1])
def test_text_has_contrast_in_both_themes(theme):
    for text in ("ink", "muted"):
        for ground in ("bg", "panel"):
            assert _contrast(NEUTRAL[text][theme], NEUTRAL[ground][theme]) >= 4.5


def test_it_is_quick(long_run, huge):
    for trace, limit in ((long_run, 0.05), (huge, 0.15)):
        history = History(trace)
        took = []
        for i in range(0, len(history), 5):
            start = time.perf_counter()
            render(history.at(i), "zh")
            took.append(time.perf_counter() - start)
        # The median: a busy machine may stop us once.
        assert sorted(took)[len(took) // 2] < limit


def test_what_it_cannot_draw_is_refused(eventful):
    state = snapshot(eventful, 0)
    for arguments, message in (
        ({"panes": ["queue"]}, "choose some of why, queues"),
        ({"panes": "pool"}, "choose some of"),
        ({"panes": []}, "choose some of"),
        ({"theme": "blue"}, "known: auto, light, dark"),
        ({"selected": "Z"}, "this trace has A, B, C, D, E"),
        ({"width": 300}, "at least 420 px"),
        ({"lang": "fr"}, "lang is 'fr'"),
    ):
        with pytest.raises(ValueError, match=message):
            render(state, **arguments)


def test_each_pane_can_stand_alone(eventful):
    for pane in PANES:
        ET.fromstring(render(snapshot(eventful, 8), "zh", panes=[pane], width=440))


def test_lines_break_at_blanks_and_between_chinese_characters():
    assert wrap("aaa bbb ccc", text_width("aaa bbb", 12) + 1) == ["aaa bbb", "ccc"]
    chinese = "\u6700\u665a\u8fdb\u6765\u7684 D \u8ba9\u8def\uff0c\u4ea4\u56de"
    lines = wrap(chinese, text_width(chinese, 12) / 2)
    assert "".join(lines).replace(" ", "") == chinese.replace(" ", "")
    assert not any(line.startswith("\uff0c") for line in lines)
    assert fit("abcdefgh", text_width("abcd…", 12)) == "abcd…"
