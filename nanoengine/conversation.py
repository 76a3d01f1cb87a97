"""The loop behind ``nanoengine chat``: questions from stdin, answers streamed to stdout."""

from __future__ import annotations

import sys
from contextlib import closing

PROMPT = "> "


def converse(llm, params, messages: list[dict], help_text: str) -> None:
    """Talk until Ctrl-D, the end of stdin, or /quit.

    messages: what the conversation begins with (a system message, or nothing). What cannot be
    served (a conversation that has outgrown the model, say) is told, and the loop goes on.
    """
    terminal = sys.stdin is not None and sys.stdin.isatty()
    if terminal:
        _line_editing()
        print(f"{llm.model_config.name}. {help_text}.", flush=True)
    history = list(messages)
    while True:
        try:
            question = _read(terminal)
        except KeyboardInterrupt:
            print(f"\n{help_text}.", flush=True)
            continue
        if question is None or question == "/quit":
            return
        if question == "/reset":
            history = list(messages)
            print("(new conversation)", flush=True)
        elif question.startswith("/") and question[1:].isalpha():
            print(f"{help_text}.", flush=True)
        elif question:
            history = _turn(llm, params, history, question)


def _turn(llm, params, history: list[dict], question: str) -> list[dict]:
    """One question and its answer; the history with both, or as it was if there was no answer."""
    asked = [*history, {"role": "user", "content": question}]
    try:
        text = answer(llm, params, asked, stoppable=True)
    except ValueError as error:
        print(f"nanoengine: {error} (/reset forgets the conversation)", file=sys.stderr, flush=True)
        return history
    return [*asked, {"role": "assistant", "content": text}] if text else history


def answer(llm, params, messages: list[dict], *, stoppable: bool = False) -> str:
    """Stream one answer to stdout and return it. stoppable: Ctrl-C ends it and what is there counts."""
    text = ""
    try:
        with closing(llm.stream_chat(messages, params)) as stream:
            for out in stream:
                print(out.delta, end="", flush=True)
                text += out.delta
                if out.error is not None:
                    told = f"\nnanoengine: the answer ended with an error: {out.error}"
                    print(told, file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        if not stoppable:
            raise
        print(" (stopped)", end="")
    print(flush=True)
    return text


def _read(terminal: bool) -> str | None:
    """The next line without its surrounding blanks; None at the end of input."""
    if sys.stdin is None:  # started with stdin closed
        return None
    if not terminal:
        line = sys.stdin.readline()
        return line.strip() if line else None
    try:
        return input(PROMPT).strip()
    except EOFError:
        print()
        return None


def _line_editing() -> None:
    """Arrow keys and history in input(), where Python was built with it."""
    try:
        import readline  # noqa: F401
    except ImportError:
        pass
