"""Files that are written whole or not at all."""

from __future__ import annotations

import os
import shutil
import stat
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from nanoengine.shown import reason, visible

LOCK_SECONDS = 20.0
_TEMPORARY = ".tmp-"
_REPLACE_TRIES = 20


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
