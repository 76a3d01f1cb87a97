"""How many KV blocks fit: measured with the largest step that the engine may run."""

from __future__ import annotations

import gc
from contextlib import contextmanager

import numpy as np
import torch

from nanoengine.config import EngineConfig
from nanoengine.engine.batch import build_batch
from nanoengine.engine.prompt_rows import PromptRows
from nanoengine.engine.sequence import Sequence
from nanoengine.sampling_params import MOST_LOGPROBS, SamplingParams
from nanoengine.worker.cuda_graphs import graph_bytes
from nanoengine.worker.device import GIB
from nanoengine.worker.prompt_logprobs import ROWS, PromptLogprobs
from nanoengine.worker.sampler import Sampler, report_logprobs

LEAST_TOKENS = 256  # a pool smaller than this serves nobody


def blocks_that_fit(runner, config: EngineConfig) -> int:
    """KV blocks for what is left of the card's share after weights, the largest step, and all that others hold.

    Errors: RuntimeError that says how much is missing and who has it.
    """
    device = runner.device
    gc.collect()  # an engine that nobody uses any more, but that is part of a cycle, still holds its memory
    torch.cuda.empty_cache()
    step_bytes = measure_largest_step(runner, config)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    block_bytes = runner.model_config.kv_bytes_per_token(runner.dtype.itemsize) * runner.block_size
    room = min(int(config.gpu_memory_utilization * total) - (total - free), free) - step_bytes
    if config.kv_cache_gib is not None:
        room = min(room, int(config.kv_cache_gib * GIB))
    useful = 2 * config.max_num_seqs * -(-config.max_model_len // runner.block_size)  # all running, and a cache
    least = -(-LEAST_TOKENS // runner.block_size)
    blocks = min(room // block_bytes, useful)
    if blocks < min(least, useful):
        own = torch.cuda.memory_allocated(device)
        missing = least * block_bytes - room
        raise RuntimeError(
            f"no room for a KV cache on {torch.cuda.get_device_name(device)}: {missing / GIB:.2f} GiB are missing. "
            f"gpu_memory_utilization={config.gpu_memory_utilization} of {total / GIB:.1f} GiB may be in use; "
            f"{(total - free) / GIB:.1f} GiB are (this process's tensors {own / GIB:.1f}, the rest is others' or the "
            f"driver's), and a step needs {step_bytes / GIB:.1f}. Close what else uses the card (llm.close(), before a "
            "notebook cell that makes llm runs again), raise gpu_memory_utilization, or lower max_num_batched_tokens "
            "or max_num_seqs"
        )
    return int(blocks)


@torch.inference_mode()
def measure_largest_step(runner, config: EngineConfig) -> int:
    """Bytes that the largest batch and the dearest sampler need beyond weights and KV, with some slack.

    The batch writes no KV (slot -1) and reads one block of zeros, so it needs no pool.
    """
    device, m = runner.device, runner.model_config
    shape = (2, 1, runner.block_size, m.num_key_value_heads, m.head_dim)
    caches = [torch.zeros(shape, dtype=runner.dtype, device=device)] * m.num_hidden_layers
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    batch = build_batch(_longest_rows(config, runner.block_size), runner.block_size)
    batch.slot_mapping = np.full_like(batch.slot_mapping, -1)
    ids = torch.zeros(len(batch.input_ids), dtype=torch.int64, device=device)
    metadata = runner.attention.prepare(batch, runner.block_size, device)
    hidden = runner.model(ids, torch.from_numpy(batch.positions).to(device), runner.attention, caches, metadata)
    layers = torch.cuda.max_memory_allocated(device) - before
    rows = config.max_num_seqs
    logits = runner.model.logits(hidden[torch.arange(rows, device=device) % len(hidden)])
    params = SamplingParams(temperature=1.0, top_k=50, top_p=0.9, min_p=0.01, logprobs=5)
    seqs = [Sequence(i, [0], params, 2) for i in range(len(logits))]  # none on a rank that does not sample
    raw = logits.clone()
    tokens = Sampler()(logits, seqs, np.ones(len(seqs), np.int64))
    report_logprobs(raw, seqs, tokens)
    del raw, tokens
    _score_a_prompt(runner, hidden)
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    graphs = 0 if not runner.mode.graphs else graph_bytes(config, logits.shape[1], runner.dtype.itemsize, layers)
    return int(1.1 * peak) + graphs + 256 * 2**20  # matrix-product workspaces, compiled kernels


def _score_a_prompt(runner, hidden: torch.Tensor) -> None:
    """prompt_logprobs of as many rows as there are at once: a longer prompt only takes more parts."""
    places, targets = np.arange(ROWS) % len(hidden), np.zeros(ROWS, np.int64)
    rows = PromptRows(places, targets, [(0, ROWS, MOST_LOGPROBS)])
    PromptLogprobs(runner.model.logits, hidden, rows)


def _longest_rows(config: EngineConfig, block_size: int) -> list[Sequence]:
    """Prompts that fill max_num_batched_tokens, as long as they may be; every block is block 0."""
    seqs, left = [], config.max_num_batched_tokens
    while left and len(seqs) < config.max_num_seqs:
        n = min(left, config.max_model_len - 1)
        seq = Sequence(len(seqs), [0] * n, SamplingParams(), n + 1)
        seq.num_scheduled_tokens, seq.block_table = n, [0] * -(-n // block_size)
        seqs.append(seq)
        left -= n
    return seqs


@contextmanager
def explain_out_of_memory(config: EngineConfig):
    """Turn CUDA's out-of-memory into a RuntimeError that says what to do."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info()
        raise RuntimeError(
            f"the GPU has no memory left for weights, {config.num_blocks or 'the'} KV blocks and graphs: "
            f"{free / GIB:.2f} of {total / GIB:.1f} GiB are free ({str(error).split('. ')[0]}). Close what else uses "
            "the card (llm.close()), lower num_blocks or gpu_memory_utilization, or take a smaller model"
        ) from error
