"""What the decoder asks of an attention backend, and which backend runs where."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from nanoengine.engine.batch import Batch


class AttentionBackend(Protocol):
    """Causal attention of ragged rows over KV blocks.

    A layer's cache is a tensor [2, num_blocks, block_size, kv_heads, head_dim]: K, then V.
    """

    name: str
    default_block_size: int

    def prepare(self, batch: Batch, block_size: int, device: torch.device) -> Any:
        """Metadata of one step, shared by all layers (an argument, never a global)."""
        ...

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cache: torch.Tensor, metadata: Any, scale: float
    ) -> torch.Tensor:
        """Write k, v to their slots, then attend.

        q: [T, heads, head_dim]; k, v: [T, kv_heads, head_dim], the new tokens of all rows end to
        end; returns [T, heads, head_dim]. Head h reads KV head h // (heads / kv_heads).
        """
        ...


def choose_backend(name: str, device: torch.device, block_size: int | None = None) -> AttentionBackend:
    """The backend called ``name``; "auto" takes the best one that works on ``device``.

    Errors: ValueError if the named one cannot run here, or not with this block size.
    """
    from nanoengine.attention.torch_attention import TorchAttention

    if name in ("auto", "torch"):
        return TorchAttention()
    raise ValueError(f"attention must be auto or torch, got {name!r}")
