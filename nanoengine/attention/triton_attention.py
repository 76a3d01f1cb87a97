"""Paged attention by our own kernels: head_dim and KV heads of any size, block sizes from 16 on.

Rows with one new token go to the decode kernel, all others to the prefill kernel; a mixed batch uses both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from nanoengine.attention.paged import Bucket, PagedBackend, PagedMetadata, common_metadata
from nanoengine.engine.batch import Batch
from nanoengine.kernels.kv_splits import plan_kv_splits
from nanoengine.kernels.paged_decode import paged_decode
from nanoengine.kernels.paged_prefill import most_tiles, paged_prefill, plan_tiles, queries_per_tile
from nanoengine.kernels.store_kv import store_kv


@dataclass(slots=True, kw_only=True)
class TritonMetadata(PagedMetadata):
    """kv_splits: [4, *] and split_rows: [3, *] of plan_kv_splits; query_tiles: [2, *] of plan_tiles."""

    kv_splits: Any
    split_rows: Any
    query_tiles: Any


def extra_kv_splits(rows: int, kv_heads: int) -> int:
    """KV splits beyond one per row of a decode step: few rows are cut until they fill the GPU; of many, only
    those that are far longer than the others.

    Fitted to what was fastest on an H200 with 8 KV heads, 1 to 256 rows and contexts of 100 to 4000 tokens
    (bench/results/h200_pieces.json, of one row h200_decode_kernel.json). It holds some 1188 programs (a split and a
    KV head each) at once: the long splits fill it once, with room for the short ones.
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

    def build(self, batch: Batch, bucket: Bucket | None = None) -> TritonMetadata:
        decode, others = np.flatnonzero(batch.query_lens == 1), np.flatnonzero(batch.query_lens > 1)
        per_tile = queries_per_tile(self.group)
        rows, tiles = len(decode), None
        if bucket is not None:
            rows = bucket.rows
            tiles = 0 if bucket.is_decode else most_tiles(bucket.tokens, bucket.rows, per_tile)
        extra = extra_kv_splits(rows, self.kv_heads) if rows else 0  # prompts alone need no launch of the decode kernel
        size = None if bucket is None else rows
        kv_splits, split_rows = plan_kv_splits(batch.context_lens[decode], decode, extra, size)
        return TritonMetadata(
            **common_metadata(batch, bucket),
            kv_splits=kv_splits,
            split_rows=split_rows,
            query_tiles=plan_tiles(batch.query_lens, batch.context_lens, others, per_tile, tiles),
        )

    def store(self, k, v, cache, slots) -> None:
        store_kv(k, v, cache, slots)

    def attend(self, q, cache, m: TritonMetadata, scale: float) -> torch.Tensor:
        out = torch.empty_like(q)
        if m.query_tiles.numel():
            paged_prefill(q, cache, m.block_tables, m.rows, m.query_start_loc, m.query_lens, m.seq_lens, m.query_tiles,
                          out, scale)  # fmt: skip
        if m.kv_splits.numel():
            paged_decode(q, cache, m.block_tables, m.rows, m.query_start_loc, m.kv_splits, m.split_rows, out, scale)
        return out
