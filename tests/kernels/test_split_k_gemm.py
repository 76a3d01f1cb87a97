"""GEMM of a few rows: equal to torch's, whole or split-K, at every edge of a block."""

import pytest
import torch

from nanoengine.kernels.rms_norm import fused_add_rms_norm, fused_add_rms_norm_reference
from nanoengine.kernels.split_k_gemm import (
    MAX_BYTES,
    MAX_ROWS,
    MAX_ROWS_WHOLE,
    SPLIT_K,
    GemmConfig,
    choose_config,
    inputs_per_split,
    plan_gemm,
    split_k_gemm,
    split_k_gemm_reference,
)
from nanoengine.model.fused import matmul


def case(device, rows, inputs, outputs, dtype=torch.float32, bias=True):
    x, weight = torch.randn(rows, inputs, device=device), torch.randn(outputs, inputs, device=device)
    b = torch.randn(outputs, device=device).to(dtype) if bias else None
    return x.to(dtype), weight.to(dtype), b


# float16 where there is a GPU; the interpreter multiplies float32 as well, and exactly
def check(device, config, rows, inputs, outputs, bias=True):
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    x, weight, b = case(device, rows, inputs, outputs, dtype, bias)
    found = split_k_gemm(x, weight, b, config)
    b = None if b is None else b.float()
    wanted = split_k_gemm_reference(x.float(), weight.float(), b, config)
    error = 2e-3 * inputs**0.5 if device.type == "cuda" else 1e-3
    torch.testing.assert_close(found.float(), wanted, rtol=error, atol=error)
    return found


@pytest.mark.parametrize("rows", [2, 15, 16, 17, 33])
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 64), (576, 100), (200, 30)])
@pytest.mark.parametrize("split_k", [1, 2, 4])
def test_gemm(device, rows, inputs, outputs, split_k):
    found = check(device, GemmConfig(16, 64, 2, split_k), rows, inputs, outputs)
    assert found.shape == ((rows, outputs) if split_k == 1 else (split_k, rows, outputs))


def test_without_bias_and_with_large_blocks(device):
    check(device, GemmConfig(128, 64, 3, 1), 130, 256, 70, bias=False)
    check(device, GemmConfig(64, 128, 2, 4), 70, 1536, 64, bias=False)


def test_a_split_without_inputs_is_zero(device):
    """(576 inputs in four splits of 256: the last one starts beyond the end.)"""
    config = GemmConfig(16, 128, 2, 4)
    assert inputs_per_split(576, config) == 256
    assert not check(device, config, 5, 576, 64)[3].any()


def test_an_input_that_is_not_finite_stays_in_its_row(device):
    x, weight, _ = case(device, 20, 64, 64, torch.float16 if device.type == "cuda" else torch.float32)
    x[7] = float("nan")
    found = split_k_gemm(x, weight, None, GemmConfig(16, 64, 2, 1))
    assert found.isnan().any(1).nonzero().flatten().tolist() == [7]


@pytest.mark.parametrize("hidden", [576, 1024])
@pytest.mark.parametrize("split_k", [1, 2, 4])
def test_the_norm_adds_all_partials(device, hidden, split_k):
    partials, weight = torch.randn(split_k, 3, hidden, device=device), torch.rand(hidden, device=device)
    residual = torch.randn(3, hidden, device=device)
    wanted = fused_add_rms_norm_reference(partials.sum(0), residual.clone(), weight, 1e-6)
    for norm in (fused_add_rms_norm_reference, fused_add_rms_norm):
        for one, other in zip(norm(partials, residual.clone(), weight, 1e-6), wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_which_gemms_it_takes(device):
    weight = torch.empty(1024, 2048, dtype=torch.bfloat16, device=device)
    x = torch.empty(300, 2048, dtype=torch.bfloat16, device=device)
    taken = [n for n in range(1, 301) if plan_gemm(x[:n], weight, True)]
    if device.type == "cuda" and torch.cuda.get_device_capability()[0] != 9:
        assert not taken
        return
    assert taken == list(range(2, MAX_ROWS + 1))
    assert [n for n in range(1, 301) if plan_gemm(x[:n], weight)] == list(range(2, MAX_ROWS_WHOLE + 1))
    assert plan_gemm(x[:, ::2][:4], weight[:, ::2]) is None  # not dense
    assert plan_gemm(x[:4], torch.empty(MAX_BYTES // 4096 + 1, 2048, dtype=x.dtype, device=device)) is None
    assert plan_gemm(torch.empty(4, 28, dtype=x.dtype, device=device), weight[:, :28].contiguous()) is None
    assert choose_config(200, 1024, True).split_k == SPLIT_K
    assert choose_config(50, 6144, True).split_k == 1


@pytest.mark.parametrize("rows", [1, 4])
def test_matrices_that_lie_in_memory_otherwise_are_left_to_torch(device, rows):
    """Turned, cut out of a larger one, at an odd address, or empty: right as well, by another way."""
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    x, weight, _ = case(device, rows, 64, 96, dtype)
    turned, cut = weight.t().contiguous().t(), torch.cat((weight, weight), 1)[:, :64]
    odd_x, odd_weight = (torch.cat((y.new_zeros(1), y.flatten()))[1:].view_as(y) for y in (x, weight))
    for a, w in ((x, turned), (x, cut), (x, odd_weight), (odd_x, weight), (x, weight[:0])):
        assert plan_gemm(a, w, True) is None
        torch.testing.assert_close(matmul(a, w), a @ w.t(), rtol=2e-3, atol=2e-2)
