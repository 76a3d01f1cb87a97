"""Records of named arrays on their way to a device: one copy, and the same names at the other end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch

Record = TypeVar("Record")
_DTYPES = {
    "l": torch.int64,
    "q": torch.int64,
    "d": torch.float64,
}  # each element is a word of 8 bytes


def padded(array: np.ndarray, size: int, fill: int) -> np.ndarray:
    """``array`` with ``fill`` behind it up to ``size``."""
    if len(array) == size:
        return array
    return np.concatenate((array, np.full(size - len(array), fill, array.dtype)))


def pack(record: Any, device: torch.device) -> torch.Tensor:
    """All arrays of ``record`` (a dataclass, and those in it) end to end, as words of 8 bytes.

    For a GPU in page-locked memory: only from there can a copy run alongside. torch keeps such memory
    for reuse and knows when a copy from it has ended. Each array starts at a multiple of 16 bytes:
    Triton compiles a kernel anew for pointers that are aligned worse than those it has seen.
    """
    return _packed(list(_arrays(record)), device)


def views(words: torch.Tensor, record: Record) -> Record:
    """``record`` with each of its arrays replaced by the tensor that ``pack`` has laid out in ``words``."""
    return _replaced(record, iter(_unpacked(words, list(_arrays(record)))))


def upload(arrays: list[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """int64 arrays as tensors on ``device``, all in one copy that the host does not wait for."""
    words = _packed(arrays, device).to(device, non_blocking=True)
    return _unpacked(words, arrays)


def on_device(values, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A list of numbers as a tensor on ``device``; the host does not wait for a GPU, as torch.tensor(device=) does."""
    host = torch.tensor(values, dtype=dtype)
    return (
        host.pin_memory().to(device, non_blocking=True)
        if device.type == "cuda"
        else host.to(device)
    )


def _packed(arrays: list[np.ndarray], device: torch.device) -> torch.Tensor:
    starts, total = _layout(array.size for array in arrays)
    host = torch.empty(total, dtype=torch.int64, pin_memory=device.type == "cuda")
    words = host.numpy()
    for start, array in zip(starts, arrays, strict=True):
        words[start : start + array.size] = array.reshape(-1).view(np.int64)
    return host


def _unpacked(words: torch.Tensor, arrays: list[np.ndarray]) -> list[torch.Tensor]:
    starts, _ = _layout(array.size for array in arrays)
    return [
        words[start : start + array.size].view(_DTYPES[array.dtype.char]).view(array.shape)
        for start, array in zip(starts, arrays, strict=True)
    ]


def _arrays(record: Any) -> Iterator[np.ndarray]:
    for field in fields(record):
        value = getattr(record, field.name)
        if isinstance(value, np.ndarray):
            yield value
        elif is_dataclass(value):
            yield from _arrays(value)


def _replaced(record: Any, tensors: Iterator[torch.Tensor]) -> Any:
    changes = {}
    for field in fields(record):
        value = getattr(record, field.name)
        if isinstance(value, np.ndarray):
            changes[field.name] = next(tensors)
        elif is_dataclass(value):
            changes[field.name] = _replaced(value, tensors)
    return replace(record, **changes)


def _layout(sizes: Iterable[int]) -> tuple[list[int], int]:
    """Where each array starts, in words, and how many words there are."""
    starts, end = [], 0
    for size in sizes:
        starts.append(end)
        end += size + size % 2
    return starts, end
