"""Runs batches on a GPU without ever waiting for it: the tokens are asked for later.

Everything a step needs travels in one copy from page-locked memory, block tables stay on the device, all but
the largest steps replay a CUDA graph, and the newest tokens are fed to the next step where they lie.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nanoengine.attention.base import why_not_triton
from nanoengine.attention.paged import PagedBackend
from nanoengine.config import EngineConfig
from nanoengine.engine.batch import Batch
from nanoengine.engine.rows import num_request_rows
from nanoengine.model.capabilities import declares, supports_cuda_graphs, unfuse
from nanoengine.worker.block_tables import BlockTables
from nanoengine.worker.cuda_graphs import record_graphs
from nanoengine.worker.inputs import StepInputs, StepResult
from nanoengine.worker.kv_memory import blocks_that_fit, explain_out_of_memory
from nanoengine.worker.model_runner import ModelRunner, PendingTokens
from nanoengine.worker.sampling_arrays import SamplingArrays


class GpuPendingTokens(PendingTokens):
    """A launched step: its tokens are on their way to page-locked memory, and ``landed`` says when they are there.

    wait: (event) -> None, once it has happened.
    """

    def __init__(self, *arguments, wait):
        super().__init__(*arguments)
        on_gpu = self._tokens.device.type == "cuda"
        self._host = torch.empty(self._tokens.shape, dtype=torch.int64, pin_memory=on_gpu)
        self._host.copy_(self._tokens, non_blocking=True)
        self._landed = torch.cuda.current_stream(self._tokens.device).record_event() if on_gpu else None
        self._wait_for = wait

    def _wait(self) -> torch.Tensor:
        if self._landed is not None:
            self._wait_for(self._landed)
        return self._host


@dataclass(frozen=True, slots=True)
class Mode:
    """How the GPU runs this model with these parts; decided once, by ``choose_mode``.

    paged: block tables stay on the device, and attention's metadata travel with the step's inputs.
    graphs: steps are CUDA graphs. kernel_samples: a kernel samples where temperature is all that is asked for.
    native_logits: compute_logits may be called, which makes no float32 copy.
    """

    paged: bool
    graphs: bool
    kernel_samples: bool
    native_logits: bool


def choose_mode(config: EngineConfig, device: torch.device, model, attention, sampler) -> Mode:
    """A part of your own is run as it is: what it does not declare to support is off."""
    paged, recordable = isinstance(attention, PagedBackend), supports_cuda_graphs(model)
    can_record = paged and recordable and attention.supports_cuda_graphs
    return Mode(
        paged=paged,
        graphs=can_record and device.type == "cuda" and not config.enforce_eager,
        kernel_samples=paged and declares(sampler, "fusable"),
        native_logits=recordable,
    )


class GpuRunner(ModelRunner):
    """ModelRunner with the GPU's own ways; parts of your own make it fall back to the plain ones.

    Errors: RuntimeError that says how much memory is missing.
    """

    overlap = 1
    max_mixed_prefill_tokens = None  # a step of max_num_batched_tokens takes a fraction of a second
    wait = staticmethod(torch.cuda.Event.synchronize)

    def _make(self, config: EngineConfig, **parts) -> None:
        with explain_out_of_memory(config):
            super()._make(config, **parts)
            max_blocks = -(-config.max_model_len // self.block_size)
            num_rows = num_request_rows(config.max_num_seqs)
            self.tables = BlockTables(num_rows, max_blocks, self.device) if self.mode.paged else None
            self.graphs = record_graphs(self, config) if self.mode.graphs else []

    def _tune(self, config: EngineConfig) -> None:
        self.mode = choose_mode(config, self.device, self.model, self.attention, self.sampler)
        if config.fused_kernels and (self.device.type != "cuda" or why_not_triton(self.device) is None):
            from nanoengine.model.fused import fuse

            self.fusion = fuse(self.model)
            if self.device.type == "cuda":
                self._compile(config)
        else:
            self.fusion = None
            unfuse(self.model)

    def _compile(self, config: EngineConfig) -> None:
        from nanoengine.kernels.contract import DECODER_KERNELS
        from nanoengine.kernels.warmup import compile_in_threads
        from nanoengine.model.fused import model_tensors

        block_size = config.block_size or self.attention.default_block_size
        names = DECODER_KERNELS + (self.attention.kernels if self.mode.paged else ())
        compile_in_threads(names, model_tensors(self.model, block_size))

    def pending(self, batch: Batch, result: StepResult, tokens: torch.Tensor, report) -> GpuPendingTokens:
        return GpuPendingTokens(batch, result, tokens, self.vocab_size, report, wait=self.wait)

    @torch.inference_mode()
    def run(self, batch: Batch, sampling: SamplingArrays | None = None) -> StepResult:
        sampling = sampling or SamplingArrays.none(len(batch.sample_rows))
        for graphs in self.graphs if batch.prompt is None else ():  # a graph keeps no hidden states
            bucket = graphs.bucket_of(batch)
            if bucket is not None:
                self.tables.update(batch, graphs.written_blocks(batch))
                return graphs.replay(bucket, batch, sampling)
        attention = None
        if self.mode.paged:
            self.tables.update(batch)
            attention = self.attention.build(batch)
        inputs = StepInputs.of(batch, sampling, attention).to(self.device)
        hidden = self.forward(batch, inputs)
        return StepResult(self.logits(hidden, inputs), inputs, prompt_logprobs=self.prompt_logprobs(hidden, batch))

    @torch.inference_mode()
    def forward(self, batch: Batch, inputs: StepInputs) -> torch.Tensor:
        if not self.mode.paged:
            return super().forward(batch, inputs)
        ids = inputs.input_ids if batch.token_rows is None else self.resolve_input_ids(inputs)
        longest = int(batch.query_lens.max()), int(batch.context_lens.max())
        metadata = self.attention.ready(inputs.attention, self.tables.tensor, *longest)
        return self.model(ids, inputs.positions, self.attention, self.layer_caches, metadata)

    def logits(self, hidden: torch.Tensor, inputs: StepInputs) -> torch.Tensor | None:
        if not self.mode.native_logits or not len(inputs.logits_indices):
            return super().logits(hidden, inputs)
        return self.model.compute_logits(hidden[inputs.logits_indices])

    def sample(self, result: StepResult, sampling: SamplingArrays, batch: Batch):
        if not (sampling.plain and self.mode.kernel_samples):  # if a graph has sampled, it was in vain
            return super().sample(result, sampling, batch)
        if not sampling.seqs:
            return super().sample(result, sampling, batch)
        if result.tokens is not None:
            return result.tokens, None
        from nanoengine.kernels.gumbel_sample import gumbel_sample

        inputs = result.inputs
        tokens = torch.empty_like(inputs.sample_request_rows)
        gumbel_sample(result.logits, inputs.temperatures, inputs.seeds, inputs.sample_positions, tokens,
                      self.last_tokens, inputs.sample_request_rows)  # fmt: skip
        return tokens, None

    def _blocks_that_fit(self, config: EngineConfig) -> int:
        return blocks_that_fit(self, config) if self.device.type == "cuda" else super()._blocks_that_fit(config)

    def _drop(self) -> None:
        self.graphs, self.tables = [], None
        super()._drop()
