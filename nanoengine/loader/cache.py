"""Where converted models live on disk, and how a folder gets there whole or not at all."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import platformdirs
from filelock import FileLock


def cache_root() -> Path:
    """``$NANOENGINE_CACHE``, or the user's cache folder (``~/.cache/nanoengine`` on Linux)."""
    chosen = os.environ.get("NANOENGINE_CACHE")
    return Path(chosen).expanduser() if chosen else Path(platformdirs.user_cache_dir("nanoengine", appauthor=False))


def build_once(target: Path, build: Callable[[Path], object], is_complete: Callable[[Path], bool]) -> Path:
    """Return ``target``, calling ``build(temporary_folder)`` first if it is absent or incomplete.

    The temporary folder lies beside ``target`` and is renamed when ``build`` returns, so a reader
    never sees half of it; a lock file makes a second process wait instead of doing the work again.

    Errors: whatever ``build`` raises (nothing is left behind); OSError if a damaged ``target``
    cannot be removed, saying what to delete, or if nothing can be written there, naming
    NANOENGINE_CACHE.
    """
    try:
        return _build_once(target, build, is_complete)
    except OSError as error:
        if error.errno not in _UNWRITABLE:
            raise
        raise OSError(
            f"the model cache {target.parent} cannot be written ({error.strerror}): "
            "set NANOENGINE_CACHE to a folder of yours with 1.5 GB free"
        ) from error


# No permission, a read-only disk, a full one, a quota, a file where a folder should be.
_UNWRITABLE = tuple(
    getattr(errno, name)
    for name in ("EACCES", "EPERM", "EROFS", "ENOSPC", "EDQUOT", "ENOTDIR", "EEXIST")
    if hasattr(errno, name)
)


def _build_once(target: Path, build: Callable[[Path], object], is_complete: Callable[[Path], bool]) -> Path:
    if is_complete(target):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{target}.lock"):
        if is_complete(target):  # another process built it while this one waited
            return target
        _remove(target)
        for stale in target.parent.glob(f"{target.name}.tmp-*"):  # from a process that was killed
            _remove(stale)
        temporary = target.parent / f"{target.name}.tmp-{os.getpid()}"
        temporary.mkdir()
        try:
            build(temporary)
            os.replace(temporary, target)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return target


def _remove(folder: Path) -> None:
    if not folder.exists():
        return
    try:
        shutil.rmtree(folder)
    except OSError as error:
        raise OSError(f"{folder} is damaged and cannot be removed ({error}): delete it, then try again") from error
