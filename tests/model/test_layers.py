"""The layers, each against a formula written out in float64 or against transformers."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from nanoengine.loader.weights import dummy_weights
from nanoengine.model.capabilities import declares, supports_cuda_graphs
from nanoengine.model.config import NAMED_CONFIGS, ModelConfig
from nanoengine.model.decoder import Decoder, full_forward
from nanoengine.model.layers import (
    AddRMSNorm,
    PackedLinear,
    RMSNorm,
    RotaryEmbedding,
    VocabParallelEmbedding,
    apply_rotary_emb,
    linear,
    rope_frequencies,
)

TINY = NAMED_CONFIGS["tiny-llama"]
LLAMA3 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}  # fmt: skip


def config(**changes) -> ModelConfig:
    return dataclasses.replace(TINY, **changes)


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 17, 64, 65, 300])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_for_any_number_of_rows(rows, bias, dtype):
    """Both ways to multiply (few rows in fp32, the rest) give x W^T + b, contiguous, and leave x alone."""
    x, weight, b = torch.randn(rows, 40).to(dtype), torch.randn(24, 40).to(dtype), torch.randn(24).to(dtype)
    before = x.clone(), b.clone()
    out = linear(x, weight, b if bias else None)
    want = x.double() @ weight.double().T + (b.double() if bias else 0)
    assert out.dtype == dtype and out.is_contiguous() and out.shape == (rows, 24)
    torch.testing.assert_close(out.double(), want, atol=1e-4 if dtype == torch.float32 else 0.2, rtol=1e-2)
    assert torch.equal(x, before[0]) and torch.equal(b, before[1])


def test_linear_of_a_view():
    """Rows cut out of a wider tensor, as the decoder's gate and up are."""
    wide, weight = torch.randn(8, 80), torch.randn(24, 40)
    torch.testing.assert_close(linear(wide[:, 40:], weight), wide[:, 40:] @ weight.T)


@pytest.mark.parametrize("shape", [(1, 64), (5, 64), (5, 3, 64)])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_rms_norm(shape, scale):
    norm = RMSNorm(64, 1e-5)
    norm.weight.data.normal_()
    x = torch.randn(shape) * scale
    want = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight.double()
    torch.testing.assert_close(norm(x).double(), want, atol=1e-6, rtol=1e-5)


def test_packed_parts_do_not_mix():
    parts = {"q_proj": 6, "k_proj": 2, "v_proj": 3}
    layer = PackedLinear(5, parts, bias=True)
    weights = {name: (torch.randn(size, 5), torch.randn(size)) for name, size in parts.items()}
    for name in ("v_proj", "q_proj", "k_proj"):  # in any order
        layer.load(name, "weight", weights[name][0])
        layer.load(name, "bias", weights[name][1])
    x = torch.randn(4, 5)
    out = layer(x).split(tuple(parts.values()), -1)
    for got, (weight, bias) in zip(out, weights.values(), strict=True):
        torch.testing.assert_close(got, x @ weight.T + bias)


SCALINGS = [None, {"rope_type": "linear", "factor": 4.0}, LLAMA3, LLAMA3 | {"factor": 8.0}]


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128])
@pytest.mark.parametrize("theta", [1e4, 1e5, 5e5, 1e6])
def test_rope_frequencies_are_those_of_transformers(scaling, head_dim, theta):
    parameters = {"rope_type": "default"} | (scaling or {}) | {"rope_theta": theta}
    theirs = LlamaConfig(head_dim=head_dim, rope_parameters=parameters, max_position_embeddings=131072)
    if scaling is None:
        want, factor = LlamaRotaryEmbedding.compute_default_rope_parameters(theirs)
    else:
        want, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](theirs, device="cpu")
    assert factor == 1.0
    ours = rope_frequencies(config(head_dim=head_dim, rope_theta=theta, rope_scaling=scaling))
    torch.testing.assert_close(ours, want, atol=0, rtol=1e-6)


def test_llama3_scaling_has_three_zones():
    plain, scaled = rope_frequencies(config(head_dim=128, rope_theta=5e5)), rope_frequencies(
        config(head_dim=128, rope_theta=5e5, rope_scaling=LLAMA3))  # fmt: skip
    ratio = plain / scaled
    length = 2 * math.pi / plain
    assert torch.allclose(ratio[length < 8192 / 4], torch.tensor(1.0))
    assert torch.allclose(ratio[length > 8192], torch.tensor(32.0))
    between = ratio[(length >= 8192 / 4) & (length <= 8192)]
    assert len(between) and ((between > 1) & (between < 32)).all() and between.diff().min() > 0


@pytest.mark.parametrize("head_dim", [32, 96, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_is_that_of_transformers(head_dim, dtype):
    """At ragged positions, as in a batch; the angles are float32 whatever the activations are."""
    positions = torch.tensor([0, 1, 2, 500, 4095, 7, 4095])
    theirs = LlamaConfig(head_dim=head_dim, rope_parameters={"rope_type": "default", "rope_theta": 1e5})
    q, k = torch.randn(7, 6, head_dim).to(dtype), torch.randn(7, 2, head_dim).to(dtype)
    cos, sin = LlamaRotaryEmbedding(theirs)(q, positions[None])
    want = apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin)
    table = RotaryEmbedding(config(head_dim=head_dim, rope_theta=1e5), 4096)
    assert table.cos.dtype == table.sin.dtype == torch.float32
    rope = table(positions, dtype)
    for got, x in zip((apply_rotary_emb(q, *rope), apply_rotary_emb(k, *rope)), want, strict=True):
        assert got.dtype == dtype
        torch.testing.assert_close(got, x[0].transpose(0, 1), atol=1e-5 if dtype == torch.float32 else 0.05, rtol=1e-5)


def test_rotation_keeps_lengths_and_depends_on_distance_only():
    torch.manual_seed(0)  # of unlucky numbers the sums differ by more
    table = RotaryEmbedding(TINY, 1000)
    q, k = torch.randn(1, 1, 32), torch.randn(1, 1, 32)

    def at(x, position):
        return apply_rotary_emb(x, *table(torch.tensor([position]), torch.float32))

    assert torch.equal(at(q, 0), q)
    torch.testing.assert_close(at(q, 777).norm(), q.norm())
    for distance in (0, 1, 50):
        scores = [(at(q, p + distance) * at(k, p)).sum().item() for p in (0, 3, 900)]
        assert scores == pytest.approx([scores[0]] * 3, abs=1e-4)


# loading


def test_weights_that_did_not_come_are_named():
    tensors = dict(dummy_weights(TINY))
    for name, parameter in [
        ("model.layers.1.self_attn.k_proj.weight", "layers.1.self_attn.qkv_proj.weight"),
        ("model.layers.3.mlp.down_proj.weight", "layers.3.mlp.down_proj.weight"),
        ("model.norm.weight", "norm.weight"),
        ("model.embed_tokens.weight", "embed_tokens.weight"),
        ("lm_head.weight", "lm_head.weight"),
    ]:
        with pytest.raises(ValueError, match=f"did not fill: {parameter}$"):
            Decoder(TINY, 8).load_weights((k, v) for k, v in tensors.items() if k != name)


def test_a_tied_head_is_the_embedding():
    tied = config(tie_word_embeddings=True)
    model = Decoder(tied, 8)
    model.load_weights(dummy_weights(tied))
    assert model.tied and model.lm_head.weight is model.embed_tokens.weight
    untied = Decoder(TINY, 8)
    untied.load_weights(dummy_weights(TINY))
    assert not untied.tied
    assert not torch.equal(untied.lm_head.weight, untied.embed_tokens.weight)


def test_logits_are_float32_in_any_format():
    model = Decoder(TINY, 8)
    model.load_weights(dummy_weights(TINY))
    for dtype in (torch.float32, torch.bfloat16):
        assert full_forward(model.to(dtype), [1, 2, 3]).dtype == torch.float32


def test_a_layer_of_your_own_gets_the_residual_and_the_steps_context():
    """It may add the residual itself, and hand on a sum without one: the next norm then adds nothing."""
    config = NAMED_CONFIGS["tiny-qwen3"]
    decoder = Decoder(config, 16)
    decoder.load_weights(dummy_weights(config))
    wanted, seen = full_forward(decoder, [3, 1, 2]), []

    class Paper(torch.nn.Module):
        def __init__(self, theirs):
            super().__init__()
            self.theirs = theirs

        def forward(self, hidden, residual, ctx):
            x, layer = hidden if residual is None else hidden + residual, self.theirs
            seen.append((residual is None, ctx.positions.tolist(), ctx.kv_cache))
            x = x + layer.self_attn(RMSNorm.forward(layer.input_layernorm, x), ctx)
            return x + layer.mlp(RMSNorm.forward(layer.post_attention_layernorm, x)), None

    decoder.layers = torch.nn.ModuleList(map(Paper, decoder.layers))
    torch.testing.assert_close(full_forward(decoder, [3, 1, 2]), wanted)
    assert seen == [(True, [0, 1, 2], None)] * 4


def test_the_first_norm_adds_nothing_and_the_others_their_residual():
    norm = AddRMSNorm(8, 1e-5)
    norm.weight.data.normal_()
    hidden, residual = torch.randn(3, 8), torch.randn(3, 8)
    before = hidden.clone(), residual.clone()
    normed, total = norm(hidden)
    assert torch.equal(total, hidden) and torch.equal(normed, RMSNorm.forward(norm, hidden))
    normed, total = norm(hidden, residual)
    assert torch.equal(total, residual + hidden)
    assert torch.equal(normed, RMSNorm.forward(norm, total))
    assert torch.equal(hidden, before[0]) and torch.equal(residual, before[1])


def test_angles_are_looked_up_once_a_step():
    config, asked = NAMED_CONFIGS["tiny-qwen3"], []
    decoder = Decoder(config, 16)
    decoder.load_weights(dummy_weights(config))
    decoder.rotary_emb.register_forward_hook(lambda *given: asked.append(given[1]))
    full_forward(decoder, [3, 1, 2])
    assert len(asked) == 1


# what a class declares


class Renamed(Decoder):
    pass


class Loads(Decoder):
    def load_weights(self, weights):
        super().load_weights(weights)


class Embeds(Decoder):
    def embed(self, input_ids):
        return super().embed(input_ids)


class Sure(Embeds):
    supports_cuda_graphs = True

    def embed(self, input_ids):
        return super().embed(input_ids)


class Loops(Decoder):
    def layers_forward(self, *given):
        return super().layers_forward(*given)


@pytest.mark.parametrize(
    ("kind", "graphs", "fusable"),
    [
        (Decoder, True, True),
        (Renamed, True, True),
        (Loads, True, True),
        (Embeds, False, True),
        (Sure, True, True),
        (Loops, False, False),
    ],
)
def test_a_subclass_with_ways_of_its_own_declares_anew_or_has_nothing_declared(
    kind, graphs, fusable
):
    decoder = kind(TINY, 8)
    assert declares(decoder, "supports_cuda_graphs") == graphs
    assert declares(decoder, "fusable") == fusable


def test_an_embedding_of_your_own_is_asked_in_every_step_so_there_are_no_graphs():
    class Scaled(VocabParallelEmbedding):
        def forward(self, input_ids):
            return 8 * super().forward(input_ids)

    decoder = Decoder(TINY, 8)
    assert supports_cuda_graphs(decoder) and not supports_cuda_graphs(Embeds(TINY, 8))
    decoder.embed_tokens.__class__ = Scaled
    assert not supports_cuda_graphs(decoder)


def test_a_method_replaced_on_the_module_itself_is_a_way_of_its_own():
    decoder, norm = Decoder(TINY, 8), RMSNorm(8, 1e-6)
    decoder.logits, norm.forward = (lambda hidden: hidden), (lambda x: x)
    assert not declares(decoder, "supports_cuda_graphs") and declares(decoder, "fusable")
    assert not declares(norm, "fusable") and not declares(torch.nn.Linear(2, 2), "fusable")
