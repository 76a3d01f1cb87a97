"""Compile all kernels of a model at once.

One after the other they take a second each, but the compiler runs in threads.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import torch

from nanoengine.kernels.contract import ModelTensors, warmup_calls


def compile_in_threads(names: Iterable[str], tensors: ModelTensors, threads: int = 8) -> None:
    """Make the warm-up calls of the kernels' files ``names`` (see contract.KERNELS).

    A kernel that is called later with other types or alignments is compiled then, as always.
    """
    device = tensors.embed_tokens.device

    def run(call) -> None:
        with torch.cuda.device(device), torch.inference_mode():
            # binds this thread to the GPU: without that it can make no tensor descriptor
            torch.cuda.synchronize()
            call()

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(run, warmup_calls(names, tensors)))
    torch.cuda.synchronize(device)
