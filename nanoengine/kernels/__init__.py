"""Triton kernels for the GPU, each beside its torch reference.

Set TRITON_INTERPRET=1 before the first import to run them on a CPU, slowly, statement by statement.
"""
