"""What is said of the progress file, in both languages.

Not typeset by ``typography.printed``: a path stands in the texts.
"""

from __future__ import annotations

from nanoengine.shown import reason

TEXT = {
    "en": {
        "not_kept": "Progress is not kept. It would be in {path} ({why}).",
        "elsewhere": "NANOENGINE_PROGRESS=FILE keeps it in another file.",
        "aside": "{path} was damaged: it is now {aside}, and a new one was begun.",
        "unreadable": "cannot be read ({why})",
        "damaged": "is damaged ({why}): restore it, or delete it to start over",
        "stuck": "{why}; it could not be renamed ({refused})",
        "foreign": "is no progress file of this course",
        "newer": "was written by a newer nanoengine (schema {schema}): update this one",
    },
    "zh": {
        "not_kept": "进度没有保存。本应写入 {path}（{why}）。",
        "elsewhere": "设置 NANOENGINE_PROGRESS=文件 可以换个地方保存。",
        "aside": "{path} 已损坏：原文件改名为 {aside}，另起了一份新的。",
        "unreadable": "无法读取：{why}",
        "damaged": "文件已损坏：{why}；请恢复它，或删掉它重新开始",
        "stuck": "{why}；也无法改名：{refused}",
        "foreign": "不是本课程的进度文件",
        "newer": "由更新版本的 nanoengine 写成（schema {schema}），请升级",
    },
}
Both = dict[str, str]  # the same in each language


def said(name: str, **facts: object) -> Both:
    """A text of ``TEXT`` in both languages. A fact may itself be in both."""

    def of(fact: object, lang: str) -> object:
        return fact[lang] if isinstance(fact, dict) else fact

    return {lang: text[name].format(**{k: of(fact, lang) for k, fact in facts.items()}) for lang, text in TEXT.items()}


def system_said(error: OSError) -> Both:
    """Why the system refused: its own words, in its own language."""
    return dict.fromkeys(TEXT, reason(error))
