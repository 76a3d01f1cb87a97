"""Block tables that stay on the device, one line for each request row: a step sends what is new."""

from __future__ import annotations

import numpy as np
import torch

from nanoengine.engine.batch import Batch
from nanoengine.engine.rows import SentBlocks, TableUpdate
from nanoengine.packing import upload


class BlockTables:
    """tensor: int32 [num_rows, max_blocks]; a sequence's table lies in its request row."""

    def __init__(self, num_rows: int, max_blocks: int, device: torch.device):
        self.tensor = torch.zeros(num_rows, max_blocks, dtype=torch.int32, device=device)
        self._sent = SentBlocks()

    def update(self, batch: Batch, written_by_step: np.ndarray | None = None) -> None:
        """Send what the device lacks of the batch's tables; the step that is launched next finds it.

        written_by_step: see SentBlocks.updates. Most decode steps then send nothing.
        """
        updates = self._sent.updates(batch, written_by_step)
        if updates:
            self._write(updates)

    def _write(self, updates: list[TableUpdate]) -> None:
        width = self.tensor.shape[1]
        starts = [update.row * width + update.start for update in updates]
        places = [np.arange(s, s + len(u.blocks)) for s, u in zip(starts, updates, strict=True)]
        blocks = [np.array(update.blocks, np.int64) for update in updates]
        index, values = upload([np.concatenate(places), np.concatenate(blocks)], self.tensor.device)
        self.tensor.view(-1).index_copy_(0, index, values.int())
