"""Names, numbers and commands as a person is shown them. Needs the standard library alone."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import unicodedata

# Marks that turn the direction of the text after them: a name could look like another one.
_TURNING = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def visible(text: object) -> str:
    """A name or a message on one line, as it can be printed, stored and encoded anywhere.

    Bytes of a file name that are no UTF-8, control characters and line ends are written as Python escapes them
    (``\\xc0``, ``\\n``). A name that was read in a locale without UTF-8 gets its characters back.
    """
    if isinstance(text, os.PathLike):
        text = os.fspath(text)
    if isinstance(text, bytes):
        text = os.fsdecode(text)
    return "".join(_escaped(char) if _is_odd(char) else char for char in decoded(str(text)))


def decoded(text: str) -> str:
    """The text without lone surrogates: those of a file name are bytes, taken as UTF-8 where they are."""
    if text.isascii() or not any("\ud800" <= char <= "\udfff" for char in text):
        return text
    try:
        return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    except UnicodeEncodeError:  # other surrogates than those that stand for bytes
        return text.encode("utf-8", "backslashreplace").decode("utf-8")


def printable(text: str) -> str:
    """The text with line ends kept, and every other character that no page or terminal should get escaped."""
    return "".join(_escaped(char) if char not in "\n\t" and _is_odd(char) else char for char in decoded(text))


def _is_odd(char: str) -> bool:
    return unicodedata.category(char) in ("Cc", "Cs", "Zl", "Zp") or char in _TURNING or char in "\ufffe\uffff"


def _escaped(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")


def for_terminal(text: object) -> str:
    """``visible``, with escapes for what stdout cannot encode: two names never look the same."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return visible(text).encode(encoding, "backslashreplace").decode(encoding)


def reason(error: BaseException) -> str:
    """Why, without the number and the path that an OSError shows beside it."""
    return visible(getattr(error, "strerror", None) or error or type(error).__name__)


def quoted(argument: object) -> str:
    """One argument as it is typed in this system's shell."""
    if os.name == "nt":
        return subprocess.list2cmdline([str(argument)])
    return shlex.quote(str(argument))


def counted(number: int, noun: str) -> str:
    """A number with its English noun: 1 attempt, 2 attempts."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
