"""Products of a few rows: equal to torch's, whole or in parts, at every edge of a tile."""

import pytest
import torch

from nanoengine.kernels.norm import add_norm, add_norm_reference
from nanoengine.kernels.ops import TritonOps
from nanoengine.kernels.product import (
    MOST_BYTES,
    MOST_ROWS,
    MOST_ROWS_WHOLE,
    PARTS,
    Tiles,
    part_length,
    plan_product,
    product,
    product_reference,
    tiles_of,
)
from nanoengine.model.layers import PackedLinear, RMSNorm
from nanoengine.model.ops import TorchOps


def case(device, rows, inputs, outputs, dtype=torch.float32, bias=True):
    x, weight = torch.randn(rows, inputs, device=device), torch.randn(outputs, inputs, device=device)
    b = torch.randn(outputs, device=device).to(dtype) if bias else None
    return x.to(dtype), weight.to(dtype), b


# float16 where there is a GPU; the interpreter multiplies float32 as well, and exactly
def check(device, tiles, rows, inputs, outputs, bias=True):
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    x, weight, b = case(device, rows, inputs, outputs, dtype, bias)
    found = product(x, weight, b, tiles)
    wanted = product_reference(x.float(), weight.float(), None if b is None else b.float(), tiles.parts, tiles.depth)
    error = 2e-3 * inputs**0.5 if device.type == "cuda" else 1e-3
    torch.testing.assert_close(found.float(), wanted, rtol=error, atol=error)
    return found


@pytest.mark.parametrize("rows", [2, 15, 16, 17, 33])
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 64), (576, 100), (200, 30)])
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_product(device, rows, inputs, outputs, parts):
    tiles = Tiles(16, 64, 2, parts)
    found = check(device, tiles, rows, inputs, outputs)
    assert found.shape == ((rows, outputs) if parts == 1 else (parts, rows, outputs))


def test_without_bias_and_with_large_tiles(device):
    check(device, Tiles(128, 64, 3, 1), 130, 256, 70, bias=False)
    check(device, Tiles(64, 128, 2, 4), 70, 1536, 64, bias=False)


def test_a_part_without_inputs_is_zero(device):
    """(576 inputs in four parts of 256: the last one starts beyond the end.)"""
    assert part_length(576, 4, 128) == 256
    assert not check(device, Tiles(16, 128, 2, 4), 5, 576, 64)[3].any()


def test_an_input_that_is_not_finite_stays_in_its_row(device):
    x, weight, _ = case(device, 20, 64, 64, torch.float16 if device.type == "cuda" else torch.float32)
    x[7] = float("nan")
    found = product(x, weight, None, Tiles(16, 64, 2, 1))
    assert found.isnan().any(1).nonzero().flatten().tolist() == [7]


@pytest.mark.parametrize("hidden", [576, 1024])
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_the_norm_adds_all_parts(device, hidden, parts):
    stream, delta = torch.randn(3, hidden, device=device), torch.randn(parts, 3, hidden, device=device)
    weight = torch.rand(hidden, device=device)
    wanted = add_norm_reference(stream.clone(), delta.sum(0), weight, 1e-6)
    for one, other in zip(add_norm(stream.clone(), delta, weight, 1e-6), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    for one, other in zip(add_norm_reference(stream, delta, weight, 1e-6), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_which_products_it_takes(device):
    weight = torch.empty(1024, 2048, dtype=torch.bfloat16, device=device)
    x = torch.empty(300, 2048, dtype=torch.bfloat16, device=device)
    taken = [n for n in range(1, 301) if plan_product(x[:n], weight, True)]
    if device.type == "cuda" and torch.cuda.get_device_capability()[0] != 9:
        assert not taken
        return
    assert taken == list(range(2, MOST_ROWS + 1))
    assert [n for n in range(1, 301) if plan_product(x[:n], weight)] == list(range(2, MOST_ROWS_WHOLE + 1))
    assert plan_product(x[:, ::2][:4], weight[:, ::2]) is None  # not dense
    assert plan_product(x[:4], torch.empty(MOST_BYTES // 4096 + 1, 2048, dtype=x.dtype, device=device)) is None
    assert plan_product(torch.empty(4, 28, dtype=x.dtype, device=device), weight[:, :28].contiguous()) is None
    assert tiles_of(200, 1024, True).parts == PARTS and tiles_of(50, 6144, True).parts == 1


@pytest.mark.parametrize("rows", [1, 4])
def test_matrices_that_lie_in_memory_otherwise_are_left_to_torch(device, rows):
    """Turned, cut out of a larger one, at an odd address, or empty: right as well, by another way."""
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    x, weight, _ = case(device, rows, 64, 96, dtype)
    turned, cut = weight.t().contiguous().t(), torch.cat((weight, weight), 1)[:, :64]
    odd_x, odd_weight = (torch.cat((y.new_zeros(1), y.flatten()))[1:].view_as(y) for y in (x, weight))
    for a, w in ((x, turned), (x, cut), (x, odd_weight), (odd_x, weight), (x, weight[:0])):
        assert plan_product(a, w, True) is None
        torch.testing.assert_close(TritonOps(True).product(a, w), a @ w.t(), rtol=2e-3, atol=2e-2)


@pytest.mark.parametrize("parts", [True, False])
@pytest.mark.parametrize("rows", [1, 2, 16, 70, 300])
def test_layers_with_it_are_those_without(device, rows, parts):
    """One MLP with its norms, through TritonOps, against plain torch: whatever is chosen for so many rows."""
    torch.manual_seed(rows)
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    up, down = PackedLinear(64, {"gate": 96, "up": 96}, True), PackedLinear(96, {"d": 64}, True)
    norm = RMSNorm(64, 1e-6)
    for parameter in (*up.parameters(), *down.parameters(), *norm.parameters()):
        parameter.data.normal_().mul_(0.3)
    up, down, norm = (x.to(device=device, dtype=dtype) for x in (up, down, norm))
    stream = torch.randn(rows, 64, device=device).to(dtype)
    plain, ops = TorchOps(), TritonOps(parts)
    results = []
    for each in (plain, ops):
        s, gate_up = each.norm_product(stream.clone(), None, norm, up)
        delta = each.swiglu_product(gate_up, down)
        results.append(each.norm(s, delta, norm))
        split = each is ops and parts and rows in (2, 16, 70) and plan_product(stream, down.weight, True) is not None
        assert delta.dim() == (3 if split else 2)
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-3, atol=2e-3 if dtype == torch.float32 else 2e-2)
