"""The checks of bounds.py fail where they should."""

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton is not installed")
import triton.language as tl  # noqa: E402

from nanoengine.kernels.common import begin, let_next_start, wait_for_last  # noqa: E402


@triton.jit
def _gemv(x, weight, out, WHEN: tl.constexpr, OVERLAP: tl.constexpr):
    """(named as one that may read its weight early)"""
    let_next_start(OVERLAP)
    w = tl.load(weight)
    if WHEN == "load":
        tl.load(x)
    if WHEN == "store":
        tl.store(out, w)
    wait_for_last(OVERLAP)
    tl.store(out, w + tl.load(x + (1 if WHEN == "beyond" else 0)))


@triton.jit
def _kernel(x, out, OVERLAP: tl.constexpr):
    """(named as one that may read nothing early)"""
    begin(OVERLAP)
    tl.store(out, tl.load(x))


@triton.jit
def _impatient(x, out, OVERLAP: tl.constexpr):
    y = tl.load(x)
    begin(OVERLAP)
    tl.store(out, y)


@triton.jit
def _hint(x, OVERLAP: tl.constexpr):
    begin(OVERLAP)
    at = tl.multiple_of(tl.load(x), 32)
    tl.store(x, at + 1)


@pytest.fixture(autouse=True)
def _interpreter():
    if torch.cuda.is_available():
        pytest.skip("a GPU is there, so Triton's interpreter is not used")


def test_kernels_that_wait_pass(device):
    x, weight, out = torch.ones(1), torch.ones(1), torch.zeros(1)
    _gemv[(2,)](x, weight, out, WHEN="right", OVERLAP=False)
    assert out == 2
    _kernel[(1,)](x, out, OVERLAP=False)
    assert out == 1


@pytest.mark.parametrize(("when", "message"), [("load", "a load before"), ("store", "a store before"),
                                               ("beyond", "outside of all tensors")])  # fmt: skip
def test_what_is_too_early_or_beyond_is_told(device, when, message):
    with pytest.raises(triton.runtime.errors.InterpreterError, match=message):
        _gemv[(1,)](torch.ones(1), torch.ones(1), torch.zeros(1), WHEN=when, OVERLAP=False)


def test_the_second_program_has_to_wait_again(device):
    with pytest.raises(triton.runtime.errors.InterpreterError, match="_impatient: a load before"):
        _impatient[(2,)](torch.ones(1), torch.zeros(1), OVERLAP=False)


def test_an_argument_that_stands_in_for_another_does_not_make_it_early(device):
    """(rope_store without QK-norm passes qkv as its norms' weights, say.)"""
    x = torch.ones(1)
    with pytest.raises(triton.runtime.errors.InterpreterError, match="_gemv: a load before"):
        _gemv[(1,)](x, x, torch.zeros(1), WHEN="right", OVERLAP=False)


def test_a_hint_that_is_not_true_is_told(device):
    _hint[(1,)](torch.full((1,), 64), OVERLAP=False)
    with pytest.raises(triton.runtime.errors.InterpreterError, match="_hint: .* not multiples"):
        _hint[(1,)](torch.full((1,), 48), OVERLAP=False)
