"""The fields of a file that came with a model, each read with its type and its range checked.

Whoever reads a field of a config.json, a generation_config.json or a GGUF file's metadata reads it
here, so that every refusal names the file, the field, its value and what it must be.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

NEEDED: Any = object()  # a default that says: the field must be there


class Fields:
    """source: the file, for messages. prefix: what stands before each name in the file (``llama.``,
    ``rope_scaling.``).

    A field that is absent has the default. ``null`` counts as absent only where the default is
    None: it never stands for a number or a flag. Errors of all methods: ValueError.
    """

    def __init__(self, values: Mapping[str, Any], source: str | Path, prefix: str = ""):
        self.values, self.source, self.prefix = values, source, prefix

    def error(self, name: str, words: str) -> ValueError:
        return ValueError(f"{self.source}: {self.prefix}{name} {words}")

    def _get(self, name: str, default: Any) -> Any:
        if name not in self.values and default is NEEDED:
            raise ValueError(f"{self.source}: the field '{self.prefix}{name}' is missing")
        return self.values.get(name, default)

    def integer(
        self, name: str, default: Any = NEEDED, least: int = 1, most: int | None = None
    ) -> Any:
        """least 1 unless said otherwise; a float or a bool is none, even 64.0."""
        value = self._get(name, default)
        if value is None and default is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            kind = {0: "an integer of at least 0", 1: "a positive integer"}.get(
                least, f"an integer of at least {least}"
            )
            raise self.error(name, f"must be {kind}, got {_shown(value)}")
        if most is not None and value > most:
            raise self.error(name, f"must be at most {most}, got {_shown(value)}")
        return value

    def number(self, name: str, default: Any = NEEDED, zero: bool = False) -> Any:
        """A finite number above 0, or with ``zero`` of at least 0, as a float."""
        value = self._get(name, default)
        if value is None and default is None:
            return None
        try:
            good = (
                not isinstance(value, bool)
                and isinstance(value, (int, float))
                and math.isfinite(value)
            )
        except OverflowError:  # an integer beyond all floats
            good = False
        if not good or value < 0 or value == 0 and not zero:
            raise self.error(
                name, f"must be a {'' if zero else 'positive '}finite number, got {_shown(value)}"
            )
        return float(value)

    def flag(self, name: str, default: Any = NEEDED) -> Any:
        """true or false; a text such as "false" is neither."""
        value = self._get(name, default)
        if not isinstance(value, bool) and (value is not None or default is not None):
            raise self.error(name, f"must be true or false, got {_shown(value)}")
        return value

    def text(self, name: str, default: Any = NEEDED, choices: tuple[str, ...] = ()) -> Any:
        value = self._get(name, default)
        if value is None and default is None:
            return None
        if not isinstance(value, str):
            raise self.error(name, f"must be a text, got {_shown(value)}")
        if choices and value not in choices:
            raise self.error(
                name, f"{value!r:.100} is not supported, only {' and '.join(map(repr, choices))}"
            )
        return value

    def texts(self, name: str, default: Any = NEEDED) -> Any:
        return self._all(name, default, "texts", lambda entry: isinstance(entry, str))

    def integers(self, name: str, default: Any = NEEDED) -> Any:
        return self._all(
            name, default, "integers", lambda e: isinstance(e, int) and not isinstance(e, bool)
        )

    def numbers(self, name: str, default: Any = NEEDED) -> Any:
        """Finite ones."""
        return self._all(
            name,
            default,
            "finite numbers",
            lambda e: isinstance(e, (int, float)) and not isinstance(e, bool) and math.isfinite(e),
        )

    def _all(self, name: str, default: Any, kind: str, is_good) -> Any:
        value = self._get(name, default)
        if value is None and default is None:
            return None
        if not isinstance(value, (list, tuple)):
            raise self.error(name, f"must be a list of {kind}, got {_shown(value)}")
        for i, entry in enumerate(value):
            if not is_good(entry):
                raise self.error(
                    f"{name}[{i}]", f"must be one of a list of {kind}, got {_shown(entry)}"
                )
        return list(value)

    def group(self, name: str) -> Fields | None:
        """The fields of an object inside this one; None if it is absent, null or empty."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, Mapping):
            raise self.error(name, f"must be an object, got {_shown(value)}")
        return Fields(value, self.source, f"{self.prefix}{name}.") if value else None


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}…"


def warn(text: str) -> None:
    """Tell who loads a model of a choice that was made for them; ``text`` names the file."""
    warnings.warn(text, stacklevel=3)


def read_json(path: Path) -> dict[str, Any]:
    """The object that a JSON file holds.

    Errors: FileNotFoundError; ValueError naming the file where it is no JSON, or no object.
    """
    if not path.exists():
        raise FileNotFoundError(
            f"{path} does not exist: a model folder needs it (is this the right folder?)"
        )
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise ValueError(
            f"{path} is not valid JSON: {error}. Download or convert it again."
        ) from None
    if not isinstance(raw, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(raw).__name__}")
    return raw
