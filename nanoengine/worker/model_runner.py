"""Runs batches through the real model: arrays to tensors, forward, sample. Needs torch."""

from __future__ import annotations

import gc
import math

import numpy as np
import torch

from nanoengine.attention import choose_backend
from nanoengine.config import EngineConfig
from nanoengine.engine.batch import Batch
from nanoengine.loader.resolve import ModelFiles, resolve_model
from nanoengine.loader.weights import dummy_weights, read_weights
from nanoengine.model.capabilities import unfuse
from nanoengine.model.decoder import Decoder
from nanoengine.worker.device import cpu_kv_bytes, pick_device, pick_dtype
from nanoengine.worker.sampler import Sampler, report_logprobs


class PendingTokens:
    """A launched step; the tokens stay on the device until they are asked for."""

    def __init__(self, num_rows: int, sample_rows: np.ndarray, tokens: torch.Tensor, logprobs):
        self._num_rows, self._sample_rows, self._tokens, self._logprobs = num_rows, sample_rows, tokens, logprobs
        self.logprobs: list[list[dict[int, float]]] | None = None

    def result(self) -> list[list[int]]:
        results: list[list[int]] = [[] for _ in range(self._num_rows)]
        for row, token in zip(self._sample_rows.tolist(), self._tokens.tolist(), strict=True):
            results[row].append(token)
        if self._logprobs is not None:
            self.logprobs = [[] for _ in range(self._num_rows)]
            for row, entry in zip(self._sample_rows.tolist(), self._logprobs, strict=True):
                self.logprobs[row].append(entry)
        return results


class ModelRunner:
    """model: a name, folder or file (see loader.resolve), its ModelFiles, or a Decoder with its weights.

    sampler, attention: objects that replace the package's own (engine.protocols.Sampler,
    attention.base.AttentionBackend). group: the ranks that share the model (parallel.group), None for one.
    """

    def __init__(self, config: EngineConfig, *, model=None, load_format: str = "auto", sampler=None, attention=None,
                 group=None):  # fmt: skip
        if config.tensor_parallel_size > 1 and group is None:
            raise ValueError(
                f"tensor_parallel_size={config.tensor_parallel_size} needs more than one runner: "
                "LLM(tensor_parallel_size=...) or make_runner(config) start them all"
            )
        self.device, self.group = pick_device(config.device), group
        if isinstance(model, Decoder):
            _check_limits(config, model.config.vocab_size, len(model.rotary_emb.cos))
            self.model = model.to(self.device)
        else:
            self.model = load_decoder(model, load_format, config, self.device, group)
        self.model_config = self.model.config
        self.dtype = next(self.model.parameters()).dtype
        m = self.model_config
        self.attention = attention or choose_backend(
            config.attention, self.device, config.block_size,
            head_dim=m.head_dim, group=m.num_attention_heads // m.num_key_value_heads, kv_heads=m.num_key_value_heads,
        )  # fmt: skip
        self.sampler = sampler or Sampler()
        self._tune(config)
        self.block_size = config.block_size or self.attention.default_block_size
        self.num_blocks = config.num_blocks or self._blocks_that_fit(config)
        if group is not None:
            self.num_blocks = group.all_reduce_min(self.num_blocks)
        shape = (m.num_hidden_layers, 2, self.num_blocks, self.block_size, m.num_key_value_heads, m.head_dim)
        self.kv_cache = zeros(shape, self.dtype, self.device)
        self._layer_caches = list(self.kv_cache)
        self._previous: torch.Tensor | None = None  # by row, the tokens that the last launch sampled

    def _tune(self, config: EngineConfig) -> None:
        """What a device wants changed before memory is measured: here, plain torch in the layers."""
        unfuse(self.model)

    @torch.inference_mode()
    def launch(self, batch: Batch) -> PendingTokens:
        logits = self.run(batch)
        seqs = [batch.seqs[row] for row in batch.sample_rows.tolist()]
        wants = any(seq.params.logprobs is not None for seq in seqs)
        raw = logits.clone() if wants else None
        tokens = self._sampled(logits, seqs, batch.sample_positions) if seqs else logits.new_empty(0, dtype=torch.int64)
        logprobs = report_logprobs(raw, seqs, tokens) if wants else None
        self._previous[torch.from_numpy(batch.sample_rows).to(self.device)] = tokens
        return PendingTokens(len(batch.seqs), batch.sample_rows, tokens, logprobs)

    @torch.inference_mode()
    def run(self, batch: Batch) -> torch.Tensor:
        """Logits, float32 [S, vocabulary], of the rows that sample: all of a step but the sampling."""
        hidden = self.forward(batch)
        rows = torch.from_numpy(np.cumsum(batch.query_lens)[batch.sample_rows] - 1).to(self.device)
        self._previous = torch.zeros(len(batch.seqs), dtype=torch.int64, device=self.device)
        return self.model.logits(hidden[rows])

    @torch.inference_mode()
    def forward(self, batch: Batch) -> torch.Tensor:
        """Hidden states [T, hidden_size] of the batch's tokens; their KV is in the cache afterwards."""
        ids = torch.from_numpy(batch.input_ids).to(self.device)
        if batch.in_flight is not None:
            ids = self.fed(ids, torch.from_numpy(batch.in_flight).to(self.device))
        positions = torch.from_numpy(batch.positions).to(self.device)
        metadata = self.attention.prepare(batch, self.block_size, self.device)
        return self.model(ids, positions, self.attention, self._layer_caches, metadata)

    def fed(self, ids: torch.Tensor, sources: torch.Tensor) -> torch.Tensor:
        """int64 [T]: ids, with those in their place that are still in flight (sources: see Batch.in_flight)."""
        return torch.where(sources >= 0, self.newest()[sources.clamp(min=0)], ids)

    def newest(self) -> torch.Tensor:
        """By row of the last launch, the token that it sampled; on every rank."""
        return self._previous if self.group is None else self.group.broadcast(self._previous)

    def _sampled(self, logits: torch.Tensor, seqs, positions: np.ndarray) -> torch.Tensor:
        """The sampler's int64 token ids [S]; RuntimeError if a sampler of your own brings something else."""
        tokens = torch.as_tensor(self.sampler(logits, seqs, positions), device=self.device)
        if tokens.shape != (len(seqs),) or tokens.dtype.is_floating_point or tokens.dtype == torch.bool:
            raise RuntimeError(
                f"the sampler returned {tokens.dtype} of shape {list(tokens.shape)}, "
                f"expected one integer token id for each of the {len(seqs)} rows"
            )
        return tokens.long()

    def _blocks_that_fit(self, config: EngineConfig) -> int:
        block_bytes = self.model_config.kv_bytes_per_token(self.dtype.itemsize) * self.block_size
        room = cpu_kv_bytes(config.kv_cache_gib)
        useful = config.max_num_seqs * -(-config.max_model_len // self.block_size)
        blocks = min(room // block_bytes, useful)
        if blocks < 1:
            raise ValueError(f"no room for one KV block of {block_bytes} bytes: only {room} are free; see kv_cache_gib")
        return int(blocks)

    def close(self) -> None:
        """Give weights and KV memory back."""
        self.model = self.kv_cache = self._layer_caches = self._previous = None
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def make_runner(config: EngineConfig, **parts) -> ModelRunner:
    """The runner for the config's device; for several ranks the first one's, which leads the others."""
    if config.tensor_parallel_size > 1:
        from nanoengine.parallel.launch import make_leader

        return make_leader(config, **parts)
    return runner_type(config.device)(config, **parts)


def runner_type(device: str) -> type[ModelRunner]:
    if pick_device(device).type != "cuda":
        return ModelRunner
    from nanoengine.worker.gpu_runner import GpuRunner

    return GpuRunner


def _check_limits(config: EngineConfig, vocab_size: int, positions: int) -> None:
    """A request that the engine lets in must not ask the model for what it does not have."""
    if config.max_model_len > positions:
        raise ValueError(f"max_model_len={config.max_model_len} is more than the model's {positions} positions")
    if config.vocab_size is None or config.vocab_size > vocab_size:
        raise ValueError(
            f"vocab_size={config.vocab_size}, but the model has {vocab_size} tokens: ids beyond are to be refused, "
            f"so make EngineConfig(vocab_size={vocab_size}) (LLM does it by itself)"
        )


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros that, on a CPU, take memory only where they are written: numpy asks the system for zeroed pages."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)


def load_decoder(model, load_format: str, config: EngineConfig, device: torch.device, group=None) -> Decoder:
    """Resolve the model's files, check every tensor, and fill a Decoder on ``device``; in a group, this rank's part."""
    files = model if isinstance(model, ModelFiles) else resolve_model(model, load_format=load_format)
    dtype = pick_dtype(config.dtype, files.config.dtype, device)
    _check_limits(config, files.config.vocab_size, files.config.max_position_embeddings)
    make, take = lambda: Decoder(files.config, config.max_model_len), None
    if group is not None:
        from nanoengine.parallel.decoder import ParallelDecoder
        from nanoengine.parallel.split import Split

        split = Split(files.config, group.rank, group.size)
        make, take = lambda: ParallelDecoder(split, config.max_model_len, group), split.shard
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            decoder = make()
    finally:
        torch.set_default_dtype(before)
    if files.load_format == "dummy":  # made on the device: a card draws 600 million numbers in no time
        made = dict(dtype=dtype, device=device) if device.type == "cuda" else {}
        weights = dummy_weights(files.config, take=take, **made)
    else:
        weights = read_weights(files.folder, files.config, take)
    decoder.load_weights(weights)
    return decoder.eval()
