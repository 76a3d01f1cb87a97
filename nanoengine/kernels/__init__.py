"""Triton kernels for the GPU, each beside its torch reference and its contract (see contract.py).

Set TRITON_INTERPRET=1 before the first import to run them on a CPU, slowly, statement by statement.
Nothing here knows the model, the worker or the engine: kernels take tensors and numbers.
"""
