"""What the decoder asks of an attention backend, and which backend runs where."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, Protocol, runtime_checkable

import torch

from nanoengine.engine.batch import Batch


class AttentionBackend(Protocol):
    """Causal attention of ragged rows over KV blocks.

    A layer's cache is a tensor [2, num_blocks, block_size, kv_heads, head_dim]: K, then V.
    name, default_block_size: for messages, and where no block size is asked for.
    reads_stored: the backend finds everything it needs in the cache, and its metadata have
    ``slot_mapping``; a fused kernel may then have written k and v already, which come as None.
    supports_cuda_graphs: see attention.paged.PagedBackend, which serves them.
    """

    name: str
    default_block_size: int
    reads_stored: bool = False
    supports_cuda_graphs: bool = False

    def prepare(self, batch: Batch, block_size: int, device: torch.device) -> Any:
        """Metadata of one step, shared by all layers (an argument, never a global)."""
        ...

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cache: torch.Tensor, metadata: Any, scale: float
    ) -> torch.Tensor:
        """Write k, v of all rows to their slots, then attend: a row may read what another one has just written.

        q: [T, heads, head_dim]; k, v: [T, kv_heads, head_dim], the new tokens of all rows end to
        end; returns [T, heads, head_dim]. Head h reads KV head h // (heads / kv_heads).
        """
        ...


@runtime_checkable
class DeclaresStorage(Protocol):
    reads_stored: bool


def reads_stored(attention: Any) -> bool:
    """What a backend declares; a plain function in its place is given q, k and v."""
    return isinstance(attention, DeclaresStorage) and attention.reads_stored


def choose_backend(
    name: str, device: torch.device, block_size: int | None = None, *, head_dim: int = 128, group: int = 1,
    kv_heads: int = 8,
) -> AttentionBackend:
    """The backend called ``name``; "auto" takes the fastest one that works on ``device``.

    On a GPU that is triton (on an H200 1.14 times as fast as flash-attn on nano-vllm's workload, 1.4 times on
    one stream: bench/results/h200_backends.json), then flash, then torch; on a CPU torch. group: query heads a KV head.
    Errors: ValueError if the named one cannot run here, or not with this block size or head_dim.
    """
    from nanoengine.attention.torch_attention import TorchAttention

    if name == "torch" or (name == "auto" and device.type != "cuda"):
        return TorchAttention()
    if name not in ("auto", "triton", "flash"):
        raise ValueError(f"attention must be auto, torch, triton or flash, got {name!r}")
    problems = {}
    for candidate, (why_not, make) in _GPU_BACKENDS.items():
        if name in ("auto", candidate):
            problem = why_not(device, block_size, head_dim)
            if problem is None:
                return make(group, kv_heads)
            problems[candidate] = problem
    if name == "auto":
        return TorchAttention()
    raise ValueError(f"attention={name!r} cannot run here: {problems[name]}")


def why_not_triton(device: torch.device, block_size: int | None = None, head_dim: int = 128) -> str | None:
    """Why our kernels cannot run there; None if they can."""
    if find_spec("triton") is None:
        return 'triton is not installed: pip install "nanoengine[kernels]"'
    if device.type != "cuda":
        return f"it needs a CUDA GPU, the device is {device}"
    if torch.cuda.get_device_capability(device) < (7, 5):
        return "it needs a GPU of compute capability 7.5 (Turing) or newer"
    if block_size is not None and block_size < 16:
        return f"block_size={block_size}, it needs at least 16"
    return None


def _why_not_flash(device: torch.device, block_size: int | None, head_dim: int) -> str | None:
    if device.type != "cuda":
        return f"it needs a CUDA GPU, the device is {device}"
    if find_spec("flash_attn") is None or find_spec("triton") is None:
        return 'flash-attn is not installed: pip install "nanoengine[gpu]"'
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "it needs a GPU of compute capability 8.0 (Ampere) or newer"
    if block_size is not None and block_size % 256:
        return f"block_size={block_size}, it needs a multiple of 256"
    if head_dim > 256:
        return f"head_dim={head_dim}, it takes up to 256"
    return None


def _make_triton(group: int, kv_heads: int) -> AttentionBackend:
    from nanoengine.attention.triton_attention import TritonAttention

    return TritonAttention(group, kv_heads)


def _make_flash(group: int, kv_heads: int) -> AttentionBackend:
    from nanoengine.attention.flash_attention import FlashAttention

    return FlashAttention()


_GPU_BACKENDS = {"triton": (why_not_triton, _make_triton), "flash": (_why_not_flash, _make_flash)}
