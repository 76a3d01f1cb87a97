"""Decode steps as CUDA graphs: some 250 kernels launched by one call. Needs torch.

A graph is a recording: same kernels, same sizes, same addresses at every replay. So there is one per
*bucket* (padded number of rows), and a replay first writes its inputs over those of the last one.
"""

from __future__ import annotations

import gc

import numpy as np
import torch

from nanoengine.attention.paged import padded
from nanoengine.engine.batch import Batch
from nanoengine.engine.device import pinned, views


def bucket_sizes(max_num_seqs: int) -> list[int]:
    """1, 2, 4, 8, then multiples of 8 up to 64 and of 16 beyond; the last one is max_num_seqs itself."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, max_num_seqs, 16)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


class DecodeGraphs:
    """runner: gives model, attention, tables, caches, block_size, and the buffer of previous tokens.

    In a group all ranks record the same buckets in the same order, their collectives with them; the first one
    alone has logits, and draws. What the others need of its last draw is shared where a step begins.
    """

    def __init__(self, runner, max_num_seqs: int, max_model_len: int):
        self._runner, self._max_model_len = runner, max_model_len
        self.sizes = bucket_sizes(max_num_seqs)
        self._bucket_of = [next(size for size in self.sizes if size >= n) for n in range(1, max_num_seqs + 1)]
        self._inputs = pinned(self._padding(max_num_seqs), runner.device).to(runner.device)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        self._capture_all()

    def bucket_of(self, batch: Batch) -> int | None:
        """The smallest bucket that holds this batch; None if it is no decode step."""
        decode = batch.is_decode and len(batch.sample_rows) == len(batch.seqs)
        return self._bucket_of[len(batch.seqs) - 1] if decode else None

    def replay(self, bucket: int, batch: Batch, options) -> torch.Tensor:
        """Run one decode step: its drawn tokens go to the runner's buffer; returns logits [bucket, vocabulary].

        options: temperatures and seeds of the rows.
        """
        lines = self._runner.tables.lines(batch, newest_follows=True)
        arrays = self._arrays(bucket, batch, lines, options.seeds, options.temperatures)
        host = pinned(arrays, self._inputs.device)
        self._inputs[: len(host)].copy_(host, non_blocking=True)
        graph, scores = self._graphs[bucket]
        graph.replay()
        return scores

    def _arrays(self, bucket, batch, lines, seeds, temperatures) -> list[np.ndarray]:
        """ids, sources, positions, seeds, temperatures (as bits), [bucket] each, then the plan of attention."""
        sources = np.full(len(batch.seqs), -1) if batch.in_flight is None else batch.in_flight
        columns = (batch.input_ids, sources, batch.positions, seeds, temperatures.view(np.int64))
        fills = (0, -1, 0, 0, 0)
        columns = [padded(column, bucket, fill) for column, fill in zip(columns, fills, strict=True)]
        return [*columns, *self._runner.attention.plan(batch, lines, bucket)]

    def _sizes(self, bucket: int) -> list[int]:
        return [len(array) for array in self._padding(bucket)]

    def _padding(self, bucket: int) -> list[np.ndarray]:
        """The inputs of a step of padded rows only."""
        none, lists = np.empty(0, np.int64), []
        batch = Batch(lists, none, none, none, none, none, lists, none, none)
        return self._arrays(bucket, batch, none, none, np.empty(0))

    def _step(self, bucket: int) -> torch.Tensor:
        """What is recorded: inputs, layers, logits, draw. Python sees it once, a replay does not."""
        from nanoengine.kernels.decode_inputs import decode_inputs
        from nanoengine.kernels.draw import draw

        runner = self._runner
        ids, sources, positions, seeds, temperatures, *plan = views(self._inputs, self._sizes(bucket))
        tables, model = runner.tables.tensor, runner.model
        metadata = runner.attention.metadata(plan, tables, 1, self._max_model_len)
        stream = decode_inputs(ids, sources, runner.newest(), positions, metadata.slots, metadata.table_rows, tables,
                               model.embed_tokens, runner.block_size, model.first_token)  # fmt: skip
        hidden = model.layers_forward(stream, positions, runner.attention, runner._layer_caches, metadata)
        scores = model.scores(hidden)
        if len(scores):
            draw(scores, temperatures.view(torch.float64), seeds, metadata.context_lens, runner._previous[:bucket])
        return scores

    @torch.inference_mode()
    def _capture_all(self) -> None:
        """Largest first: the smaller ones then fit into its memory."""
        device, pool = self._inputs.device, None
        # NCCL has a thread that looks at events all the time: what other threads do must not end a recording
        mode = "global" if self._runner.group is None else "thread_local"
        side = torch.cuda.Stream(device)
        gc.collect()
        for bucket in reversed(self.sizes):
            padding = pinned(self._padding(bucket), device)
            self._inputs[: len(padding)].copy_(padding)
            side.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(side):  # a first run outside: compiles kernels, chooses matrix products
                self._step(bucket)
            torch.cuda.current_stream(device).wait_stream(side)
            torch.cuda.synchronize(device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=side, capture_error_mode=mode):
                scores = self._step(bucket)
            pool = pool or graph.pool()
            self._graphs[bucket] = (graph, scores)
        torch.cuda.synchronize(device)
