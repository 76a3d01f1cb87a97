"""Which backend a GPU gets, decided without one."""

import pytest
import torch

from nanoengine.attention import base
from nanoengine.attention.base import choose_backend

CUDA = torch.device("cuda")


@pytest.fixture
def machine(monkeypatch):
    """machine(packages, capability): what is installed, and what the card is."""
    made = {name: (why, lambda *heads, name=name: name) for name, (why, _) in base._GPU_BACKENDS.items()}
    monkeypatch.setattr(base, "_GPU_BACKENDS", made)

    def be(packages=("triton", "flash_attn"), capability=(9, 0)):
        monkeypatch.setattr(base, "find_spec", lambda name: name if name in packages else None)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)

    return be


def name_of(*args, **more):
    backend = choose_backend(*args, **more)
    return getattr(backend, "name", backend)


def test_auto_takes_the_fastest_that_works(machine):
    machine()
    assert name_of("auto", CUDA) == "triton"
    assert name_of("auto", CUDA, 48) == name_of("auto", CUDA, 256) == "triton"
    assert name_of("auto", CUDA, 8) == "torch"
    assert name_of("auto", torch.device("cpu")) == "torch"
    machine(packages=())
    assert name_of("auto", CUDA) == "torch"
    machine(capability=(7, 0))
    assert name_of("auto", CUDA) == "torch"
    machine(capability=(7, 5))
    assert name_of("auto", CUDA) == "triton"


@pytest.mark.parametrize(
    ("name", "block_size", "packages", "capability", "message"),
    [
        ("flash", 16, ("triton", "flash_attn"), (9, 0), "block_size=16.*multiple of 256"),
        ("flash", None, ("triton",), (9, 0), "flash-attn is not installed"),
        ("flash", None, ("triton", "flash_attn"), (7, 5), "compute capability 8.0"),
        ("triton", None, (), (9, 0), "triton is not installed"),
        ("triton", 8, ("triton",), (9, 0), "block_size=8.*at least 16"),
        ("triton", None, ("triton",), (7, 0), "compute capability 7.5"),
    ],
)
def test_a_named_backend_that_cannot_run_says_why(machine, name, block_size, packages, capability, message):
    machine(packages, capability)
    with pytest.raises(ValueError, match=f"attention='{name}' cannot run here: .*{message}"):
        choose_backend(name, CUDA, block_size)
    with pytest.raises(ValueError, match="must be auto, torch, triton or flash"):
        choose_backend("other", CUDA)
