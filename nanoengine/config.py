"""Settings of one engine. Frozen: what is measured later (number of blocks) is not written back here."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields

from nanoengine.checks import BIG, boolean, integer, integers, number

POLICIES = ("token_budget", "prefill_first")
DTYPES = ("auto", "float32", "bfloat16", "float16")
BACKENDS = ("auto", "torch", "flash", "triton")


@dataclass(slots=True, frozen=True)
class EngineConfig:
    """All settings of an engine, checked once.

    max_num_seqs: sequences in one batch at most (it does not bound the waiting queue).
    max_num_batched_tokens: tokens computed in one step at most, over all sequences.
    max_mixed_prefill_tokens: tokens of prefills, over all sequences, that a step computes at most
        while a running sequence decodes: so far can one prompt delay the next token of a stream.
        None: what the runner likes (64 on a CPU, no cap on a GPU). max_num_batched_tokens holds
        beside it, and alone where nobody decodes. It means what the chunk of Sarathi-Serve's mixed
        batches does; vLLM's long_prefill_token_threshold caps each request, decodes or not, and
        SGLang's chunked_prefill_size every chunk. "prefill_first" never mixes: no cap there.
    max_model_len: prompt plus output of one sequence, in tokens; at least 2.
    block_size: tokens in one KV block. None: chosen by the attention backend (16, or 256 for flash).
    num_blocks: blocks in the KV pool. None: what the runner finds room for.
    policy: "token_budget" (running first, then waiting, phases mixed, as vLLM V1) or
        "prefill_first" (one kind a step, as nano-vllm).
    watermark: share of the pool that an admission leaves free while other sequences run, so that
        a newcomer is not preempted by the next decode step.
    overlap: steps in flight while the host prepares the next one: 0 or 1. None: what the runner likes
        (1 on a GPU, 0 on a CPU, where host and device are the same).
    vocab_size: ids at or above it are refused. eos_token_ids: the model's end tokens, each below it.
    seed: where requests without a seed of their own get one from.
    device: "auto", "cpu", "cuda", "cuda:1". dtype: "auto", "float32", "bfloat16", "float16".
    attention: "auto", "torch", "flash" or "triton".
    gpu_memory_utilization: share of the card's memory that may be in use, what others hold included.
    kv_cache_gib: memory for KV at most, in GiB. None: on a CPU 1 GiB, or less where less is free; on a
        GPU all of its share that weights and the largest step leave. Of several ranks, each one's.
    enforce_eager: no CUDA graphs. fused_kernels: False runs the layers in plain torch.
    tensor_parallel_size: ranks that share the model: GPUs of this machine, or processes on a CPU; under torchrun
        its WORLD_SIZE (parallel.launch). Must divide the query heads, and divide or be a multiple of the KV heads.
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_mixed_prefill_tokens: int | None = None
    max_model_len: int = 4096
    block_size: int | None = None
    num_blocks: int | None = None
    policy: str = "token_budget"
    enable_prefix_caching: bool = True
    watermark: float = 0.01
    overlap: int | None = None
    vocab_size: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    seed: int = 0
    device: str = "auto"
    dtype: str = "auto"
    attention: str = "auto"
    gpu_memory_utilization: float = 0.9
    kv_cache_gib: float | None = None
    enforce_eager: bool = False
    fused_kernels: bool = True
    tensor_parallel_size: int = 1

    def __post_init__(self) -> None:
        put = lambda name, value: object.__setattr__(self, name, value)  # noqa: E731 (frozen)
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "tensor_parallel_size"):
            put(name, integer(name, getattr(self, name), 2 if name == "max_model_len" else 1, BIG))
        for name in ("max_mixed_prefill_tokens", "block_size", "num_blocks", "vocab_size"):
            if getattr(self, name) is not None:
                put(name, integer(name, getattr(self, name), 1, BIG))
        if self.overlap is not None:
            put("overlap", integer("overlap", self.overlap, 0, 1))
        put("seed", integer("seed", self.seed, -(2**63), 2**63 - 1))
        put("watermark", number("watermark", self.watermark, 0, 0.5))
        put("gpu_memory_utilization", number("gpu_memory_utilization", self.gpu_memory_utilization, 0.01, 1))
        if self.kv_cache_gib is not None:
            put("kv_cache_gib", number("kv_cache_gib", self.kv_cache_gib, 1e-6, 1e6))
        put("eos_token_ids", integers("eos_token_ids", self.eos_token_ids, 0, BIG))
        for token in self.eos_token_ids:
            if self.vocab_size is not None and token >= self.vocab_size:
                raise ValueError(
                    f"eos_token_ids contains {token}, vocab_size is {self.vocab_size}: "
                    "an end token must be one that can be drawn"
                )
        for name in ("enable_prefix_caching", "enforce_eager", "fused_kernels"):
            boolean(name, getattr(self, name))
        for name, choices in (("policy", POLICIES), ("dtype", DTYPES), ("attention", BACKENDS)):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}")
        if not isinstance(self.device, str) or not re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device):
            raise ValueError(f"device must be auto, cpu, cuda or cuda:N, got {self.device!r}")

    @classmethod
    def names(cls) -> tuple[str, ...]:
        return tuple(f.name for f in fields(cls))
