"""Reads a notebook that somebody handed in, and says of a file that is none what it is instead."""

from __future__ import annotations

import codecs
import json
import os
import stat
from typing import Any

MAX_NOTEBOOK = 50 << 20  # bytes
_UTF_32 = (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)
_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
# How other files begin that are handed in under the name of a notebook.
_OTHERS = {b"PK\x03\x04": "a zip archive", b"%PDF": "a PDF", b"<": "a page of HTML or XML", b"\x1f\x8b": "a gzip file"}


def read_notebook(path: str) -> dict[str, Any]:
    """The notebook as plain data with a list of cells; nbformat 2 and 3 are upgraded, a UTF-8 BOM is allowed.

    Raises:
        ValueError: it is none; the message says what the file is. OSError: it cannot be opened.
    """
    found = os.stat(path)
    if stat.S_ISDIR(found.st_mode):
        os.listdir(path)
        raise ValueError("a folder, no notebook")
    if not stat.S_ISREG(found.st_mode):  # a pipe would be waited for
        raise ValueError("no notebook: it is no regular file")
    if found.st_size > MAX_NOTEBOOK:
        raise ValueError(f"larger than {MAX_NOTEBOOK >> 20} MiB")
    with open(path, "rb") as file:
        data = file.read()
    notebook = _upgraded(_parsed(data))
    cells = notebook.get("cells") if isinstance(notebook, dict) else None
    if not isinstance(cells, list) or not all(isinstance(cell, dict) for cell in cells):
        raise ValueError("no notebook: it has no list of cells")
    if not isinstance(notebook.get("metadata", {}), dict):
        raise ValueError("no notebook: its metadata is no table")
    return notebook


def _parsed(data: bytes) -> Any:
    if not data.strip(b" \t\r\n\0" + codecs.BOM_UTF8):
        raise ValueError(f"the file is empty ({len(data)} bytes)")
    try:
        text = data.decode("utf-8-sig")
        return json.loads(text)
    except UnicodeDecodeError as error:
        raise ValueError(_encoding_of(data, error)) from None
    except RecursionError:
        raise ValueError("no notebook: its JSON is nested too deeply") from None
    except ValueError as error:
        raise ValueError(_what_it_is(data, text, error)) from None


def _what_it_is(data: bytes, text: str, error: ValueError) -> str:
    """Of a text that is UTF-8 and no JSON."""
    start = data.removeprefix(codecs.BOM_UTF8).lstrip()
    for mark, name in _OTHERS.items():
        if start.startswith(mark):
            return f"no notebook: the file is {name}"
    if "\0" in text:
        return _wide(data) or "no notebook: the file is not JSON (it holds zero bytes)"
    if start.startswith(b"{") and _ends_early(text, error):
        return f"cut off after {len(data)} bytes: the notebook is not whole, hand it in again"
    place = f"line {error.lineno}: {error.msg}" if isinstance(error, json.JSONDecodeError) else str(error)
    return f"no notebook: the file is not JSON ({place})"


def _ends_early(text: str, error: ValueError) -> bool:
    """JSON that is right as far as it goes: the error is at its end, or in a string that nobody closed."""
    if not isinstance(error, json.JSONDecodeError):
        return False
    if error.msg.startswith(("Unterminated string", "Invalid \\escape", "Invalid \\uXXXX escape")):
        return "\n" not in text[error.pos :].rstrip() and not text.rstrip().endswith("}")
    rest = text[error.pos :].strip()
    return not rest or any(word.startswith(rest) for word in ("true", "false", "null", "-"))


def _encoding_of(data: bytes, error: UnicodeDecodeError) -> str:
    """Of bytes that are no UTF-8."""
    for mark, name in _OTHERS.items():
        if data.startswith(mark) and mark != b"<":
            return f"no notebook: the file is {name}"
    wide = _wide(data)
    if wide:
        return wide
    if error.reason == "unexpected end of data":
        return f"cut off after {len(data)} bytes, in the middle of a character: hand it in again"
    try:
        json.loads(data.decode("gb18030"))
        return _save_as("GBK or GB18030")
    except (ValueError, RecursionError):
        return f"no notebook: the file is not UTF-8 (byte {error.start} is 0x{data[error.start]:02x})"


def _wide(data: bytes) -> str:
    """Of UTF-16 and UTF-32, with or without a mark; empty for anything else."""
    if data.startswith(_UTF_32):
        return _save_as("UTF-32")
    zeros = data[:64].count(0)
    if data.startswith(_UTF_16) or (data[:2].strip(b"\0") in (b"{", b"[") and zeros >= len(data[:64]) // 3):
        return _save_as("UTF-16")
    return ""


def _save_as(encoding: str) -> str:
    return f"the file is {encoding} text and a notebook is UTF-8: save it as UTF-8, hand it in again"


def _upgraded(notebook: Any) -> Any:
    """A notebook of nbformat 2 or 3 (IPython before 2015) as nbformat 4; anything else as it is."""
    if not isinstance(notebook, dict) or "cells" in notebook or not isinstance(notebook.get("worksheets"), list):
        return notebook
    import nbformat

    try:
        major = notebook.get("nbformat") if notebook.get("nbformat") in (2, 3) else 3
        old = nbformat.from_dict({"metadata": {}, "nbformat_minor": 0, **notebook, "nbformat": major})
        return nbformat.convert(old, 4)
    except Exception as error:  # whatever an old, damaged notebook trips it over
        raise ValueError(f"a notebook of nbformat {major} that cannot be upgraded: {error!r}") from None
