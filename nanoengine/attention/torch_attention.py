"""Paged attention in plain torch: runs on any device, and is what the other backends are held to.

Each row is one call on its own keys and values: nothing is padded to the longest row, and the
query heads of a group are stacked along the query axis, so that KV heads are never copied.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from nanoengine.attention.base import AttentionBackend
from nanoengine.engine.batch import Batch


@dataclass(slots=True)
class Row:
    """One sequence of the batch: its new tokens lie at [first, first + queries) of q, k and v.

    blocks: int64 ids of its blocks; None for a prompt without earlier context, whose keys are
    exactly the new ones. mask: bool [queries, context], True where a query may look; None where
    all may (decode) or where the plain causal rule does (no earlier context).
    """

    first: int
    queries: int
    context: int
    blocks: torch.Tensor | None
    mask: torch.Tensor | None


@dataclass(slots=True)
class Metadata:
    slot_mapping: torch.Tensor  # int64, those that are written; -1 (a padded row) writes nowhere
    written: torch.Tensor | None  # int64 indices of the tokens that are written, None for all
    rows: list[Row]


class TorchAttention(AttentionBackend):
    name = "torch"
    default_block_size = 16

    def prepare(self, batch: Batch, block_size: int, device: torch.device) -> Metadata:
        rows, first = [], 0
        for queries, context, table in zip(
            batch.query_lens.tolist(), batch.context_lens.tolist(), batch.block_tables, strict=True
        ):
            start, blocks, mask = context - queries, None, None
            if start:
                needed = -(-context // block_size)
                blocks = torch.tensor(table[:needed], dtype=torch.int64, device=device)
                if queries > 1:
                    positions = torch.arange(context, device=device)
                    mask = positions <= positions[start:, None]
            rows.append(Row(first, queries, context, blocks, mask))
            first += queries
        slots = torch.from_numpy(batch.slot_mapping).to(device)
        written = None
        if (batch.slot_mapping < 0).any():
            written = torch.nonzero(slots >= 0).squeeze(1)
            slots = slots[written]
        return Metadata(slots, written, rows)

    def __call__(self, q, k, v, cache, metadata: Metadata, scale: float) -> torch.Tensor:
        store(cache, k, v, metadata)
        group = q.shape[1] // k.shape[1]
        out = torch.empty_like(q)
        for row in metadata.rows:
            span = slice(row.first, row.first + row.queries)
            if row.blocks is None:
                keys, values = k[span], v[span]
            else:
                keys, values = gather(cache[0], row), gather(cache[1], row)
            out[span] = attend(q[span], keys, values, group, row, scale)
        return out


def store(cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, metadata: Metadata) -> None:
    """Write k and v, [T, kv_heads, head_dim], to their slots of cache [2, blocks, size, kv_heads, head_dim]."""
    flat = cache.view(2, -1, *cache.shape[3:])
    if metadata.written is not None:
        k, v = k[metadata.written], v[metadata.written]
    flat[0].index_copy_(0, metadata.slot_mapping, k)
    flat[1].index_copy_(0, metadata.slot_mapping, v)


def gather(cache: torch.Tensor, row: Row) -> torch.Tensor:
    """[context, kv_heads, head_dim]: the row's keys (or values), block by block."""
    return cache.index_select(0, row.blocks).flatten(0, 1)[: row.context]


def attend(q, keys, values, group: int, row: Row, scale: float) -> torch.Tensor:
    """q: [n, heads, d]; keys, values: [context, kv_heads, d]; returns [n, heads, d]."""
    n, heads, d = q.shape
    keys, values = keys.transpose(0, 1), values.transpose(0, 1)  # [kv_heads, context, d]
    q = q.view(n, heads // group, group, d)
    if n == 1:  # every query head of a group sees all keys: the group is the query axis
        out = F.scaled_dot_product_attention(q.squeeze(0)[None], keys[None], values[None], scale=scale)
        return out.reshape(1, heads, d)
    q = q.permute(1, 2, 0, 3)  # [kv_heads, group, n, d]; expand() makes views, it copies nothing
    keys, values = (x[:, None].expand(-1, group, -1, -1) for x in (keys, values))
    causal = row.mask is None
    out = F.scaled_dot_product_attention(q, keys, values, attn_mask=row.mask, is_causal=causal, scale=scale)
    return out.permute(2, 0, 1, 3).reshape(n, heads, d)


def dense_attention(q, k, v, cache, metadata, scale: float) -> torch.Tensor:
    """Causal attention of one sequence without any cache: q [n, heads, d], k and v [n, kv_heads, d].

    What a forward pass that starts from nothing needs; ``cache`` and ``metadata`` are not looked at.
    """
    row = Row(0, q.shape[0], q.shape[0], None, None)
    return attend(q, k, v, q.shape[1] // k.shape[1], row, scale)
