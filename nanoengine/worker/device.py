"""Which device, which number format, how much memory."""

from __future__ import annotations

import psutil
import torch

GIB = 2**30


def pick_device(name: str) -> torch.device:
    """"auto" takes the first GPU if torch can use one, else the CPU.

    Errors: ValueError if the named one is not there; RuntimeError if it is, but cannot run this torch.
    """
    if name == "auto":
        return _usable(torch.device("cuda")) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device must be auto, cpu or cuda, got {name!r}") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be auto, cpu or cuda, got {name!r}")
    if device.type == "cuda" and not torch.cuda.is_available():
        built = "this torch is a CPU build" if torch.version.cuda is None else "torch sees no usable GPU or driver"
        raise ValueError(f"device={name!r} asked for, but {built}: see `nanoengine doctor`, or use device='cpu'")
    if device.type == "cuda" and device.index is not None and device.index >= torch.cuda.device_count():
        raise ValueError(f"device={name!r}: there are only {torch.cuda.device_count()} GPUs")
    return _usable(device) if device.type == "cuda" else device


def _usable(device: torch.device) -> torch.device:
    """``device``, if one kernel runs on it: a driver that is too old, or a card that is, shows here."""
    try:
        torch.zeros(1, device=device).item()
    except RuntimeError as error:
        reason = str(error).strip().split("\n")[0]
        raise RuntimeError(
            f"the GPU {device} does not work with torch {torch.__version__} (CUDA {torch.version.cuda}): {reason}. "
            "Try a newer driver or another build of torch (`nanoengine doctor` says more); device='cpu' always runs"
        ) from error
    return device


def pick_dtype(name: str, model_dtype: str, device: torch.device) -> torch.dtype:
    """"auto": float32 on a CPU (bf16 without bf16 units is slower); on a GPU the checkpoint's own
    16-bit format, with float16 in place of bfloat16 where the card has none (T4)."""
    names = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name != "auto":
        if name not in names:
            raise ValueError(f"dtype must be auto, {', '.join(names)}, got {name!r}")
        return names[name]
    if device.type == "cpu":
        return torch.float32
    if model_dtype == "float16" or torch.cuda.get_device_capability(device) < (8, 0):
        return torch.float16
    return torch.bfloat16


def cpu_kv_bytes(kv_cache_gib: float | None) -> int:
    """Bytes for KV in main memory: what was asked for, else 1 GiB or half of what is free."""
    if kv_cache_gib is not None:
        return int(kv_cache_gib * GIB)
    return min(GIB, psutil.virtual_memory().available // 2)
