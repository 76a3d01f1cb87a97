"""Fused kernels against their torch references."""

import pytest
import torch

from nanoengine.engine.protocols import NO_TOKEN, NON_FINITE
from nanoengine.kernels.decode_inputs import decode_inputs, decode_inputs_reference
from nanoengine.kernels.gemv import (
    gemv,
    gemv_reference,
    rms_norm_gemv,
    rms_norm_gemv_reference,
    silu_and_mul_gemv,
    silu_and_mul_gemv_reference,
)
from nanoengine.kernels.gumbel_sample import gumbel_sample, gumbel_sample_reference
from nanoengine.kernels.rms_norm import fused_add_rms_norm, fused_add_rms_norm_reference
from nanoengine.kernels.rope_store import rope_store, rope_store_reference
from nanoengine.kernels.silu_and_mul import silu_and_mul, silu_and_mul_reference
from nanoengine.model.config import ModelConfig
from nanoengine.model.layers import RotaryEmbedding


def close(found, wanted, error=1e-5):
    torch.testing.assert_close(found, wanted, rtol=error, atol=error)


@pytest.mark.parametrize("hidden", [576, 1024])
@pytest.mark.parametrize("add", [True, False])
def test_fused_add_rms_norm(device, hidden, add):
    x, weight = torch.randn(3, hidden, device=device), torch.rand(hidden, device=device)
    residual = torch.randn(3, hidden, device=device) if add else None
    wanted = fused_add_rms_norm_reference(x, residual, weight, 1e-6)
    before = x.clone()
    found = fused_add_rms_norm(x, residual, weight, 1e-6)
    for one, other in zip(found, wanted, strict=True):
        close(one, other)
    assert torch.equal(x, before) and found[1] is (x if residual is None else residual)


@pytest.mark.parametrize("size", [48, 1536])
def test_silu_and_mul(device, size):
    x = torch.randn(3, 2 * size, device=device)
    close(silu_and_mul(x), silu_and_mul_reference(x))


@pytest.mark.parametrize(("heads", "kv_heads", "d"), [(9, 3, 64), (16, 8, 128), (4, 2, 96)])
@pytest.mark.parametrize("norm", [True, False])
def test_rope_store(device, heads, kv_heads, d, norm):
    config = ModelConfig("Qwen3ForCausalLM", 100, heads * d, 64, 1, heads, kv_heads, d, 64)
    table = RotaryEmbedding(config, 64).to(device)
    qkv = torch.randn(4, (heads + 2 * kv_heads) * d, device=device)
    weights = (torch.rand(d, device=device), torch.rand(d, device=device)) if norm else (None, None)
    positions, slots = torch.tensor([0, 7, 63, 1], device=device), torch.tensor([9, -1, 31, 0], device=device)
    found, wanted = (torch.zeros(2, 4, 8, kv_heads, d, device=device) for _ in range(2))
    q = rope_store(qkv, heads, *weights, 1e-6, table.cos, table.sin, positions, found, slots)
    close(q, rope_store_reference(qkv, heads, *weights, 1e-6, table.cos, table.sin, positions, wanted, slots))
    close(found, wanted)
    assert found[1].view(32, -1).abs().sum(-1).count_nonzero() == 3


@pytest.mark.parametrize(("inputs", "outputs"), [(64, 7), (576, 30)])
@pytest.mark.parametrize("bias", [True, False])
def test_linear_layers_of_one_token(device, inputs, outputs, bias):
    weight = torch.randn(outputs, inputs, device=device)
    b = torch.randn(outputs, device=device) if bias else None
    x, residual = (torch.randn(1, inputs, device=device) for _ in range(2))
    w = torch.rand(inputs, device=device)
    close(gemv(x, weight, b), gemv_reference(x, weight, b), 1e-4)
    gate_up = torch.randn(1, 2 * inputs, device=device)
    wanted = silu_and_mul_gemv_reference(gate_up, weight, b)
    close(silu_and_mul_gemv(gate_up, weight, b), wanted, 1e-4)
    before = residual.clone()
    for each in (residual, None):
        wanted = rms_norm_gemv_reference(x, each, w, 1e-5, weight, b)
        for one, other in zip(rms_norm_gemv(x, each, w, 1e-5, weight, b), wanted, strict=True):
            close(one, other, 1e-4)
    assert torch.equal(residual, before)


@pytest.mark.parametrize("vocab", [100, 9000])
def test_it_samples_the_samplers_tokens(device, vocab):
    logits = torch.randn(6, vocab, device=device) * 3
    temperatures = torch.tensor([0.0, 1.0, 0.6, 2.0, 0.0, 1e-8], device=device, dtype=torch.float64)
    seeds = torch.tensor([1, 2**62, -5, -(2**63), 3, 7], device=device)
    positions = torch.tensor([1, 2, 3, 4000, 5, 6], device=device)
    out = torch.full((6,), -1, device=device)
    gumbel_sample(logits, temperatures, seeds, positions, out)
    assert out.tolist() == gumbel_sample_reference(logits, temperatures, seeds, positions).tolist()
    ties = torch.zeros(1, vocab, device=device)
    gumbel_sample(ties, temperatures[:1], seeds[:1], positions[:1], out)
    assert out[0] == 0


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("vocab", [1, 100, 9000])
@pytest.mark.parametrize("temperature", [0.0, 1e-300, 0.7, 1e4])
def test_no_draw_leaves_the_vocabulary(device, dtype, vocab, temperature):
    """Rows of NaN, +inf and -inf give their negative numbers, all others a token; extremes are no +inf."""
    last, most = vocab - 1, torch.finfo(dtype).max
    cases = [  # what is written over a row of random logits, and what the row then gives
        (slice(None), NAN, NON_FINITE), (last, NAN, NON_FINITE), (0, -NAN, NON_FINITE),
        (last, INF, NON_FINITE), (slice(None), INF, NON_FINITE), (slice(None), -INF, NO_TOKEN),
        (slice(None), -most, None), (slice(None), most, None), (0, most, None), (last, -INF, None),
    ]  # fmt: skip
    logits = (torch.randn(len(cases) + 1, vocab, device=device) * 3).to(dtype)
    for row, (where, value, _) in zip(logits, cases, strict=False):
        row[where] = value
    logits[-1, :last] = -INF  # one token alone is left
    count = len(logits)
    temperatures = torch.full((count,), temperature, device=device, dtype=torch.float64)
    seeds = torch.arange(count, device=device)
    out = torch.full((count,), -9, device=device)
    gumbel_sample(logits, temperatures, seeds, seeds + 1, out)
    for token, (_, value, wanted) in zip(out.tolist(), cases, strict=False):
        if wanted is None and not (vocab == 1 and value == -INF):
            assert 0 <= token < vocab
        else:
            assert token == (NO_TOKEN if wanted is None else wanted)
    assert out[-1] == last
    assert out.tolist() == gumbel_sample_reference(logits, temperatures, seeds, seeds + 1).tolist()


def test_a_row_that_is_no_number_leaves_its_neighbours_alone(device):
    logits = torch.randn(5, 5000, device=device)
    temperatures = torch.tensor([0.0, 0.8, 0.0, 0.8, 0.8], device=device, dtype=torch.float64)
    seeds = torch.arange(5, device=device)
    wanted, found = (torch.zeros(5, dtype=torch.int64, device=device) for _ in range(2))
    gumbel_sample(logits, temperatures, seeds, seeds, wanted)
    logits[1, 4999] = logits[2, 0] = NAN
    gumbel_sample(logits, temperatures, seeds, seeds, found)
    assert found.tolist() == [wanted[0].item(), NON_FINITE, NON_FINITE, *wanted[3:].tolist()]


def test_decode_inputs_of_rows_without_a_token_are_zeros(device):
    embedding = torch.full((4, 16), NAN, device=device)
    zeros, none = torch.zeros(3, dtype=torch.int64, device=device), torch.full((3,), -1, device=device)
    previous, sources = torch.tensor([NON_FINITE, NO_TOKEN, 2**40], device=device), torch.arange(3, device=device)
    tables = torch.zeros(1, 4, dtype=torch.int32, device=device)
    arguments = (zeros, sources, previous, zeros, none, zeros, tables, embedding, 16)
    assert not decode_inputs(*arguments).any()
    assert not decode_inputs_reference(*arguments).any()


def test_decode_inputs(device):
    embedding = torch.randn(10, 48, device=device)
    ids, sources = torch.tensor([3, 0, 0, 0], device=device), torch.tensor([-1, 2, 0, -1], device=device)
    previous, positions = torch.tensor([7, 8, 9], device=device), torch.tensor([5, 32, 16, 0], device=device)
    slots, rows = torch.tensor([21, 160, 48, -1], device=device), torch.tensor([2, 0, 1, 0], device=device)
    found, wanted = (torch.full((3, 4), 99, dtype=torch.int32, device=device) for _ in range(2))
    x = decode_inputs(ids, sources, previous, positions, slots, rows, found, embedding, 16)
    assert torch.equal(
        x, decode_inputs_reference(ids, sources, previous, positions, slots, rows, wanted, embedding, 16)
    )
    assert torch.equal(found, wanted)
    assert found.tolist() == [[99, 99, 10, 99], [99, 3, 99, 99], [1, 99, 99, 99]]
