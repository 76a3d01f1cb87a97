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
