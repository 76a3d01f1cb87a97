"""What no engine can beat: bytes over bandwidth, operations over the matrix rate."""

from __future__ import annotations

from dataclasses import dataclass

from nanoengine.bench.workload import Workload
from nanoengine.model.config import ModelConfig


@dataclass(frozen=True)
class Card:
    """bandwidth: bytes/s of memory; flops: dense 16-bit operations/s. Both from the vendor's data sheet."""

    name: str
    bandwidth: float
    flops: float


CARDS = (
    Card("H200", 4.8e12, 989e12), Card("H100", 3.35e12, 989e12), Card("A100", 2.04e12, 312e12),
    Card("L40S", 0.864e12, 362e12), Card("L4", 0.3e12, 121e12), Card("T4", 0.32e12, 65e12),
    Card("4090", 1.01e12, 165e12), Card("3090", 0.936e12, 71e12),
)  # fmt: skip


def find_card(name: str) -> Card | None:
    """The card whose name is part of ``name`` ("NVIDIA H200"); None for one that is not listed."""
    words = name.replace("-", " ").split()
    return next((card for card in CARDS if card.name in words), None)


def decode_seconds(config: ModelConfig, card: Card, contexts: list[int], bytes_per_element: int = 2) -> float:
    """Least time of one decode step: all weights once, all keys and values of all rows once, or the arithmetic.

    contexts: tokens with KV of each row, the new one included.
    """
    weights, kv = config.num_parameters(), config.kv_bytes_per_token(1)
    moved = bytes_per_element * (weights + kv * sum(contexts))
    attention = 4 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * sum(contexts)
    return max(moved / card.bandwidth, (2 * weights * len(contexts) + attention) / card.flops)


def prefill_seconds(config: ModelConfig, card: Card, prompt_lens: list[int], share: float = 0.5) -> float:
    """Time of the prompts' arithmetic at ``share`` of the matrix rate (large products reach half of it and more)."""
    body = config.num_parameters() - config.vocab_size * config.hidden_size
    pairs = sum(n * (n + 1) / 2 for n in prompt_lens)
    attention = 4 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * pairs
    return (2 * body * sum(prompt_lens) + attention) / (share * card.flops)


def workload_seconds(config: ModelConfig, card: Card, workload: Workload, bytes_per_element: int = 2) -> float:
    """Least time of a workload whose requests all start at once and of which each step decodes all that are left."""
    total, prompts = prefill_seconds(config, card, list(map(len, workload.prompts))), workload.prompts
    for step in range(1, max(workload.output_lens)):
        contexts = [len(p) + step for p, n in zip(prompts, workload.output_lens, strict=True) if n > step]
        total += decode_seconds(config, card, contexts, bytes_per_element)
    return total
