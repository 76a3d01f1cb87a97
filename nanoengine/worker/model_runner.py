"""Runs batches through the real model: arrays to tensors, forward, sample."""

from __future__ import annotations

import gc
import math

import numpy as np
import torch

from nanoengine.attention import AttentionBackend, choose_backend
from nanoengine.config import EngineConfig
from nanoengine.engine.batch import Batch
from nanoengine.engine.protocols import ROW_ERRORS, Pending, Runner, require, supported_by
from nanoengine.engine.rows import num_request_rows
from nanoengine.loader.resolve import ModelFiles, resolve_model
from nanoengine.loader.weights import dummy_weights, read_weights
from nanoengine.model.capabilities import unfuse
from nanoengine.model.decoder import Decoder
from nanoengine.worker.device import cpu_kv_bytes, pick_device, pick_dtype
from nanoengine.worker.inputs import StepInputs, StepResult
from nanoengine.worker.prompt_logprobs import PromptLogprobs
from nanoengine.worker.sampler import Sampler, judged, report_logprobs
from nanoengine.worker.sampling_arrays import SamplingArrays


class PendingTokens(Pending):
    """A launched step; the tokens stay on the device until they are asked for.

    report: () -> logprobs of the sampling rows, computed when the result is asked for; or None.
    """

    def __init__(self, batch: Batch, result: StepResult, tokens: torch.Tensor, vocab_size: int, report=None):
        self._num_rows, self._sample_rows = len(batch.seqs), batch.sample_rows
        self._tokens, self._vocab_size, self._report = tokens, vocab_size, report
        self._prompt, self.graph_bucket = result.prompt_logprobs, result.graph_bucket

    def result(self) -> list[list[int]]:
        tokens = check_ids(self._wait().tolist(), self._vocab_size)
        if self._prompt is not None:
            self.prompt_logprobs = self._prompt.by_row(self._num_rows)
        if self._report is not None:
            self.logprobs = self._by_row(self._report())
        return [[token] for token in tokens] if len(tokens) == self._num_rows else self._by_row(tokens)

    def _wait(self) -> torch.Tensor:
        """The tokens, int64 [S], once they are there."""
        return self._tokens

    def _by_row(self, values: list) -> list[list]:
        """A list for each row of the batch: its value if it samples, nothing if it does not."""
        rows: list[list] = [[] for _ in range(self._num_rows)]
        for row, value in zip(self._sample_rows.tolist(), values, strict=True):
            rows[row].append(value)
        return rows


class ModelRunner(Runner):
    """model: a name, folder or file (see loader.resolve), its ModelFiles, or a Decoder with its weights.

    sampler, attention: objects that replace the package's own (engine.protocols.Sampler,
    attention.base.AttentionBackend). group: the ranks that share the model (parallel.group), None for one.
    If the constructor raises, weights and KV are let go of: a traceback keeps the object alive.
    """

    max_mixed_prefill_tokens: int | None = 64  # on a CPU a step takes as long as it has tokens

    def __init__(self, config: EngineConfig, **parts):
        try:
            self._make(config, **parts)
        except BaseException:
            self._drop()
            raise

    def _make(
        self, config, *, model=None, load_format="auto", sampler=None, attention=None, group=None
    ) -> None:
        if config.tensor_parallel_size > 1 and group is None:
            raise ValueError(
                f"tensor_parallel_size={config.tensor_parallel_size} needs more than one runner: "
                "LLM(tensor_parallel_size=...) or make_runner(config) start them all"
            )
        if group is not None and not (isinstance(model, Decoder) and model.lm_head.group is group):
            raise ValueError("group: the model must be this rank's part (parallel.decoder.load_part)")
        self.device, self.group = pick_device(config.device), group
        if isinstance(model, Decoder):
            _check_limits(config, model.vocab_size, len(model.rotary_emb.cos))
            if len(model.embed_tokens.weight) != model.config.vocab_size:
                raise ValueError(
                    f"embed_tokens has {len(model.embed_tokens.weight)} rows, config.vocab_size is "
                    f"{model.config.vocab_size}: every token that can be drawn must have a row"
                )
            self.model = model.to(self.device)
        else:
            self.model = load_decoder(model, load_format, config, self.device)
        self.model_config = self.model.config
        self.vocab_size = self.model.vocab_size  # of all ranks together
        self.dtype = next(self.model.parameters()).dtype
        m = self.model_config
        if attention is not None:
            require(attention, AttentionBackend, "attention")
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
        self.layer_caches = list(self.kv_cache)
        self.padding_row = num_request_rows(config.max_num_seqs)  # behind them
        self.last_tokens = torch.zeros(self.padding_row + 1, dtype=torch.int64, device=self.device)
        self._sampling = SamplingArrays.of([])

    @property
    def supports(self) -> frozenset[str]:
        """Which of engine.admission.RUNNER_OPTIONS it has: its sampler's, and one of its own."""
        return frozenset({"prompt_logprobs"}) | supported_by(self.sampler)

    def _tune(self, config: EngineConfig) -> None:
        """What a device wants changed before memory is measured: here, plain torch in the layers."""
        unfuse(self.model)

    @torch.inference_mode()
    def launch(self, batch: Batch) -> Pending:
        sampling = self.sampling_of(batch)
        result = self.run(batch, sampling)
        tokens, report = self.sample(result, sampling, batch)
        return self.pending(batch, result, tokens, report)

    def pending(self, batch: Batch, result: StepResult, tokens: torch.Tensor, report) -> Pending:
        return PendingTokens(batch, result, tokens, self.vocab_size, report)

    @torch.inference_mode()
    def run(self, batch: Batch, sampling: SamplingArrays | None = None) -> StepResult:
        """All of a step but the sampling. sampling: None on a rank that does not sample."""
        inputs = StepInputs.of(batch, sampling or SamplingArrays.none(len(batch.sample_rows))).to(self.device)
        hidden = self.forward(batch, inputs)
        return StepResult(self.logits(hidden, inputs), inputs, prompt_logprobs=self.prompt_logprobs(hidden, batch))

    def logits(self, hidden: torch.Tensor, inputs: StepInputs) -> torch.Tensor | None:
        """[S, vocabulary] of the rows that sample, None if none does."""
        return self.model.logits(hidden[inputs.logits_indices]) if len(inputs.logits_indices) else None

    def prompt_logprobs(self, hidden: torch.Tensor, batch: Batch) -> PromptLogprobs | None:
        """Those that the step's rows ask for; other ranks only give their parts of the logits."""
        return None if batch.prompt is None else PromptLogprobs(self.model.logits, hidden, batch.prompt)

    @torch.inference_mode()
    def forward(self, batch: Batch, inputs: StepInputs) -> torch.Tensor:
        """Hidden states [T, hidden_size] of the batch's tokens; their KV is in the cache afterwards."""
        ids = inputs.input_ids if batch.token_rows is None else self.resolve_input_ids(inputs)
        metadata = self.attention.prepare(batch, self.block_size, self.device)
        return self.model(ids, inputs.positions, self.attention, self.layer_caches, metadata)

    def resolve_input_ids(self, inputs: StepInputs) -> torch.Tensor:
        """int64 [T]: input ids, with the last tokens of their rows where the host does not know them.

        A row that got no token, or one that does not exist, is fed some id that does: reading
        beyond the embedding would end every request on a GPU, and the row is thrown away when the
        host hears of it.
        """
        last = self.broadcast_last_tokens().clamp(0, self.vocab_size - 1)
        return torch.where(inputs.token_rows >= 0, last[inputs.token_rows.clamp(min=0)], inputs.input_ids)

    def broadcast_last_tokens(self) -> torch.Tensor:
        """By request row, the last token that was sampled; on every rank."""
        return self.last_tokens if self.group is None else self.group.broadcast(self.last_tokens)

    def sampling_of(self, batch: Batch) -> SamplingArrays:
        """What the sampling rows ask for; made anew only when the rows change."""
        seqs = batch.seqs
        if len(batch.sample_rows) < len(seqs):
            seqs = [seqs[row] for row in batch.sample_rows.tolist()]
        if self._sampling.seqs != seqs:  # sequences compare by identity: cheap
            self._sampling = SamplingArrays.of(seqs)
        return self._sampling

    def sample(self, result: StepResult, sampling: SamplingArrays, batch: Batch):
        """(tokens [S], what computes their logprobs or None); the tokens become the last ones of their rows."""
        if not sampling.seqs:
            return torch.empty(0, dtype=torch.int64, device=self.device), None
        # the sampler may change its logits, and the next replay of a graph writes over them
        raw = result.logits.to(torch.float32, copy=True) if sampling.logprobs else None
        tokens = self._sampled(result.logits.float(), sampling.seqs, batch.sample_positions)
        rows = result.inputs.sample_request_rows[: len(tokens)]  # a graph's are padded
        self.last_tokens.index_copy_(0, rows, tokens)
        return tokens, self.report(raw, sampling, tokens)

    @staticmethod
    def report(raw: torch.Tensor | None, sampling: SamplingArrays, tokens: torch.Tensor):
        """What computes logprobs when they are asked for; the tokens are copied before a later step replaces them."""
        if raw is None:
            return None
        kept = tokens.clone()
        return lambda: report_logprobs(raw, sampling.seqs, kept)

    def _sampled(self, logits: torch.Tensor, seqs, positions: np.ndarray) -> torch.Tensor:
        """The sampler's int64 token ids [S]; RuntimeError if one of your own brings something else.

        Negative for rows whose logits are no numbers to draw from (engine.protocols.ROW_ERRORS).
        """
        highest = logits.amax(-1)  # first: a sampler may change its logits
        tokens = torch.as_tensor(self.sampler(logits, seqs, positions), device=self.device)
        if tokens.shape != (len(seqs),) or tokens.dtype.is_floating_point or tokens.dtype == torch.bool:
            raise RuntimeError(
                f"the sampler returned {tokens.dtype} of shape {list(tokens.shape)}, "
                f"expected one integer token id for each of the {len(seqs)} rows"
            )
        return judged(tokens.long(), highest)

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
        self._drop()

    def _drop(self) -> None:
        self.model = self.kv_cache = self.layer_caches = self.last_tokens = None
        gc.collect()
        torch.cuda.empty_cache()  # nothing where no GPU was used


def runner_type(device: str) -> type[ModelRunner]:
    if pick_device(device).type != "cuda":
        return ModelRunner
    from nanoengine.worker.gpu_runner import GpuRunner

    return GpuRunner


def check_ids(tokens: list[int], vocab_size: int) -> list[int]:
    """The drawn ids; RuntimeError for one outside the vocabulary that is none of ROW_ERRORS."""
    if tokens and (max(tokens) >= vocab_size or min(tokens) < min(ROW_ERRORS)):
        wrong = next(token for token in tokens if token >= vocab_size or token < min(ROW_ERRORS))
        raise RuntimeError(
            f"the sampler returned token id {wrong}, outside the vocabulary [0, {vocab_size})"
        )
    return tokens


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


def load_decoder(
    model, load_format: str, config: EngineConfig, device: torch.device, make=None, take=None
) -> Decoder:
    """Resolve the model's files, check every tensor, and fill a Decoder on ``device``.

    make: () -> the empty Decoder, and take: (name, tensor) -> what it wants of a checkpoint's
    tensor, where that is a part (parallel.decoder.load_part); None for the whole model.
    """
    files = model if isinstance(model, ModelFiles) else resolve_model(model, load_format=load_format)
    dtype = pick_dtype(config.dtype, files.config.dtype, device)
    _check_limits(config, files.config.vocab_size, files.config.max_position_embeddings)
    make = make or (lambda: Decoder(files.config, config.max_model_len))
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
