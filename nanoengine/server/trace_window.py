"""The last steps of a run that has no end: what /trace shows."""

from __future__ import annotations

from nanoengine.trace import Trace


class TraceWindow(Trace):
    """A Trace that keeps only the last ``size`` steps, numbered from the start of the server.

    The engine's thread writes it; any thread may call ``newer_than``.
    """

    def __init__(self, size: int):
        super().__init__()
        self.size, self.count = size, 0
        self.window: list[dict] = []

    def after(self, engine, step, output) -> None:
        before = len(self.steps)
        super().after(engine, step, output)
        if len(self.steps) == before:
            return
        self.steps[-1]["step"] = self.count
        self.count += 1
        # a new list instead of a deletion: a reader in another thread keeps the one it has
        self.window = self.steps = self.steps[-self.size :]
        self._seen &= engine.sequences.keys()  # ids are never used again, so the others are not needed

    def newer_than(self, step: int) -> dict:
        """What /trace says: "steps" after that one, and the number of the "last" step (-1 before the first)."""
        window = self.window
        last = window[-1]["step"] if window else -1
        return {"last": last, "steps": [record for record in window if record["step"] > step]}
