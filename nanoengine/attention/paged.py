"""What the GPU backends share: metadata as named arrays that travel with a step's other inputs.

A backend *builds* its metadata on the host (numpy), the step's one copy brings them to the device
(tensors of the same names), and ``ready`` completes them there. With a bucket all sizes depend on the
bucket alone, so that the next step can be written over the one before, which a CUDA graph needs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from nanoengine.engine.batch import Batch
from nanoengine.packing import pack, padded, upload, views


@dataclass(frozen=True, slots=True)
class Bucket:
    """The sizes that a step is padded to. is_decode: each row has one token, padded rows too."""

    tokens: int
    rows: int
    is_decode: bool = False


@dataclass(slots=True, kw_only=True)
class PagedMetadata:
    """T tokens, B rows, int64. A padded token has slot -1, a padded row no context.

    slot_mapping: [T]. rows: [B], the line of each row in ``block_tables``.
    query_start_loc: [B + 1], where each row's tokens start. query_lens, seq_lens: [B], tokens
    computed now, and tokens with KV afterwards.
    block_tables: int32 [*, max_blocks] on the device. max_query_len, max_seq_len: the longest.
    """

    slot_mapping: Any
    rows: Any
    query_start_loc: Any
    query_lens: Any
    seq_lens: Any
    block_tables: torch.Tensor | None = None
    max_query_len: int = 0
    max_seq_len: int = 0


def common_metadata(batch: Batch, bucket: Bucket | None = None) -> dict[str, np.ndarray]:
    """The arrays of any PagedMetadata, by name."""
    slots, rows, queries, seq_lens = (
        batch.slot_mapping,
        batch.rows,
        batch.query_lens,
        batch.context_lens,
    )
    if bucket is not None:
        slots = padded(slots, bucket.tokens, -1)
        rows, seq_lens = padded(rows, bucket.rows, 0), padded(seq_lens, bucket.rows, 0)
        queries = padded(queries, bucket.rows, 1 if bucket.is_decode else 0)
    starts = np.zeros(len(queries) + 1, np.int64)
    np.cumsum(queries, out=starts[1:])
    return dict(
        slot_mapping=slots, rows=rows, query_start_loc=starts, query_lens=queries, seq_lens=seq_lens
    )


class PagedBackend:
    """A backend over block tables on the device. A subclass gives build, store and attend.

    reads_stored: a fused kernel may have written k and v to the cache already; then they are None.
    supports_cuda_graphs: sizes of build() depend on the bucket alone, and attend() waits for nothing.
    kernels: files of nanoengine.kernels that every step launches; they are compiled beforehand.
    """

    reads_stored = True
    supports_cuda_graphs = True
    kernels: tuple[str, ...] = ()

    def build(self, batch: Batch, bucket: Bucket | None = None) -> PagedMetadata:
        """Metadata on the host, padded to ``bucket``."""
        raise NotImplementedError

    def ready(
        self, metadata: PagedMetadata, block_tables, max_query_len: int, max_seq_len: int
    ) -> PagedMetadata:
        """``metadata`` on the device, with what it needs beside the arrays."""
        return replace(
            metadata,
            block_tables=block_tables,
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
        )

    def prepare(self, batch: Batch, block_size: int, device: torch.device) -> PagedMetadata:
        """Metadata of one batch that owns its block tables: all of them are sent."""
        width = max(map(len, batch.block_tables), default=1)
        lines = np.zeros((len(batch.seqs), width), np.int64)
        for line, table in zip(lines, batch.block_tables, strict=True):
            line[: len(table)] = table
        built = self.build(replace(batch, rows=np.arange(len(batch.seqs))))
        (tables,) = upload([lines], device)
        metadata = views(pack(built, device).to(device, non_blocking=True), built)
        longest = (int(batch.query_lens.max(initial=1)), int(batch.context_lens.max(initial=1)))
        return self.ready(metadata, tables.int(), *longest)

    def __call__(self, q, k, v, cache, metadata: PagedMetadata, scale: float) -> torch.Tensor:
        if k is not None:
            self.store(k, v, cache, metadata.slot_mapping)
        return self.attend(q, cache, metadata, scale)
