"""Every check: red on its stub, green on right answers of several shapes, red on plausible wrong ones, saying why."""

import dataclasses
import math
import random
import re

import pytest

from nanoengine.course import check as check_module
from nanoengine.course.check import CheckFailed, NotWritten, check, examine
from nanoengine.course.checks import all_exercises, find_exercise
from nanoengine.course.checks.lesson_01_ledger import weight_shapes
from nanoengine.course.exercises import variant
from nanoengine.course.rules import MAX_HAN, MAX_WORDS, words
from nanoengine.course.source import LANGS, find_sources, read_source
from nanoengine.course.typography import said
from nanoengine.course.wrap import columns, wrap
from nanoengine.model.config import NAMED_CONFIGS
from tests.course_exercises import answers_01, answers_02, answers_03, answers_04, answers_05, answers_06
from tests.course_exercises.conftest import ROOT

ANSWERS = [answers_01, answers_02, answers_03, answers_04, answers_05, answers_06]
RIGHT = {key: value for module in ANSWERS for key, value in module.RIGHT.items()}
WRONG = {key: value for module in ANSWERS for key, value in module.WRONG.items()}
EXERCISES = all_exercises()
SEEDS = (0, 1, 17)
RIGHT_CASES = [(key, name) for key in RIGHT for name in RIGHT[key]]
WRONG_CASES = [(key, name) for key in WRONG for name in WRONG[key]]


def _answer_cell(exercise, kind):
    """The globals after the answer cell of a stub or a solution has run."""
    (path,) = find_sources(ROOT / "exercises" / "src", [exercise.section.lesson])
    (cell,) = [c for c in variant(read_source(path), kind).cells if c.id == f"{exercise.id}-answer"]
    namespace = {}
    exec(cell.en, namespace)
    return namespace


def _by_id(value):
    return getattr(value, "id", value)


def test_every_exercise_has_enough_answers_to_try_it_on():
    for exercise in EXERCISES:
        assert len(RIGHT[exercise.id]) >= 2
        assert len([1 for _, verdict, _ in WRONG[exercise.id].values() if verdict == "wrong"]) >= 3
        assert "imported" in [verdict for _, verdict, _ in WRONG[exercise.id].values()]


@pytest.mark.parametrize("exercise", EXERCISES, ids=_by_id)
def test_the_stub_is_red_as_not_written(exercise):
    with pytest.raises(NotWritten, match=f"{exercise.id}: not written yet") as caught:
        check(exercise.id, _answer_cell(exercise, "exercise"))
    assert isinstance(caught.value, NotImplementedError)
    assert caught.value._render_traceback_() == str(caught.value).splitlines()


@pytest.mark.parametrize("exercise", EXERCISES, ids=_by_id)
def test_the_solution_is_green_and_prints_one_stable_line(exercise, capsys):
    for seed in SEEDS:
        check(exercise.id, _answer_cell(exercise, "solution"), seed=seed)
    lines = capsys.readouterr().out.splitlines()
    assert set(lines) == {f"✓ {exercise.id} passed ({len(exercise.boundaries) + exercise.num_random} cases)"}


@pytest.mark.parametrize(("exercise_id", "name"), RIGHT_CASES)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_right_answer_of_another_shape_is_green(exercise_id, name, seed):
    exercise = find_exercise(exercise_id)
    result = examine(exercise, {exercise.name: RIGHT[exercise_id][name]}, seed=seed)
    assert result.passed, result.message


@pytest.mark.parametrize(("exercise_id", "name"), WRONG_CASES)
def test_a_wrong_answer_is_red_and_the_message_says_what_to_change(exercise_id, name):
    exercise = find_exercise(exercise_id)
    answer, verdict, says = WRONG[exercise_id][name]
    result = examine(exercise, {exercise.name: answer}, seed=0)
    assert result.verdict == verdict, result.message
    words = " ".join(result.message.split())
    assert says in words
    if verdict == "wrong":
        assert f"lesson {exercise.section.lesson}, “{exercise.section.heading['en']}”" in words
        assert all(columns(line) <= 120 for line in result.message.splitlines())
        for row in ("input", "expected", "got", "why", "re-read"):
            assert re.search(rf"^  {row} +\S", result.message, re.MULTILINE), f"{row} is missing: {result.message}"


NOT_IMPORTED = [(key, name) for key, name in WRONG_CASES if WRONG[key][name][1] == "wrong"]


@pytest.mark.parametrize(("exercise_id", "name"), NOT_IMPORTED)
def test_a_wrong_answer_gets_a_chinese_message_in_a_chinese_notebook(exercise_id, name):
    exercise = find_exercise(exercise_id)
    result = examine(exercise, {exercise.name: WRONG[exercise_id][name][0]}, lang="zh")
    assert result.message.startswith(f"{exercise_id}：还不对。")
    assert said(exercise.section.heading, "zh") in result.message
    why = re.search(r"^  为什么 +(.*)$", result.message, re.MULTILINE)[1]
    assert re.search(r"[\u3400-\u9fff]", why)


def test_the_failing_input_is_shrunk():
    exercise = find_exercise("ex01a")
    case = exercise.random_case(random.Random(5))
    assert len(case.requests) > 1
    failure, _ = check_module._try(exercise, answers_01.waits, case, "en")
    small, still = check_module._shrink(exercise, answers_01.waits, case, failure, "en")
    assert still is not None
    assert [(len(prompt), new) for prompt, new in small.requests] == [(1, 1)]


@pytest.mark.parametrize("exercise", EXERCISES, ids=_by_id)
def test_a_smaller_case_is_another_case_and_the_descent_ends(exercise):
    rng = random.Random(3)
    for _ in range(20):
        case, steps = exercise.random_case(rng), 0
        while (candidate := next(iter(exercise.smaller(case)), None)) is not None:
            assert candidate != case
            case, steps = candidate, steps + 1
            assert steps < 200


def test_random_cases_are_never_refused_by_the_engine():
    rng = random.Random(9)
    exercise = find_exercise("ex01a")
    assert all(case.fits() for case in exercise.boundaries)
    assert all(exercise.random_case(rng).fits() for _ in range(500))


def test_an_exception_is_shown_with_the_learners_own_line(tmp_path):
    cell = tmp_path / "cell.py"
    cell.write_text("def step(engine):\n    return engine.nobody\n", encoding="utf-8")
    namespace = {}
    exec(compile(cell.read_text(encoding="utf-8"), str(cell), "exec"), namespace)
    with pytest.raises(CheckFailed) as caught:
        check("ex01a", namespace)
    assert "AttributeError: 'LLMEngine' object has no attribute 'nobody'" in str(caught.value)
    assert "in step(), line 2: return engine.nobody" in str(caught.value)


def test_a_missing_answer_and_an_unknown_exercise_are_named():
    with pytest.raises(CheckFailed, match="there is no step here"):
        check("ex01a", {})
    with pytest.raises(ValueError, match="no exercise 'ex77z'; there are ex01a, ex01b"):
        check("ex77z", {})


def test_an_interrupt_reaches_the_learner():
    def step(engine):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        check("ex01a", {"step": step})


@pytest.mark.parametrize("exercise", EXERCISES, ids=_by_id)
def test_hints_are_short_and_come_in_both_languages(exercise):
    assert len(exercise.hints) == 3
    for hint in exercise.hints:
        assert set(hint) == set(LANGS)
        assert words(hint["en"]) <= MAX_WORDS
        assert 5 < len(re.findall(r"[\u3400-\u9fff]", hint["zh"])) <= MAX_HAN


@pytest.mark.parametrize("exercise", EXERCISES, ids=_by_id)
def test_the_section_to_reread_is_a_heading_of_the_lesson(exercise):
    (path,) = find_sources(ROOT / "lessons" / "src", [exercise.section.lesson])
    (cell,) = [c for c in read_source(path).cells if c.id == exercise.section.cell]
    for lang in LANGS:
        assert cell.text(lang).splitlines()[0].lstrip("# ") == said(exercise.section.heading, lang)


def test_lines_break_between_words_and_between_chinese_characters():
    assert wrap("one two three", 7) == ["one two", "three"]
    assert wrap("一二三 abc。四", 6) == ["一二三", "abc。", "四"]
    assert wrap("", 5) == [""]
    assert max(map(columns, wrap("块表 " * 40, 20))) <= 20


@pytest.mark.parametrize("biased", [{}, {"attention_bias": True}, {"qkv_bias": True}, {"mlp_bias": True}])
@pytest.mark.parametrize("name", sorted(NAMED_CONFIGS))
def test_the_ledger_counts_every_weight_of_every_model(name, biased):
    model = dataclasses.replace(NAMED_CONFIGS[name], **biased)
    assert sum(map(math.prod, weight_shapes(model))) == model.num_parameters()
