"""What model.fused puts in whose place, and that it computes the same."""

import dataclasses

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


def batch_of(query_lens, seq_lens):
    query_lens, seq_lens = np.array(query_lens), np.array(seq_lens)
    rows, tokens = len(query_lens), int(query_lens.sum())
    ends = zip(query_lens, seq_lens, strict=True)
    positions = np.concatenate([np.arange(end - n, end) for n, end in ends])
    tables = [list(range(-(-int(end) // 16))) for end in seq_lens]
    slots, ids = np.full(tokens, -1), np.zeros(tokens, np.int64)
    return Batch(list(range(rows)), ids, positions, slots, query_lens, seq_lens, tables,
                 np.arange(rows), seq_lens, np.arange(rows), np.ones(rows, bool))  # fmt: skip


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
            k, v = (x.flatten(0, 1)[metadata.slot_mapping] for x in cache)
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


def test_a_plain_runner_computes_in_plain_torch_whoever_had_the_decoder_before():
    from nanoengine.config import EngineConfig
    from nanoengine.worker.gpu_runner import GpuRunner
    from nanoengine.worker.model_runner import ModelRunner

    config = EngineConfig(vocab_size=48, max_model_len=40, num_blocks=4, device="cpu")
    model = decoder()
    for kind, changes, fused in (
        (GpuRunner, {}, True),
        (ModelRunner, {}, False),
        (GpuRunner, {}, True),
        (GpuRunner, {"fused_kernels": False}, False),
    ):
        runner = kind(dataclasses.replace(config, **changes), model=model)
        assert all(map(is_fused, (model.norm, model.lm_head, *model.layers))) == fused
        assert kind is ModelRunner or (runner.fusion is None) != fused
