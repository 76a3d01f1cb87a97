"""Slides and answer key: everything inside one file, an idea a slide, notes for the teacher only there."""

import base64
import re
from html.parser import HTMLParser

import nbformat
import pytest

from nanoengine.course import build, reveal, slides
from nanoengine.course.answer_key import answer_key
from nanoengine.course.checks import exercises_of
from nanoengine.course.live import folded, part
from nanoengine.course.record import load_all
from nanoengine.course.reveal import RevealMissing, load_reveal
from nanoengine.course.slides import MAX_LINES, ROOM, make_slides, to_page
from nanoengine.course.source import read_source

RECORDS = load_all()
PIXEL = "data:image/png;base64,iVBORw0KGgo="


def _markdown(cell_id, source, kind="-", tags=()):
    return nbformat.v4.new_markdown_cell(
        source, id=cell_id, metadata={"slideshow": {"slide_type": kind}, "tags": list(tags)}
    )


def _code(cell_id, source, *outputs, tags=()):
    metadata = {"slideshow": {"slide_type": "-"}, "tags": list(tags)}
    made = nbformat.v4.new_code_cell(source, id=cell_id, metadata=metadata)
    made.outputs = list(outputs)
    return made


def _stream(text):
    return nbformat.v4.new_output("stream", text=text)


def _html(markup):
    return nbformat.v4.new_output("display_data", data={"text/html": markup, "text/plain": "<a widget>"})


@pytest.fixture
def notebook():
    long = "\n".join(f"line_{n} = {n}" for n in range(30))
    made = nbformat.v4.new_notebook()
    made.cells = [
        _markdown("title", "# Ninety lines\n\nA *lesson* with | no table.", "slide"),
        _code("env", 'lesson("01")', _stream("Lesson 01 ready\n")),
        _markdown("question", "## The question", "slide"),
        _markdown("quote", "> **Key insight.** One step."),
        _code("long", long, _stream("".join(f"out {n}\n" for n in range(40)))),
        _code("picture", "player()", _html(f'<img alt="queues" src="{PIXEL}">')),
        _markdown("deeper", "### Deeper", "subslide"),
        _markdown("secret", "Only the teacher reads this.", "notes", tags=("notes",)),
        _code("close", "llm.close()", tags=("hidden",)),
    ]
    return made


def test_several_pictures_have_a_slide_each():
    made = nbformat.v4.new_notebook()
    pictures = "".join(f'<div><img alt="step {n}" src="{PIXEL}"></div>' for n in range(3))
    made.cells = [_markdown("a", "## A", "slide"), _code("b", "keyframes(trace)", _html(f"<div>{pictures}</div>"))]
    (column,) = make_slides(made, "en")
    assert ["".join(slide.parts).count("<img") for slide in column] == [1, 1, 1]


@pytest.mark.parametrize(
    "height, apart", [("163", [3, 2]), ("122pt", [3, 2]), ("300", [2, 2, 1]), ("755", [1] * 5), ("755pt", [1] * 5)]
)
def test_small_pictures_share_a_slide(height, apart):
    svg = base64.b64encode(f'<svg xmlns="x" width="760" height="{height}" viewBox="0 0 9 9"></svg>'.encode()).decode()
    made = nbformat.v4.new_notebook()
    pictures = f'<div><img src="data:image/svg+xml;base64,{svg}" alt="a step"></div>' * 5
    made.cells = [_markdown("a", "## A", "slide"), _code("b", "", _html(pictures))]
    [column] = make_slides(made, "en")
    assert [n for n in ("".join(slide.parts).count("<img") for slide in column) if n] == apart


def _on_slides(markup):
    """The HTML of each slide that holds some of the output."""
    made = nbformat.v4.new_notebook()
    made.cells = [_markdown("a", "## A", "slide"), _code("b", "quiz()", _html(markup))]
    [column] = make_slides(made, "en")
    return [text for text in ("".join(slide.parts) for slide in column) if 'class="output"' in text]


def test_a_question_and_its_folded_answer_have_a_slide():
    answers = folded("Unfold", "<p>why</p>" * 12)
    form = "".join(part(f"<p><b>{n}.</b> Asked?</p>{answers}") for n in range(5))
    pages = _on_slides(f'<div class="still">{form}<p>the end</p></div>')
    assert [page.count("Asked?") for page in pages] == [1] * 5
    assert "the end" in pages[4] and all(_Page(page).open == [] for page in pages)
    short = "".join(part(f"<p>{n}</p>") for n in range(3))
    assert len(_on_slides(f"<div>{short}</div>")) == 1


def test_two_runs_of_the_player_have_a_slide_each():
    runs = "".join(f'<p><b>{name}</b></p><div><img alt="{name}" src="{PIXEL}"></div>' for name in ("one", "two"))
    pages = _on_slides(f'<div class="stills">{runs}<p><small>still</small></p></div>')
    assert [(page.count("<img"), _Page(page).open) for page in pages] == [(1, []), (1, [])]


def test_a_quote_takes_the_room_of_its_frame():
    made = nbformat.v4.new_notebook()
    made.cells = [_markdown("a", "## A", "slide"), _markdown("b", "> **Key.** One."), _markdown("c", "One.")]
    [[slide]] = make_slides(made, "en")
    made.cells = made.cells[:1] + made.cells[2:]
    [[without]] = make_slides(made, "en")
    assert slide.lines - without.lines == 3


def _columns(notebook, lang="en"):
    return [[slide.ids for slide in column] for column in make_slides(notebook, lang)]


def test_headings_open_slides_and_what_does_not_fit_goes_below(notebook):
    assert _columns(notebook) == [
        [["title", "env"]],
        [["question", "quote", "long"], ["long"], ["picture"], ["deeper"]],  # code and its picture together
    ]
    for column in make_slides(notebook, "en"):
        assert all(slide.lines <= ROOM for slide in column)


MORE = [("en", "… 18 more lines in the notebook"), ("zh", "…… 其余 18 行见 notebook")]


@pytest.mark.parametrize(("lang", "words"), MORE)
def test_long_code_and_long_output_are_excerpts(notebook, lang, words):
    text = "".join(part for column in make_slides(notebook, lang) for slide in column for part in slide.parts)
    plain = re.sub(r"<[^>]+>", "", text)
    assert words in plain
    assert f"line_{MAX_LINES - 1} = " in plain and f"line_{MAX_LINES} = " not in plain
    assert f"out {MAX_LINES - 1}" in plain and f"out {MAX_LINES}" not in plain


def test_teachers_cells_and_hidden_ones_are_on_no_slide(notebook):
    page = to_page(notebook, "en", None, load_reveal())
    assert "Only the teacher" not in page and "llm.close" not in page


class _Page(HTMLParser):
    """What a browser would fetch, and whether tags are closed."""

    def __init__(self, page):
        super().__init__()
        self.fetched, self.open = [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.fetched += [v for k, v in attrs if k in ("src", "href") and v and not v.startswith(("data:", "#"))]
        if tag not in ("img", "meta", "br", "link", "input", "hr"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_the_page_is_one_file_that_fetches_nothing(notebook, lang):
    page = to_page(notebook, lang, None, load_reveal())
    parsed = _Page(page)
    assert parsed.fetched == [] and parsed.open == []
    assert "@import" not in page
    assert not re.search(r"url\((?!data:)", "".join(re.findall(r"<style>.*?</style>", page, re.DOTALL)))
    assert f'<img alt="queues" src="{PIXEL}">' in page
    assert "<title>Ninety lines</title>" in page


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.name)
@pytest.mark.parametrize("lang", ["en", "zh"])
def test_the_plan_stands_in_the_speakers_notes_once_each(record, lang):
    made = nbformat.v4.new_notebook()
    ids = dict.fromkeys(cell_id for item in record.plan for cell_id in item.sections)
    made.cells = [_markdown(cell_id, f"## {cell_id}", "slide") for cell_id in ids]
    page = to_page(made, lang, record, load_reveal())
    notes = re.findall(r'<aside class="notes">(.*?)</aside>', page)
    assert sum(note.count("<b>") for note in notes) == len(record.plan)


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.name)
@pytest.mark.parametrize("lang", ["en", "zh"])
def test_the_answer_key_holds_answers_likely_wrong_ones_and_solutions(record, lang):
    page = answer_key(record, lang)
    parsed = _Page(page)
    assert parsed.fetched == [] and parsed.open == []
    assert page.count('class="right"') == sum(len(question.right) for question in record.quiz)
    assert page.count("<small>") == sum(len(question.options) for question in record.quiz) + len(record.wrong_answers)
    assert all(f"<h3>{exercise.id} · " in page for exercise in exercises_of(record.lesson))
    assert "NotImplementedError" not in page


def test_without_reveal_it_is_said_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(reveal.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RevealMissing, match="pip install --no-deps sphinx-revealjs"):
        load_reveal()


def test_slides_of_a_lesson_whose_numbers_are_not_filled_in_are_refused(tmp_path, capsys):
    (tmp_path / "src").mkdir()
    text = '# %% [markdown] id="a"\n# # A {{ blocks }}\n#\n# <!-- zh -->\n# # 甲\n'
    (tmp_path / "src" / "02_small.py").write_text(text, encoding="utf-8")
    assert build.build_lesson(tmp_path, read_source(tmp_path / "src" / "02_small.py"), run=False)
    assert slides.main(["--lessons", str(tmp_path), "--out", str(tmp_path / "out")]) == 1
    assert "run `make notebooks` first" in capsys.readouterr().err


def test_a_lesson_that_was_not_built_is_named(tmp_path, capsys):
    (tmp_path / "src").mkdir()
    text = '# %% [markdown] id="a"\n# # A\n#\n# <!-- zh -->\n# # 甲\n'
    (tmp_path / "src" / "02_small.py").write_text(text, encoding="utf-8")
    assert slides.main(["--lessons", str(tmp_path), "--out", str(tmp_path / "out")]) == 1
    assert "run `make notebooks` first" in capsys.readouterr().err
