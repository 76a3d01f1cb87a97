"""Kernels run on the GPU where there is one, else in Triton's interpreter, which must be chosen before the import."""

import os

import pytest
import torch

from tests.kernels.bounds import bounds_checked

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture
def device():
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def _triton():
    pytest.importorskip("triton", reason="triton is not installed")
    if torch.cuda.is_available():
        yield
    else:
        with bounds_checked():
            yield
