"""Steps as CUDA graphs: some 250 kernels launched by one call. Needs torch.

A graph is a recording: same kernels, same sizes, same addresses at every replay. So there is one per
*bucket* (padded number of tokens), and a replay first writes its inputs over those of the last one.
"""

from __future__ import annotations

import gc
from bisect import bisect_left

import numpy as np
import torch

from nanoengine.attention.paged import padded
from nanoengine.engine.batch import Batch
from nanoengine.worker.device import pinned, views
from nanoengine.worker.sampling_arrays import SamplingArrays

MOST_TOKENS = 4096  # of a mixed step: larger ones keep the GPU busy for longer than it takes to launch them
MOST_ROWS = 256  # of a mixed step


def bucket_sizes(max_num_seqs: int) -> list[int]:
    """1, 2, 4, 8, then multiples of 8 up to 64 and of 16 beyond; the last one is max_num_seqs itself."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, max_num_seqs, 16)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


def most_tokens(config) -> int:
    """Of any step: a row computes all of its tokens but the last one."""
    return min(config.max_num_batched_tokens, config.max_num_seqs * (config.max_model_len - 1))


def mixed_sizes(most: int) -> list[int]:
    """Numbers of tokens of mixed steps, up to ``most``; from 512 on at most a fifth of them is padding."""
    sizes = [32, 64, *range(128, 1024, 128), *range(1024, 2048, 256), *range(2048, MOST_TOKENS, 512)]
    most = min(MOST_TOKENS, most)
    return [size for size in sizes if size < most] + [most]


def graph_bytes(config, vocab_size: int, itemsize: int, layer_bytes: int) -> int:
    """What graphs hold on to: the logits of all rows, and the layers of their largest mixed step.

    layer_bytes: what the layers of the largest step need.
    """
    if config.enforce_eager:
        return 0
    most = most_tokens(config)
    return config.max_num_seqs * vocab_size * itemsize + layer_bytes * min(MOST_TOKENS, most) // most


def record_graphs(runner, config) -> list[Graphs]:
    """All graphs of a runner. They replay one after the other, so they share one memory and one table of logits.

    In a group all ranks record the same buckets in the same order, their collectives with them; the first one
    alone has logits, and draws. What the others need of its last draw is shared where a step begins.
    """
    rows, model = config.max_num_seqs, runner.model
    first = runner.group is None or runner.group.rank == 0
    scores = model.embed_tokens.weight.new_empty(rows if first else 0, model.vocab_size)
    decode, mixed = DecodeGraphs(runner, config, scores), MixedGraphs(runner, config, scores)
    decode.record(*mixed.record())  # the largest first: the smaller ones then fit into its memory
    return [decode, mixed]


class Graphs:
    """The steps of one kind. sizes: its buckets, ascending; rows: the most rows of a step.

    runner: gives model, attention, tables, caches, block_size, and the buffer of newest tokens.
    """

    sizes: list[int]
    rows: int

    def __init__(self, runner, config, scores: torch.Tensor):
        self._runner, self._max_model_len, self._scores = runner, config.max_model_len, scores
        self._inputs = pinned(self._padding(self.sizes[-1]), runner.device).to(runner.device)
        self._given = {size: views(self._inputs, list(map(len, self._padding(size)))) for size in self.sizes}
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def bucket_of(self, batch: Batch) -> int | None:
        """The smallest bucket that holds this batch; None if it is no step of this kind."""
        tokens = len(batch.input_ids)
        if tokens > self.sizes[-1] or len(batch.seqs) > self.rows or not self._is_mine(batch):
            return None
        return self.sizes[bisect_left(self.sizes, tokens)]

    def replay(self, bucket: int, batch: Batch, options) -> tuple:
        """Run one step: (logits [S, vocabulary], drawn tokens [S], where they lie among the newest tokens).

        options: temperatures and seeds of the rows that sample. The first two are overwritten by the next replay.
        """
        host = pinned(self._arrays(bucket, batch, self._lines(batch), options), self._inputs.device)
        self._inputs[: len(host)].copy_(host, non_blocking=True)
        self._graphs[bucket].replay()
        return self._results(bucket, len(batch.sample_rows))

    def _is_mine(self, batch: Batch) -> bool:
        return True

    def _lines(self, batch: Batch) -> np.ndarray:
        return self._runner.tables.lines(batch)

    def _arrays(self, bucket: int, batch: Batch, lines: np.ndarray, options) -> list[np.ndarray]:
        """The inputs of a step, padded: their sizes depend on the bucket alone."""
        raise NotImplementedError

    def _step(self, bucket: int) -> None:
        """What is recorded: inputs, layers, logits, draw. Python sees it once, a replay does not."""
        raise NotImplementedError

    def _results(self, bucket: int, count: int) -> tuple:
        raise NotImplementedError

    def _padding(self, bucket: int) -> list[np.ndarray]:
        """The inputs of a step of padded rows only."""
        none, lists = np.empty(0, np.int64), []
        batch = Batch(lists, none, none, none, none, none, lists, none, none)
        return self._arrays(bucket, batch, none, SamplingArrays.none(0))

    def _pad(self, bucket: int) -> None:
        """Make the inputs those of a step that reads and writes nothing."""
        padding = pinned(self._padding(bucket), self._inputs.device)
        self._inputs[: len(padding)].copy_(padding)

    @torch.inference_mode()
    def record(self, pool=None, side=None) -> tuple:
        """Record all buckets, the largest first. Returns the pool that their memory comes from, and the stream that
        they were recorded on: what is free there is free for that stream alone."""
        device = self._inputs.device
        # NCCL has a thread that looks at events all the time: what other threads do must not end a recording
        mode = "global" if self._runner.group is None else "thread_local"
        side = side or torch.cuda.Stream(device)
        gc.collect()
        for bucket in reversed(self.sizes):
            self._pad(bucket)
            side.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(side):  # a first run outside: compiles kernels, chooses matrix products
                self._step(bucket)
            torch.cuda.current_stream(device).wait_stream(side)
            torch.cuda.synchronize(device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=side, capture_error_mode=mode):
                self._step(bucket)
            pool = pool or graph.pool()
            self._graphs[bucket] = graph
        torch.cuda.synchronize(device)
        return pool, side


class DecodeGraphs(Graphs):
    """Each row has one token, and samples. A bucket is a number of rows."""

    def __init__(self, runner, config, scores):
        self.rows = min(config.max_num_seqs, config.max_num_batched_tokens)
        self.sizes = bucket_sizes(self.rows)
        super().__init__(runner, config, scores)

    def _is_mine(self, batch: Batch) -> bool:
        return batch.is_decode and len(batch.sample_rows) == len(batch.seqs)

    def _lines(self, batch: Batch) -> np.ndarray:
        return self._runner.tables.lines(batch, newest_follows=batch.positions // self._runner.block_size)

    def _arrays(self, bucket, batch, lines, options) -> list[np.ndarray]:
        """ids, sources, positions, seeds, temperatures (as bits), [bucket] each, then the plan of attention."""
        columns = (batch.input_ids, sources_of(batch), batch.positions, options.seeds, options.temperature_bits)
        columns = [padded(x, bucket, fill) for x, fill in zip(columns, (0, -1, 0, 0, 0), strict=True)]
        return [*columns, *self._runner.attention.plan(batch, lines, bucket)]

    def _step(self, bucket: int) -> None:
        from nanoengine.kernels.decode_inputs import decode_inputs
        from nanoengine.kernels.gumbel_sample import gumbel_sample

        runner = self._runner
        ids, sources, positions, seeds, temperatures, *plan = self._given[bucket]
        tables, model, (slots, table_rows, *_) = runner.tables.tensor, runner.model, plan
        embed = model.embed_tokens
        rows = decode_inputs(ids, sources, runner.newest(), positions, slots, table_rows, tables, embed.weight,
                             runner.block_size, embed.first_token)  # fmt: skip
        metadata = runner.attention.metadata(plan, tables, 1, self._max_model_len)  # may copy tables: they are complete
        hidden = embed.all_reduce(rows)
        hidden = model.layers_forward(hidden, positions, runner.attention, runner._layer_caches, metadata)
        scores = model.compute_logits(hidden, self._scores[:bucket])
        if len(scores):
            seen, newest = metadata.context_lens, runner._previous[:bucket]
            gumbel_sample(scores, temperatures.view(torch.float64), seeds, seen, newest)

    def _results(self, bucket, count):
        return self._scores[:count], self._runner._previous[:count], None


class MixedGraphs(Graphs):
    """Any step: prompts, chunks, decoding rows beside them. A bucket is a number of tokens.

    Launching such a step kernel by kernel takes 10 to 20 ms of the host; most of them are done sooner.
    """

    def __init__(self, runner, config, scores):
        self.rows, self.sizes = min(config.max_num_seqs, MOST_ROWS), mixed_sizes(most_tokens(config))
        self._tokens = torch.zeros(self.rows, dtype=torch.int64, device=runner.device)
        super().__init__(runner, config, scores)

    def _arrays(self, bucket, batch, lines, options) -> list[np.ndarray]:
        """ids, sources, positions [bucket]; then of the rows that sample, padded to ``rows``: their last tokens, row
        numbers, seeds, temperatures (as bits), positions; then the plan of attention."""
        columns = (batch.input_ids, sources_of(batch), batch.positions)
        columns = [padded(x, bucket, fill) for x, fill in zip(columns, (0, -1, 0), strict=True)]
        last = np.cumsum(batch.query_lens)[batch.sample_rows] - 1
        samples = (last, batch.sample_rows, options.seeds, options.temperature_bits, batch.sample_positions)
        nowhere = len(self._runner._previous) - 1
        samples = [padded(x, self.rows, fill) for x, fill in zip(samples, (0, nowhere, 0, 0, 0), strict=True)]
        return [*columns, *samples, *self._runner.attention.plan(batch, lines, self.rows, bucket)]

    def _step(self, bucket: int) -> None:
        from nanoengine.kernels.gumbel_sample import gumbel_sample

        runner = self._runner
        ids, sources, positions, last, rows, seeds, temperatures, places, *plan = self._given[bucket]
        longest = max(2, bucket)  # of one token would mean a decode step
        metadata = runner.attention.metadata(plan, runner.tables.tensor, longest, self._max_model_len)
        hidden = runner.model(runner.fed(ids, sources), positions, runner.attention, runner._layer_caches, metadata)
        scores = runner.model.compute_logits(hidden[last], self._scores[: self.rows])
        if len(scores):
            gumbel_sample(scores, temperatures.view(torch.float64), seeds, places, self._tokens)
            runner._previous.index_copy_(0, rows, self._tokens)

    def _results(self, bucket, count):
        return self._scores[:count], self._tokens[:count], self._given[bucket][4][:count]


def sources_of(batch: Batch) -> np.ndarray:
    """int64 [T]: see Batch.in_flight; -1 where the id is known."""
    return np.full(len(batch.input_ids), -1) if batch.in_flight is None else batch.in_flight
