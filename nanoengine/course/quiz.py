"""The quiz of a lesson: pick, answer, and read why each option is right or wrong. Four of five pass."""

from __future__ import annotations

from typing import Any

from nanoengine.course.lesson import current_lang
from nanoengine.course.live import Form, fill, folded, page, part, remember, row
from nanoengine.course.phrases import say
from nanoengine.course.pointers import describe
from nanoengine.course.record import PASS_MARK, Question, Record, load
from nanoengine.course.text import inline
from nanoengine.markup import escape

LETTERS = "ABCDE"
_RIGHT, _WRONG = "#3d8440", "#b8600b"  # legible on light and dark, as the colours of show


def quiz(no: str, *, lang: str | None = None) -> Quiz:
    """The five questions of lesson ``no`` ("01" to "18"), the value of a cell. Results go into the progress file.

    Raises:
        ValueError: there is no such lesson.
    """
    return Quiz(load(no), lang or current_lang())


class Quiz(Form):
    """What ``quiz`` returns. ``answer`` is what a click does, and works without widgets."""

    def __init__(self, record: Record, lang: str) -> None:
        super().__init__(lang)
        self.record = record
        self.given: dict[int, frozenset[int]] = {}  # question -> chosen options, once answered
        self.saved = ""

    # the model

    @property
    def right(self) -> int:
        """Questions answered right: all right options chosen and no other."""
        return sum(self.record.quiz[i].right == chosen for i, chosen in self.given.items())

    @property
    def finished(self) -> bool:
        return len(self.given) == len(self.record.quiz)

    def answer(self, index: int, chosen: frozenset[int] | set[int]) -> bool:
        """Answer question ``index`` (from 0) with option indices; True if right. The last one saves the score."""
        self.given[index] = frozenset(chosen)
        if self.finished:
            of = len(self.record.quiz)
            passed = self.right >= PASS_MARK
            entry = {"right": self.right, "of": of, "passed": passed}
            self.saved = remember("quiz", self.record.lesson, entry, self.lang)
        return self.record.quiz[index].right == self.given[index]

    def reset(self) -> None:
        self.given = {}

    def score(self) -> str:
        values = {"right": self.right, "need": PASS_MARK, "done": len(self.given), "of": len(self.record.quiz)}
        key = "passed" if self.right >= PASS_MARK else "failed"
        if not self.finished:
            key = "score" if self.given else "score_none"
        return say(key, self.lang, left=values["of"] - values["done"], **values)

    # the still form

    def html(self) -> str:
        out = []
        for number, question in enumerate(self.record.quiz, 1):
            # Letters as text: JupyterLab's sanitiser takes the type of a list away.
            letters = zip(LETTERS, question.options, strict=False)
            options = "<br>".join(f"{letter}. {inline(option.text[self.lang])}" for letter, option in letters)
            why = folded(say("unfold", self.lang), self.reasons(question, live=False))
            out.append(part(f"<p><b>{number}.</b> {self._asked(question)}</p><p>{options}</p>{why}"))
        return "".join(out)

    def text(self) -> str:
        lines = []
        for number, question in enumerate(self.record.quiz, 1):
            lines.append(f"{number}. {question.question[self.lang]}")
            lines += [f"   {LETTERS[i]}. {o.text[self.lang]}" for i, o in enumerate(question.options)]
        return "\n".join(lines)

    def _asked(self, question: Question) -> str:
        kind = say("several" if len(question.right) > 1 else "one", self.lang)
        blank = "" if self.lang == "zh" else " "  # a wide bracket brings its own room
        return f'{inline(question.question[self.lang])}{blank}<small style="white-space:nowrap">{kind}</small>'

    def reasons(self, question: Question, chosen: frozenset[int] = frozenset(), *, live: bool = True) -> str:
        """HTML: each option with a mark, why, and where to read again."""
        out = []
        for i, option in enumerate(question.options):
            mark, colour, word = ("✓", _RIGHT, "option_right") if option.right else ("✗", _WRONG, "option_wrong")
            places = (describe(pointer, self.record.name, self.lang, live=live) for pointer in option.see)
            # Two cells may stand under one heading.
            shown = dict.fromkeys(f"<code>{escape(p)}</code>" if ".py" in p else escape(p) for p in places)
            see = say("reread", self.lang, places=say("enumerate", self.lang).join(shown))
            picked = " ◂" if i in chosen else ""
            out.append(
                f'<p style="margin:4px 0"><b style="color:{colour}">{LETTERS[i]} {mark} {say(word, self.lang)}{picked}'
                f"</b> · {inline(option.reason[self.lang])} <small>{see}</small></p>"
            )
        return "".join(out)

    # the live form

    def build(self) -> Any:
        import ipywidgets as w

        self._cards = [_QuestionCard(w, self, i) for i in range(len(self.record.quiz))]
        self._score = page(w)
        again = w.Button(description=say("again", self.lang))
        again.on_click(self._on_again)
        self._show_score()
        return w.VBox([*(card.widget for card in self._cards), row(w, [self._score, again])])

    def _show_score(self) -> None:
        if self.finished:
            colour = _RIGHT if self.right >= PASS_MARK else _WRONG
            fill(self._score, f'<b style="color:{colour}">{self.score()}</b> <small>{inline(self.saved)}</small>')
        else:
            fill(self._score, self.score())

    def _on_again(self, _button: Any) -> None:
        self.reset()
        for card in self._cards:
            card.reset()
        self._show_score()


class _QuestionCard:
    """One question's widgets: a box to tick for each option, a button, the reasons."""

    def __init__(self, w: Any, owner: Quiz, index: int) -> None:
        self.owner, self.index, self.question = owner, index, owner.record.quiz[index]
        self.boxes = [
            w.Checkbox(description=LETTERS[i], tooltip=option.text[owner.lang], indent=False, layout={"width": "48px"})
            for i, option in enumerate(self.question.options)
        ]
        for box in self.boxes:
            box.observe(self._on_tick, "value")
        self.button = w.Button(description=say("answer", owner.lang), button_style="primary")
        self.button.on_click(self._on_answer)
        self.verdict, self.why = page(w), page(w)
        asked = page(w, f"<b>{index + 1}.</b> {owner._asked(self.question)}")
        lines = [
            w.HBox([box, page(w, inline(option.text[owner.lang]))], layout={"align_items": "baseline"})
            for box, option in zip(self.boxes, self.question.options, strict=True)
        ]
        self.widget = w.VBox([asked, *lines, row(w, [self.button, self.verdict]), self.why])
        self.widget.layout.margin = "0 0 14px 0"

    def _on_tick(self, change: dict) -> None:
        if change["new"] and len(self.question.right) == 1:  # one answer: a new tick takes the old one away
            for box in self.boxes:
                if box is not change["owner"]:
                    box.value = False

    def _on_answer(self, _button: Any) -> None:
        chosen = frozenset(i for i, box in enumerate(self.boxes) if box.value)
        lang = self.owner.lang
        if not chosen:
            fill(self.verdict, say("pick", lang))
            return
        right = self.owner.answer(self.index, chosen)
        colour, word = (_RIGHT, "right") if right else (_WRONG, "wrong")
        fill(self.verdict, f'<b style="color:{colour}">{say(word, lang)}</b>')
        fill(self.why, self.owner.reasons(self.question, chosen))
        self._lock(True)
        self.owner._show_score()

    def reset(self) -> None:
        for box in self.boxes:
            box.value = False
        fill(self.verdict, "")
        fill(self.why, "")
        self._lock(False)

    def _lock(self, locked: bool) -> None:
        self.button.disabled = locked
        for box in self.boxes:
            box.disabled = locked
