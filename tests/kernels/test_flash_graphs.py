"""flash-attn's metadata of padded rows, without flash-attn: two functions in torch, strict about what they get."""

import random
import sys
from types import SimpleNamespace

import pytest
import torch

from nanoengine.config import EngineConfig
from nanoengine.worker.model_runner import ModelRunner
from tests.kernels.test_graph_fuzz import decoder, outputs, requests_of, settings_of
from tests.kernels.unrecorded import give_graphs


def attention(q, k, v, table, context, scale):
    """q [n, heads, D], the last n of ``context`` tokens; k, v: the pool."""
    keys, values = (part[table.long()].flatten(0, 1)[:context].repeat_interleave(q.shape[1] // k.shape[2], 1)
                    for part in (k, v))  # fmt: skip
    scores = torch.einsum("qhd,khd->hqk", q, keys) * scale
    unseen = torch.arange(context) > torch.arange(context - len(q), context)[:, None]
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(unseen, -torch.inf).softmax(-1), values)


def check_shapes(k, block_table, rows):
    assert k.shape[1] % 256 == 0 and k.stride(-1) == 1
    assert block_table.dtype == torch.int32 and block_table.is_contiguous() and len(block_table) == rows


def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal,
                           block_table):  # fmt: skip
    """A token that no row has keeps what memory held before."""
    check_shapes(k, block_table, len(cu_seqlens_q) - 1)
    assert causal and cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32 and len(cu_seqlens_q) == len(cu_seqlens_k)
    assert max_seqlen_q > 1  # of one token flash-attn swaps queries and groups, which wants a row for each token
    queries, contexts = cu_seqlens_q.diff(), cu_seqlens_k.diff()
    assert cu_seqlens_q[0] == cu_seqlens_k[0] == 0 and cu_seqlens_q[-1] <= len(q)
    assert (0 <= queries).all() and (queries <= contexts).all()
    assert queries.max() <= max_seqlen_q and contexts.max() <= max_seqlen_k
    assert max_seqlen_k <= block_table.shape[1] * k.shape[1]
    out = torch.full_like(q, torch.nan)
    for table, start, n, context in zip(block_table, cu_seqlens_q.tolist(), queries.tolist(), contexts.tolist(),
                                        strict=False):  # fmt: skip
        out[start : start + n] = attention(q[start : start + n], k, v, table, context, softmax_scale)
    return out


def flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens, block_table, softmax_scale, causal):
    check_shapes(k_cache, block_table, len(q))
    assert causal and cache_seqlens.dtype == torch.int32 and len(cache_seqlens) == len(q)
    out = torch.full_like(q, torch.nan)
    for row, (table, context) in enumerate(zip(block_table, cache_seqlens.tolist(), strict=True)):
        if context:
            out[row] = attention(q[row], k_cache, v_cache, table, context, softmax_scale)
    return out


@pytest.mark.parametrize(("seed", "limits"), [(0, {}), (4, {}), (3, dict(max_num_seqs=2, max_num_batched_tokens=1))])
def test_tokens_are_those_of_the_plain_runner(seed, limits, monkeypatch):
    """Random requests as for our own kernels, through graphs; a bucket of one token among them."""
    from nanoengine.worker.gpu_runner import GpuRunner
    from tests.kernels.test_gpu_runner import one_layer

    functions = (flash_attn_varlen_func, flash_attn_with_kvcache)
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(**{f.__name__: f for f in functions}))
    from nanoengine.attention.flash_attention import FlashAttention

    draw, shape = random.Random(seed), one_layer(True).config
    config = EngineConfig(vocab_size=64, fused_kernels=False, **settings_of(draw) | limits)
    requests = requests_of(draw)
    wanted = outputs(ModelRunner(config, model=decoder(shape)), config, requests)
    runner = GpuRunner(config, model=decoder(shape), attention=FlashAttention())
    for cache in runner.layer_caches:
        cache.fill_(torch.nan)
    replays = give_graphs(runner, config)
    assert outputs(runner, config, requests) == wanted, (config, requests)
    assert {kind for kind, _ in replays} == {"DecodeGraphs", "MixedGraphs"}
