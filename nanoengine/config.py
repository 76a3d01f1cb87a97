"""Settings of one engine. Frozen: what is measured later (number of blocks) is not written back here."""

from __future__ import annotations

from dataclasses import dataclass, fields

POLICIES = ("token_budget", "prefill_first")


@dataclass(slots=True, frozen=True)
class EngineConfig:
    """All settings of an engine, checked once.

    max_num_seqs: sequences in one batch at most (it does not bound the waiting queue).
    max_num_batched_tokens: tokens computed in one step at most, over all sequences.
    max_model_len: prompt plus output of one sequence, in tokens.
    block_size: tokens in one KV block. None: chosen by the attention backend (16, or 256 for flash).
    num_blocks: blocks in the KV pool. None: what the runner finds room for.
    policy: "token_budget" (running first, then waiting, phases mixed, as vLLM V1) or
        "prefill_first" (one kind a step, as nano-vllm).
    watermark: share of the pool that an admission leaves free while other sequences run, so that
        a newcomer is not preempted by the next decode step.
    overlap: steps in flight while the host prepares the next one: 0 or 1.
    vocab_size: ids at or above it are refused. eos_token_ids: the model's end tokens.
    seed: where requests without a seed of their own get one from.
    device: "auto", "cpu", "cuda", "cuda:1". dtype: "auto", "float32", "bfloat16", "float16".
    attention: "auto", "torch", "flash" or "triton".
    gpu_memory_utilization: share of the card's memory this process may use.
    kv_cache_gib: memory for KV on a CPU, in GiB; None: 1 GiB, or less where less is free.
    enforce_eager: no CUDA graphs. tensor_parallel_size: number of ranks.
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_model_len: int = 4096
    block_size: int | None = None
    num_blocks: int | None = None
    policy: str = "token_budget"
    enable_prefix_caching: bool = True
    watermark: float = 0.01
    overlap: int = 0
    vocab_size: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    seed: int = 0
    device: str = "auto"
    dtype: str = "auto"
    attention: str = "auto"
    gpu_memory_utilization: float = 0.9
    kv_cache_gib: float | None = None
    enforce_eager: bool = False
    tensor_parallel_size: int = 1

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "tensor_parallel_size"):
            _at_least_one(name, getattr(self, name))
        for name in ("block_size", "num_blocks", "vocab_size"):
            if getattr(self, name) is not None:
                _at_least_one(name, getattr(self, name))
        if self.max_model_len < 2:
            raise ValueError("max_model_len must be at least 2 (one prompt token, one new token), got 1")
        if self.policy not in POLICIES:
            raise ValueError(f"policy must be one of {', '.join(POLICIES)}, got {self.policy!r}")
        if self.overlap not in (0, 1) or isinstance(self.overlap, bool):
            raise ValueError(f"overlap must be 0 or 1, got {self.overlap!r}")
        limits = {"watermark": (0, 0.5), "gpu_memory_utilization": (0.01, 1), "kv_cache_gib": (1e-6, 1e6)}
        for name, (low, high) in limits.items():
            value = getattr(self, name)
            if value is None and name == "kv_cache_gib":
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
                raise ValueError(f"{name} must lie in [{low}, {high}], got {value!r}")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise ValueError(f"seed must be an integer, got {self.seed!r}")
        for name in ("enable_prefix_caching", "enforce_eager"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")

    @classmethod
    def names(cls) -> tuple[str, ...]:
        return tuple(f.name for f in fields(cls))


def _at_least_one(name: str, value) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
