"""Quiz, recall and hunt: what a click does, what is saved, and the still form for where nothing runs."""

import json
import re

import pytest

from nanoengine.course.hunt import hunt
from nanoengine.course.lesson import lesson
from nanoengine.course.quiz import quiz
from nanoengine.course.recall import recall
from nanoengine.course.text import inline, plain

FORMS = [quiz, recall, hunt]


def _saved(progress_file):
    return json.loads(progress_file.read_text(encoding="utf-8")) if progress_file.exists() else None


def _all_right(form):
    return [question.right for question in form.record.quiz]


def test_five_right_answers_pass_and_are_saved(progress_file):
    form = quiz("01")
    right = _all_right(form)
    assert [form.answer(i, chosen) for i, chosen in enumerate(right[:4])] == [True] * 4
    assert _saved(progress_file) is None  # nothing is recorded before the last question
    assert form.answer(4, right[4])
    entry = _saved(progress_file)["quiz"]["01"]
    assert (entry["right"], entry["of"], entry["passed"]) == (5, 5, True)
    assert form.score() == "5 of 5 right: passed."


@pytest.mark.parametrize(("wrong", "passed"), [(1, True), (2, False)])
def test_four_of_five_is_the_line(progress_file, wrong, passed):
    form = quiz("01")
    for i, chosen in enumerate(_all_right(form)):
        other = frozenset(range(len(form.record.quiz[i].options))) - chosen
        form.answer(i, other if i < wrong else chosen)
    assert _saved(progress_file)["quiz"]["01"]["passed"] is passed
    assert ("passed" in form.score()) is passed


def test_a_part_of_the_right_options_or_one_too_many_is_wrong():
    form = quiz("01")
    index = next(i for i, q in enumerate(form.record.quiz) if len(q.right) > 1)
    right = form.record.quiz[index].right
    extra = next(i for i in range(5) if i not in right)
    assert not form.answer(index, set(list(right)[:1]))
    assert not form.answer(index, right | {extra})
    assert form.answer(index, right)


def test_clicks_answer_lock_and_reset(progress_file):
    form = quiz("01", lang="zh")
    assert form.widget is form.widget
    first, single = form._cards[0], next(c for c in form._cards if len(c.question.right) == 1)
    first.button.click()
    assert "先选" in first.verdict.value and not form.given
    for i in first.question.right:
        first.boxes[i].value = True
    first.button.click()
    assert "答对了" in first.verdict.value
    assert first.button.disabled and all(box.disabled for box in first.boxes)
    assert all(option.reason["zh"].split("`")[0] in plain(first.why.value) for option in first.question.options)
    single.boxes[0].value = single.boxes[1].value = True  # one answer: the second tick takes the first away
    assert [box.value for box in single.boxes[:2]] == [False, True]
    form._on_again(None)
    assert not form.given and not first.button.disabled and first.why.value == "" and not first.boxes[0].value


def test_without_a_progress_file_the_quiz_says_so(monkeypatch, tmp_path):
    monkeypatch.delenv("NANOENGINE_PROGRESS")
    monkeypatch.chdir(tmp_path)
    form = quiz("01")
    for i, chosen in enumerate(_all_right(form)):
        form.answer(i, chosen)
    assert form.saved.startswith("Not saved: there is no progress file")


def test_a_damaged_progress_file_is_said_where_the_reader_looks(progress_file):
    progress_file.write_text("{", encoding="utf-8")
    sheet = recall("01")
    sheet.widget  # noqa: B018 - builds it
    sheet._on_grade("good")
    assert "was damaged" in sheet._note.value and "progress.damaged-1.json" in sheet._note.value
    assert progress_file.with_name("progress.damaged-1.json").read_text(encoding="utf-8") == "{"


def test_recall_shows_the_rubric_first_and_saves_the_grade(progress_file):
    sheet = recall("01")
    assert sheet.widget is not None
    assert sheet._grades.layout.display == "none"
    sheet._on_reveal(None)
    assert sheet._grades.layout.display is None and "excellent" in sheet._rubric.value
    sheet._on_grade("excellent")
    entry = _saved(progress_file)["recall"]["01"]
    assert (entry["level"], entry["passed"]) == ("excellent", True)
    sheet._on_grade("none")
    assert _saved(progress_file)["recall"]["01"]["passed"] is False
    with pytest.raises(ValueError, match="level is 'great'; it must be one of none, pass"):
        sheet.grade("great")


def test_the_clock_counts_down_without_a_thread():
    clock = recall("01")
    assert clock.widget is not None
    timer = clock._clock
    timer.play.value = 53  # what the page does each second
    assert timer.label.value == "2:07 left"
    timer.play.value = timer.seconds
    assert timer.label.value == "time is up: finish the sentence"
    timer.restart(30)
    assert (timer.play.value, timer.play.max, timer.bar.max, timer.play.playing) == (0, 30, 30, True)


def test_the_clock_of_a_form_that_is_shown_again_stops():
    first, second = recall("01"), recall("01")
    assert first.widget is not None
    first._clock.restart()
    assert second.widget is not None
    assert not first._clock.play.playing


def test_a_hunt_is_done_when_every_answer_was_seen(progress_file):
    form = hunt("01")
    for stop in form.record.hunt[:-1]:
        form.reveal(stop)
    assert _saved(progress_file) is None
    form.reveal(form.record.hunt[-1])
    assert _saved(progress_file)["hunt"]["01"]["stops"] == len(form.record.hunt)
    assert "admit_waiting" in form.source(form.record.hunt[0]) and "▸" in form.source(form.record.hunt[0])


@pytest.mark.parametrize("lang", ["en", "zh"])
@pytest.mark.parametrize("make", FORMS)
def test_the_still_form_holds_everything_and_is_stable(make, lang):
    live, still = make("01", lang=lang).bundles()
    assert "application/vnd.jupyter.widget-view+json" in live
    assert set(still) == {"text/html", "text/plain"}
    assert make("01", lang=lang).bundles()[1] == still
    html = still["text/html"]
    assert "<script" not in html and "<details>" in html
    assert html.count("<details>") == html.count("</details>")
    # a number of a line would make the saved notebook old with every edit of the source
    assert not re.search(r"\.py:\d", html)


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_the_still_quiz_gives_each_reason_and_pointer(lang):
    form = quiz("01", lang=lang)
    html = form.html()
    for question in form.record.quiz:
        assert inline(question.question[lang]) in html
        for option in question.options:
            assert inline(option.reason[lang]) in html


def test_how_many_answers_there_are_follows_the_question_as_print_has_it():
    assert '？<small style="white-space:nowrap">（' in quiz("06", lang="zh").html()
    assert '? <small style="white-space:nowrap">(' in quiz("06", lang="en").html()


def test_the_language_is_that_of_the_lesson(capsys):
    assert quiz("01").lang == "en"
    lesson("04", lang="zh")
    assert {make("01").lang for make in FORMS} == {"zh"}
    assert recall("01", lang="en").lang == "en"


def test_a_build_keeps_the_still_form_and_no_widget():
    import nbformat

    from nanoengine.course.notebook import normalise

    outputs = [nbformat.v4.new_output("display_data", data=bundle) for bundle in quiz("01").bundles()]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("quiz('01')", outputs=outputs)])
    normalise(notebook)
    assert [set(output.data) for output in notebook.cells[0].outputs] == [{"text/html", "text/plain"}]
