"""Both languages say everything, and say it in their own words."""

import inspect
import re
import string

import pytest

import nanoengine.trace
from nanoengine.viz import History, describe, explain
from nanoengine.viz.explain import _event
from nanoengine.viz.words import LABELS, SENTENCES, label, listing, sentence

KINDS = re.findall(r'case "(\w+)":', inspect.getsource(nanoengine.trace.why))
EXAMPLES = [
    {"kind": "arrive", "seq": 0, "prompt": 9},
    {"kind": "admit", "seq": 0, "blocks": 3},
    {"kind": "hit", "seq": 1, "tokens": 8, "own": False},
    {"kind": "hit", "seq": 1, "tokens": 8, "own": True},
    {"kind": "preempt", "seq": 1, "needed_by": 0, "blocks": 4, "computed": 13},
    {"kind": "preempt", "seq": 1, "needed_by": 1, "blocks": 4, "computed": 13},
    {"kind": "finish", "seq": 0, "reason": "stop", "generated": 7},
    {"kind": "finish", "seq": 0, "reason": "length", "generated": 7},
    {"kind": "abort", "seq": 2},
]
# Words that stay English in the Chinese text: terms, and the letters of sequences.
TERMS = {"token", "prompt", "prefill", "decode", "KV", "ref"}


def _fields(text):
    return {name for _, name, _, _ in string.Formatter().parse(text) if name}


def test_every_kind_of_event_of_a_trace_has_an_example_here():
    assert KINDS and set(KINDS) == {example["kind"] for example in EXAMPLES}


@pytest.mark.parametrize("tables", [LABELS, SENTENCES])
def test_both_languages_have_the_same_keys_and_fields(tables):
    assert tables["en"].keys() == tables["zh"].keys()
    for key, english in tables["en"].items():
        if key not in ("steady_decode", "steady_part"):  # the count may be said or left out
            assert _fields(tables["zh"][key]) == _fields(english), key


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: f"{e['kind']}-{e.get('reason', e.get('own', ''))}")
@pytest.mark.parametrize("lang", ["en", "zh"])
def test_every_event_has_a_sentence_with_its_numbers(eventful, example, lang):
    state = History(eventful).at(0)
    key, values = _event(state, example)
    text = sentence(lang, key, **{**values, "who": values["who"][0]})
    assert text.endswith("." if lang == "en" else "\u3002")
    for name, value in example.items():
        if isinstance(value, int) and not isinstance(value, bool) and name not in ("seq", "needed_by"):
            assert str(value) in text
    assert state.letters[example["seq"]] in text


def _english_in(chinese):
    return set(re.findall(r"[A-Za-z]{2,}", chinese)) - TERMS


@pytest.mark.parametrize("table", [LABELS["zh"], SENTENCES["zh"]])
def test_the_chinese_is_chinese(table):
    for key, text in table.items():
        assert not _english_in(re.sub(r"{\w+}", "", text)), key


@pytest.mark.parametrize("table", [LABELS["en"], SENTENCES["en"]])
def test_the_english_is_english(table):
    assert all(text.isascii() or set(text) - set(string.printable) <= set("…·×") for text in table.values())


def test_every_step_is_explained_in_both_languages(eventful, prefill_first, long_run):
    for trace in (eventful, prefill_first, long_run):
        history = History(trace)
        for i in range(len(history)):
            for state in (history.at(i), history.before(i)):
                english, chinese = explain(state, "en"), explain(state, "zh")
                assert len(english) == len(chinese) >= 1
                assert not _english_in("".join(chinese)) - set(state.letters.values())
                assert "{" not in "".join(english + chinese)


def test_chinese_punctuation_is_wide_and_english_in_between_is_not_touched():
    assert label("zh", "token_budget") == "\u7b56\u7565\uff1a\u7edf\u4e00 token \u9884\u7b97"
    assert sentence("zh", "abort", who="A").startswith("A \u88ab\u53d6\u6d88\uff0c")
    assert label("en", "key_ref") == "small number: sequences that hold it"


def test_the_reason_for_waiting_is_the_one_that_holds(eventful):
    history = History(eventful)
    for i, step in enumerate(eventful):
        said = [text for text in explain(history.at(i), "en") if " waits: " in text or "waits, though" in text]
        assert len(said) == bool(step["waiting"])
        if said and "tokens fill" in said[0]:
            need, free = map(int, re.findall(r"\d+", said[0]))
            assert free == len(step["free"]) < need
        if said and "is spent" in said[0]:
            assert sum(row["tokens"] for row in step["rows"]) == step["max_num_batched_tokens"]
        if said and "preempts" in said[0]:
            assert any(event["kind"] == "preempt" for event in step["events"])


def test_lists():
    assert listing("en", ["A", "B", "C"]) == "A, B and C"
    assert listing("zh", ["A", "B", "C"]) == "A\u3001B\u3001C"
    assert listing("en", ["A"]) == "A"
    assert listing("en", []) == "nobody"
    assert listing("en", [str(i) for i in range(10)]).endswith("7 (+2 more)")


def test_the_paragraph_holds_the_state(eventful):
    text = describe(History(eventful).at(8), "en")
    assert text.startswith("Engine, step 8 of 20. A needs a block and none is free: D")
    assert "Waiting: D and E. Running: A, B and C." in text
    assert "A decode 1, B decode 1 and C decode 1 (3 of 12 budget tokens)" in text
    assert text.endswith("KV pool: 12 in use · 0 free but cached · 0 free.")


def test_an_unknown_language_or_sentence_is_refused():
    with pytest.raises(ValueError, match="lang is 'de'"):
        label("de", "step", step=1)
    with pytest.raises(ValueError, match="no sentence for 'eaten'"):
        sentence("en", "eaten")
