"""Logprobs of the prompt's own tokens, a few rows of logits at a time.

The logits of a whole prompt would be the largest tensor of the engine: 8,192 tokens times 151,936 ids
in float32 are 5 GB. So the LM head runs on ROWS tokens at a time, and of each part only the likeliest
ids stay. The peak is that of ROWS rows, however long the prompts are.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from nanoengine.engine.prompt_rows import PromptRows
from nanoengine.packing import upload

ROWS = 64


class PromptLogprobs:
    """The likeliest ids of each token in ``prompt.tokens``, on their way to the host.

    logits: hidden [S, hidden_size] -> [S, vocabulary], or [0, vocabulary] on a rank that samples
    nothing; every rank calls it equally often.
    """

    def __init__(
        self,
        logits: Callable[[torch.Tensor], torch.Tensor],
        hidden: torch.Tensor,
        prompt: PromptRows,
    ):
        self._prompt, self._parts = prompt, []
        most = max((count for _, _, count in prompt.spans), default=0)
        places, targets = upload([prompt.tokens, prompt.targets], hidden.device)
        for first in range(0, len(places), ROWS):
            scores = logits(hidden[places[first : first + ROWS]])
            if len(scores):
                parts = likeliest(scores, targets[first : first + ROWS], most)
                self._parts.append([_to_host(part) for part in parts])
                del parts
            del scores  # before the next part's logits are made

    def by_row(self, num_rows: int) -> list[list[dict[int, float]]]:
        """A list of entries for each row of the batch, once the step has landed."""
        wanted = [most for _, count, most in self._prompt.spans for _ in range(count)]
        values, ids, own = (torch.cat(column).tolist() for column in zip(*self._parts, strict=True))
        entries = [
            {token: value} | dict(zip(row_ids[:most], row_values[:most], strict=True))
            for token, value, row_ids, row_values, most in zip(
                self._prompt.targets.tolist(), own, ids, values, wanted, strict=True
            )
        ]
        return self._prompt.by_row(entries, num_rows)


def likeliest(scores: torch.Tensor, targets: torch.Tensor, most: int) -> tuple[torch.Tensor, ...]:
    """Logprobs and ids [S, most] of the likeliest tokens, and the targets' own logprobs [S]."""
    logprobs = scores.float().log_softmax(-1)
    values, ids = logprobs.topk(min(most, logprobs.shape[-1]))
    return values, ids, logprobs.gather(1, targets[:, None])[:, 0]


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that is complete once the step's event is: nothing waits here."""
    if tensor.device.type == "cpu":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    return host
