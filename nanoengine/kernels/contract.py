"""What every kernel's file declares beside its kernel, and the one list of these files.

Importing this needs no triton; ``contract_of`` does. Warm-up, the bounds test and the compile test
read the contracts, so a new kernel touches its own file and the list below.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import NamedTuple

import torch

DECODER_KERNELS = (
    "decode_inputs",
    "gemv",
    "gumbel_sample",
    "rms_norm",
    "rope_store",
    "silu_and_mul",
    "split_k_gemm",
)
ATTENTION_KERNELS = ("kv_splits", "paged_decode", "paged_prefill", "store_kv")
KERNELS = DECODER_KERNELS + ATTENTION_KERNELS


class LinearTensors(NamedTuple):
    """weight: [out, in]; bias: [out], or None."""

    weight: torch.Tensor
    bias: torch.Tensor | None


@dataclass(frozen=True)
class ModelTensors:
    """A model as its kernels see it, for warm-up calls: one layer's weights and the other sizes.

    embed_tokens: [rows, hidden_size]; vocab_size: columns of the logits. norm: the weight of an
    RMSNorm over hidden_size. It and the linear layers are None where no fused kernel computes them.
    q_norm, k_norm: weights [head_dim], or None. cos, sin: float32 [positions, head_dim]. split_k:
    o_proj and down_proj may hand split-K partials to the next norm.
    """

    embed_tokens: torch.Tensor
    vocab_size: int
    eps: float
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    cos: torch.Tensor
    sin: torch.Tensor
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    norm: torch.Tensor | None = None
    lm_head: LinearTensors | None = None
    qkv_proj: LinearTensors | None = None
    o_proj: LinearTensors | None = None
    gate_up_proj: LinearTensors | None = None
    down_proj: LinearTensors | None = None
    split_k: bool = False

    @property
    def hidden_size(self) -> int:
        return self.embed_tokens.shape[1]

    def zeros(self, *shape: int) -> torch.Tensor:
        """Zeros of the model's dtype on its device."""
        return self.embed_tokens.new_zeros(shape)

    def numbers(self, *values: int) -> torch.Tensor:
        """int64 on the model's device."""
        return torch.tensor(values, dtype=torch.int64, device=self.embed_tokens.device)

    def kv_cache(self) -> torch.Tensor:
        """One layer's cache of a single block."""
        return self.zeros(2, 1, self.block_size, self.num_kv_heads, self.head_dim)


@dataclass(frozen=True)
class Contract:
    """What callers and tests may rely on; each kernel's file has one, as ``CONTRACT``.

    references: by launcher, the torch function that computes the same in float32.

    early_reads: by Triton function, the arguments that it may read before ``wait_for_last``:
    weights, and what the host has sent for this step. The kernel ahead may still be running then,
    so nothing that a kernel of the same step writes is among them: block tables are not
    (decode_inputs adds to them), and keys and values are not. An empty entry reads nothing early.

    warmup: (ModelTensors) -> calls without arguments. Together they compile every variant that a
    step of this model launches. The compile test takes its signatures from them.

    hopper: True if it is launched on GPUs of compute capability 9 alone. prefetches: True if it
    asks for its weights before it waits.
    """

    references: Mapping[Callable, Callable]
    early_reads: Mapping[str, Iterable[str]]
    warmup: Callable[[ModelTensors], list[Callable[[], object]]]
    hopper: bool = False
    prefetches: bool = False


def contract_of(name: str) -> Contract:
    """The contract of ``nanoengine/kernels/<name>.py``. Needs triton."""
    return import_module(f"nanoengine.kernels.{name}").CONTRACT


def contract_of_function() -> dict[str, Contract]:
    """The contract of each Triton function, by the function's name."""
    contracts = map(contract_of, KERNELS)
    return {function: contract for contract in contracts for function in contract.early_reads}


def warmup_calls(names: Iterable[str], tensors: ModelTensors) -> list[Callable[[], object]]:
    return [call for name in names for call in contract_of(name).warmup(tensors)]
