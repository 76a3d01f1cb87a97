"""Ctrl-C between two steps of the engine, not in the middle of one."""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager


@contextmanager
def interruptible():
    """Take Ctrl-C between steps: yields a function that does, if it was pressed, what Ctrl-C did before.

    That is to raise KeyboardInterrupt, unless someone set another handler. A press during the last
    step counts at the end; a second one does not wait. Only the main thread gets signals; elsewhere
    nothing is changed.
    """
    pressed: list[int] = []

    def remember(number, frame):
        pressed.append(number)
        if len(pressed) > 1:
            previous(number, frame)

    def check():
        if pressed:
            previous(pressed.pop(), None)

    main = threading.current_thread() is threading.main_thread()
    previous = signal.getsignal(signal.SIGINT) if main else None
    if not callable(previous):  # ignored, or not ours to change
        yield lambda: None
        return
    signal.signal(signal.SIGINT, remember)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, previous)
    check()
