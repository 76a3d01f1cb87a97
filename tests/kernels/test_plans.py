"""What a step's inputs are padded to, and which graph takes it. No kernel runs here."""

from unittest.mock import patch

import numpy as np
import pytest

from nanoengine.config import EngineConfig
from nanoengine.engine.batch import Batch
from tests.kernels.test_gpu_runner import one_layer

NONE = np.empty(0, np.int64)
EMPTY = Batch([], NONE, NONE, NONE, NONE, NONE, [], NONE, NONE, NONE, NONE.astype(bool))


def ragged(queries, contexts, slots=None) -> Batch:
    """A batch of rows 0..B-1 that all sample."""
    rows, tokens = np.arange(len(queries)), np.arange(queries.sum()) if slots is None else slots
    return Batch(list(rows), tokens, tokens, tokens, queries, contexts, [[i] for i in rows], rows, contexts + 1, rows,
                 np.ones(len(rows), bool))  # fmt: skip


def sizes_of(metadata) -> list[int]:
    names = ("slot_mapping", "rows", "query_start_loc", "query_lens", "seq_lens")
    names += ("kv_splits", "split_rows", "query_tiles")
    return [getattr(metadata, name).size for name in names]


def test_padding_of_a_decode_batch_reads_and_writes_nothing():
    from nanoengine.attention.paged import Bucket
    from nanoengine.attention.triton_attention import TritonAttention, extra_kv_splits

    one = np.ones(2, np.int64)
    bucket = Bucket(4, 4, is_decode=True)
    full = TritonAttention(2).build(ragged(one, one * 50, one * 33), bucket)
    empty = TritonAttention(2).build(EMPTY, bucket)
    sizes = [4, 4, 5, 4, 4, 4 * (4 + extra_kv_splits(4, 8)), 3 * extra_kv_splits(4, 8), 0]
    assert sizes_of(full) == sizes_of(empty) == sizes
    assert (full.slot_mapping.tolist(), full.query_start_loc.tolist()) == ([33, 33, -1, -1], [0, 1, 2, 3, 4])
    assert (full.query_lens.tolist(), full.seq_lens.tolist()) == ([1, 1, 1, 1], [50, 50, 0, 0])
    assert set(full.kv_splits[0].tolist()) == {0, 1, -1}
    assert (empty.kv_splits == -1).all()


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
        assert mixed.buckets[-1].tokens == min(4096, largest)
        assert decode.buckets[-1].tokens == min(sizes[:2])


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
        batch = Batch([None] * len(queries), tokens, tokens, tokens, queries, queries, [], rows, rows, rows, rows)
        buckets = [graphs.bucket_of(batch) for graphs in runner.graphs]
        return [bucket and bucket.tokens for bucket in buckets]

    assert buckets([1] * 3, 3) == [4, 32]
    assert buckets([1] * 300, 300) == [300, None]  # a mixed step has 256 rows at most
    assert buckets([1] * 300, 299) == [None, None]
    assert buckets([1] * 256, 255) == [None, 256]
    assert buckets([2] + [1] * 255, 256) == [None, 384]
    assert buckets([2] + [1] * 256, 257) == [None, None]
    assert buckets([39] * 105, 0) == [None, 4096]
    assert buckets([39] * 106, 0) == [None, None]


def test_padding_of_a_mixed_batch_reads_and_writes_nothing():
    from nanoengine.attention.paged import Bucket
    from nanoengine.attention.triton_attention import TritonAttention, extra_kv_splits

    full = TritonAttention(2).build(ragged(np.array([3, 1, 70]), np.array([3, 50, 90])), Bucket(128, 5))
    empty = TritonAttention(2).build(EMPTY, Bucket(128, 5))
    sizes = [128, 5, 6, 5, 5, 4 * (5 + extra_kv_splits(5, 8)), 3 * extra_kv_splits(5, 8), 2 * (128 // 64 + 5)]
    assert sizes_of(full) == sizes_of(empty) == sizes
    assert (full.slot_mapping[:74] == np.arange(74)).all() and (full.slot_mapping[74:] == -1).all()
    assert full.query_start_loc.tolist() == [0, 3, 4, 74, 74, 74] and full.query_lens.tolist() == [3, 1, 70, 0, 0]
    assert full.seq_lens.tolist() == [3, 50, 90, 0, 0]
    assert set(full.kv_splits[0].tolist()) == {1, -1}
    tiles = full.query_tiles
    assert tiles[:, :3].tolist() == [[2, 2, 0], [64, 0, 0]] and (tiles[0, 3:] == -1).all()
    assert (empty.kv_splits == -1).all() and (empty.query_tiles == -1).all()


def test_a_step_of_prompts_alone_or_decoding_rows_alone_launches_one_kernel():
    """Without a graph, that is: a recorded step has the sizes of its bucket."""
    from nanoengine.attention.triton_attention import TritonAttention

    one = np.ones(2, np.int64)
    for queries, pieces, tiles in ((one * 5, 0, 2), (one, 2, 0), (np.array([5, 1]), 1, 1)):
        built = TritonAttention(2).build(ragged(queries, queries * 2))
        assert ((built.kv_splits[0] >= 0).sum(), built.query_tiles.shape[1]) == (pieces, tiles)
        assert bool(built.kv_splits.size) == bool(pieces)


@pytest.mark.parametrize("seed", range(20))
def test_a_mixed_step_never_needs_more_tiles_than_its_bucket_has(seed):
    from nanoengine.kernels.paged_prefill import most_tiles, plan_tiles

    draw = np.random.default_rng(seed)
    lens = draw.integers(1, [2, 3, 5, 70, 400][seed % 5], int(draw.integers(1, 60)))
    rows, per_tile = np.flatnonzero(lens > 1), int(draw.integers(1, 130))
    assert plan_tiles(lens, lens, rows, per_tile).shape[1] <= most_tiles(int(lens.sum()), len(lens), per_tile)


def test_pieces_of_a_decode_step():
    """What was fastest at 8 KV heads; half as many KV heads want twice the pieces."""
    from nanoengine.attention.triton_attention import extra_kv_splits

    fastest = {1: 32, 4: 124, 8: 136, 48: 136, 101: 136, 143: 120, 213: 90, 256: 72, 1024: 32}
    assert {rows: extra_kv_splits(rows, 8) for rows in fastest} == fastest
    assert [extra_kv_splits(2 * rows, 4) for rows in fastest] == [2 * extra_kv_splits(rows, 8) for rows in fastest]


def test_memory_of_graphs_is_logits_and_layers_not_the_sampler():
    from nanoengine.worker.cuda_graphs import graph_bytes

    config = EngineConfig(vocab_size=151_936, max_num_seqs=1024, max_num_batched_tokens=8192, max_model_len=4096)
    logits = 1024 * 151_936 * 2
    assert graph_bytes(config, 151_936, 2, 1000) == logits + 500  # the largest graph has half of the tokens
    config = EngineConfig(vocab_size=151_936, max_num_seqs=1024, max_num_batched_tokens=2048, max_model_len=4096)
    assert graph_bytes(config, 151_936, 2, 1000) == logits + 1000
