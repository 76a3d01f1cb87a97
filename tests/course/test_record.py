"""The YAML beside a lesson: what is in the course is right, and what breaks the format is named."""

import copy

import pytest
import yaml

from nanoengine.course.pointers import record_problems, reference_problems, sections
from nanoengine.course.record import RecordError, course_root, load, load_all, read_record, record_paths

SRC = course_root() / "lessons" / "src"
GOOD = yaml.safe_load((SRC / "01_ninety_lines.yaml").read_text(encoding="utf-8"))


def _write(tmp_path, data):
    src = tmp_path / "lessons" / "src"
    src.mkdir(parents=True, exist_ok=True)
    (src / "01_ninety_lines.py").write_text((SRC / "01_ninety_lines.py").read_text(encoding="utf-8"), encoding="utf-8")
    path = src / "01_ninety_lines.yaml"
    path.write_text(yaml.safe_dump(data, allow_unicode=True), encoding="utf-8")
    return path


@pytest.fixture
def data():
    return copy.deepcopy(GOOD)


def test_every_lesson_source_has_its_record_and_the_other_way_round():
    assert [p.stem for p in record_paths()] == sorted(p.stem for p in SRC.glob("[0-9][0-9]_*.py"))


@pytest.mark.parametrize("path", record_paths(), ids=lambda p: p.stem)
def test_the_courses_records_are_whole_and_point_at_what_exists(path):
    record = read_record(path)
    assert record_problems(record) == []
    assert sum(item.minutes for item in record.plan) >= 40


@pytest.mark.parametrize("path", sorted(SRC.glob("[0-9][0-9]_*.*")), ids=lambda p: p.name)
def test_every_file_and_symbol_named_in_a_lesson_exists(path):
    assert reference_problems(path.read_text(encoding="utf-8"), path.name) == []


def test_a_reference_that_leads_nowhere_is_named():
    text = "see nanoengine/engine/scheduler.py:Scheduler.schedul and vllm/v1/engine/core.py:EngineCore.stepp, "
    text += "nanoengine/engine/scheduler.py:Scheduler.schedule. And scheduler.py: it is short"
    problems = reference_problems(text, "x.py")
    assert len(problems) == 2
    assert "there is no 'schedul'; it has " in problems[0]
    assert "'vllm/v1/engine/core.py:EngineCore.stepp' is not in nanoengine/course/manifest.yaml" in problems[1]


BREAKS = [
    (lambda d: d["quiz"][0]["question"].pop("zh"), "quiz[1] (launch-returns).question.zh: is missing"),
    (lambda d: d["faq"][1]["answer"].update(en=" "), "faq[2] (sampling-not-in-postprocess).answer.en: is missing"),
    (lambda d: d["quiz"][1]["options"][2]["reason"].update(en="TODO say why"), ".options[3].reason.en: is unfinished"),
    (lambda d: d["cards"][0]["stop"].update(zh="待补"), "cards[1] (what-happens-in-each-step).stop.zh: is unfinished"),
    (lambda d: d["recall"]["rubric"].pop("good"), "recall.rubric.good: is missing"),
    (lambda d: d["recall"]["prompt"].update(en="画出循环"), "recall.prompt.en: contains Chinese"),
    (lambda d: d["recall"]["prompt"].update(zh="draw the loop"), "recall.prompt.zh: contains no Chinese"),
    (lambda d: d["quiz"].pop(), "quiz: must have 5 entries, got 4"),
    (lambda d: d["quiz"][3]["options"][1].pop("right"), "(block-bytes).options: one or more must be right"),
    (lambda d: d["quiz"][3]["options"][0].update(rigth=True), "options[1].rigth: unknown field; known are reason"),
    (lambda d: d["quiz"][3]["options"][0].pop("see"), "options[1].see: needs at least 1"),
    (lambda d: d["quiz"][4].update(id="block-bytes"), "quiz: the id 'block-bytes' is used twice"),
    (lambda d: d["hunt"][0].update(id="Not A Slug"), "hunt[1].id: 'Not A Slug' must be small letters"),
    (lambda d: d["cards"][0]["short"].update(en="word " * 120), "short.en: 120 words, limit 95"),
    (lambda d: d["cards"][0]["short"].update(zh="字" * 200), "short.zh: 200 characters, limit 185"),
    (lambda d: d.update(lesson="02"), 'lesson: must be "01"'),
    (lambda d: d.update(notes=["a list"]), "notes: must be fields, got ['a list']"),
]


@pytest.mark.parametrize(("edit", "message"), BREAKS, ids=[message for _, message in BREAKS])
def test_a_broken_record_is_refused_with_file_record_and_field(tmp_path, data, edit, message):
    edit(data)
    with pytest.raises(RecordError) as caught:
        read_record(_write(tmp_path, data))
    assert message in str(caught.value)
    assert all(line.startswith("01_ninety_lines.yaml: ") for line in str(caught.value).splitlines())


def test_all_problems_are_told_at_once(tmp_path, data):
    for edit, _ in BREAKS[:4]:
        edit(data)
    with pytest.raises(RecordError) as caught:
        read_record(_write(tmp_path, data))
    assert len(str(caught.value).splitlines()) == 4


DANGLING = [
    (lambda d: d["quiz"][0]["options"][0].update(see="no-such-cell"), "no cell with the id 'no-such-cell'"),
    (lambda d: d["hunt"][0].update(at="nanoengine/engine/scheduler.py:Scheduler.admit"), "there is no 'admit'"),
    (lambda d: d["hunt"][0].update(marks=["no such line"]), "'no such line' is not in nanoengine/engine/scheduler.py"),
    (lambda d: d["faq"][0].update(see=["nanoengine/engine/gone.py:X"]), "there is no file 'nanoengine/engine/gone.py'"),
    (lambda d: d["cards"][0].update(see=["nanovllm/a.py:B"]), "'nanovllm/a.py:B' is not in nanoengine/course/manifest"),
    (lambda d: d["cards"][0].update(topics=["no-topic"]), "'no-topic' is not in topics.yaml"),
    (lambda d: d["notes"]["plan"][0].update(sections=["nowhere"]), "notes.plan[1]: the lesson has no cell"),
]


@pytest.mark.parametrize(("edit", "message"), DANGLING, ids=[message for _, message in DANGLING])
def test_a_dangling_pointer_is_named(tmp_path, data, edit, message):
    edit(data)
    problems = record_problems(read_record(_write(tmp_path, data)), tmp_path)
    assert len(problems) == 1
    assert message in problems[0]
    assert problems[0].startswith("01_ninety_lines.yaml: ")


def test_a_record_without_its_lesson_is_a_problem(tmp_path, data):
    path = _write(tmp_path, data)
    path.with_suffix(".py").unlink()
    assert record_problems(read_record(path), tmp_path) == [
        "01_ninety_lines.yaml: there is no lessons/src/01_ninety_lines.py beside it"
    ]


def test_text_that_is_no_yaml_is_refused(tmp_path):
    path = tmp_path / "01_x.yaml"
    path.write_text("quiz: [", encoding="utf-8")
    with pytest.raises(RecordError, match="01_x.yaml: no YAML"):
        read_record(path)


def test_an_unknown_lesson_says_which_there_are():
    with pytest.raises(ValueError, match="lesson '99' has no quiz, hunt or cards; these have: '01'"):
        load("99")
    assert load_all()[0] is load("01")


def test_sections_agree_with_the_lessons_real_reader():
    from nanoengine.course.source import read_source

    for path in SRC.glob("[0-9][0-9]_*.py"):
        assert list(sections(path.stem)) == [cell.id for cell in read_source(path).cells]
    section = sections("01_ninety_lines")["step-walk"]
    assert section.title == {"en": "3 · Open the source", "zh": "3 · 打开源码"}
    assert section.text["en"].startswith("**①")
