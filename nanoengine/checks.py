"""Checks of values that users give: one message shape, name, limit and value."""

from __future__ import annotations

import math
from typing import Any

INFINITY = math.inf
BIG = 2**31 - 1  # what an int32 index can hold


def number(name: str, value: Any, low: float, high: float, *, open_low: bool = False) -> float:
    """``value`` as a float, if it is a finite number in [low, high] ((low, high] with open_low).

    Numbers of NumPy and the like are taken, truth values and strings are not.
    Errors: ValueError naming argument, limit and value.
    """
    try:
        if is_bool(value) or isinstance(value, (str, bytes)) or getattr(value, "ndim", 0):
            raise TypeError
        plain = value.__float__()
        if not math.isfinite(plain):
            raise TypeError
    except (AttributeError, TypeError, ValueError):
        raise ValueError(f"{name} must be a number, got {value!r}") from None
    except OverflowError:  # an integer beyond all floats
        plain = INFINITY if value > 0 else -INFINITY
    if not low <= plain <= high or (open_low and plain == low):
        raise ValueError(f"{name} must lie in {'(' if open_low else '['}{low}, {high}], got {value!r}")
    return plain


def integer(name: str, value: Any, low: int, high: float = INFINITY) -> int:
    """``value`` as a plain int, if it is an integer in [low, high]; ValueError as above."""
    try:
        if is_bool(value) or getattr(value, "ndim", 0):
            raise TypeError
        plain = value.__index__()
    except (AttributeError, TypeError):
        raise ValueError(f"{name} must be an integer, got {value!r}") from None
    if not low <= plain <= high:
        limit = f"be at least {low}" if high == INFINITY else f"lie in [{low}, {high}]"
        raise ValueError(f"{name} must {limit}, got {value!r}")
    return plain


def integers(name: str, values: Any, low: int, high: float) -> tuple[int, ...]:
    """Each of ``values``, from any iterable but a text, as integer() has it."""
    try:
        if isinstance(values, (str, bytes)):
            raise TypeError
        iterator = iter(values)
    except TypeError:
        raise ValueError(f"{name} must be a list of token ids, got {values!r}") from None
    return tuple(integer(name, value, low, high) for value in iterator)


def boolean(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")
    return value


def is_bool(value: Any) -> bool:
    """True for True and False, NumPy's too: they count as 1 and 0, which is never what was meant."""
    return isinstance(value, bool) or type(value).__name__ in ("bool", "bool_")
