"""Tensor parallelism on torch.distributed: k ranks, each with a part of every layer.

Read in this order: ``split`` (who has what), ``decoder`` (one rank's part of it), ``group`` (the
collectives), ``steps`` (how the other ranks learn of a step), ``leader`` (rank 0's runner), ``worker``
(the other ranks), ``launch`` (who starts whom), ``watch`` (what happens when a rank fails).
"""
