"""Paged attention by our own kernels: head_dim and KV heads of any size, any block size.

Rows with one new token go to the decode kernel, all others to the prefill kernel; a mixed batch uses both.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from nanoengine.attention.paged import PagedBackend, PagedMetadata, batch_arrays, padded
from nanoengine.engine.batch import Batch
from nanoengine.kernels.paged_decode import paged_decode, plan_pieces
from nanoengine.kernels.paged_prefill import paged_prefill, plan_tiles, queries_per_tile
from nanoengine.kernels.store_kv import store_kv


@dataclass(slots=True)
class Work:
    """Decode pieces (see plan_pieces) and prefill tiles (see plan_tiles), on the device."""

    pieces: torch.Tensor
    rows: torch.Tensor
    firsts: torch.Tensor
    counts: torch.Tensor
    tiles: torch.Tensor


def num_pieces(rows: int) -> int:
    """Pieces of a decode step with ``rows`` rows: enough to fill the GPU, and to even out unequal rows."""
    return rows + min(max(31, 2 * rows), 256)


class TritonAttention(PagedBackend):
    """group: query heads a KV head."""

    name = "triton"
    default_block_size = 16

    def __init__(self, group: int = 1):
        self.group = group

    def plan(self, batch: Batch, table_rows: np.ndarray, size: int | None = None) -> list[np.ndarray]:
        """size: pad a decode batch to this many rows; then all arrays have sizes that depend on it alone."""
        arrays = batch_arrays(batch, table_rows, size)
        decode = np.flatnonzero(batch.query_lens == 1)
        tiles = np.empty((2, 0), np.int64)
        if len(decode) < len(batch.seqs):
            others = np.flatnonzero(batch.query_lens > 1)
            tiles = plan_tiles(batch.query_lens, batch.context_lens, others, queries_per_tile(self.group))
        rows = len(decode) if size is None else size
        work, firsts, counts = plan_pieces(batch.context_lens[decode], decode, num_pieces(rows) if rows else 0)
        listed = (padded(a, rows, 0) for a in (decode, firsts, counts))
        return [*arrays, work.reshape(-1), *listed, tiles.reshape(-1)]

    def metadata(self, tensors, tables, max_query: int, max_context: int) -> PagedMetadata:
        slots, table_rows, starts, query_lens, context_lens, work, *listed, tiles = tensors
        extra = Work(work.view(4, -1), *listed, tiles.view(2, -1))
        return PagedMetadata(
            slots, tables, table_rows, starts, query_lens, context_lens, max_query, max_context, extra
        )  # fmt: skip

    def store(self, k, v, cache, slots) -> None:
        store_kv(k, v, cache, slots)

    def attend(self, q, cache, m: PagedMetadata, scale: float) -> torch.Tensor:
        out, work = torch.empty_like(q), m.extra
        if work.tiles.numel():
            paged_prefill(q, cache, m.tables, m.table_rows, m.starts, m.query_lens, m.context_lens, work.tiles, out,
                          scale)  # fmt: skip
        if work.rows.numel():
            paged_decode(q, cache, m.tables, m.table_rows, m.starts, work.pieces, work.rows, work.firsts, work.counts,
                         out, scale)  # fmt: skip
        return out
