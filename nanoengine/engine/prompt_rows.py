"""Which tokens of a batch must bring logprobs of the prompt."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from nanoengine.engine.sequence import Sequence


@dataclass(slots=True)
class PromptRows:
    """The tokens of a batch that predict a prompt token whose logprobs are asked for.

    tokens: int64 [P], their places among the batch's tokens. targets: int64 [P], the prompt ids that
    they predict. spans: (row of the batch, number of its tokens, likeliest tokens to report) in order.
    """

    tokens: np.ndarray
    targets: np.ndarray = field(
        default_factory=lambda: np.empty(0, np.int64)
    )  # other ranks need none
    spans: list[tuple[int, int, int]] = field(default_factory=list)

    def by_row(
        self, entries: list[dict[int, float]], num_rows: int
    ) -> list[list[dict[int, float]]]:
        """``entries``, one for each of the P tokens, as a list a row."""
        rows: list[list[dict[int, float]]] = [[] for _ in range(num_rows)]
        done = 0
        for row, count, _ in self.spans:
            rows[row] = entries[done : done + count]
            done += count
        return rows


def prompt_rows(seqs: list[Sequence], starts: list[int], counts: list[int]) -> PromptRows | None:
    """starts, counts: each row's first position, and how many tokens it computes. None if nobody asks.

    What is known already is not asked for again: a preempted sequence computes its prompt twice.
    """
    places, targets, spans, offset = [], [], [], 0
    for row, (seq, start, count) in enumerate(zip(seqs, starts, counts, strict=True)):
        if seq.prompt_logprobs is not None:
            first = max(start, len(seq.prompt_logprobs) - 1)
            end = min(start + count, seq.num_prompt_tokens - 1)
            if first < end:
                places.append(np.arange(first - start, end - start) + offset)
                targets += seq.token_ids[first + 1 : end + 1]
                spans.append((row, end - first, seq.params.prompt_logprobs))
        offset += count
    if not spans:
        return None
    return PromptRows(np.concatenate(places), np.array(targets, np.int64), spans)
