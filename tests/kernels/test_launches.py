"""Which kernels a step launches, in which order; where the ranks of a step meet."""

import dataclasses
import itertools

import pytest
import torch

from nanoengine.model.config import NAMED_CONFIGS
from nanoengine.model.decoder import Decoder
from nanoengine.model.fused import fuse
from tests.kernels.test_fusion import CPU, TINY, ReadsStored, batch_of


@pytest.fixture
def launches(monkeypatch):
    """The names of the kernels that are launched, which then do nothing, and of torch's matmuls."""
    if torch.cuda.is_available():
        pytest.skip("a GPU is there, so Triton's interpreter is not used")
    from triton.runtime.interpreter import GridExecutor

    from nanoengine.model import fused, layers

    names = []

    def launched(kernel, *arguments, **more):
        names.append(kernel.fn.__name__)

    def noted(x, weight, bias=None):
        names.append("cublas")
        return x.new_zeros(len(x), len(weight))

    def mm(x, weight, out):
        names.append("cublas")
        return out

    monkeypatch.setattr(GridExecutor, "__call__", launched)
    for module in (fused, layers):
        monkeypatch.setattr(module, "linear", noted)
    monkeypatch.setattr(torch, "mm", mm)
    return names


# By number of tokens: what computes qkv, o, gate_up, down, and the logits. Matrices of more than 16 MB
# are left to cuBLAS, split-K is for o and down alone, and one token goes to gemv.
GEMMS = {
    "tiny-qwen3": {4: "kkkk", 64: "kkkk", 256: "ckck", 300: "cccc"},
    "tiny-llama": {4: "kkkk", 64: "kkkk", 256: "ckck", 300: "cccc"},
    "smollm2-135m": {4: "kkkk", 64: "kkkk", 256: "ckck", 300: "cccc"},
    "qwen3-0.6b": {4: "kkkk", 64: "kkkk", 256: "ckck", 300: "cccc"},
    "qwen3-8b": {4: "cccc", 64: "cccc", 256: "cccc", 300: "cccc"},
}
GEMM = {"k": "_split_k_gemm", "c": "cublas"}


def expected(name: str, tokens: int, attention: list[str]) -> list[str]:
    if tokens == 1:
        down = ["_gemv"]
        if name == "qwen3-8b":  # its rows are too long for gemv
            down = ["_silu_and_mul", "cublas"]
        layer = ["_gemv", "_rope_store", *attention, "_gemv", "_gemv", *down]
        return layer * 2 + ["_fused_add_rms_norm", "_gemv"]
    qkv, o, gate_up, down = (GEMM[kind] for kind in GEMMS[name][tokens])
    layer = ["_fused_add_rms_norm", qkv, "_rope_store", *attention, o]
    layer += ["_fused_add_rms_norm", gate_up, "_silu_and_mul", down]
    return layer * 2 + ["_fused_add_rms_norm", "cublas"]


@pytest.mark.parametrize("name", GEMMS)
def test_the_kernels_of_a_step(launches, name):
    """Of decode steps and of prompts; a graph records the same."""
    from nanoengine.attention.triton_attention import TritonAttention

    config = dataclasses.replace(NAMED_CONFIGS[name], num_hidden_layers=2, vocab_size=512)
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = Decoder(config, 512)
    finally:
        torch.set_default_dtype(torch.float32)
    assert fuse(model).split_k
    kv_heads = config.num_key_value_heads
    attention = TritonAttention(config.num_attention_heads // kv_heads, kv_heads)
    caches = [torch.zeros(2, 32, 16, kv_heads, config.head_dim, dtype=torch.bfloat16)] * 2
    decode, prefill = ["_decode_kv_splits", "_combine_kv_splits"], ["_paged_prefill"]
    for tokens in (1, 4, 64, 256, 300):
        steps = [(batch_of([1] * tokens, [20] * tokens), decode)]
        if tokens > 1:
            steps.append((batch_of([tokens], [tokens]), prefill))
        for batch, kernels in steps:
            launches.clear()
            metadata = attention.prepare(batch, 16, CPU)
            ids, positions = map(torch.from_numpy, (batch.input_ids, batch.positions))
            with torch.inference_mode():
                hidden = model(ids, positions, attention, caches, metadata)
                model.compute_logits(hidden, torch.empty(tokens, 512, dtype=torch.bfloat16))
            assert launches == expected(name, tokens, kernels), (tokens, kernels)


class Meetings:
    """Rank 0 of two, by itself: notes where the ranks would meet."""

    rank, size = 0, 2

    def __init__(self, names):
        self.names = names

    def all_reduce(self, x):
        assert x.dim() == 2  # never split-K partials: the ranks would send four times as much
        self.names.append("all_reduce")
        return x

    def gather(self, x):
        self.names.append("gather")
        return torch.stack((x, x))


@pytest.mark.parametrize("tokens", [1, 4, 300])
def test_ranks_meet_after_the_embedding_twice_a_layer_and_for_the_logits(launches, tokens):
    """In the same places with fused kernels, and where a graph has looked up the embedding."""
    from nanoengine.parallel.decoder import ParallelDecoder
    from nanoengine.parallel.split import Split

    model = ParallelDecoder(Split(TINY, 0, 2), 512, Meetings(launches)).to(torch.bfloat16)
    ids, positions = torch.zeros(tokens, dtype=torch.int64), torch.arange(tokens)
    batch, attention = batch_of([tokens], [tokens]), ReadsStored()
    metadata = attention.prepare(batch, 16, CPU)
    caches = list(torch.zeros(2, 2, 32, 16, 1, TINY.head_dim, dtype=torch.bfloat16))
    wanted = ["all_reduce"] * 5 + ["gather"]
    with torch.inference_mode():
        for fused, looked_up in itertools.product((False, True), repeat=2):
            if fused:
                fuse(model)
            launches.clear()
            rows = torch.zeros(tokens, TINY.hidden_size, dtype=torch.bfloat16)
            hidden = model.embed_tokens.all_reduce(rows) if looked_up else model.embed(ids)
            hidden = model.layers_forward(hidden, positions, attention, caches, metadata)
            assert model.compute_logits(hidden).shape == (tokens, TINY.vocab_size)
            assert [name for name in launches if name in wanted] == wanted
    name = "gemv" if tokens == 1 else "split_k_gemm"
    assert not model.layers[0].mlp.down_proj.split_k and model.layers[0].mlp.down_proj.group
    assert (f"_{name}" in launches) == (tokens < 300)
    assert launches[-1] == "gather" and launches[0] == "all_reduce"
