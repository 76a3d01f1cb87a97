"""Grades as a table for a spreadsheet (CSV) and as a page for the teacher (HTML, one file, no scripts)."""

from __future__ import annotations

import csv
import io
import os
import re
from collections import Counter
from pathlib import Path

from nanoengine.course.files import write_whole
from nanoengine.course.grade import Row, titles
from nanoengine.course.typography import printed
from nanoengine.markup import escape
from nanoengine.shown import counted, visible

# A sign beside the word, so that nothing hangs on colour alone.
_SIGNS = {"passed": "✓", "wrong": "✗", "stub": "○", "missing": "–", "imported": "=", "no result": "✗"}
_TEXT = printed({
    "en": {
        "title": "Grades",
        "summary": "{n}, seed {seed}, {seconds:.1f} s",
        "file": "file",
        "passed": "passed",
        "time": "time",
        "notes": "notes",
        "share": "passed by",
        "common": "What went wrong most often",
        "details": "Each submission",
        "nothing": "Nothing went wrong.",
        "verdicts": {"passed": "passed", "wrong": "wrong", "stub": "not written", "missing": "not defined",
                     "imported": "imported", "no result": "no result"},
        "legend": "Only “passed” counts. “imported”: the answer is, copies or calls the package's own. "
        "“no result”: the notebook ended or was stopped before the check.",
    },
    "zh": {
        "title": "成绩",
        "summary": "{n} 份提交,种子 {seed},{seconds:.1f} 秒",
        "file": "文件",
        "passed": "通过",
        "time": "用时",
        "notes": "备注",
        "share": "通过率",
        "common": "最常见的错误",
        "details": "逐份详情",
        "nothing": "没有发现问题。",
        "verdicts": {"passed": "通过", "wrong": "错误", "stub": "未写", "missing": "未定义", "imported": "直接引用",
                     "no result": "无结果"},
        "legend": "只有「通过」计分。「直接引用」:答案就是包里自带的,或者抄了它、调用了它。"
        "「无结果」:还没运行到检查,notebook 就退出或被终止了。",
    },
})  # fmt: skip
_STYLE = """
:root { color-scheme: light dark; --line: #8886; --good: #00795a; --bad: #b3450a; --soft: #8881; }
@media (prefers-color-scheme: dark) { :root { --good: #2fc79b; --bad: #ff9d66; } }
body { font: 16px/1.5 system-ui, "Noto Sans CJK SC", sans-serif; margin: 2rem auto; max-width: 70rem;
  padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; }
th, td { border-bottom: 1px solid var(--line); padding: .4rem .6rem; text-align: left; vertical-align: top; }
th { font-weight: 600; } td.number, th.number { text-align: right; white-space: nowrap; }
td.mark { white-space: nowrap; } .good { color: var(--good); } .bad { color: var(--bad); }
tr:nth-child(even) td { background: var(--soft); }
td.notes { font-size: 14px; overflow-wrap: anywhere; }
details { margin: .5rem 0; } summary { cursor: pointer; overflow-wrap: anywhere; }
pre { background: var(--soft); padding: .7rem; font: 13px/1.45 ui-monospace, monospace; white-space: pre-wrap; }
"""


def names_of(rows: list[Row]) -> list[str]:
    """Each file as it is called below the folder that holds them all."""
    paths = [Path(os.path.abspath(row.path)) for row in rows]  # links are not followed: they would lead out of it
    try:
        top = os.path.commonpath([path.parent for path in paths])
    except ValueError:  # on two drives
        return [row.name for row in rows]
    return [visible(path.relative_to(top).as_posix()) for path in paths]


def to_csv(rows: list[Row]) -> str:
    """file, a column an exercise, passed, of, seconds, notes. UTF-8 with a mark, so that Excel reads Chinese names."""
    ids = sorted({exercise_id for row in rows for exercise_id in row.marks})
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["file", *ids, "passed", "of", "seconds", "notes"])
    for name, row in zip(names_of(rows), rows, strict=True):
        verdicts = [row.marks[i].verdict if i in row.marks else "" for i in ids]
        writer.writerow([_cell(name), *verdicts, row.num_passed, len(row.marks), f"{row.seconds:.1f}",
                         _cell("; ".join(row.notes))])  # fmt: skip
    return out.getvalue()


def _cell(text: str) -> str:
    """A text on one line, without what would end a row. A spreadsheet takes one that begins so for a formula."""
    text = visible(text)
    return f"'{text}" if text.lstrip().startswith(tuple("=+-@＝＋－＠")) else text


def to_html(rows: list[Row], *, lang: str = "en", seed: int = 0, seconds: float = 0.0) -> str:
    """One page: the table, what went wrong most often, and each submission's messages, folded."""
    text, names = _TEXT[lang], titles(rows, lang)
    number = counted(len(rows), "submission") if lang == "en" else len(rows)
    summary = text["summary"].format(n=number, seed=seed, seconds=seconds)
    return (
        f'<!doctype html>\n<html lang="{"zh-CN" if lang == "zh" else "en"}"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width"><title>{text["title"]}</title>'
        f"<style>{_STYLE}</style></head><body><h1>{text['title']}</h1><p>{summary}</p>"
        f"{_table(rows, names, text)}<p>{text['legend']}</p>"
        f"<h2>{text['common']}</h2>{_common(rows, text)}<h2>{text['details']}</h2>"
        + "".join(_details(name, row, text) for name, row in zip(names_of(rows), rows, strict=True))
        + "</body></html>\n"
    )


def _table(rows: list[Row], names: dict[str, str], text: dict) -> str:
    head = "".join(f"<th>{i}<br>{escape(name)}</th>" for i, name in names.items())
    body = "".join(
        f"<tr><td>{escape(name)}</td>{''.join(_mark(row, i, text) for i in names)}"
        f'<td class="number">{row.num_passed} / {len(row.marks)}</td><td class="number">{row.seconds:.1f} s</td>'
        f'<td class="notes">{"<br>".join(escape(visible(note)) for note in row.notes)}</td></tr>'
        for name, row in zip(names_of(rows), rows, strict=True)
    )
    shares = "".join(f"<th>{_share(rows, i)}</th>" for i in names)
    return (
        f'<table><thead><tr><th>{text["file"]}</th>{head}<th class="number">{text["passed"]}</th>'
        f'<th class="number">{text["time"]}</th><th>{text["notes"]}</th></tr></thead><tbody>{body}</tbody>'
        f'<tfoot><tr><th>{text["share"]}</th>{shares}<th colspan="3"></th></tr></tfoot></table>'
    )


def _mark(row: Row, exercise_id: str, text: dict) -> str:
    if exercise_id not in row.marks:
        return '<td class="mark"></td>'
    verdict = row.marks[exercise_id].verdict
    kind = "good" if verdict == "passed" else "bad"
    return f'<td class="mark {kind}">{_SIGNS[verdict]} {text["verdicts"][verdict]}</td>'


def _share(rows: list[Row], exercise_id: str) -> str:
    asked = [row.marks[exercise_id].verdict for row in rows if exercise_id in row.marks]
    return f"{asked.count('passed')} / {len(asked)}"


def _common(rows: list[Row], text: dict) -> str:
    """The reasons in the messages, counted: what to go over in class."""
    reasons: Counter[tuple[str, str]] = Counter()
    for row in rows:
        for exercise_id, mark in row.marks.items():
            if mark.verdict == "wrong":
                found = re.search(r"^  (?:why|为什么) +(.+?)^  \S", mark.message + "\n  .", re.MULTILINE | re.DOTALL)
                reason = found[1] if found else mark.message.split(": ", 1)[-1]
                reasons[exercise_id, " ".join(reason.split())] += 1
    if not reasons:
        return f"<p>{text['nothing']}</p>"
    items = "".join(f"<li><b>{n}×</b> {i}: {escape(reason)}</li>" for (i, reason), n in reasons.most_common(8))
    return f"<ul>{items}</ul>"


def _details(name: str, row: Row, text: dict) -> str:
    parts = [f"<pre>{escape(mark.message or f'{i}: ' + text['verdicts'][mark.verdict])}</pre>"
             for i, mark in row.marks.items()]  # fmt: skip
    notes = "".join(f"<p>{escape(visible(note))}</p>" for note in row.notes)
    head = f"{escape(name)}: {row.num_passed} / {len(row.marks)}"
    return f"<details><summary>{head}</summary>{notes}{''.join(parts)}</details>\n"


def write_reports(
    rows: list[Row], csv_path: Path, html_path: Path, *, lang: str = "en", seed: int = 0, seconds: float = 0.0
) -> None:
    """Write both files. Older ones are replaced only when both reports are made.

    Raises:
        OSError: a file cannot be written; what it held before is still there.
    """
    table, page = to_csv(rows), to_html(rows, lang=lang, seed=seed, seconds=seconds)
    write_whole(csv_path, table, encoding="utf-8-sig")
    write_whole(html_path, page)
