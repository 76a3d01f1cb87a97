"""Slides and answer keys for a lecture: ``python -m nanoengine.course.slides [NN ...]``, or ``make slides``.

``build/slides/`` gets, for each lesson and language, ``NN_slug.html`` (reveal.js; press S for the speaker's view with
minute plan and notes) and ``NN_slug.key.html``. Each is one file that needs no network. The pictures are the static
ones of the executed notebook.
"""

from __future__ import annotations

import argparse
import base64
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path

from markdown_it import MarkdownIt
from nbformat import NotebookNode
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

from nanoengine.course.build import notebook_path
from nanoengine.course.live import PART
from nanoengine.course.notebook import read_notebook, value_fields
from nanoengine.course.record import PlanItem, Record, record_paths
from nanoengine.course.record import load as load_record
from nanoengine.course.reveal import Reveal, RevealMissing, load_reveal
from nanoengine.course.source import LANGS, SourceError, find_sources, read_source
from nanoengine.markup import escape

MAX_LINES = 12  # of code or printed output on a slide; the notebook has the rest
ROOM = 21  # lines that a slide holds; what is more goes on a slide below
_PICTURE_LINES = 14  # of a large picture, or of one whose height is not known
_LINE = 33  # px
_MORE = {"en": "… {n} more lines in the notebook", "zh": "…… 其余 {n} 行见 notebook"}
_MINUTES = {"en": "{n} min", "zh": "{n} 分钟"}
_STYLE = """
.reveal { font-size: 26px; font-family: system-ui, "Noto Sans CJK SC", sans-serif; }
.reveal h1 { font-size: 1.9em; } .reveal h2 { font-size: 1.5em; } .reveal h3 { font-size: 1.2em; }
.reveal h1, .reveal h2, .reveal h3 { text-transform: none; font-family: inherit; letter-spacing: 0; }
.reveal .slides section { text-align: left; height: 100%; overflow-y: auto; box-sizing: border-box;
  padding: 12px 20px; }
.reveal .slides section.stack { padding: 0; overflow: visible; }
.reveal pre, .reveal blockquote { box-sizing: border-box; }
.reveal pre { width: 100%; margin: 10px 0; font-size: 18px; line-height: 1.35; box-shadow: none; }
.reveal pre.code { background: #f4f5f7; border-left: 4px solid #0072b2; padding: 8px 14px; overflow-x: auto; }
.reveal pre.out { padding: 4px 14px; overflow-x: auto; color: #333; }
.reveal .more { font-size: 16px; color: #666; margin: 0 14px; }
.reveal img { max-height: 520px; max-width: 100%; margin: 6px 0; }
.reveal blockquote { width: 100%; margin: 12px 0; padding: 6px 16px; border-left: 5px solid #d55e00;
  background: #faf6f2; font-style: normal; box-shadow: none; }
.reveal table { font-size: .8em; margin: 8px 0; } .reveal .slide-number { font-size: 15px; }
.reveal ul, .reveal ol { display: block; margin-left: 1.1em; } .reveal details { font-size: .8em; }
.reveal small { font-size: .85em; } .reveal small, .reveal small * { vertical-align: baseline; }
.reveal .output { font-size: .8em; display: flow-root; } .reveal .output pre { font-size: 16px; }
.reveal .output:only-child img { max-height: 660px; } .reveal .output:only-child:has(details) img { max-height: 600px; }
.reveal .output:only-child details img { max-height: 480px; } .reveal details { display: flow-root; }
.reveal .output div:has(> img):has(+ details) { float: left; margin-right: 24px; }
.reveal .output div:has(> code:only-child) { font-size: 16px !important; }
"""
_MARKDOWN = MarkdownIt("commonmark", {"html": True}).enable("table")


@dataclass
class Slide:
    """Parts of HTML, the ids of the cells on it, and the lines they take."""

    parts: list[str] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    lines: int = 0

    def add(self, part: str, lines: int, cell_id: str) -> None:
        self.parts.append(part)
        self.lines += lines
        if cell_id not in self.ids:
            self.ids.append(cell_id)


def make_slides(notebook: NotebookNode, lang: str) -> list[list[Slide]]:
    """Columns of slides: a heading ``#`` or ``##`` opens a column, a smaller one a slide below, and so does a cell for
    which there is no room. Cells tagged ``notes`` or ``hidden`` are left out."""
    columns: list[list[Slide]] = []
    for cell in notebook.cells:
        kind = cell.metadata.get("slideshow", {}).get("slide_type", "-")
        if kind in ("notes", "skip") or "hidden" in cell.metadata.get("tags", ()):
            continue
        if kind == "slide" or not columns:
            columns.append([Slide()])
        elif kind == "subslide":
            columns[-1].append(Slide())
        parts = list(_parts(cell, lang))
        whole = sum(lines for _, lines in parts)
        if columns[-1][-1].parts and columns[-1][-1].lines + whole > ROOM >= whole:
            columns[-1].append(Slide())  # code and what it shows stay together where they can
        for part, lines in parts:
            if columns[-1][-1].parts and columns[-1][-1].lines + lines > ROOM:
                columns[-1].append(Slide())
            columns[-1][-1].add(part, lines, cell.id)
    return columns


def _parts(cell: NotebookNode, lang: str) -> Iterator[tuple[str, int]]:
    """(HTML, lines that it takes) of a text, or of code and then of each of its outputs."""
    if cell.cell_type == "markdown":
        yield _MARKDOWN.render(cell.source), _text_lines(cell.source)
        return
    if cell.source.strip():
        shown, more = _excerpt(cell.source, lang)
        code = highlight(shown, PythonLexer(), HtmlFormatter(nowrap=True, noclasses=True))
        yield f'<pre class="code"><code>{code}</code></pre>{more}', _count(shown) + 1
    for output in cell.outputs:
        text = output.get("text") if output.output_type == "stream" else None
        data = output.get("data", {})
        if "text/html" in data:
            yield from _html_parts(data["text/html"])
        elif "image/png" in data:
            alt = escape(data.get("text/plain", ""))
            yield f'<img alt="{alt}" src="data:image/png;base64,{data["image/png"].strip()}">', _PICTURE_LINES
        elif text or data.get("text/plain"):
            shown, more = _excerpt(text or data["text/plain"], lang)
            yield f'<pre class="out">{escape(shown)}</pre>{more}', _count(shown)


def _html_parts(markup: str) -> Iterator[tuple[str, int]]:
    """The markup as it is; several pictures with nothing between them, the parts of a form, and two runs side by side
    go apart, as many on a slide as it holds. What is folded counts as open: an answer has room below its question."""
    pictures = re.findall(r"<img\b[^>]*>", markup)
    if len(pictures) > 1 and not re.sub(r"<[^>]+>", "", markup).strip():
        yield from ((f'<div class="output">{picture}</div>', _picture_lines(picture)) for picture in pictures)
        return
    pieces, start = [markup], PART if PART in markup else "<p><b>"  # a run of the player begins with its name
    if markup.count(start) > 1 and (start == PART or pictures):
        inside = re.sub(r"^<div\b[^>]*>(.*)</div>$", r"\1", markup, flags=re.DOTALL)
        pieces = [piece for piece in re.split(f"(?={re.escape(start)})", inside) if piece]
    for piece in pieces:
        words = re.sub(r"<[^>]+>", "", piece).strip()
        lines = (_markup_lines(piece) if words else 0) + (_picture_lines(piece) if "<img" in piece else 0)
        yield f'<div class="output">{piece}</div>', min(ROOM, lines)


def _picture_lines(markup: str) -> int:
    """Lines that the pictures take; each says its height, in px or pt, in the first tag of its SVG."""
    lines, scale = 0, {"pt": 4 / 3}
    for data in re.findall(r"<img\b[^>]*?(?:data:image/svg\+xml;base64,([\w+/=]*)|>)", markup):
        found = re.search(r'<svg[^>]*?\sheight="([\d.]+)(pt)?"', base64.b64decode(data).decode()) if data else None
        px = float(found[1]) * scale.get(found[2], 1) + 12 if found else _PICTURE_LINES * _LINE
        lines += ceil(px / _LINE)
    return min(lines, _PICTURE_LINES)


def _excerpt(text: str, lang: str) -> tuple[str, str]:
    lines = text.rstrip("\n").split("\n")
    if len(lines) <= MAX_LINES:
        return "\n".join(lines), ""
    more = _MORE[lang].format(n=len(lines) - MAX_LINES)
    return "\n".join(lines[:MAX_LINES]), f'<p class="more">{more}</p>'


def _text_lines(text: str) -> int:
    """Lines of 75 columns that a Markdown text takes, a Chinese character being two columns wide; two gaps between
    paragraphs are as high as a line, and so is each edge of a quote's frame."""
    full = sum(1 + sum(2 if ord(c) > 0x2E7F else 1 for c in line) // 75 for line in text.split("\n") if line.strip())
    gaps = len(re.findall(r"\n(?:>?[ ]*\n)+", text.strip())) + 1
    return full + gaps // 2 + (2 if text.lstrip().startswith(">") else 0)


def _markup_lines(markup: str) -> int:
    return min(ROOM, 1 + _text_lines(re.sub(r"<[^>]+>", "", re.sub(r"</(?:p|div|li|tr|summary|pre)>", "\n", markup))))


def _count(text: str) -> int:
    return text.count("\n") + 1


def to_page(notebook: NotebookNode, lang: str, record: Record | None, reveal: Reveal) -> str:
    """The slides as one HTML page. ``record``: whose notes for the teacher go into the speaker's view."""
    columns = make_slides(notebook, lang)
    plan = list(record.plan) if record else []
    inside = "\n".join(f"<section>{''.join(_section(s, plan, lang) for s in column)}</section>" for column in columns)
    title = next((c.source.split("\n", 1)[0].lstrip("# ") for c in notebook.cells if c.cell_type == "markdown"), "")
    language = "zh-CN" if lang == "zh" else "en"
    return (
        f'<!doctype html>\n<html lang="{language}"><head><meta charset="utf-8"><title>{escape(title)}</title>\n'
        f"<style>{reveal.css}</style><style>{_STYLE}</style></head>\n"
        f'<body><div class="reveal"><div class="slides">\n{inside}\n</div></div>\n<script>{reveal.script}</script>\n'
        "<script>Reveal.initialize({hash: true, width: 1280, height: 720, margin: 0.04, center: false, "
        'slideNumber: "c/t", plugins: [RevealNotes]});</script></body></html>\n'
    )


def _section(slide: Slide, plan: list[PlanItem], lang: str) -> str:
    """One slide; the item of the plan that begins with one of its cells stands in its notes, and is used up."""
    notes = [item for item in plan if set(item.sections) & set(slide.ids)]
    for item in notes:
        plan.remove(item)
    words = "".join(
        f"<p><b>{_MINUTES[lang].format(n=item.minutes)}</b> {escape(item.what[lang])}</p>" for item in notes
    )
    aside = f'<aside class="notes">{words}</aside>' if words else ""
    return f'<section data-cells="{" ".join(slide.ids)}">{"".join(slide.parts)}{aside}</section>\n'


def build_slides(lessons: Path, out: Path, numbers: list[str]) -> list[str]:
    """Write slides and answer keys; returns a line about each file.

    Raises:
        SourceError: a lesson has no source or was not built. RevealMissing: see load_reveal.
    """
    from nanoengine.course.answer_key import answer_key

    reveal, lines = load_reveal(), []
    with_record = {path.stem[:2] for path in record_paths(lessons / "src")}
    for path in find_sources(lessons / "src", numbers):
        source = read_source(path)
        record = load_record(source.number) if source.number in with_record else None
        for lang in LANGS:
            notebook = read_notebook(notebook_path(lessons, source, lang))
            if notebook is None or value_fields(notebook):
                raise SourceError(f"{notebook_path(lessons, source, lang)} is not built: run `make notebooks` first")
            folder = out / "zh" if lang == "zh" else out
            pages = {f"{source.name}.html": to_page(notebook, lang, record, reveal)}
            if record is not None:
                pages[f"{source.name}.key.html"] = answer_key(record, lang)
            folder.mkdir(parents=True, exist_ok=True)
            for name, page in pages.items():
                (folder / name).write_text(page, encoding="utf-8")
                lines.append(f"{folder / name}: {len(page) / 1e6:.1f} MB")
    return lines


def main(argv: list[str] | None = None) -> int:
    """Exit status 0 if everything was written, else 1."""
    parser = argparse.ArgumentParser(prog="python -m nanoengine.course.slides", description=__doc__)
    parser.add_argument("numbers", nargs="*", metavar="NN", help="lessons; all by default")
    parser.add_argument("--lessons", type=Path, default=Path("lessons"), metavar="DIR", help="default: lessons")
    parser.add_argument("--out", type=Path, default=Path("build/slides"), metavar="DIR", help="default: build/slides")
    args = parser.parse_args(argv)
    try:
        for line in build_slides(args.lessons, args.out, args.numbers):
            print(line)
    except (SourceError, RevealMissing, FileNotFoundError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
