"""What is asked of an engine in a benchmark: prompts and how many tokens each gets."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

# Beginnings of different length and kind, so that a batch is ragged as real ones are.
TEXTS = (
    "The capital of France is",
    "Once upon a time, in a small village by the sea, there lived a fisherman who",
    "Write a short letter to a friend in which you explain why you moved to another city:\n\nDear Anna,\n",
    "The three laws of thermodynamics say that",
    "def fibonacci(n):\n    \"\"\"Return the n-th Fibonacci number.\"\"\"\n",
    "Question: Why is the sky blue, and why does it turn red in the evening?\nAnswer:",
    "Water boils at 100 degrees Celsius at sea level. On a high mountain it boils at a lower temperature, because",
    "A recipe for tomato soup. Ingredients: one kilogram of ripe tomatoes, two onions, a clove of garlic, olive oil, "
    "salt, pepper and a little sugar. First,",
    "The history of the printing press begins",
    "In computer science, a queue is",
    "My favourite season is autumn. The leaves turn yellow and red, the air is clear, and in the evening",
    "Translate into plain English: The party of the first part shall indemnify the party of the second part.\nPlain:",
    "List five things to take along on a hike in the mountains:\n1.",
    "The doctor looked at the picture for a long time. Then she put it back on the table and said:",
    "An operating system shares one processor among many programs. To each of them it looks as if it had the machine "
    "for itself. The scheduler decides who runs next, and the memory manager",
    "The sum of the angles of a triangle is",
)  # fmt: skip


@dataclass(frozen=True)
class Workload:
    """name; prompts: one list of token ids a request; output_lens: tokens each request generates."""

    name: str
    prompts: list[list[int]]
    output_lens: list[int]

    def __post_init__(self) -> None:
        if len(self.prompts) != len(self.output_lens):
            raise ValueError(f"{len(self.prompts)} prompts, but {len(self.output_lens)} output lengths")

    @property
    def num_input_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def num_output_tokens(self) -> int:
        return sum(self.output_lens)


def synthetic(
    name: str, num_requests: int, input_len: tuple[int, int], output_len: tuple[int, int], *,
    vocab_size: int, seed: int = 0, shared_prefix: int = 0,
) -> Workload:  # fmt: skip
    """Random token ids, equal for equal arguments. input_len, output_len: least and largest, both included.

    shared_prefix: so many of the input tokens are the same in all requests.
    Errors: ValueError naming the argument.
    """
    for what, (low, high) in (("input_len", input_len), ("output_len", output_len)):
        if not 1 <= low <= high:
            raise ValueError(f"{what} must be (least, largest) with 1 <= least <= largest, got {(low, high)}")
    if num_requests < 1 or vocab_size < 1:
        raise ValueError(f"num_requests and vocab_size must be at least 1, got {num_requests} and {vocab_size}")
    if not 0 <= shared_prefix < input_len[0]:
        raise ValueError(f"shared_prefix must lie in [0, {input_len[0]}), the least input_len, got {shared_prefix}")
    draw = random.Random(seed)
    prefix = draw.choices(range(vocab_size), k=shared_prefix)
    prompts, output_lens = [], []
    for _ in range(num_requests):
        prompts.append(prefix + draw.choices(range(vocab_size), k=draw.randint(*input_len) - shared_prefix))
        output_lens.append(draw.randint(*output_len))
    return Workload(name, prompts, output_lens)


# name: (requests, input lengths, output lengths, shared prefix)
NAMED: dict[str, tuple[int, tuple[int, int], tuple[int, int], int]] = {
    "tiny": (4, (3, 9), (4, 4), 0),
    "single-stream": (1, (128, 128), (512, 512), 0),
    "mixed-256": (256, (100, 1024), (100, 1024), 0),  # the sizes of nano-vllm's bench.py
    "shared-prefix": (64, (576, 640), (64, 64), 512),
}


def named(name: str, *, vocab_size: int, seed: int = 0) -> Workload:
    """A workload of NAMED. Errors: ValueError listing the names."""
    if name not in NAMED:
        raise ValueError(f"no workload {name!r}; there are {', '.join(NAMED)}")
    count, input_len, output_len, prefix = NAMED[name]
    return synthetic(name, count, input_len, output_len, vocab_size=vocab_size, seed=seed, shared_prefix=prefix)


def text_workload(encode: Callable[[str], list[int]], num_requests: int, output_len: int) -> Workload:
    """Real English beginnings, for models that know English; from the 17th on they repeat with a number before."""
    if num_requests < 1 or output_len < 1:
        raise ValueError(f"num_requests and output_len must be at least 1, got {num_requests} and {output_len}")
    texts = [
        TEXTS[i % len(TEXTS)] if i < len(TEXTS) else f"({i // len(TEXTS) + 1}) {TEXTS[i % len(TEXTS)]}"
        for i in range(num_requests)
    ]
    return Workload("text", [encode(text) for text in texts], [output_len] * num_requests)
