"""Paged attention by flash-attn (Dao 2023, arXiv:2307.08691): varlen prefill with block tables, paged decode.

flash-attn reads KV blocks of a multiple of 256 tokens. New keys and values are stored by our own kernel.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from nanoengine.attention.paged import Bucket, PagedBackend, PagedMetadata, common_metadata
from nanoengine.engine.batch import Batch
from nanoengine.kernels.store_kv import store_kv

BLOCK_MULTIPLE = 256


@dataclass(slots=True, kw_only=True)
class FlashMetadata(PagedMetadata):
    """What flash-attn's functions are given, int32, by their names of it."""

    block_table: torch.Tensor | None = None
    cache_seqlens: torch.Tensor | None = None
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None


class FlashAttention(PagedBackend):
    name = "flash"
    default_block_size = BLOCK_MULTIPLE

    def __init__(self) -> None:
        from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

        self._varlen, self._with_kvcache = flash_attn_varlen_func, flash_attn_with_kvcache

    def store(self, k, v, cache, slots) -> None:
        store_kv(k, v, cache, slots)

    def build(self, batch: Batch, bucket: Bucket | None = None) -> FlashMetadata:
        return FlashMetadata(**common_metadata(batch, bucket))

    def ready(self, metadata: FlashMetadata, block_tables, max_query_len: int, max_seq_len: int) -> FlashMetadata:
        """flash-attn wants int32, the block tables of the batch's rows, and where each row's keys start."""
        m = PagedBackend.ready(self, metadata, block_tables, max_query_len, max_seq_len)
        key_ends = torch.nn.functional.pad(torch.cumsum(m.seq_lens, 0), (1, 0))
        return replace(
            m,
            block_table=block_tables[m.rows].contiguous(),
            cache_seqlens=m.seq_lens.int(),
            cu_seqlens_q=m.query_start_loc.int(),
            cu_seqlens_k=key_ends.int(),
        )

    def attend(self, q, cache, m: FlashMetadata, scale: float) -> torch.Tensor:
        common = dict(softmax_scale=scale, causal=True, block_table=m.block_table)
        if m.max_query_len == 1:
            out = self._with_kvcache(q[:, None], *cache, cache_seqlens=m.cache_seqlens, **common)
            return out[:, 0]
        return self._varlen(
            q,
            *cache,
            cu_seqlens_q=m.cu_seqlens_q,
            cu_seqlens_k=m.cu_seqlens_k,
            max_seqlen_q=m.max_query_len,
            max_seqlen_k=m.max_seq_len,
            **common,
        )
