"""Cards: the order of asking, the schedule in the progress file, Anki's ids, the mock interview."""

import json
import sqlite3
import zipfile
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from zoneinfo import ZoneInfo

import pytest

from nanoengine.course import progress
from nanoengine.course.cards import cards
from nanoengine.course.deck import DECK_IDS, Schedule, anki_notes, export_anki, span
from nanoengine.course.due import is_due
from nanoengine.course.interview import CARD_SECONDS, Asked, Interview, draw, interview, run_interview, summary
from nanoengine.course.record import load, load_all
from nanoengine.course.text import Text, bare
from nanoengine.course.topics import topics

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
DECK = load("01").cards


def test_good_answers_move_a_card_away_and_lost_ones_bring_it_back():
    schedule, key = Schedule(), DECK[0].key
    due, now = [], NOW
    for _ in range(4):
        now = datetime.fromisoformat(schedule.review(key, 3, now)["due"])
        due.append(now)
    gaps = [b - a for a, b in zip([NOW, *due], due, strict=False)]
    assert gaps == sorted(gaps) and gaps[0] == timedelta(minutes=10) and gaps[-1] > timedelta(days=7)
    assert datetime.fromisoformat(schedule.review(key, 1, now)["due"]) - now == timedelta(minutes=10)


def test_due_cards_come_first_then_new_ones_then_those_of_later():
    schedule = Schedule()
    schedule.review(DECK[0].key, 4, NOW - timedelta(hours=1))  # easy: days ahead
    schedule.review(DECK[2].key, 1, NOW - timedelta(hours=1))  # lost: was due a minute later
    assert [card.id for card in schedule.order(DECK, NOW)] == [DECK[i].id for i in (2, 1, 3, 0)]
    assert [schedule.is_due(card, NOW) for card in DECK] == [False, True, True, True]


@pytest.mark.parametrize("zone", [ZoneInfo("UTC"), timezone(timedelta(hours=8)), ZoneInfo("America/New_York")])
def test_a_review_may_be_told_in_any_zone(zone):
    there, here = Schedule(), Schedule()
    kept = there.review(DECK[0].key, 3, NOW.astimezone(zone))
    assert kept == here.review(DECK[0].key, 3, NOW)
    assert there.is_due(DECK[0], (NOW + timedelta(minutes=10)).astimezone(zone))
    assert not there.is_due(DECK[0], (NOW + timedelta(minutes=9)).astimezone(zone))


def test_now_without_a_zone_is_local_time():
    there, here = Schedule(), Schedule()
    local = NOW.astimezone().replace(tzinfo=None)
    assert there.review(DECK[0].key, 3, local) == here.review(DECK[0].key, 3, NOW)
    assert there.order(DECK, local) == here.order(DECK, NOW)


def test_a_card_in_review_is_due_on_its_day_one_that_is_learned_at_its_minute():
    east = timezone(timedelta(hours=8))
    due = datetime(2026, 1, 9, 20, tzinfo=east)
    entry = {"state": 2, "due": due.astimezone(UTC).isoformat()}
    assert is_due(entry, datetime(2026, 1, 9, 0, 1, tzinfo=east))
    assert is_due(entry, datetime(2026, 1, 9, 8, tzinfo=east))
    assert not is_due(entry, datetime(2026, 1, 8, 23, 59, tzinfo=east))
    assert not is_due(entry, datetime(2026, 1, 8, 16, tzinfo=UTC) - timedelta(hours=20))
    assert not is_due({**entry, "state": 1}, datetime(2026, 1, 9, 19, 59, tzinfo=east))
    assert is_due({**entry, "state": 1}, due)


@pytest.mark.parametrize(
    "entry",
    [{}, {"due": "2025-01-01T10:00:00"}, {"due": "soon", "state": 2}, {"due": None, "reviews": None},
     {"due": "2025-01-01T10:00:00", "state": 2, "step": None, "stability": 3.0, "difficulty": 5.0,
      "last_review": "2024-12-30T10:00:00"},
     {"due": "2025-01-01T10:00:00", "state": 2, "stability": None}, {"due": "2025-01-01T10:00:00", "state": 9}],
)  # fmt: skip
def test_a_card_of_an_older_version_is_due_and_can_be_graded(progress_file, entry):
    progress.save(progress_file, {**progress.empty(), "cards": {DECK[0].key: entry}})
    form = cards("01")
    assert form.start() is DECK[0] and form.schedule.is_due(DECK[0])
    assert "Saved." in form.grade(3)
    assert form.schedule.due(DECK[0].key) > datetime.now(UTC)


def test_the_schedule_lives_in_the_progress_file(progress_file):
    form = cards("01")
    form.start()
    assert "Saved." in form.grade(4)
    saved = json.loads(progress_file.read_text(encoding="utf-8"))["cards"]
    assert list(saved) == [DECK[0].key] and saved[DECK[0].key]["reviews"] == 1
    again = cards("01")
    assert again.start() is DECK[1]  # another kernel: the first is not due for days
    again.card = DECK[0]
    again.grade(3)
    assert json.loads(progress_file.read_text(encoding="utf-8"))["cards"][DECK[0].key]["reviews"] == 2


def test_without_a_file_the_schedule_lasts_as_long_as_the_widget(monkeypatch, tmp_path):
    monkeypatch.delenv("NANOENGINE_PROGRESS")
    monkeypatch.chdir(tmp_path)
    form = cards("01")
    assert form.start() is DECK[0]
    assert "Not saved" in form.grade(3)
    assert form.schedule.order(form.deck)[0] is DECK[1]


def test_a_card_is_unfolded_step_by_step(progress_file):
    form = cards("01", lang="zh")
    assert form.widget is not None
    short, long, follow = form._steps
    assert [button.disabled for button in form._steps] == [False, True, True]
    assert form._grades.layout.display == "none" and form._clock.seconds == 30
    short.click()
    assert "循环里就三件事" in form._short.value and form._clock.seconds == 180 and form._clock.play.playing
    long.click()
    follow.click()
    assert "接着会问" in form._follow.value and "打住" in form._follow.value
    form._on_grade(3)
    assert "10 分钟后再复习。 已保存。" in form._note.value
    form._on_next(None)
    assert form.card is DECK[1] and form._short.value == "" and form._clock.seconds == 30
    for _ in DECK[1:]:
        form._on_grade(4)
        form._on_next(None)
    assert "现在没有要复习的" in form._note.value


@pytest.mark.parametrize(("minutes", "words"), [(0.2, "1 min"), (59, "59 min"), (90, "2 h"), (60 * 24 * 9, "9 d")])
def test_a_time_ahead_is_said_in_its_largest_unit(minutes, words):
    assert span(timedelta(minutes=minutes), "en") == words


def _notes_of(path):
    with zipfile.ZipFile(path) as archive:
        (path.parent / "x.db").write_bytes(archive.read("collection.anki2"))
    with sqlite3.connect(path.parent / "x.db") as db:
        return dict(db.execute("select guid, flds from notes")), {r[0] for r in db.execute("select did from cards")}


def test_anki_ids_stay_when_a_text_changes(tmp_path):
    record = load("01")
    number = export_anki(tmp_path / "a.apkg", lang="en")
    assert number == sum(len(r.cards) for r in load_all()) + sum(t.answer is not None for t in topics().values())
    edited = replace(record, cards=(replace(DECK[0], short=Text("New.", "新。")), *DECK[1:]))
    others = [other for other in load_all() if other.lesson != record.lesson]
    export_anki(tmp_path / "b.apkg", lang="en", records=[edited, *others])
    before, decks = _notes_of(tmp_path / "a.apkg")
    after, decks_after = _notes_of(tmp_path / "b.apkg")
    assert before.keys() == after.keys() and decks == decks_after == {DECK_IDS["en"]}
    assert sum(before[guid] != after[guid] for guid in before) == 1
    export_anki(tmp_path / "c.apkg", lang="zh")
    chinese, _ = _notes_of(tmp_path / "c.apkg")
    assert len(chinese) == number and not chinese.keys() & before.keys()


def test_an_anki_note_holds_the_whole_card():
    notes = {key: fields for key, fields, _ in anki_notes("zh", [load("01")])}
    fields = notes["01/kv-ledger"]
    assert "一个 token 的 KV" in fields[0] and "112 KiB" in fields[1] and "91%" in fields[2] and "fp8" in fields[3]
    assert notes["topic/multi-lora"][2:] == ["", "", "", "-"]


def test_a_wrong_ending_is_refused(tmp_path):
    with pytest.raises(ValueError, match="an Anki package ends in .apkg"):
        export_anki(tmp_path / "cards.txt")


# the mock interview


def _deck(lessons):
    return [replace(card, lesson=no) for no in lessons for card in DECK]


def test_a_set_fills_the_time_and_no_lesson_comes_twice_too_early():
    assert len(draw(_deck(["01", "02", "03"]), 15, seed=1)) == 15 * 60 // CARD_SECONDS == 4
    for seed in range(20):
        asked = [item.card.lesson for item in draw(_deck(["01", "02", "03"]), 15, seed=seed)]
        assert set(asked[:3]) == {"01", "02", "03"}
    assert draw(DECK, 15, seed=3) == draw(list(reversed(DECK)), 15, seed=3)
    assert len({item.card.key for item in draw(DECK, 60, seed=0)}) == len(DECK)


def test_too_little_time_and_no_cards_are_refused():
    with pytest.raises(ValueError, match="minutes is 3; one question needs 4"):
        draw(DECK, 3)
    with pytest.raises(ValueError, match="no interview cards"):
        draw([], 15)


def _terminal(typed, seconds, **settings):
    said, answers, clock = [], iter(typed), iter(seconds)

    def read(prompt):
        said.append(prompt)
        value = next(answers, None)
        if value is None:
            raise EOFError
        return value

    done = run_interview(8, seed=1, read=read, write=said.append, now=lambda: next(clock), **settings)
    return done, "\n".join(said)


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_the_terminal_interview_times_grades_and_closes_with_the_rubric(lang):
    done, said = _terminal(["", "", "9", "4", "", "", "2"], [0, 100, 200, 200 + CARD_SECONDS + 1], lang=lang)
    assert [(item.seconds, item.grade, item.over) for item in done] == [(100, 4, False), (CARD_SECONDS + 1, 2, True)]
    for item in done:
        for text in (item.card.question, item.follow_up.question, item.card.short, item.card.stop):
            assert bare(text[lang]) in said
    assert "**" not in said and "`" not in said
    assert {"en": "2 questions, 5:26, mean grade 3.0 of 4, 1 over time.", "zh": "平均 3.0/4，1 道超时"}[lang] in said
    assert {"en": "Type 1, 2, 3 or 4.", "zh": "请输入 1、2、3 或 4。"}[lang] in said
    assert said.rstrip().endswith({"en": "for the next question.", "zh": "等人追问。"}[lang])


def test_ending_early_still_sums_up():
    done, said = _terminal(["", "", "3"], [0, 60, 70])
    assert len(done) == 1
    assert "Ended early." in said and "1 question, 1:00" in said and "Rubric" in said
    assert _terminal([], [0])[0] == []


def test_few_cards_are_said_to_be_few():
    said = []
    run_interview(60, deck=DECK[:1], read=lambda _: "3", write=said.append, now=lambda: 0.0)
    assert "Only 1 card so far" in said[0]


def test_the_interview_in_a_notebook_goes_the_same_way():
    seconds = iter([0.0, 50.0, 60.0, 70.0])
    form = Interview(draw(DECK, 8, seed=1), 8, "en", now=lambda: next(seconds))
    assert form.widget is not None
    form._on_go(None)  # begin
    for grade, took in ((2, 50.0), (4, 10.0)):
        item = form.current
        assert item.card.question["en"].split("`")[0] in form._head.value and form._answer.value == ""
        form._on_go(None)
        assert "Follow-up" in form._answer.value
        form._on_go(None)
        assert "You took 0:" in form._answer.value and form._grades.layout.display is None
        form._on_grade(grade)
        assert form.done[-1] == Asked(item.card, item.follow_up, took, grade)
    assert "mean grade 3.0 of 4" in form._head.value and "<li><strong>Answer first." in form._head.value
    assert summary([], "en") == "Ended early."
    assert "<details" not in interview(lang="zh").html()
