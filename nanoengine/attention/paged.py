"""What the GPU backends share: one packed upload a step, and metadata of the same shape for both.

A *plan* is a list of int64 arrays, made on the host from a batch. They travel in one copy, and
metadata are made of the tensors that arrive. So a plan whose sizes depend on the number of rows alone
can be written over the one before, which is what a CUDA graph needs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from nanoengine.engine.batch import Batch
from nanoengine.worker.device import upload


@dataclass(slots=True)
class PagedMetadata:
    """slots: int64 [T]. tables: int32 [*, max_blocks], row b of the batch uses line table_rows[b] (int64 [B]).
    starts: int64 [B], each row's first token; query_lens, context_lens: int64 [B].
    max_query, max_context: the longest. extra: what one backend alone needs.
    """

    slots: torch.Tensor
    tables: torch.Tensor
    table_rows: torch.Tensor
    starts: torch.Tensor
    query_lens: torch.Tensor
    context_lens: torch.Tensor
    max_query: int
    max_context: int
    extra: object = None


def padded(array: np.ndarray, size: int, fill: int) -> np.ndarray:
    """``array`` with ``fill`` behind it up to ``size``."""
    return np.concatenate((array, np.full(size - len(array), fill, np.int64))) if len(array) < size else array


def batch_arrays(batch: Batch, table_rows: np.ndarray, size: int | None, tokens: int | None = None) -> list[np.ndarray]:
    """slots [T] and table_rows, starts, query_lens, context_lens [B]: the first five arrays of any plan.

    size: number of rows to pad to, and tokens: number of tokens; without it the batch is a decode step, and so is
    its padding. A padded row has no context, a padded token slot -1: they read no key and write none.
    """
    starts = np.cumsum(batch.query_lens) - batch.query_lens
    rows = [table_rows, starts, batch.query_lens, batch.context_lens]
    if size is None:
        return [batch.slot_mapping, *rows]
    slots = padded(batch.slot_mapping, size if tokens is None else tokens, -1)
    lines, starts, queries, contexts = (padded(a, size, 0) for a in rows)
    if tokens is None and size > len(batch.seqs):
        starts[len(batch.seqs) :], queries[len(batch.seqs) :] = np.arange(len(batch.seqs), size), 1
    return [slots, lines, starts, queries, contexts]


class PagedBackend:
    """A backend whose metadata come from a plan. A subclass gives plan, metadata and attend.

    reads_stored: k and v may have been written before (a fused kernel did it): then they are None.
    kernels: files of nanoengine.kernels that every step launches; they are compiled beforehand.
    """

    reads_stored = True
    kernels: tuple[str, ...] = ()

    def prepare(self, batch: Batch, block_size: int, device: torch.device) -> PagedMetadata:
        """Metadata of one batch that owns its block tables: all of them are sent."""
        width = max(map(len, batch.block_tables), default=1)
        lines = np.zeros((len(batch.seqs), width), np.int64)
        for line, table in zip(lines, batch.block_tables, strict=True):
            line[: len(table)] = table
        plan = self.plan(batch, np.arange(len(batch.seqs)))
        tables, *tensors = upload([lines.reshape(-1), *plan], device)
        longest = (int(batch.query_lens.max(initial=1)), int(batch.context_lens.max(initial=1)))
        return self.metadata(tensors, tables.view(lines.shape).int(), *longest)

    def __call__(self, q, k, v, cache, metadata: PagedMetadata, scale: float) -> torch.Tensor:
        if k is not None:
            self.store(k, v, cache, metadata.slots)
        return self.attend(q, cache, metadata, scale)
