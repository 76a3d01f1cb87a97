"""One request inside the engine: its tokens, its progress, its blocks."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from nanoengine.sampling_params import SamplingParams


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False, weakref_slot=True)
class Sequence:
    """A flat record; the scheduler and the block manager write it, runners only read it.

    The one progress counter: ``num_computed_tokens`` catches up with ``num_tokens``. Prefill,
    chunk, decode, cache hit and recompute after a preemption are all this same catching up.

        token_ids             known on the host: prompt, then output that has landed
        num_tokens            known tokens + the one that a step in flight is about to sample
        num_computed_tokens   tokens whose KV is in the pool, or will be once launched steps ran
        num_prefill_tokens    those known when it was last queued: up to there it prefills
        num_scheduled_tokens  tokens that the step being built computes

    shares_prefix: False for one that has found KV of others and got no token from it: it computes all
    of its own. starts_over: it will, once its steps in flight have landed (see postprocess).
    max_total_tokens: prompt + output at which it ends with "length". capacity: tokens that the
    block table has room for (len(block_table) * block_size). num_in_flight: launched steps that
    have not landed; blocks are given back only when it is 0.
    """

    seq_id: int
    token_ids: list[int]
    params: SamplingParams
    max_total_tokens: int
    end_token_ids: frozenset[int] = frozenset()
    seed: int = 0
    prompt: str | None = None
    cache_salt: str | None = None  # prompts share cached blocks only with prompts of the same salt
    arrival: float = 0.0
    detokenizer: Any = None  # tokenizer.detokenizer.IncrementalDetokenizer, where text is wanted

    status: Status = Status.WAITING
    num_prompt_tokens: int = 0
    num_prefill_tokens: int = 0
    num_tokens: int = 0
    num_computed_tokens: int = 0
    num_scheduled_tokens: int = 0
    num_in_flight: int = 0
    row: int = -1  # its request row while it runs (engine.rows), -1 for none

    block_table: list[int] = field(default_factory=list)
    capacity: int = 0
    # prefix cache: blocks committed so far, the content id of the last one, and for each full
    # block its (chained hash, token bytes), kept because tokens never change once known
    num_committed_blocks: int = 0
    content_id: int = 0
    block_keys: list[tuple[int, bytes]] = field(default_factory=list)
    num_cached_tokens: int = 0
    shares_prefix: bool = True
    starts_over: bool = False

    finish_reason: str | None = None
    error: str | None = None  # why, where finish_reason is "error"
    stop_reason: str | int | None = None
    logprobs: list[dict[int, float]] | None = None
    # one entry a prompt token whose turn has come, None for the first; None if nobody asks
    prompt_logprobs: list[dict[int, float] | None] | None = None
    num_preemptions: int = 0
    first_token: float | None = None
    finished_at: float | None = None

    def __post_init__(self) -> None:
        self.num_prompt_tokens = self.num_prefill_tokens = self.num_tokens = len(self.token_ids)
        if self.params.logprobs is not None:
            self.logprobs = []
        if self.params.prompt_logprobs is not None:
            self.prompt_logprobs = [None]

    @property
    def output_ids(self) -> list[int]:
        """Generated token ids, a copy."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def is_finished(self) -> bool:
        """True from the moment an end was found (its last blocks may still wait for a step in flight)."""
        return self.finish_reason is not None

    def restart(self) -> None:
        """Forget all progress but the tokens: the KV is gone and will be computed again."""
        self.status = Status.WAITING
        self.num_prefill_tokens = self.num_tokens = len(self.token_ids)
        self.num_computed_tokens = self.num_scheduled_tokens = self.num_in_flight = 0
        self.block_table, self.capacity, self.row = [], 0, -1
        self.num_committed_blocks = self.content_id = 0
        self.starts_over = False

    def __repr__(self) -> str:
        return (
            f"Sequence({self.seq_id}, {self.status.value}, computed {self.num_computed_tokens}"
            f"/{self.num_tokens} tokens, blocks {self.block_table})"
        )
