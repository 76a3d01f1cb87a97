"""What rank 0 knows of the other ranks' lives: a rank that fails must end the call, not hang it.

A rank that ends, for whatever reason, takes the engine with it: the others are somewhere within a step and
cannot be brought back into step. ``failure`` then says who and why, and every later call repeats it.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import traceback
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from nanoengine.parallel.group import Group, PeerLost

log = logging.getLogger(__name__)

GRACE_S = 10.0  # for a rank to end by itself, or for the cause of a lost connection to become known
ECHO_S = 0.3  # one rank's end makes the others fail: so long their reports may take to come in
ADVICE = "close() this LLM and make a new one"
FIRST_WORD_S, NEXT_WORD_S = 10, 60  # a rank that does not come: after so long, and then so often, it is told
STOPPED = "is stopped"
BOOTSTRAP = "import sys; sys.path[:] = sys.argv[1:]; from nanoengine.parallel.worker import main; main()"


class Ranks:
    """failure: None, or the text of the RuntimeError that every call on this engine gets."""

    def __init__(self) -> None:
        self.failure: str | None = None
        self.group: Group | None = None  # set once it stands
        self._stopping = False
        self._failed, self._lock, self._owner = threading.Event(), threading.Lock(), os.getpid()

    @property
    def is_fork(self) -> bool:
        """True in a fork of the process that leads the ranks: connections without the threads that serve them."""
        return os.getpid() != self._owner

    def check(self) -> None:
        """RuntimeError if a rank has failed."""
        if self.is_fork:
            raise RuntimeError(f"this LLM's ranks listen to process {self._owner}, of which this one is a fork: make "
                               "an LLM of its own here")  # fmt: skip
        if self.failure is not None:
            raise RuntimeError(self.failure)

    def connected(self, group: Group) -> None:
        """From now on ``group`` is what the ranks are told by."""
        self.group, group.while_waiting = group, self.waiting

    def waiting(self, seconds: float) -> None:
        """Called each second that rank 0 waits for the others: a wait that nobody understands looks like a hang."""
        if self._stopping and seconds >= GRACE_S:  # close() while another thread waits for a step that does not end
            raise PeerLost("the ranks do not hear that this is the end")
        if seconds < FIRST_WORD_S or (seconds - FIRST_WORD_S) % NEXT_WORD_S >= 1:
            return
        where = self._whereabouts()
        if seconds >= NEXT_WORD_S or STOPPED in where:  # to load a model takes its time
            log.warning("waiting for the other ranks since %.0f s: %s. Ctrl-C, pressed twice, ends it.", seconds, where)

    def _whereabouts(self) -> str:
        return "none has ended"

    def fail(self, reason: str) -> None:
        """Note the first reason, and release whoever waits for the ranks. From any thread."""
        with self._lock:
            if self.failure is not None:
                return
            self.failure = f"{reason.rstrip()}\nThe {self._size()} ranks cannot go on without each other: {ADVICE}."
        self._failed.set()
        self.kill()
        if self.group is not None:
            self.group.abort()

    @contextmanager
    def guard(self):
        """Around what all ranks do together: an error in it leaves them out of step, so it ends the engine.

        An error of this rank is raised as it is; one that another rank caused becomes a RuntimeError with
        that rank's own traceback.
        """
        try:
            yield
        except PeerLost as error:
            raise self.explain(error) from error
        except BaseException as error:
            self.broke_off(error)
            raise

    def explain(self, error: BaseException) -> RuntimeError:
        """The RuntimeError for a call that broke off with ``error``: waits for the cause to become known."""
        if not self._failed.wait(GRACE_S):
            self.fail(f"rank 0 lost the other ranks, none of which has ended: {error}")
        return RuntimeError(self.failure)

    def broke_off(self, error: BaseException) -> None:
        text = traceback.format_exception_only(error)[-1].strip()
        self.fail(f"rank 0 broke off within a step ({text})")

    def _size(self) -> int:
        return self.group.size if self.group is not None else 0

    def kill(self) -> None:
        """End the processes that are ours to end."""

    def forget(self) -> None:
        """The end where nobody called close(); most often Python's own."""
        self.kill()

    def stop(self, goodbye) -> None:
        """The orderly end. goodbye: () -> None, tells the other ranks."""


@dataclass
class Child:
    """rank: whose process this is. notes: (kind, text) it has sent; code: its exit code."""

    rank: int
    process: subprocess.Popen
    hello: threading.Event = field(default_factory=threading.Event)
    notes: list[tuple[str, str]] = field(default_factory=list)
    code: int | None = None

    @property
    def story(self) -> str:
        """How it ended, with its traceback if it sent one."""
        name = f"rank {self.rank} (process {self.process.pid})"
        if self.notes:
            return f"{name} failed:\n{self.notes[-1][1]}"
        if self.code is not None and self.code < 0:
            hint = " (out of memory?)" if self.code == -signal.SIGKILL else ""
            return f"{name} was killed by {signal.Signals(-self.code).name}{hint}"
        return f"{name} ended with exit code {self.code}"

    @property
    def state(self) -> str:
        try:
            status = psutil.Process(self.process.pid).status()
        except psutil.Error:
            return "has ended"
        if status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
            return f"{STOPPED} (`kill -CONT {self.process.pid}` lets it go on)"
        return f"is {status}"

    @property
    def is_cause(self) -> bool:
        """False if it only noticed that another rank was gone."""
        return not (self.notes and self.notes[-1][0] == "lost")


class LocalRanks(Ranks):
    """Ranks 1 to k-1 as processes of this machine, started here.

    A process gets its job through a pipe that then stays open: when it closes, this process has gone, and
    the other ends too, however this one died. Its answers come through another pipe, whose end means its end.
    """

    def __init__(self) -> None:
        super().__init__()
        self.children, self._watchers = [], []

    def start(self, jobs: list) -> None:
        """jobs: one a rank, from rank 1 on; pickled. If it raises, stop() ends those that run."""
        for rank, job in enumerate(jobs, 1):
            self.children.append(child := self._start(rank, job))
            watcher = threading.Thread(target=self._watch, args=(child,), name=f"rank-{rank}", daemon=True)
            self._watchers.append(watcher)
            watcher.start()

    def _start(self, rank: int, job) -> Child:
        # It finds its modules where this process does: the folder that it runs in may have a random.py. A process
        # group of its own keeps Ctrl-C from it, and wakes it if it is stopped when its parent dies: then it ends.
        root, path = str(Path(__file__).parents[2]), [entry for entry in sys.path if isinstance(entry, str)]
        process = subprocess.Popen(
            [sys.executable, "-c", BOOTSTRAP, *([] if root in path else [root]), *path],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=None if os.name == "nt" else 0,
        )  # fmt: skip
        try:
            process.stdin.write(pickle.dumps(job))
            process.stdin.flush()
        except OSError:  # it has died already: _watch will say so
            pass
        return Child(rank, process)

    def _size(self) -> int:
        return len(self.children) + 1

    def wait_until_they_listen(self) -> None:
        """RuntimeError if one ends before."""
        began = time.monotonic()
        for child in self.children:
            while not child.hello.wait(1.0):
                self.check()
                self.waiting(time.monotonic() - began)

    def _watch(self, child: Child) -> None:
        for line in child.process.stdout:
            try:
                kind, text = json.loads(line)
            except (ValueError, TypeError):  # something prints when Python starts, a sitecustomize say
                if line.strip():
                    print(line.decode(errors="replace").rstrip(), file=sys.stderr)
                continue
            if kind == "hello":
                child.hello.set()
            else:
                child.notes.append((kind, text))
        child.process.stdout.close()
        child.code = child.process.wait()
        if not self._stopping:
            time.sleep(ECHO_S)
            ended = [c for c in self.children if c.code is not None or c.notes]
            self.fail(max(ended, key=lambda c: c.is_cause).story)

    def kill(self) -> None:
        if self.is_fork:
            return
        self._stopping = True
        for child in self.children:
            if child.process.poll() is None:
                child.process.kill()

    def forget(self) -> None:
        """Leave no thread of gloo's or of ours to Python's end: one that it meets there may abort the process."""
        self.kill()
        if self.group is not None and not self.is_fork:
            self.group.close()
        for watcher in self._watchers:
            if watcher is not threading.current_thread() and not self.is_fork:
                watcher.join(GRACE_S)

    def stop(self, goodbye=None) -> None:
        if self.is_fork:
            return
        if self._stopping or goodbye is None:
            self.kill()
        else:
            self._stopping = True
            try:
                goodbye()
            except PeerLost:
                self.kill()
        for child in self.children:
            try:
                child.process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                child.process.kill()
                child.process.wait()
            child.process.stdin.close()

    def _whereabouts(self) -> str:
        return ", ".join(f"rank {child.rank} (process {child.process.pid}) {child.state}" for child in self.children)


class TorchrunRanks(Ranks):
    """Ranks that torchrun started and looks after: it ends all when one ends. Their tracebacks come by the store."""

    def __init__(self, store, size: int):
        super().__init__()
        self._store, self._ranks = store, size
        threading.Thread(target=self._watch, name="ranks", daemon=True).start()

    def _size(self) -> int:
        return self._ranks

    def _watch(self) -> None:
        while not self._stopping and self.failure is None:
            time.sleep(ECHO_S)
            try:
                if self._store.check([FAILURE]):
                    rank, text = json.loads(self._store.get(FAILURE))
                    self.fail(f"rank {rank} failed:\n{text}")
            except RuntimeError:  # the store has gone, and torchrun with it
                return

    def stop(self, goodbye=None) -> None:
        if not self._stopping and not self.is_fork and self.failure is None and goodbye is not None:
            goodbye()
        self._stopping = True


FAILURE = "failure"  # key of an engine's store


def report_failure(store, rank: int, error: BaseException) -> None:
    """For TorchrunRanks at the other end; who only lost a peer says nothing, the cause is elsewhere."""
    if not isinstance(error, PeerLost):
        store.set(FAILURE, json.dumps([rank, "".join(traceback.format_exception(error))]))
