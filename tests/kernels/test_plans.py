"""What a step's inputs are padded to, and which graph takes it. No kernel runs here."""

from unittest.mock import patch

import numpy as np
import pytest

from nanoengine.config import EngineConfig
from nanoengine.engine.batch import Batch
from tests.kernels.test_gpu_runner import one_layer


def test_padding_of_a_decode_batch_reads_and_writes_nothing():
    from nanoengine.attention.triton_attention import TritonAttention, spare_pieces

    one = np.ones(2, np.int64)
    batch = Batch([0, 1], one, one, one * 33, one, one * 50, [[0], [1]], np.arange(2), one)
    full, empty = TritonAttention(2).plan(batch, one, 4), TritonAttention(2).plan(
        Batch([], *[np.empty(0, np.int64)] * 5, [], *[np.empty(0, np.int64)] * 2), np.empty(0, np.int64), 4
    )
    sizes = [4, 4, 4, 4, 4, 4 * (4 + spare_pieces(4, 8)), 3 * spare_pieces(4, 8), 0]
    assert [len(x) for x in full] == [len(x) for x in empty] == sizes
    slots, _, starts, queries, contexts, work, *_ = full
    assert (slots.tolist(), starts.tolist()) == ([33, 33, -1, -1], [0, 1, 2, 3])
    assert (queries.tolist(), contexts.tolist()) == ([1, 1, 1, 1], [50, 50, 0, 0])
    assert set(work.reshape(4, -1)[0].tolist()) == {0, 1, -1}
    assert (empty[5] == -1).all()


def test_buckets_end_at_the_largest_batch():
    from nanoengine.worker.cuda_graphs import bucket_sizes

    assert bucket_sizes(1) == [1]
    assert bucket_sizes(13) == [1, 2, 4, 8, 13]
    assert bucket_sizes(256)[-3:] == [224, 240, 256]
    assert bucket_sizes(100)[-2:] == [96, 100]


def test_buckets_of_mixed_steps():
    from nanoengine.worker.cuda_graphs import mixed_sizes

    assert mixed_sizes(8) == [8]
    assert mixed_sizes(200) == [32, 64, 128, 200]
    sizes = mixed_sizes(8192)
    assert sizes == sorted(set(sizes)) and sizes[-1] == 4096
    assert all(b - a <= b / 5 + 1 for a, b in zip(sizes, sizes[1:], strict=False) if a >= 512)


def test_no_graph_is_larger_than_the_largest_step():
    """Memory is measured with that step: a larger graph would need more than was left for it."""
    from nanoengine.attention.triton_attention import TritonAttention
    from nanoengine.worker.cuda_graphs import Graphs, graph_bytes, most_tokens, record_graphs
    from nanoengine.worker.gpu_runner import GpuRunner
    from nanoengine.worker.kv_memory import _longest_rows

    for sizes in ((2, 8192, 40), (7, 4, 40), (256, 8192, 64), (1, 1, 2)):
        names = ("max_num_seqs", "max_num_batched_tokens", "max_model_len")
        settings = dict(zip(names, sizes, strict=True)) | dict(vocab_size=64, num_blocks=20, device="cpu")
        config = EngineConfig(**settings)
        largest = sum(seq.num_scheduled_tokens for seq in _longest_rows(config, 16))
        assert largest == most_tokens(config)
        logits = config.max_num_seqs * 64 * 2
        assert graph_bytes(config, 64, 2, 10**6) == logits + 10**6 * min(4096, largest) // largest
        assert graph_bytes(EngineConfig(enforce_eager=True, **settings), 64, 2, 10**6) == 0
        runner = GpuRunner(config, model=one_layer(True), attention=TritonAttention(2, 2))
        with patch.object(Graphs, "record", lambda graphs, *before: ()):
            decode, mixed = record_graphs(runner, config)
        assert mixed.sizes[-1] == min(4096, largest) and decode.sizes[-1] == min(sizes[:2])


def test_which_graph_a_step_gets():
    from nanoengine.attention.triton_attention import TritonAttention
    from nanoengine.worker.cuda_graphs import Graphs, record_graphs
    from nanoengine.worker.gpu_runner import GpuRunner

    config = EngineConfig(vocab_size=64, max_model_len=40, max_num_seqs=300, num_blocks=20, device="cpu")
    runner = GpuRunner(config, model=one_layer(True), attention=TritonAttention(2, 2))
    with patch.object(Graphs, "record", lambda graphs, *before: ()):
        runner.graphs = record_graphs(runner, config)

    def buckets(queries, sampling):
        queries, tokens = np.array(queries), np.zeros(sum(queries), np.int64)
        rows = np.arange(sampling)
        batch = Batch([None] * len(queries), tokens, tokens, tokens, queries, queries, [], rows, rows)
        return [graphs.bucket_of(batch) for graphs in runner.graphs]

    assert buckets([1] * 3, 3) == [4, 32]
    assert buckets([1] * 300, 300) == [300, None]  # a mixed step has 256 rows at most
    assert buckets([1] * 300, 299) == [None, None]
    assert buckets([1] * 256, 255) == [None, 256]
    assert buckets([2] + [1] * 255, 256) == [None, 384]
    assert buckets([2] + [1] * 256, 257) == [None, None]
    assert buckets([39] * 105, 0) == [None, 4096]
    assert buckets([39] * 106, 0) == [None, None]


def test_padding_of_a_mixed_batch_reads_and_writes_nothing():
    from nanoengine.attention.triton_attention import TritonAttention, spare_pieces

    queries, contexts, one = np.array([3, 1, 70]), np.array([3, 50, 90]), np.ones(3, np.int64)
    tokens = np.arange(74)
    batch = Batch([0, 1, 2], tokens, tokens, tokens, queries, contexts, [[0], [1], [2]], np.arange(3), one)
    none = np.empty(0, np.int64)
    empty = Batch([], none, none, none, none, none, [], none, none)
    plans = [TritonAttention(2).plan(batch, one, 5, 128), TritonAttention(2).plan(empty, none, 5, 128)]
    sizes = [128, 5, 5, 5, 5, 4 * (5 + spare_pieces(5, 8)), 3 * spare_pieces(5, 8), 2 * (128 // 64 + 5)]
    assert [[len(x) for x in plan] for plan in plans] == [sizes, sizes]
    slots, _, starts, _, seen, work, _, tiles = plans[0]
    assert (slots[:74] == tokens).all() and (slots[74:] == -1).all()
    assert (starts.tolist(), seen.tolist()) == ([0, 3, 4, 0, 0], [3, 50, 90, 0, 0])
    assert set(work.reshape(4, -1)[0].tolist()) == {1, -1}
    assert tiles.reshape(2, -1)[:, :3].tolist() == [[2, 2, 0], [64, 0, 0]] and (tiles.reshape(2, -1)[0, 3:] == -1).all()
    assert (plans[1][5] == -1).all() and (plans[1][7] == -1).all()


def test_a_step_of_prompts_alone_or_decoding_rows_alone_launches_one_kernel():
    """Without a graph, that is: a recorded step has the sizes of its bucket."""
    from nanoengine.attention.triton_attention import TritonAttention

    one = np.ones(2, np.int64)
    for queries, pieces, tiles in ((one * 5, 0, 2), (one, 2, 0), (np.array([5, 1]), 1, 1)):
        tokens = np.arange(queries.sum())
        batch = Batch([0, 1], tokens, tokens, tokens, queries, queries * 2, [[0], [1]], np.arange(2), one)
        plan = TritonAttention(2).plan(batch, one)
        assert ((plan[5].reshape(4, -1)[0] >= 0).sum(), len(plan[7]) // 2) == (pieces, tiles)
        assert bool(len(plan[5])) == bool(pieces)


@pytest.mark.parametrize("seed", range(20))
def test_a_mixed_step_never_needs_more_tiles_than_its_bucket_has(seed):
    from nanoengine.kernels.paged_prefill import most_tiles, plan_tiles

    draw = np.random.default_rng(seed)
    lens = draw.integers(1, [2, 3, 5, 70, 400][seed % 5], int(draw.integers(1, 60)))
    rows, per_tile = np.flatnonzero(lens > 1), int(draw.integers(1, 130))
    assert plan_tiles(lens, lens, rows, per_tile).shape[1] <= most_tiles(int(lens.sum()), len(lens), per_tile)


def test_pieces_of_a_decode_step():
    """What was fastest at 8 KV heads; half as many KV heads want twice the pieces."""
    from nanoengine.attention.triton_attention import spare_pieces

    fastest = {1: 32, 4: 124, 8: 136, 48: 136, 101: 136, 143: 120, 213: 90, 256: 72, 1024: 32}
    assert {rows: spare_pieces(rows, 8) for rows in fastest} == fastest
    assert [spare_pieces(2 * rows, 4) for rows in fastest] == [2 * spare_pieces(rows, 8) for rows in fastest]


def test_memory_of_graphs_is_logits_and_layers_not_the_sampler():
    from nanoengine.worker.cuda_graphs import graph_bytes

    config = EngineConfig(vocab_size=151_936, max_num_seqs=1024, max_num_batched_tokens=8192, max_model_len=4096)
    logits = 1024 * 151_936 * 2
    assert graph_bytes(config, 151_936, 2, 1000) == logits + 500  # the largest graph has half of the tokens
    config = EngineConfig(vocab_size=151_936, max_num_seqs=1024, max_num_batched_tokens=2048, max_model_len=4096)
    assert graph_bytes(config, 151_936, 2, 1000) == logits + 1000
