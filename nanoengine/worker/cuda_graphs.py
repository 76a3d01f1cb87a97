"""Steps as CUDA graphs: some 250 kernels launched by one call.

A graph is a recording: same kernels, same sizes, same addresses at every replay. So there is one per
*bucket* (padded number of tokens), and a replay first writes its inputs over those of the last one.
"""

from __future__ import annotations

import gc
from bisect import bisect_left

import numpy as np
import torch

from nanoengine.attention.paged import Bucket
from nanoengine.engine.batch import Batch
from nanoengine.packing import pack, views
from nanoengine.worker.inputs import StepInputs, StepResult
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
    """All graphs of a runner. They replay one after the other, so they share one memory, logits and sampled tokens.

    In a group all ranks record the same buckets in the same order, their collectives with them; the first one
    alone has logits, and samples. What the others need of its last tokens is broadcast where a step begins.
    """
    rows, model = config.max_num_seqs, runner.model
    first = runner.group is None or runner.group.rank == 0
    logits = model.embed_tokens.weight.new_empty(rows if first else 0, model.vocab_size)
    tokens = torch.zeros(rows, dtype=torch.int64, device=runner.device)
    decode, mixed = DecodeGraphs(runner, config, logits, tokens), MixedGraphs(runner, config, logits, tokens)
    decode.record(*mixed.record())  # the largest first: the smaller ones then fit into its memory
    return [decode, mixed]


class Graphs:
    """The steps of one kind. buckets: their sizes, the number of tokens ascending; rows: the most rows of a step.

    runner: gives model, attention, tables, caches, block_size, and the buffer of last tokens. logits, tokens: where
    a step leaves what it computes for the rows that sample.
    """

    buckets: list[Bucket]
    rows: int

    def __init__(self, runner, config, logits: torch.Tensor, tokens: torch.Tensor):
        self._runner, self._max_model_len = runner, config.max_model_len
        self._logits, self._tokens = logits, tokens
        padding = {bucket: self._padding(bucket) for bucket in self.buckets}
        self._words = pack(padding[self.buckets[-1]], runner.device).to(runner.device)
        self._inputs = {bucket: views(self._words, inputs) for bucket, inputs in padding.items()}
        self._graphs: dict[Bucket, torch.cuda.CUDAGraph] = {}

    def bucket_of(self, batch: Batch) -> Bucket | None:
        """The smallest bucket that holds this batch; None if it is no step of this kind."""
        tokens = len(batch.input_ids)
        if tokens > self.buckets[-1].tokens or len(batch.seqs) > self.rows or not self._is_mine(batch):
            return None
        return self.buckets[bisect_left(self.buckets, tokens, key=lambda bucket: bucket.tokens)]

    def replay(self, bucket: Bucket, batch: Batch, sampling: SamplingArrays) -> StepResult:
        """Run one step, whose block tables are on the device. The next replay writes over its logits and tokens."""
        words = pack(self._inputs_of(bucket, batch, sampling), self._words.device)
        self._words[: len(words)].copy_(words, non_blocking=True)
        self._graphs[bucket].replay()
        count = len(batch.sample_rows)
        return StepResult(self._logits[:count], self._inputs[bucket], self._tokens[:count], bucket.tokens)

    def written_blocks(self, batch: Batch) -> np.ndarray | None:
        """int64 [B], the entry of each row's block table that the step itself writes; None for none."""
        return None

    def _is_mine(self, batch: Batch) -> bool:
        return True

    def _inputs_of(self, bucket: Bucket, batch: Batch, sampling: SamplingArrays) -> StepInputs:
        attention = self._runner.attention.build(batch, bucket)
        return StepInputs.of(batch, sampling, attention, bucket, padding_row=self._runner.padding_row)

    def _forward(self, bucket: Bucket) -> torch.Tensor:
        """Hidden states of the rows that sample; what a graph of this kind records before logits and sampling."""
        raise NotImplementedError

    def _step(self, bucket: Bucket) -> None:
        """What is recorded. Python sees it once, a replay does not."""
        from nanoengine.kernels.gumbel_sample import gumbel_sample

        inputs, hidden = self._inputs[bucket], self._forward(bucket)
        logits = self._runner.model.compute_logits(hidden, self._logits[: len(hidden)])
        if len(logits):
            gumbel_sample(logits, inputs.temperatures, inputs.seeds, inputs.sample_positions, self._tokens,
                          self._runner.last_tokens, inputs.sample_request_rows)  # fmt: skip

    def _padding(self, bucket: Bucket) -> StepInputs:
        """The inputs of a step of padded rows only: it reads and writes nothing."""
        none = np.empty(0, np.int64)
        batch = Batch([], none, none, none, none, none, [], none, none, none, none.astype(bool))
        return self._inputs_of(bucket, batch, SamplingArrays.none(0))

    def _pad(self, bucket: Bucket) -> None:
        padding = pack(self._padding(bucket), self._words.device)
        self._words[: len(padding)].copy_(padding)

    @torch.inference_mode()
    def record(self, pool=None, side=None) -> tuple:
        """Record all buckets, the largest first. Returns the pool that their memory comes from, and the stream that
        they were recorded on: what is free there is free for that stream alone."""
        device = self._words.device
        # NCCL has a thread that looks at events all the time: what other threads do must not end a recording
        mode = "global" if self._runner.group is None else "thread_local"
        side = side or torch.cuda.Stream(device)
        gc.collect()
        for bucket in reversed(self.buckets):
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
    """Each row has one token, and samples."""

    def __init__(self, runner, config, logits, tokens):
        self.rows = min(config.max_num_seqs, config.max_num_batched_tokens)
        self.buckets = [Bucket(size, size, is_decode=True) for size in bucket_sizes(self.rows)]
        super().__init__(runner, config, logits, tokens)

    def _is_mine(self, batch: Batch) -> bool:
        return batch.is_decode and len(batch.sample_rows) == len(batch.seqs)

    def written_blocks(self, batch: Batch) -> np.ndarray:
        return batch.positions // self._runner.block_size  # decode_inputs takes the block from the slot

    def _forward(self, bucket: Bucket) -> torch.Tensor:
        from nanoengine.kernels.decode_inputs import decode_inputs

        runner, inputs = self._runner, self._inputs[bucket]
        built, tables, embed = inputs.attention, runner.tables.tensor, runner.model.embed_tokens
        embedded = decode_inputs(inputs.input_ids, inputs.token_rows, runner.broadcast_last_tokens(), inputs.positions,
                                 built.slot_mapping, built.rows, tables, embed.weight, runner.block_size,
                                 embed.first_token)  # fmt: skip
        # after decode_inputs has written the newest blocks: a backend may copy tables here
        metadata = runner.attention.ready(built, tables, 1, self._max_model_len)
        hidden = embed.all_reduce(embedded)
        return runner.model.layers_forward(hidden, inputs.positions, runner.attention, runner.layer_caches, metadata)


class MixedGraphs(Graphs):
    """Any step: prompts, chunks, decoding rows beside them.

    Launching such a step kernel by kernel takes 10 to 20 ms of the host; most of them are done sooner.
    """

    def __init__(self, runner, config, logits, tokens):
        self.rows = min(config.max_num_seqs, MOST_ROWS)
        self.buckets = [Bucket(size, self.rows) for size in mixed_sizes(most_tokens(config))]
        super().__init__(runner, config, logits, tokens)

    def _forward(self, bucket: Bucket) -> torch.Tensor:
        runner, inputs = self._runner, self._inputs[bucket]
        longest = max(2, bucket.tokens)  # of one token would mean a decode step
        metadata = runner.attention.ready(inputs.attention, runner.tables.tensor, longest, self._max_model_len)
        ids = runner.resolve_input_ids(inputs)
        hidden = runner.model(ids, inputs.positions, runner.attention, runner.layer_caches, metadata)
        return hidden[inputs.logits_indices]
