"""Files that are written whole or not at all, and names as a reader can be shown them. Needs no torch."""

from __future__ import annotations

import os
import shutil
import stat
import sys
import unicodedata
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LOCK_SECONDS = 20.0
_TEMPORARY = ".tmp-"
_REPLACE_TRIES = 20
# Marks that turn the direction of the text after them: a name could look like another one.
_TURNING = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def write_whole(path: Path, text: str, *, encoding: str = "utf-8") -> None:
    """Write a file so that a reader, a full disk or a killed process never meets half of it.

    The text goes into a new file beside ``path``, which then takes its place. A link stays a link. What is no regular
    file (a pipe, /dev/stdout) is written as it is.

    Raises:
        UnicodeEncodeError: the text cannot be encoded. OSError: the folder or the file cannot be written.
        In both cases an older file is as it was.
    """
    data = text.encode(encoding)
    target = Path(os.path.realpath(path))
    if os.path.lexists(target) and not stat.S_ISREG(os.stat(target).st_mode):
        target.write_bytes(data)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name[:200]}{_TEMPORARY}{uuid.uuid4().hex}")
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if target.exists():
            shutil.copymode(target, temporary)
        _replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _replace(temporary: Path, target: Path) -> None:
    """``os.replace``. Windows refuses it while another process reads the target, which takes a moment."""
    for left in reversed(range(_REPLACE_TRIES)):
        try:
            os.replace(temporary, target)
            return
        except PermissionError:
            if os.name != "nt" or not left:
                raise
            import time

            time.sleep(0.05)


def remove_unfinished(path: Path) -> None:
    """Delete what writers of ``path`` left behind when they were killed. Only while no other one writes."""
    target = Path(os.path.realpath(path))
    prefix = f".{target.name[:200]}{_TEMPORARY}"
    for left in target.parent.iterdir():
        if left.name.startswith(prefix):
            with suppress(OSError):
                left.unlink()


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keep other processes from changing ``path`` in the block. The lock is a hidden file beside it.

    Raises:
        OSError: the lock cannot be made, or another process holds it for ``LOCK_SECONDS``.
    """
    from filelock import FileLock, SoftFileLock

    target = Path(os.path.realpath(path))
    target.parent.mkdir(parents=True, exist_ok=True)
    name = target.with_name(f".{target.name}.lock")
    lock = FileLock(name, timeout=LOCK_SECONDS)
    try:
        lock.acquire()
    except NotImplementedError:  # a network drive without locks: a file that is there or not
        lock = SoftFileLock(name, timeout=LOCK_SECONDS)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def check_writable(path: Path) -> None:
    """Raise OSError where ``write_whole`` could not write ``path``; leaves nothing behind."""
    target = Path(os.path.realpath(path))
    if target.is_dir():
        raise IsADirectoryError(f"{visible(path)} is a folder: name a file")
    if os.path.lexists(target) and not target.is_file():
        return
    probe = target.with_name(f".{target.name[:200]}{_TEMPORARY}{uuid.uuid4().hex}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(probe, "xb"):
            pass
        probe.unlink()
    except OSError as error:
        raise OSError(f"{visible(path)} cannot be written ({reason(error)})") from None


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
        import subprocess

        return subprocess.list2cmdline([str(argument)])
    import shlex

    return shlex.quote(str(argument))


def counted(number: int, noun: str) -> str:
    """A number with its English noun: 1 attempt, 2 attempts."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
