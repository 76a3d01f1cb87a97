"""Block tables that stay on the GPU: a step sends what is new, not what is known. Needs torch."""

from __future__ import annotations

import numpy as np
import torch

from nanoengine.engine.batch import Batch
from nanoengine.worker.device import upload


class BlockTables:
    """tensor: int32 [lines, max_blocks] on the device; a sequence keeps its line while it runs.

    A block table only grows, and a sequence that starts over gets a new list: so a line is known by
    the list it mirrors, and up to date if it has as many entries. A line whose list is not in the batch
    may be taken for another one: if its sequence comes back, the table is sent again.
    """

    def __init__(self, lines: int, max_blocks: int, device: torch.device):
        self.tensor = torch.zeros(lines, max_blocks, dtype=torch.int32, device=device)
        self._lists: list[list[int] | None] = [None] * lines  # held, so that an id() is not used again
        self._sent = np.zeros(lines, np.int64)  # entries that the device has
        self._line_of: dict[int, int] = {}
        self._last: tuple[list[int], np.ndarray] = ([], np.empty(0, np.int64))

    def lines(self, batch: Batch, *, newest_follows: np.ndarray | None = None) -> np.ndarray:
        """int64 [B]: the line of each row, with all its blocks on the device when the step runs.

        newest_follows: int64 [B], the entry of each row that the step itself writes, its new token's (decode_inputs
        does): if it is the last one it need not be sent, and most decode steps send nothing else.
        """
        keys = list(map(id, batch.block_tables))
        if keys == self._last[0]:
            lines = self._last[1]
        else:
            lines = self._assign(keys, batch.block_tables)
            self._last = (keys, lines)
        sizes = np.fromiter(map(len, batch.block_tables), np.int64, len(keys))
        known = self._sent[lines]
        missing = known < (sizes if newest_follows is None else sizes - (newest_follows == sizes - 1))
        if missing.any():
            self._send([(int(lines[i]), batch.block_tables[i], int(known[i])) for i in np.flatnonzero(missing)])
        self._sent[lines] = sizes
        return lines

    def _assign(self, keys: list[int], tables: list[list[int]]) -> np.ndarray:
        lines = [self._line_of.get(key, -1) for key in keys]
        if -1 in lines:
            taken = set(lines)
            idle = (line for line in range(len(self._lists)) if line not in taken)
            for row, line in enumerate(lines):
                if line < 0:
                    lines[row] = line = next(idle)
                    self._line_of.pop(id(self._lists[line]), None)
                    self._lists[line], self._sent[line] = tables[row], 0
                    self._line_of[keys[row]] = line
        return np.array(lines, np.int64)

    def _send(self, changes: list[tuple[int, list[int], int]]) -> None:
        width = self.tensor.shape[1]
        places = [np.arange(line * width + known, line * width + len(table)) for line, table, known in changes]
        blocks = [np.array(table[known:], np.int64) for _, table, known in changes]
        index, values = upload([np.concatenate(places), np.concatenate(blocks)], self.tensor.device)
        self.tensor.view(-1).index_copy_(0, index, values.int())
