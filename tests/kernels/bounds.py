"""In Triton's interpreter every load and store is checked: it must lie in a tensor that the kernel was given.

A kernel that reads or writes elsewhere mostly works, on a CPU as on a GPU, until the day it does not.
"""

from contextlib import contextmanager
from unittest.mock import patch

import numpy as np
import torch


@contextmanager
def bounds_checked():
    """AssertionError with the kernel's name and the distance where an address is outside of all its tensors."""
    from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

    launch = GridExecutor.__call__
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store
    memory, name = [], ""

    def launched(self, *arguments, **more):
        nonlocal memory, name
        tensors = [getattr(x, "base", x) for x in (*arguments, *more.values())]  # a descriptor's base is its tensor
        storages = [x.untyped_storage() for x in tensors if isinstance(x, torch.Tensor)]
        memory, name = [(s.data_ptr(), s.data_ptr() + s.nbytes()) for s in storages], self.fn.__name__
        return launch(self, *arguments, **more)

    def check(what, pointers, mask, size):
        at = pointers.data[np.broadcast_to(mask.data, pointers.data.shape).astype(bool)].astype(np.int64).reshape(-1)
        outside = np.ones(len(at), bool)
        for start, end in memory:
            outside &= (at < start) | (at + size > end)
        if outside.any():
            first = int(at[outside][0])
            nearest = min((min(abs(first - start), abs(first - end)) for start, end in memory), default=None)
            raise AssertionError(f"{name}: {outside.sum()} of {len(at)} {what}s are outside of all tensors, the first "
                                 f"{nearest} bytes from the nearest")  # fmt: skip

    def loaded(self, pointers, mask, other, *more, **named):
        check("load", pointers, mask, pointers.get_element_ty().primitive_bitwidth // 8)
        return load(self, pointers, mask, other, *more, **named)

    def stored(self, pointers, value, mask, *more, **named):
        check("store", pointers, mask, value.data.dtype.itemsize)
        return store(self, pointers, value, mask, *more, **named)

    with (
        patch.object(GridExecutor, "__call__", launched),
        patch.object(InterpreterBuilder, "create_masked_load", loaded),
        patch.object(InterpreterBuilder, "create_masked_store", stored),
    ):
        yield
