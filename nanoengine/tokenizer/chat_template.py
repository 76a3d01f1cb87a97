"""Messages -> prompt text, by the Jinja template that comes with a model. Needs no transformers.

The rules that make a template mean the same as in transformers (its ``apply_chat_template``):
trim_blocks and lstrip_blocks on; break and continue allowed; ``raise_exception``, ``strftime_now``
and an unescaped ``tojson`` provided; ``{% generation %}`` marks are transparent. The environment is
sandboxed, because a template is code from whoever published the model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


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
def _compile(source: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationMark, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(source)


def render_chat(template: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
    """Fill ``template`` with checked messages and further variables.

    Errors: ValueError naming the message that is malformed, or with the template's own complaint.
    """
    checked = check_messages(messages)
    try:
        return _compile(template).render(messages=checked, **variables)
    except (TemplateError, TypeError) as error:
        raise ValueError(f"the model's chat template refuses these messages: {error}") from error


def check_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Copies of the messages; content given as a list of text parts is joined to one string.

    Errors: ValueError naming the index and the field.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence) or not messages:
        raise ValueError(f"messages must be a non-empty list of {{'role': ..., 'content': ...}}, got {messages!r:.200}")
    return [_check_message(i, message) for i, message in enumerate(messages)]


def _check_message(i: int, message: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise ValueError(f"messages[{i}] must be a dict with 'role' and 'content', got {message!r:.200}")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise ValueError(f"messages[{i}]['role'] must be a non-empty string such as 'user', got {role!r:.200}")
    if isinstance(content, list):
        content = "".join(_part_text(i, part) for part in content)
    if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
        raise ValueError(f"messages[{i}]['content'] must be a string, got {content!r:.200}")
    return {**message, "content": content}


def _part_text(i: int, part: Any) -> str:
    text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
    if not isinstance(text, str):
        raise ValueError(f"messages[{i}]['content'] may hold only {{'type': 'text', 'text': ...}}, got {part!r:.200}")
    return text
