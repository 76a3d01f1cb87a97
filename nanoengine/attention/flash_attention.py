"""Paged attention by flash-attn (Dao 2023, arXiv:2307.08691): varlen prefill with block tables, paged decode.

flash-attn reads KV blocks of a multiple of 256 tokens. New keys and values are stored by our own kernel.
"""

from __future__ import annotations

import numpy as np
import torch

from nanoengine.attention.paged import PagedBackend, PagedMetadata, batch_arrays
from nanoengine.engine.batch import Batch
from nanoengine.kernels.store_kv import store_kv

BLOCK_MULTIPLE = 256


class FlashAttention(PagedBackend):
    name = "flash"
    default_block_size = BLOCK_MULTIPLE

    def __init__(self) -> None:
        from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

        self._varlen, self._with_kvcache = flash_attn_varlen_func, flash_attn_with_kvcache

    def store(self, k, v, cache, slots) -> None:
        store_kv(k, v, cache, slots)

    def plan(self, batch: Batch, table_rows: np.ndarray, size=None, tokens=None) -> list[np.ndarray]:
        return batch_arrays(batch, table_rows, size, tokens)

    def metadata(self, tensors, tables, max_query: int, max_context: int) -> PagedMetadata:
        """flash-attn wants int32: the block tables of the batch's rows, lengths, and where rows start."""
        slots, table_rows, starts, query_lens, context_lens = tensors
        ends = torch.stack((torch.cumsum(query_lens, 0), torch.cumsum(context_lens, 0)))
        cumulative = torch.nn.functional.pad(ends, (1, 0)).int()
        extra = (tables[table_rows].contiguous(), context_lens.int(), cumulative[0], cumulative[1])
        return PagedMetadata(
            slots, tables, table_rows, starts, query_lens, context_lens, max_query, max_context, extra
        )  # fmt: skip

    def attend(self, q, cache, m: PagedMetadata, scale: float) -> torch.Tensor:
        tables, contexts, query_ends, context_ends = m.extra
        if m.max_query == 1:
            out = self._with_kvcache(q[:, None], *cache, cache_seqlens=contexts, block_table=tables,
                                     softmax_scale=scale, causal=True)  # fmt: skip
            return out[:, 0]
        return self._varlen(
            q, *cache, cu_seqlens_q=query_ends, cu_seqlens_k=context_ends, max_seqlen_q=m.max_query,
            max_seqlen_k=m.max_context, softmax_scale=scale, causal=True, block_table=tables,
        )  # fmt: skip
