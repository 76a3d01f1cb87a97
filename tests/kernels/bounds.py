"""In Triton's interpreter every load and store is checked: where it is, and when.

It must lie in a tensor that the kernel was given: a kernel that reads or writes elsewhere mostly works, on a CPU as on
a GPU, until the day it does not. What it tells the compiler (tl.multiple_of) must be true. And before ``wait_for_last``
a kernel may write nothing, and read only what its contract says (``early_reads``): on a GPU the kernel ahead may still
be running.
"""

from contextlib import contextmanager
from unittest.mock import patch

import numpy as np
import torch

from nanoengine.kernels.contract import contract_of_function


@contextmanager
def bounds_checked():
    """AssertionError with the kernel's name and the distance, or what it read too early."""
    from triton.runtime.interpreter import GridExecutor, InterpretedFunction, InterpreterBuilder, TensorHandle

    launch, called, next_program = GridExecutor.__call__, InterpretedFunction.__call__, InterpreterBuilder.set_grid_idx
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store
    give = TensorHandle.set_attr
    memory, early, name, waited = [], [], "", True
    contracts = contract_of_function()

    def launched(self, *arguments, **more):
        nonlocal memory, early, name
        given = dict(zip(self.arg_names, arguments, strict=False)) | more
        tensors = {key: getattr(x, "base", x) for key, x in given.items()}  # a descriptor's base is its tensor
        places = {key: (s.data_ptr(), s.data_ptr() + s.nbytes()) for key, x in tensors.items()
                  if isinstance(x, torch.Tensor) for s in [x.untyped_storage()]}  # fmt: skip
        name = self.fn.__name__
        own = set(contracts[name].early_reads[name]) if name in contracts else set()
        others = {place for key, place in places.items() if key not in own}  # an argument may stand in for another
        memory, early = list(places.values()), [places[key] for key in own if places.get(key) not in {None, *others}]
        return launch(self, *arguments, **more)

    def program(self, *index):
        nonlocal waited
        waited = False
        return next_program(self, *index)

    def call(self, *arguments, **more):
        nonlocal waited
        waited |= self.fn.__name__ == "wait_for_last"
        return called(self, *arguments, **more)

    def outside(at, size, places):
        found = np.ones(len(at), bool)
        for start, end in places:
            found &= (at < start) | (at + size > end)
        return at[found]

    def check(what, pointers, mask, size):
        at = pointers.data[np.broadcast_to(mask.data, pointers.data.shape).astype(bool)].astype(np.int64).reshape(-1)
        lost = outside(at, size, memory)
        if len(lost):
            first = int(lost[0])
            nearest = min((min(abs(first - start), abs(first - end)) for start, end in memory), default=None)
            raise AssertionError(f"{name}: {len(lost)} of {len(at)} {what}s are outside of all tensors, the first "
                                 f"{nearest} bytes from the nearest")  # fmt: skip
        if not waited and (what == "store" or len(outside(at, size, early))):
            raise AssertionError(f"{name}: a {what} before wait_for_last, of what the kernel before may write or read")

    def loaded(self, pointers, mask, other, *more, **named):
        check("load", pointers, mask, pointers.get_element_ty().primitive_bitwidth // 8)
        return load(self, pointers, mask, other, *more, **named)

    def stored(self, pointers, value, mask, *more, **named):
        check("store", pointers, mask, value.data.dtype.itemsize)
        return store(self, pointers, value, mask, *more, **named)

    def hinted(self, key, values):
        if key == "tt.divisibility" and (self.data % np.array(values)).any():
            raise AssertionError(f"{name}: {self.data} are not multiples of {values}, as it tells the compiler")
        return give(self, key, values)

    with (
        patch.object(TensorHandle, "set_attr", hinted),
        patch.object(GridExecutor, "__call__", launched),
        patch.object(InterpretedFunction, "__call__", call),
        patch.object(InterpreterBuilder, "set_grid_idx", program),
        patch.object(InterpreterBuilder, "create_masked_load", loaded),
        patch.object(InterpreterBuilder, "create_masked_store", stored),
    ):
        yield
