"""Paged attention by our own kernels: head_dim and KV heads of any size, any block size.

Rows with one new token go to the decode kernel, all others to the prefill kernel; a mixed batch uses both.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from nanoengine.attention.paged import PagedBackend, PagedMetadata, batch_arrays
from nanoengine.engine.batch import Batch
from nanoengine.kernels.kv_splits import plan_kv_splits
from nanoengine.kernels.paged_decode import paged_decode
from nanoengine.kernels.paged_prefill import most_tiles, paged_prefill, plan_tiles, queries_per_tile
from nanoengine.kernels.store_kv import store_kv


@dataclass(slots=True)
class Work:
    """Decode pieces (see plan_kv_splits) and prefill tiles (see plan_tiles), on the device."""

    pieces: torch.Tensor
    split: torch.Tensor
    tiles: torch.Tensor


def spare_pieces(rows: int, kv_heads: int) -> int:
    """Pieces beyond one a row of a decode step: few rows are cut until they fill the GPU; of many, only those that
    are far longer than the others.

    Fitted to what was fastest on an H200 with 8 KV heads, 1 to 256 rows and contexts of 100 to 4000 tokens
    (bench/results/h200_pieces.json, of one row h200_decode_kernel.json). It holds some 1188 programs (a piece and a KV
    head each) at once: the long pieces fill it once, with room for the short ones.
    """
    programs = rows * kv_heads
    return max(256, min(31 * programs, 1088, 3 * (3392 - programs) // 7)) // kv_heads


class TritonAttention(PagedBackend):
    """group: query heads a KV head."""

    name = "triton"
    default_block_size = 16
    kernels = ("kv_splits", "paged_decode", "paged_prefill")

    def __init__(self, group: int = 1, kv_heads: int = 8):
        self.group, self.kv_heads = group, kv_heads

    def plan(self, batch: Batch, table_rows: np.ndarray, size: int | None = None, tokens: int | None = None):
        """size: pad to this many rows, and tokens: to this many tokens (without it the batch is a decode step);
        then all arrays have sizes that depend on these two alone."""
        arrays = batch_arrays(batch, table_rows, size, tokens)
        decode, others = np.flatnonzero(batch.query_lens == 1), np.flatnonzero(batch.query_lens > 1)
        per_tile = queries_per_tile(self.group)
        most = None if size is None else 0 if tokens is None else most_tiles(tokens, size, per_tile)
        tiles = plan_tiles(batch.query_lens, batch.context_lens, others, per_tile, most)
        rows = len(decode) if size is None else size
        spare = spare_pieces(rows, self.kv_heads) if rows else 0  # prompts alone need no launch of the decode kernel
        work, split = plan_kv_splits(batch.context_lens[decode], decode, spare, size)
        return [*arrays, work.reshape(-1), split.reshape(-1), tiles.reshape(-1)]

    def metadata(self, tensors, tables, max_query: int, max_context: int) -> PagedMetadata:
        slots, table_rows, starts, query_lens, context_lens, work, split, tiles = tensors
        extra = Work(work.view(4, -1), split.view(3, -1), tiles.view(2, -1))
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
        if work.pieces.numel():
            paged_decode(q, cache, m.tables, m.table_rows, m.starts, work.pieces, work.split, out, scale)
        return out
