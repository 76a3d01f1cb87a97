"""A batch on its way to the other ranks: what they need of it, and no block table twice.

A step of 256 decoding sequences is some 14 KB. Block tables are kept at the other end and only what is new
is sent, so that no step sends more because its contexts are long.
"""

from __future__ import annotations

import numpy as np
import torch

from nanoengine.engine.batch import Batch
from nanoengine.engine.block_tables import BlockTables
from nanoengine.engine.prompt_rows import PromptRows


class SentTables(BlockTables):
    """The bookkeeping of tables on a device, for tables at another rank."""

    def __init__(self, lines: int):
        super().__init__(lines, 1, torch.device("cpu"))
        self.changes: list[tuple[int, int, list[int]]] = []

    def _send(self, changes) -> None:
        self.changes = [(line, known, table[known:]) for line, table, known in changes]


class StepSender:
    """Rank 0's side. max_num_seqs: rows of a batch at most."""

    def __init__(self, max_num_seqs: int):
        self._tables = SentTables(max_num_seqs)

    def pack(self, batch: Batch) -> tuple:
        """Plain data, to be pickled at once: (arrays of the batch, line of each row, what is new in which lines)."""
        self._tables.changes = []
        lines = self._tables.lines(batch)
        arrays = (batch.input_ids, batch.positions, batch.slot_mapping, batch.query_lens, batch.context_lens,
                  batch.sample_rows, batch.sample_positions, batch.in_flight,
                  None if batch.prompt is None else batch.prompt.tokens)  # fmt: skip
        return arrays, lines, self._tables.changes


class StepReceiver:
    """Another rank's side: gives the batch that was packed, its rows in the same order."""

    def __init__(self) -> None:
        self._tables: dict[int, list[int]] = {}

    def unpack(self, message: tuple) -> Batch:
        """``seqs`` are bare row numbers: nobody samples here. A table stays the same list while it grows."""
        arrays, lines, changes = message
        for line, known, blocks in changes:
            if known:
                self._tables[line] += blocks
            else:
                self._tables[line] = blocks
        ids, positions, slots, query_lens, context_lens, sample_rows, sample_positions, in_flight, prompt = arrays
        tables = [self._tables[line] for line in lines.tolist()]
        prompt = None if prompt is None else PromptRows(prompt)
        return Batch(list(range(len(lines))), ids, positions, slots, query_lens, context_lens, tables, sample_rows,
                     np.asarray(sample_positions), in_flight, prompt)  # fmt: skip
