"""The teacher's page of a lesson: plan, quiz with answers, hunt, recall rubric, likely wrong answers, solutions."""

from __future__ import annotations

from collections.abc import Iterator

from nanoengine.course.checks import exercises_of
from nanoengine.course.record import Record, course_root
from nanoengine.course.source import find_sources, read_source
from nanoengine.course.text import html, inline
from nanoengine.course.typography import printed
from nanoengine.markup import escape

_TEXT = printed(
    {
        "en": {
            "title": "Lesson {no}: answer key",
            "plan": "Minute plan",
            "total": "{n} minutes in all",
            "wrong": "Likely wrong answers",
            "quiz": "Quiz",
            "hunt": "Code hunt",
            "recall": "Recall",
            "exercises": "Exercises",
            "hints": "Hints",
            "right": "right",
            "minutes": "{n} min",
        },
        "zh": {
            "title": "第 {no} 课 · 参考答案",
            "plan": "时间安排",
            "total": "共 {n} 分钟",
            "wrong": "常见的错误回答",
            "quiz": "测验",
            "hunt": "代码寻宝",
            "recall": "复述",
            "exercises": "练习",
            "hints": "提示",
            "right": "正确",
            "minutes": "{n} 分钟",
        },
    }
)
_STYLE = """
:root { color-scheme: light dark; --line: #8886; --soft: #8882; --good: #00795a; }
@media (prefers-color-scheme: dark) { :root { --good: #2fc79b; } }
body { font: 16px/1.55 system-ui, "Noto Sans CJK SC", sans-serif; margin: 2rem auto; max-width: 52rem;
  padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; } td, th { border-bottom: 1px solid var(--line); padding: .3rem .5rem;
  text-align: left; vertical-align: top; }
pre { background: var(--soft); padding: .7rem; overflow-x: auto; font-size: 13px; }
.right { color: var(--good); font-weight: 600; } li { margin: .3rem 0; } h3 { margin-bottom: .3rem; }
@media print { body { font-size: 11pt; } h2 { break-after: avoid; } }
"""


def answer_key(record: Record, lang: str) -> str:
    """One HTML page without scripts, to read or to print."""
    text = _TEXT[lang]
    title = text["title"].format(no=record.lesson)
    return (
        f'<!doctype html>\n<html lang="{"zh-CN" if lang == "zh" else "en"}"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width"><title>{title}</title><style>{_STYLE}</style></head>'
        f"<body><h1>{title}</h1>{''.join(_sections(record, lang, text))}</body></html>\n"
    )


def _sections(record: Record, lang: str, text: dict[str, str]) -> Iterator[str]:
    yield f"<h2>{text['plan']}</h2>{_plan(record, lang, text)}"
    yield f"<h2>{text['wrong']}</h2>"
    for wrong in record.wrong_answers:
        yield f"<h3>{inline(wrong.says[lang])}</h3>{html(wrong.reply[lang])}<p><small>{_quote(wrong.where)}</small></p>"
    yield f"<h2>{text['quiz']}</h2>"
    for number, question in enumerate(record.quiz, 1):
        options = "".join(_option(option, lang, text) for option in question.options)
        yield f"<h3>{number}. {inline(question.question[lang])}</h3><ol type='a'>{options}</ol>"
    yield f"<h2>{text['hunt']}</h2>"
    for stop in record.hunt:
        yield f"<h3>{inline(stop.question[lang])}</h3><p><code>{_quote(stop.at)}</code></p>{html(stop.answer[lang])}"
    yield f"<h2>{text['recall']}</h2>{html(record.recall.prompt[lang])}<ul>"
    yield from (f"<li><b>{level}</b>: {inline(words[lang])}</li>" for level, words in record.recall.rubric.items())
    yield "</ul>"
    yield from _exercises(record.lesson, lang, text)


def _plan(record: Record, lang: str, text: dict[str, str]) -> str:
    rows = "".join(f"<tr><td>{text['minutes'].format(n=item.minutes)}</td><td>{inline(item.what[lang])}</td></tr>"
                   for item in record.plan)  # fmt: skip
    total = text["total"].format(n=sum(item.minutes for item in record.plan))
    return f"<table>{rows}</table><p>{total}</p>"


def _option(option, lang: str, text: dict[str, str]) -> str:
    sign = f'<span class="right">✓ {text["right"]}</span> · ' if option.right else "✗ "
    return f"<li>{sign}{inline(option.text[lang])}<br><small>{inline(option.reason[lang])}</small></li>"


def _exercises(lesson: str, lang: str, text: dict[str, str]) -> Iterator[str]:
    exercises = exercises_of(lesson)
    if not exercises:
        return
    from nanoengine.course.exercises import variant

    paths = find_sources(course_root() / "exercises" / "src", [lesson])
    solved = {cell.id: cell.en for path in paths for cell in variant(read_source(path), "solution").cells}
    yield f"<h2>{text['exercises']}</h2>"
    for exercise in exercises:
        hints = "".join(f"<li>{inline(hint[lang])}</li>" for hint in exercise.hints)
        yield f"<h3>{exercise.id} · {_quote(exercise.title[lang])}</h3>"
        yield f"<pre>{_quote(solved[f'{exercise.id}-answer'])}</pre><p>{text['hints']}</p><ol>{hints}</ol>"


def _quote(text: str) -> str:
    return escape(text)
