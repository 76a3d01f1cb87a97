"""Interview topics only become fewer that are open; cited symbols of other engines are whole."""

import re

import pytest

from nanoengine.course.lesson import NUMBERS
from nanoengine.course.manifest import manifest, missing_symbols
from nanoengine.course.record import SHORT_LIMIT, load_all
from nanoengine.course.text import has_han, spoken_length
from nanoengine.course.topics import most_open, open_topics, topics

FIRST_COUNT = 75  # topics gathered when the list was made; it may grow


def test_the_list_of_open_topics_is_as_short_as_was_promised():
    still = open_topics(load_all())
    listing = "\n".join(f"  {topic.id} (lesson {topic.lesson})" for topic in still)
    assert len(still) <= most_open(), f"open topics:\n{listing}"
    assert len(still) == most_open(), f"{most_open()} in topics.yaml can be lowered to {len(still)}"


def test_no_topic_was_lost_and_each_has_a_home():
    assert len(topics()) >= FIRST_COUNT
    assert {topic.lesson for topic in topics().values() if topic.lesson} <= set(NUMBERS)


@pytest.mark.parametrize("topic", [t for t in topics().values() if t.answer], ids=lambda t: t.id)
def test_an_answer_out_of_scope_can_be_said_in_30_seconds_in_both_languages(topic):
    assert 20 <= spoken_length(topic.answer.en) <= SHORT_LIMIT[0]
    assert 30 <= spoken_length(topic.answer.zh) <= SHORT_LIMIT[1]
    assert has_han(topic.answer.zh) and has_han(topic.asked.zh) and not has_han(topic.answer.en + topic.asked.en)


def test_a_card_answers_a_topic_in_the_lesson_that_the_list_names():
    homes = {topic.id: topic.lesson for topic in topics().values()}
    wrong = [(c.key, t) for r in load_all() for c in r.cards for t in c.topics if homes[t] != c.lesson]
    assert wrong == []


def test_versions_are_pinned_and_facts_are_in_both_languages():
    assert {(c.engine, c.version) for c in manifest().values()} == {("nano-vllm", "bb823b3"), ("vLLM", "v0.24.0")}
    for cited in manifest().values():
        assert re.fullmatch(r"(nanovllm|vllm)/[\w/]+\.py:[A-Z]\w+(\.\w+)?", cited.at)
        assert has_han(cited.fact.zh) and not has_han(cited.fact.en)


def test_a_symbol_that_a_new_version_lost_is_found(tmp_path):
    files = {}
    for at in manifest():
        file, _, symbol = at.partition(":")
        if file.startswith("vllm/"):
            files.setdefault(file, {}).setdefault(symbol.partition(".")[0], []).append(symbol.partition(".")[2])
    for file, classes in files.items():
        path = tmp_path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        methods = {c: "".join(f"    def {m}(self): ...\n" for m in ms if m) for c, ms in classes.items()}
        body = [f"class {c}:\n    pass\n{text}" for c, text in methods.items()]
        path.write_text("\n".join(body), encoding="utf-8")
    assert missing_symbols(tmp_path) == []
    core = tmp_path / "vllm/v1/engine/core.py"
    core.write_text(core.read_text(encoding="utf-8").replace("def step(", "def turn("), encoding="utf-8")
    gone = "vllm/v1/core/kv_cache_manager.py"
    (tmp_path / gone).unlink()
    cited_there = [at for at in manifest() if at.startswith(gone)]
    assert f"{gone}:KVCacheManager.allocate_slots" in cited_there
    assert missing_symbols(tmp_path) == ["vllm/v1/engine/core.py:EngineCore.step", *cited_there]
