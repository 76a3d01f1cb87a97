"""Rows of one step that share blocks, on every backend: a step stores all its KV before any row attends.

Rows stand in reverse, who shares before who computes, and the pool is filled with NaN: what attends too early says so.
"""

from __future__ import annotations

import math
import sys
from types import SimpleNamespace

import pytest
import torch

from nanoengine import SamplingParams
from nanoengine.config import EngineConfig
from nanoengine.engine.llm_engine import LLMEngine
from nanoengine.model.config import ModelConfig
from nanoengine.worker.model_runner import ModelRunner
from tests.engine.test_sharing import Reversed
from tests.kernels import test_flash_graphs as flash
from tests.kernels.test_graph_fuzz import decoder
from tests.kernels.unrecorded import give_graphs


def backend(name: str, monkeypatch):
    if name == "torch":
        from nanoengine.attention.torch_attention import TorchAttention

        return TorchAttention()
    if name == "triton":
        from nanoengine.attention.triton_attention import TritonAttention

        return TritonAttention(2)
    functions = (flash.flash_attn_varlen_func, flash.flash_attn_with_kvcache)
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(**{f.__name__: f for f in functions}))
    from nanoengine.attention.flash_attention import FlashAttention

    return FlashAttention()


def tokens(runner, config, prompts, scheduler=None):
    """Output ids; and by request, how many prompt tokens were found in the cache."""
    for cache in runner.layer_caches:
        cache.fill_(math.nan)
    engine = LLMEngine(config, runner=runner, scheduler=scheduler)
    params = [SamplingParams(temperature=0 if i % 2 else 5, seed=i, max_tokens=2) for i in range(len(prompts))]
    seqs = [engine.add_request(prompt, p) for prompt, p in zip(prompts, params, strict=True)]
    for _ in engine.run():
        pass
    return [seq.output_ids for seq in seqs], [seq.num_cached_tokens for seq in seqs]


@pytest.mark.parametrize(
    ("name", "kind", "fused"),
    [("torch", "cpu", False), ("torch", "gpu", True), ("triton", "gpu", False), ("triton", "graphs", True),
     ("flash", "gpu", False), ("flash", "graphs", False)],
)  # fmt: skip
def test_rows_of_one_step_share_blocks_whatever_their_order(name, kind, fused, monkeypatch):
    from nanoengine.worker.gpu_runner import GpuRunner

    size, most = (256, 700) if name == "flash" else (16, 64)
    shape = ModelConfig("Qwen3ForCausalLM", 64, 32, 48, 2, 2, 1, 16, most, qk_norm=True, dtype="float32")
    prompt = [(5 * i + i // 7) % 64 for i in range(2 * size + 2)]
    prompts = [prompt, prompt[:size] + [9, 9], prompt + [1]]
    settings = dict(vocab_size=64, max_model_len=most, max_num_seqs=3, num_blocks=12, block_size=size,
                    max_num_batched_tokens=most, device="cpu")  # fmt: skip
    alone = EngineConfig(**settings, enable_prefix_caching=False)
    wanted, _ = tokens(ModelRunner(alone, model=decoder(shape, most)), alone, prompts)
    config = EngineConfig(**settings, fused_kernels=fused)
    runner = (ModelRunner if kind == "cpu" else GpuRunner)(
        config, model=decoder(shape, most), attention=backend(name, monkeypatch)
    )
    replays = give_graphs(runner, config) if kind == "graphs" else None
    found, cached = tokens(runner, config, prompts, Reversed)
    assert found == wanted
    assert cached == [0, size, 2 * size]
    if kind == "graphs":
        assert {kind for kind, _ in replays} == {"DecodeGraphs", "MixedGraphs"}


def test_every_paged_backend_stores_all_rows_before_any_attends():
    """One call each a layer, store first; with k written by a fused kernel, no second time."""
    from nanoengine.attention.paged import PagedBackend

    calls = []
    paged = PagedBackend()
    paged.store = lambda k, v, cache, slots: calls.append(("store", len(k)))
    paged.attend = lambda q, cache, metadata, scale: calls.append(("attend", len(q))) or q
    q = torch.zeros(7, 2, 4)
    paged(q, q, q, None, SimpleNamespace(slot_mapping=None), 1.0)
    paged(q, None, None, None, SimpleNamespace(slot_mapping=None), 1.0)
    assert calls == [("store", 7), ("attend", 7), ("attend", 7)]
