"""Runs batches on a GPU without ever waiting for it: the tokens are asked for later. Needs torch.

Everything a step needs travels in one copy from page-locked memory, block tables stay on the device, all but
the largest steps replay a CUDA graph, and the newest tokens are fed to the next step where they lie.
"""

from __future__ import annotations

import numpy as np
import torch

from nanoengine.attention.base import why_not_triton
from nanoengine.attention.paged import PagedBackend
from nanoengine.config import EngineConfig
from nanoengine.engine.batch import Batch
from nanoengine.engine.sequence import Sequence
from nanoengine.model.capabilities import supports_cuda_graphs, unfuse
from nanoengine.worker.block_tables import BlockTables
from nanoengine.worker.cuda_graphs import record_graphs
from nanoengine.worker.device import upload
from nanoengine.worker.kv_memory import blocks_that_fit, explain_out_of_memory
from nanoengine.worker.model_runner import ModelRunner
from nanoengine.worker.sampler import Sampler, report_logprobs
from nanoengine.worker.sampling_arrays import SamplingArrays


class PendingTokens:
    """A launched step: its tokens are on their way to page-locked memory, and ``landed`` says when they are there.

    report: () -> logprobs of the sampling rows, computed when asked for. wait: (event) -> None, once it is there.
    """

    def __init__(self, batch: Batch, tokens: torch.Tensor, report=None, graph_bucket: int | None = None,
                 wait=torch.cuda.Event.synchronize):  # fmt: skip
        self._num_rows, self._sample_rows, self._report = len(batch.seqs), batch.sample_rows, report
        self._wait = wait
        self.graph_bucket, self.logprobs = graph_bucket, None
        on_gpu = tokens.device.type == "cuda"
        self._host = torch.empty(tokens.shape, dtype=torch.int64, pin_memory=on_gpu)
        self._host.copy_(tokens, non_blocking=True)
        self._landed = torch.cuda.current_stream(tokens.device).record_event() if on_gpu else None

    def result(self) -> list[list[int]]:
        if self._landed is not None:
            self._wait(self._landed)
        tokens = self._host.tolist()
        if len(tokens) == self._num_rows:
            results = [[token] for token in tokens]
        else:
            results = [[] for _ in range(self._num_rows)]
            for row, token in zip(self._sample_rows.tolist(), tokens, strict=True):
                results[row].append(token)
        if self._report is not None:
            self.logprobs = [[] for _ in range(self._num_rows)]
            for row, entry in zip(self._sample_rows.tolist(), self._report(), strict=True):
                self.logprobs[row].append(entry)
        return results


class GpuRunner(ModelRunner):
    """ModelRunner with the GPU's own ways; parts of your own make it fall back to the plain ones.

    overlap: steps that it likes to have in flight. Errors: RuntimeError that says how much memory is missing.
    """

    overlap = 1
    wait = staticmethod(torch.cuda.Event.synchronize)

    def __init__(self, config: EngineConfig, **parts):
        self._lines = config.max_num_seqs
        with explain_out_of_memory(config):
            super().__init__(config, **parts)
            self._plain_sampler = type(self.sampler) is Sampler
            self._previous = torch.zeros(self._lines + 1, dtype=torch.int64, device=self.device)  # the last is nobody's
            self._options = SamplingArrays.of([])
            max_blocks = -(-config.max_model_len // self.block_size)
            self.tables = BlockTables(self._lines, max_blocks, self.device) if self._paged else None
            self.graphs, self._own_model = [], not supports_cuda_graphs(self.model)
            if self._paged and self.device.type == "cuda" and not config.enforce_eager and not self._own_model:
                self.graphs = record_graphs(self, config)

    def _tune(self, config: EngineConfig) -> None:
        self._paged = isinstance(self.attention, PagedBackend)
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
        names = DECODER_KERNELS + (self.attention.kernels if self._paged else ())
        compile_in_threads(names, model_tensors(self.model, block_size))

    @torch.inference_mode()
    def launch(self, batch: Batch) -> PendingTokens:
        whole = len(batch.sample_rows) == len(batch.seqs)
        options = self._options_of(batch.seqs if whole else [batch.seqs[row] for row in batch.sample_rows.tolist()])
        scores, bucket, *more = self.run(batch, options)
        if bucket is None:
            return self._sample_eagerly(batch, options, scores, *more)
        tokens, rows = more
        raw = scores.to(torch.float32, copy=True) if options.logprobs else None  # the next replay writes over scores
        if len(tokens) and not (options.plain and self._plain_sampler):  # the graph has drawn: in vain
            tokens.copy_(self._sampled(scores.float(), options.seqs, batch.sample_positions))
            if rows is not None:
                self._previous.index_copy_(0, rows, tokens)
        return PendingTokens(batch, tokens, self._report(raw, options.seqs, tokens), bucket, self.wait)

    @torch.inference_mode()
    def run(self, batch: Batch, options: SamplingArrays | None = None) -> tuple:
        """(logits [S, vocabulary], graph bucket, ...): all of a step but the sampling, except what a graph draws.

        After a graph the drawn tokens and their places follow (see Graphs.replay); where no graph ran the bucket is
        None, and the sampling rows' numbers, seeds, temperatures (as bits) and positions follow, on the device.
        options: None on a rank that does not sample.
        """
        options = options or SamplingArrays.none(len(batch.sample_rows))
        for graphs in self.graphs:
            bucket = graphs.bucket_of(batch)
            if bucket is not None:
                scores, *drawn = graphs.replay(bucket, batch, options)
                return scores, bucket, *drawn
        last = np.cumsum(batch.query_lens)[batch.sample_rows] - 1
        hidden, (last, *columns) = self._forward(
            batch, last, batch.sample_rows, options.seeds, options.temperature_bits, batch.sample_positions
        )
        scores = self.model.logits if self._own_model else self.model.compute_logits
        return scores(hidden[last]) if len(last) else None, None, *columns

    def _sample_eagerly(self, batch: Batch, options: SamplingArrays, scores, rows, seeds, temperatures, places):
        if scores is None:
            return PendingTokens(batch, rows, wait=self.wait)
        raw = None
        if options.plain and self._plain_sampler and self._paged:
            from nanoengine.kernels.gumbel_sample import gumbel_sample

            tokens = torch.empty_like(rows)
            gumbel_sample(scores, temperatures.view(torch.float64), seeds, places, tokens)
        else:
            raw = scores.to(torch.float32, copy=True) if options.logprobs else None  # a sampler may change its logits
            tokens = self._sampled(scores.float(), options.seqs, batch.sample_positions)
        self._previous.index_copy_(0, rows, tokens)
        return PendingTokens(batch, tokens, self._report(raw, options.seqs, tokens), wait=self.wait)

    @torch.inference_mode()
    def forward(self, batch: Batch) -> torch.Tensor:
        return self._forward(batch)[0]

    def _forward(self, batch: Batch, *more: np.ndarray) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Hidden states [T, hidden_size], and ``more`` (int64 arrays) on the device."""
        sources = [] if batch.in_flight is None else [batch.in_flight]
        plan = self.attention.plan(batch, self.tables.lines(batch)) if self._paged else []
        arrays = [batch.input_ids, batch.positions, *more, *sources, *plan]
        ids, positions, *rest = upload(arrays, self.device)
        more_there, rest = rest[: len(more)], rest[len(more) :]
        if sources:
            ids, rest = self.fed(ids, rest[0]), rest[1:]
        if self._paged:
            longest = int(batch.query_lens.max()), int(batch.context_lens.max())
            metadata = self.attention.metadata(rest, self.tables.tensor, *longest)
        else:
            metadata = self.attention.prepare(batch, self.block_size, self.device)
        return self.model(ids, positions, self.attention, self._layer_caches, metadata), more_there

    def _options_of(self, seqs: list[Sequence]) -> SamplingArrays:
        if self._options.seqs != seqs:  # sequences compare by identity: cheap
            self._options = SamplingArrays.of(seqs)
        return self._options

    @staticmethod
    def _report(raw: torch.Tensor | None, seqs: list[Sequence], tokens: torch.Tensor):
        """What computes logprobs when they are asked for; the tokens are copied before a later step replaces them."""
        if raw is None:
            return None
        kept = tokens.clone()
        return lambda: report_logprobs(raw, seqs, kept)

    def _blocks_that_fit(self, config: EngineConfig) -> int:
        return blocks_that_fit(self, config) if self.device.type == "cuda" else super()._blocks_that_fit(config)

    def close(self) -> None:
        self.graphs, self.tables = [], None
        super().close()
