"""The row of a running sequence: where its block table and its last token lie on the device."""

from __future__ import annotations

from dataclasses import dataclass
from weakref import ref

import numpy as np

from nanoengine.engine.batch import Batch
from nanoengine.engine.sequence import Sequence, Status


def num_request_rows(max_num_seqs: int) -> int:
    """All that run, and all that ended in the one step that may be in flight."""
    return 2 * max_num_seqs


class RowTable:
    """Gives each scheduled sequence a row number in [0, num_rows) and keeps it until it may be used again.

    A row is held from the first scheduled step of a sequence to its last landed one: while it runs,
    and, once it has ended or was aborted, while a launched step that reads the row has not landed.
    So a row in a launched step never changes hands.

    One device that runs its launches in order would not need that: what is written for the next
    owner comes after the last read. But a runner may upload beside its steps, ranks run apart from
    each other, and a result is read by row after the next launch: the rule holds for all of them,
    and a test can see it broken.

    A preempted or restarted sequence has given its row up (``Sequence.restart``, which needs all of
    its steps landed, or dropped by ``reset``).
    """

    def __init__(self, num_rows: int):
        self.num_rows = num_rows
        self.reset()

    def reset(self) -> None:
        """Every row is free. After a failed step only: nobody waits for what is still in flight."""
        self._owner: list[ref[Sequence] | None] = [None] * self.num_rows
        self._free = list(range(self.num_rows - 1, -1, -1))

    def assign(self, seqs: list[Sequence]) -> list[bool]:
        """Give a row to each of ``seqs`` that has none. Returns, for each, True if its row is new;
        nothing at all if none is, the usual case.

        Errors: RuntimeError if more sequences run than there are rows.
        """
        if -1 not in [seq.row for seq in seqs]:  # the hot path of decoding
            return []
        new = []
        for seq in seqs:
            is_new = seq.row < 0
            if is_new:
                if not self._free:
                    self._reclaim()
                seq.row = self._free.pop()
                # an ended sequence may go: a row keeps nobody alive
                self._owner[seq.row] = ref(seq)
            new.append(is_new)
        return new

    def held_by(self, row: int) -> Sequence | None:
        """The sequence that holds ``row``, None if nobody does."""
        owner = self._owner[row]
        seq = owner() if owner is not None else None
        return seq if seq is not None and _holds(seq, row) else None

    def _reclaim(self) -> None:
        """Find the rows that nobody holds any more: all at once, when they are needed."""
        self._free = [row for row in reversed(range(self.num_rows)) if self.held_by(row) is None]
        for row in self._free:
            self._owner[row] = None
        if not self._free:
            raise RuntimeError(
                f"the scheduler runs more than {self.num_rows} sequences at once: "
                "keep to config.max_num_seqs"
            )


def _holds(seq: Sequence, row: int) -> bool:
    return seq.row == row and (seq.status is Status.RUNNING or seq.num_in_flight > 0)


@dataclass(slots=True, frozen=True)
class TableUpdate:
    """Blocks that a row's table on the device lacks: entries ``start`` to ``start + len(blocks)``."""

    row: int
    start: int
    blocks: list[int]


class SentBlocks:
    """How many entries of each row's block table the other side has: a device, or another rank.

    A block table only grows while its sequence holds the row, so a step sends what is new.
    """

    def __init__(self) -> None:
        self._sent = np.zeros(0, np.int64)

    def updates(self, batch: Batch, written_by_step: np.ndarray | None = None) -> list[TableUpdate]:
        """What has to be sent for ``batch``, which then counts as sent.

        written_by_step: int64 [B], the column of each row's table that the step itself writes (a
        decode step's slot names the block of the new token); not sent if it is the table's last.
        """
        if len(batch.rows) and (missing := int(batch.rows.max()) + 1 - len(self._sent)) > 0:
            self._sent = np.concatenate((self._sent, np.zeros(missing, np.int64)))
        self._sent[batch.rows[batch.new_rows]] = 0
        sizes = np.fromiter(map(len, batch.block_tables), np.int64, len(batch.block_tables))
        sent = self._sent[batch.rows]
        needed = sizes if written_by_step is None else sizes - (written_by_step == sizes - 1)
        self._sent[batch.rows] = sizes
        if not (sent < needed).any():
            return []
        return [
            TableUpdate(int(batch.rows[i]), int(sent[i]), batch.block_tables[i][sent[i] :])
            for i in np.flatnonzero(sent < needed)
        ]
