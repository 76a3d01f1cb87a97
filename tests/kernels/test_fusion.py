"""What model.fused puts in whose place, and which kernels a step then launches, in which order."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch

from nanoengine.attention.torch_attention import TorchAttention
from nanoengine.engine.batch import Batch
from nanoengine.kernels.contract import DECODER_KERNELS, warmup_calls
from nanoengine.loader.weights import dummy_weights
from nanoengine.model.capabilities import is_fused, unfuse
from nanoengine.model.config import NAMED_CONFIGS
from nanoengine.model.decoder import Attention, Decoder, DecoderLayer
from nanoengine.model.fused import (
    FusedDecoderLayer,
    FusedLMHead,
    FusedPackedLinear,
    FusedRowParallelLinear,
    fuse,
    model_tensors,
)
from nanoengine.model.layers import PackedLinear, RMSNorm, RotaryEmbedding, RowParallelLinear

TINY = dataclasses.replace(
    NAMED_CONFIGS["tiny-qwen3"],
    vocab_size=48,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    head_dim=16,
)
CPU = torch.device("cpu")


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


def batch_of(query_lens, seq_lens):
    query_lens, seq_lens = np.array(query_lens), np.array(seq_lens)
    rows, tokens = len(query_lens), int(query_lens.sum())
    ends = zip(query_lens, seq_lens, strict=True)
    positions = np.concatenate([np.arange(end - n, end) for n, end in ends])
    tables = [list(range(-(-int(end) // 16))) for end in seq_lens]
    slots, ids = np.full(tokens, -1), np.zeros(tokens, np.int64)
    return Batch(list(range(rows)), ids, positions, slots, query_lens, seq_lens, tables,
                 np.arange(rows), seq_lens)  # fmt: skip


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


def decoder(kind=Decoder):
    model = kind(TINY, 64)
    model.load_weights(dummy_weights(TINY))
    return model


def test_all_of_our_own_decoder_is_fused_and_can_be_undone():
    model = decoder()
    before = {name: (id(module), type(module)) for name, module in model.named_modules()}
    state = {name: id(parameter) for name, parameter in model.named_parameters()}
    done = fuse(model)
    assert not done.left and done.split_k and len(done.fused) == 2 * 9 + 2
    assert all(isinstance(layer, FusedDecoderLayer) for layer in model.layers)
    assert isinstance(model.lm_head, FusedLMHead) and is_fused(model.norm)
    assert {name: id(module) for name, module in model.named_modules()} == {
        name: number for name, (number, _) in before.items()
    }
    assert fuse(model) == done
    unfuse(model)
    assert {name: (id(module), type(module)) for name, module in model.named_modules()} == before
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == state


class Doubled(PackedLinear):
    def forward(self, x):
        return 2 * super().forward(x)


class Scaled(RowParallelLinear):
    def forward(self, x):
        return 3 * super().forward(x)


class Renamed(PackedLinear):
    pass


class OwnNorm(RMSNorm):
    def forward(self, x):
        return 2 * super().forward(x)


class Slower(RotaryEmbedding):
    def forward(self, positions, dtype):
        return super().forward(positions // 2, dtype)


class Parallel(DecoderLayer):
    """Attention and MLP of the same input; the residual is kept beside them."""

    def forward(self, hidden, residual, ctx):
        normed, total = self.input_layernorm(hidden, residual)
        other, again = self.post_attention_layernorm(hidden, residual)
        return self.self_attn(normed, ctx) + self.mlp(other), (total + again) / 2


class Halved(Attention):
    def split_heads(self, qkv, ctx):
        q, k, v = super().split_heads(qkv, ctx)
        return q / 2, k, v


def change(path, kind):
    def changed(model):
        model.get_submodule(path).__class__ = kind

    return changed


def not_ours(model):
    """A module that knows nothing of this package."""
    theirs = model.layers[0].mlp.down_proj
    linear = torch.nn.Linear(theirs.weight.shape[1], len(theirs.weight), bias=False)
    linear.weight.data.copy_(2 * theirs.weight)
    model.layers[0].mlp.down_proj = linear


def patched(model):
    """A method of one module only."""
    mlp = model.layers[1].mlp
    plain = mlp.forward
    mlp.forward = lambda hidden: -plain(hidden)


CHANGES = {
    "layers.0.self_attn.qkv_proj": change("layers.0.self_attn.qkv_proj", Doubled),
    "layers.1.mlp.gate_up_proj": change("layers.1.mlp.gate_up_proj", Doubled),
    "layers.0.self_attn.o_proj": change("layers.0.self_attn.o_proj", Scaled),
    "layers.1.mlp.down_proj": change("layers.1.mlp.down_proj", Scaled),
    "layers.0.mlp.down_proj": not_ours,
    "layers.0.self_attn.q_norm": change("layers.0.self_attn.q_norm", OwnNorm),
    "layers.1.self_attn": change("layers.1.self_attn", Halved),
    "layers.1": change("layers.1", Parallel),
    "layers.1.mlp": patched,
    "rotary_emb": change("rotary_emb", Slower),
}


class ReadsStored(TorchAttention):
    """Torch's attention, for keys and values that a kernel has stored."""

    reads_stored = True

    def __call__(self, q, k, v, cache, metadata, scale):
        if k is None:
            k, v = (x.flatten(0, 1)[metadata.slots] for x in cache)
        return super().__call__(q, k, v, cache, metadata, scale)


def logits_of(model, attention, tokens):
    """Of a prompt, with paged attention and the cache that it leaves behind."""
    batch = batch_of([tokens], [tokens])
    batch.slot_mapping = np.arange(tokens)
    metadata = attention.prepare(batch, 16, CPU)
    caches = list(torch.zeros(2, 2, 8, 16, TINY.num_key_value_heads, TINY.head_dim))
    ids = torch.arange(tokens) * 7 % TINY.vocab_size
    with torch.inference_mode():
        hidden = model(ids, torch.arange(tokens), attention, caches, metadata)
        return model.logits(hidden), caches


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("tokens", [1, 5])
def test_a_module_of_your_own_is_run_as_it_is(name, tokens):
    """Whatever stands beside it is fused, and the result is that of plain torch."""
    if torch.cuda.is_available():
        pytest.skip("a GPU is there, so Triton's interpreter is not used")
    model, attention = decoder(), ReadsStored()
    ours, _ = logits_of(model, attention, tokens)
    CHANGES[name](model)
    wanted, wanted_caches = logits_of(model, attention, tokens)
    if tokens > 1:  # of one key, the softmax is 1 whatever the query is
        assert (ours - wanted).abs().max() > 0.01
    done = fuse(model)
    assert done.left == [name] and not done.split_k and done.fused
    assert not is_fused(model.get_submodule(name))
    assert warmup_calls(DECODER_KERNELS, model_tensors(model, 16))  # asks for no weight of yours
    found, caches = logits_of(model, attention, tokens)
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)
    for one, other in zip(caches, wanted_caches, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
    unfuse(model)
    assert torch.equal(logits_of(model, attention, tokens)[0], wanted)


def test_a_subclass_that_overrides_nothing_is_fused_and_keeps_what_it_has():
    model = decoder()
    linear = model.layers[0].mlp.gate_up_proj
    linear.__class__ = Renamed
    done = fuse(model)
    assert done.split_k and not done.left
    assert isinstance(linear, FusedPackedLinear) and isinstance(linear, Renamed)
    unfuse(model)
    assert type(linear) is Renamed


def test_a_linear_layer_called_by_itself_never_returns_partials():
    model = decoder()
    x = torch.randn(4, TINY.intermediate_size)
    linear = model.layers[0].mlp.down_proj
    wanted = linear(x)
    assert fuse(model).split_k
    assert isinstance(linear, FusedRowParallelLinear) and linear.split_k
    if not torch.cuda.is_available():
        torch.testing.assert_close(linear(x), wanted, rtol=1e-3, atol=1e-3)
        assert linear.before_norm(x).dim() == 3


@pytest.mark.parametrize("rows", [1, 2, 16, 70, 300])
def test_fused_modules_are_the_plain_ones(device, rows):
    """One layer's MLP between its norms: whatever is chosen for this many rows."""
    torch.manual_seed(rows)
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    config = dataclasses.replace(TINY, mlp_bias=True)
    model = Decoder(config, 8)
    for parameter in model.parameters():
        parameter.data.normal_().mul_(0.3)
    model, layer = model.to(device=device, dtype=dtype), model.layers[0]
    norm, mlp = layer.post_attention_layernorm, layer.mlp
    hidden, residual = (torch.randn(rows, 64, device=device).to(dtype) for _ in range(2))
    normed, total = norm(hidden, residual)
    wanted = model.norm(mlp(normed), total)
    fuse(model)
    gate_up, total = mlp.gate_up_proj.after_norm(norm, hidden, residual.clone())
    down = mlp.down_proj.after_silu_and_mul(gate_up)
    if device.type == "cpu":
        assert (down.dim() == 3) == (rows in (2, 16, 70))
    for one, other in zip(model.norm(down, total), wanted, strict=True):
        error = 2e-3 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(one, other, rtol=2e-3, atol=error)
