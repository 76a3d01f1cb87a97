"""What the rows of a batch ask of the sampler, as arrays that travel to a GPU with the batch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nanoengine.engine.sequence import Sequence


@dataclass(slots=True)
class SamplingArrays:
    """Sampling options of some rows. plain: temperature is all that any of them asks for."""

    seqs: list[Sequence]
    temperatures: np.ndarray  # float64 [S]
    seeds: np.ndarray  # int64 [S]
    plain: bool
    logprobs: bool

    @classmethod
    def of(cls, seqs: list[Sequence]) -> SamplingArrays:
        params = [seq.params for seq in seqs]
        plain = all(
            p.top_p >= 1
            and not (p.top_k or p.min_p or p.min_tokens or p.needs_history)
            and not (p.logit_bias or p.bad_words_ids)
            and p.logprobs is None
            and p.allowed_token_ids is None
            for p in params
        )
        temperatures = np.array([p.temperature for p in params], np.float64)
        seeds = np.array([seq.seed % 2**64 for seq in seqs], np.uint64).view(np.int64)
        return cls(list(seqs), temperatures, seeds, plain, any(p.logprobs is not None for p in params))

    @classmethod
    def none(cls, rows: int) -> SamplingArrays:
        """For a rank that samples nothing."""
        return cls([], np.zeros(rows), np.zeros(rows, np.int64), True, False)
