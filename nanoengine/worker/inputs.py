"""What one forward pass reads, by name: numpy arrays on the host, tensors of the same names on the device.

    Batch -> StepInputs.of -> pack -> one copy to the device -> views -> eager step or CUDA graph

An eager step, a decode graph and a mixed graph take the same record. A graph pads it to the sizes of
a ``Bucket``, so that each array always lies at the same address.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from nanoengine.attention.paged import Bucket
from nanoengine.engine.batch import Batch
from nanoengine.packing import pack, padded, views
from nanoengine.worker.prompt_logprobs import PromptLogprobs
from nanoengine.worker.sampling_arrays import SamplingArrays


@dataclass(slots=True)
class StepInputs:
    """T tokens, B rows, S rows that sample; int64 but for ``temperatures``, which are float64.

    input_ids, positions: [T]. token_rows: [T]; where >= 0, the id is the last token that was sampled
    in that request row, and the host has not seen it yet.
    logits_indices: [S], the token of each sampling row whose logits are wanted.
    sample_request_rows: [S], the request row whose last token the sampled one becomes.
    sample_positions, seeds, temperatures: [S], what the sampled token depends on beside the logits.
    attention: what a paged backend reads; None for a backend that prepares itself.
    """

    input_ids: Any
    token_rows: Any
    positions: Any
    logits_indices: Any
    sample_request_rows: Any
    sample_positions: Any
    seeds: Any
    temperatures: Any
    attention: Any = None

    @classmethod
    def of(
        cls,
        batch: Batch,
        sampling: SamplingArrays,
        attention: Any = None,
        bucket: Bucket | None = None,
        padding_row: int = -1,
    ) -> StepInputs:
        """The arrays of ``batch``; with a bucket, padded to its sizes.

        padding_row: the request row that the tokens of padded rows go to; with a bucket it must be given.
        """
        token_rows = batch.token_rows
        if token_rows is None:
            token_rows = np.full(len(batch.input_ids), -1)
        ends = np.cumsum(batch.query_lens)
        inputs = cls(
            input_ids=batch.input_ids,
            token_rows=token_rows,
            positions=batch.positions,
            logits_indices=ends[batch.sample_rows] - 1,
            sample_request_rows=batch.rows[batch.sample_rows],
            sample_positions=batch.sample_positions,
            seeds=sampling.seeds,
            temperatures=sampling.temperatures,
            attention=attention,
        )
        return inputs if bucket is None else inputs._padded(bucket, padding_row)

    def _padded(self, bucket: Bucket, padding_row: int) -> StepInputs:
        tokens, rows = bucket.tokens, bucket.rows
        return replace(
            self,
            input_ids=padded(self.input_ids, tokens, 0),
            token_rows=padded(self.token_rows, tokens, -1),
            positions=padded(self.positions, tokens, 0),
            logits_indices=padded(self.logits_indices, rows, 0),
            sample_request_rows=padded(self.sample_request_rows, rows, padding_row),
            sample_positions=padded(self.sample_positions, rows, 0),
            seeds=padded(self.seeds, rows, 0),
            temperatures=padded(self.temperatures, rows, 0),
        )

    def to(self, device: torch.device) -> StepInputs:
        """The same on ``device``, in one copy that the host does not wait for."""
        return views(pack(self, device).to(device, non_blocking=True), self)


@dataclass(slots=True)
class StepResult:
    """What a step leaves on the device.

    logits: [S, vocabulary] of the rows that sample, in the weights' own format; None where none
        samples, and on ranks that do not sample. The next replay of a graph writes over them.
    inputs: the step's own, on the device.
    tokens: int64 [S], what a CUDA graph has sampled; None where no graph ran.
    graph_bucket: the number of tokens that the graph was recorded for; None where none ran.
    prompt_logprobs: on their way to the host, for the rows that ask; None where none does.
    """

    logits: torch.Tensor | None
    inputs: StepInputs
    tokens: torch.Tensor | None = None
    graph_bucket: int | None = None
    prompt_logprobs: PromptLogprobs | None = None
