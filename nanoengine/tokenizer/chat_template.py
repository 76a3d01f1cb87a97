"""Messages -> prompt text, by the Jinja template that comes with a model. Needs no transformers.

The rules that make a template mean the same as in transformers (its ``apply_chat_template``):
trim_blocks and lstrip_blocks on; break and continue allowed; ``raise_exception``, ``strftime_now``
and an unescaped ``tojson`` provided; ``{% generation %}`` marks are transparent. The environment is
sandboxed, because a template is code from whoever published the model.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Template, TemplateError, meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

# of Tokenizer.apply_chat_template itself, for any template
SWITCHES = ("add_generation_prompt", "continue_final_message")
# Put behind the text that the model is to continue, to find it again in what a template made of it.
# The blank tells whether the template trims.
_END_OF_TEXT = "\ue000end of text\ue001 "


class _GenerationMark(Extension):
    """``{% generation %} ... {% endgeneration %}`` marks what a trainer learns from: just render it."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _tojson(value: Any, ensure_ascii: bool = False, indent=None, separators=None, sort_keys: bool = False) -> str:
    # Jinja's own filter escapes <, > and & for HTML, which a model has never seen.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@lru_cache(maxsize=16)
def _compile(source: str) -> tuple[Template, frozenset[str]]:
    """The template, and the names of the variables that it reads."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationMark, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    read = meta.find_undeclared_variables(environment.parse(source))
    return environment.from_string(source), frozenset(read)


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any],
    *,
    continue_final_message: bool = False,
) -> str:
    """Fill ``template`` with checked messages and further variables.

    continue_final_message: end with the last message's text, without what the template writes
    after it.

    Errors: ValueError naming the message that is malformed, or with the template's own complaint:
    a template is code, so whatever it raises is one.
    """
    checked = check_messages(messages)
    if continue_final_message:
        if not isinstance(checked[-1]["content"], str):
            path = f"messages[{len(checked) - 1}].content"
            raise ValueError(f"{path} must be a string to be continued, got None")
        checked[-1]["content"] += _END_OF_TEXT
    try:
        text = _compile(template)[0].render({**variables, "messages": checked})
    except Exception as error:
        said = str(error) if isinstance(error, TemplateError) else f"{type(error).__name__}: {error}"
        raise ValueError(f"the model's chat template refuses these messages: {said}") from error
    return _up_to_the_mark(text) if continue_final_message else text


def check_template_kwargs(
    template: str, kwargs: Mapping[str, Any], given: Iterable[str] = ()
) -> None:
    """Refuse names that would change nothing. given: names that a template has anyway.

    Errors: ValueError naming the first that ``template`` does not read, and those that it does.
    """
    if not isinstance(kwargs, Mapping):
        raise ValueError(f"chat_template_kwargs must be a dict, got {kwargs!r:.200}")
    try:
        read = _compile(template)[1]
    except Exception:  # it cannot be rendered either, which says why
        return
    for name in kwargs:
        if name in (*SWITCHES, *(read - {"messages"})):
            continue
        own = sorted(read - {"messages", *SWITCHES, *given})
        close = difflib.get_close_matches(str(name), [*own, *SWITCHES], n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ValueError(
            f"chat_template_kwargs may not hold {name!r:.100}: {hint}this model's chat template "
            f"reads {', '.join(own) or 'no variable of its own'}"
        )


def _up_to_the_mark(text: str) -> str:
    mark = _END_OF_TEXT.rstrip()
    if mark not in text:
        raise ValueError(
            "continue_final_message: this model's chat template does not write the last message's text"
        )
    before, _, after = text.rpartition(mark)
    # where the template trims, it would have trimmed what stands before the mark
    return before if after.startswith(" ") else before.rstrip()


def check_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Copies of the messages; content given as a list of text parts is joined to one string.

    An assistant's message may come back as clients hold it: without content (it counts as "",
    unless tool calls stand in its place) and with further fields that are None or empty, which are
    left out.
    Errors: ValueError naming the field by its path, as messages[0].content.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence) or not messages:
        raise ValueError(f"messages must be a non-empty list of {{'role': ..., 'content': ...}}, got {messages!r:.200}")
    return [_check_message(i, message) for i, message in enumerate(messages)]


def _check_message(i: int, message: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise ValueError(f"messages[{i}] must be a dict with 'role' and 'content', got {message!r:.200}")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise ValueError(
            f"messages[{i}].role must be a non-empty string such as 'user', got {role!r:.200}"
        )
    path = f"messages[{i}].content"
    if isinstance(content, (list, tuple)):
        content = "".join(_part_text(f"{path}[{j}]", part) for j, part in enumerate(content))
    if content is None and role == "assistant" and not message.get("tool_calls"):
        content = ""
    if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
        raise ValueError(f"{path} must be a string or a list of text parts, got {content!r:.200}")
    given = {name: value for name, value in message.items() if value is not None and value != []}
    return {**given, "content": content}


def _part_text(path: str, part: Any) -> str:
    text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
    if not isinstance(text, str):
        raise ValueError(f"{path} must be {{'type': 'text', 'text': ...}}, got {part!r:.200}")
    return text
