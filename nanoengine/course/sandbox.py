"""Runs another person's notebook in a process of its own, and lets nothing of it live on. Linux does it best.

Limits: wall time, processor time, address space, file size; no stdin; no network. Everything that the process starts is
ended with it: it leads a session of its own, has a PID namespace of its own where the kernel allows that, carries a
mark in its environment, and its orphans come back to us. This keeps accidents and simple tricks in; it is no jail: the
process may read what its user may read. Grade strangers' work in a container.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psutil

MARK = "NANOENGINE_GRADED"
_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37
_NEWUSER, _NEWPID, _NEWNET = 0x10000000, 0x20000000, 0x40000000
_KEPT = ("PATH", "LANG", "LC_ALL", "PYTHONPATH", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "TMPDIR", "SYSTEMROOT")
_READ_LIMIT = 8 << 20  # bytes of results that are looked at


@dataclass(frozen=True)
class Limits:
    """seconds: wall time of one submission. cell_seconds: processor time of one cell or
    check. memory_gib: address space."""

    seconds: float = 60.0
    cell_seconds: float = 20.0
    memory_gib: float = 4.0


@dataclass(frozen=True)
class Ended:
    """How a child ended. reason: "done", "time" or "died". code: of its exit; of a signal, negative or 128 + number."""

    reason: str
    code: int
    seconds: float
    results: bytes


def run_child(module: str, job: bytes, limits: Limits) -> Ended:
    """Run ``python -m module``, with ``job`` on its stdin, in an empty folder; what it writes to the descriptor named
    in its first argument comes back as ``results``. Returns once it and everything it started has ended."""
    mark = uuid.uuid4().hex
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, tempfile.TemporaryFile() as results:
        start = time.monotonic()
        child = subprocess.Popen(
            [sys.executable, "-m", module, str(results.fileno())],
            cwd=folder, env=_environment(folder, mark), pass_fds=[results.fileno()], start_new_session=True,
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        reason = "done"
        try:
            child.communicate(job, timeout=limits.seconds)
        except subprocess.TimeoutExpired:
            reason = "time"
        except BrokenPipeError:  # it died before it read the job
            child.wait()
        finally:
            end_all(child, mark)
        results.seek(0)
        return Ended(reason if reason == "time" or child.returncode == 0 else "died", child.returncode,
                     time.monotonic() - start, results.read(_READ_LIMIT))  # fmt: skip


def _environment(folder: str, mark: str) -> dict[str, str]:
    """Nothing of the teacher's own: no tokens, no profile, no progress file."""
    kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
    return kept | {"HOME": folder, "IPYTHONDIR": folder, "MPLCONFIGDIR": folder, "MPLBACKEND": "Agg", MARK: mark,
                   "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "HF_HUB_OFFLINE": "1"}  # fmt: skip


def end_all(child: subprocess.Popen, mark: str) -> None:
    """Kill the child's process group and all that carry the mark or descend from the child, until none is left."""
    known = _tree(child.pid)
    for _ in range(50):
        try:
            os.killpg(child.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass
        known |= {p for p in psutil.process_iter() if _environ(p).get(MARK) == mark}
        alive = [p for p in known if p.is_running() and p.status() != psutil.STATUS_ZOMBIE and p.pid != os.getpid()]
        for process in alive:
            _kill(process)
        if not alive:
            break
        psutil.wait_procs(alive, timeout=0.2)
    child.wait()


def _tree(pid: int) -> set[psutil.Process]:
    try:
        root = psutil.Process(pid)
        return {root, *root.children(recursive=True)}
    except psutil.Error:
        return set()


def _environ(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except (psutil.Error, OSError):
        return {}


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.Error:
        pass


@contextmanager
def no_survivors() -> Iterator[None]:
    """While the block runs, orphans of our children become our own children; at its end, those that are left die.

    This catches a process that left its session and wiped its environment. Linux only; elsewhere it does nothing.
    """
    libc = _libc()
    before = {p.pid for p in psutil.Process().children(recursive=True)}
    old = ctypes.c_int(0)
    if libc is not None:
        libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(old), 0, 0, 0)
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        for _ in range(20):
            left = [p for p in psutil.Process().children(recursive=True) if p.pid not in before]
            for process in left:
                _kill(process)
            if not left:
                break
            psutil.wait_procs(left, timeout=1)  # reaps them, too
        if libc is not None:
            libc.prctl(_PR_SET_CHILD_SUBREAPER, old.value, 0, 0, 0)


def _libc():
    return ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


# in the child, before it runs anything of the learner's


def confine(limits: Limits) -> None:
    """Set this process's limits, take its network away, and make it the first of a PID namespace if that is allowed.

    Returns in the process that is to run the notebook; where there is a namespace, the one it was forked from only
    waits for it.
    """
    _own_namespaces()
    _no_network()
    try:
        import resource
    except ImportError:  # Windows: the parent's time limit remains
        return
    memory, seconds = int(limits.memory_gib * 2**30), int(limits.seconds) + 1
    # A little is kept for the checks of a notebook that has eaten all it may.
    for what, soft, hard in (
        (resource.RLIMIT_AS, memory, memory + 2**28),
        (resource.RLIMIT_CPU, seconds, seconds + 2),
        (resource.RLIMIT_FSIZE, 2**26, 2**26),
        (resource.RLIMIT_CORE, 0, 0),
    ):
        resource.setrlimit(what, (soft, hard))


def more_memory() -> None:
    """Up to the hard limit, for a check after a MemoryError."""
    try:
        import resource
    except ImportError:
        return
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))


def _own_namespaces() -> None:
    libc = _libc()
    if libc is None or libc.unshare(_NEWUSER | _NEWPID | _NEWNET) != 0:
        return
    child = os.fork()
    if child == 0:
        return
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os._exit(code if code >= 0 else 128 - code)  # as a shell says that a signal ended it


def _no_network() -> None:
    """Where there is no namespace: refuse names and connections of this interpreter. The hook cannot be taken off."""

    def refuse(event: str, args: tuple) -> None:
        if event in ("socket.connect", "socket.bind", "socket.getaddrinfo", "socket.sendto"):
            raise PermissionError("a notebook that is graded has no network")

    sys.addaudithook(refuse)
