"""What a user may give as prompts and messages, brought to one shape."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from typing import Any

Prompt = str | list[int] | dict[str, Any]


def prompt_list(prompts: Prompt | SequenceOf[Prompt]) -> list[Prompt]:
    """A bare str, dict, or list of token ids is one prompt; otherwise a list of them. ValueError if neither."""
    if isinstance(prompts, (str, dict)) or _is_ids(prompts):
        return [prompts]
    if isinstance(prompts, (list, tuple)):
        return list(prompts)
    raise ValueError(
        "prompts must be a str, a list of token ids, a dict(prompt=… or prompt_token_ids=…), or a list of those, "
        f"got {type(prompts).__name__}"
    )


def prompt_parts(prompt: Prompt, encode) -> tuple[str | None, Iterable[int]]:
    """(text or None, token ids) of one prompt; ``encode`` turns text into ids. The ids are not checked yet."""
    if isinstance(prompt, dict):
        unknown = set(prompt) - {"prompt", "prompt_token_ids", "cache_salt"}
        if unknown or not prompt:
            raise ValueError(
                "a prompt dict has the key 'prompt' or 'prompt_token_ids', and perhaps 'cache_salt', "
                f"got {sorted(map(str, prompt)) or 'none'}"
            )
        ids = prompt.get("prompt_token_ids")
        text = prompt.get("prompt")
        if ids is None:
            return prompt_parts(text, encode) if isinstance(text, str) else _no_prompt(text)
        return text, ids
    if isinstance(prompt, str):
        return prompt, encode(prompt)
    if hasattr(prompt, "__iter__") and not isinstance(prompt, bytes):
        return None, prompt  # not list(prompt): it may have no end
    return _no_prompt(prompt)


def cache_salt_of(prompt: Prompt):
    """What a prompt dict says about ``cache_salt``; it is not checked yet."""
    return prompt.get("cache_salt") if isinstance(prompt, dict) else None


def params_list(params, count: int, default) -> list:
    """One SamplingParams for all prompts, or exactly one a prompt."""
    if params is None:
        return [default] * count
    if isinstance(params, (list, tuple)):
        if len(params) != count:
            raise ValueError(f"sampling_params has {len(params)} entries for {count} prompts: give one, or one each")
        return list(params)
    return [params] * count


def conversations(messages) -> list[list[dict[str, Any]]]:
    """A str is one user message; a list of dicts one conversation; a list of lists several."""
    if isinstance(messages, str):
        return [[{"role": "user", "content": messages}]]
    if isinstance(messages, (list, tuple)) and messages:
        if all(isinstance(m, dict) for m in messages):
            return [list(messages)]
        if all(isinstance(m, (list, tuple)) and m and all(isinstance(x, dict) for x in m) for m in messages):
            return [list(m) for m in messages]
    raise ValueError(
        "messages must be a str, a list of {'role': …, 'content': …} dicts, or a list of such lists, and not empty; "
        f"got {messages!r:.200}"
    )


def _is_ids(prompts) -> bool:
    if isinstance(prompts, (list, tuple)):
        # an array has __index__, too, but is a prompt of its own
        return bool(prompts) and all(hasattr(x, "__index__") and not getattr(x, "ndim", 0) for x in prompts)
    return hasattr(prompts, "dtype") and getattr(prompts, "ndim", None) == 1  # a numpy or torch vector


def _no_prompt(value):
    raise ValueError(f"a prompt must be a str or a list of token ids, got {type(value).__name__}")
