"""Llama, Qwen2 and Qwen3 are one decoder with options.

The decoder does not know sequences, blocks or queues. It gets the new tokens of all rows laid end
to end, their positions, and an attention backend with the metadata of this step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from nanoengine.attention.base import reads_stored
from nanoengine.model.capabilities import Declares
from nanoengine.model.config import ModelConfig
from nanoengine.model.layers import (
    AddRMSNorm,
    PackedLinear,
    ParallelLMHead,
    RMSNorm,
    RotaryEmbedding,
    RowParallelLinear,
    VocabParallelEmbedding,
    apply_rotary_emb,
)


@dataclass(slots=True)
class ForwardContext:
    """What the layers need beside the hidden states: one object per step.

    positions: int64 [T]. attention: the backend (see attention.base.AttentionBackend), with this
    step's ``metadata``. reads_stored: it takes k and v from the cache, if a kernel has put them there.
    kv_cache: that of the layer whose turn it is.
    """

    positions: torch.Tensor
    rotary_emb: RotaryEmbedding
    attention: Callable
    metadata: Any
    reads_stored: bool = False
    kv_cache: torch.Tensor | None = None
    _cos_sin: tuple[torch.Tensor, torch.Tensor] | None = None

    def cos_sin(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Of this step's positions, each [T, 1, head_dim]; looked up when the first layer asks."""
        if self._cos_sin is None:
            self._cos_sin = self.rotary_emb(self.positions, dtype)
        return self._cos_sin


class Attention(Declares, nn.Module):
    """q, k, v in one matmul; QK-norm (Qwen3) and RoPE; attention over the cache; o_proj."""

    speaks_for = {"fusable": ("forward", "split_heads")}
    fusable = True

    def __init__(self, config: ModelConfig, group=None):
        super().__init__()
        d, bias = config.head_dim, config.attention_bias
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.scaling = d**-0.5
        sizes = (self.num_heads * d, self.num_kv_heads * d, self.num_kv_heads * d)
        parts = dict(zip(("q_proj", "k_proj", "v_proj"), sizes, strict=True))
        self.qkv_proj = PackedLinear(config.hidden_size, parts, bias or config.qkv_bias)
        self.o_proj = RowParallelLinear(self.num_heads * d, config.hidden_size, bias, group)
        self.q_norm = RMSNorm(d, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(d, config.rms_norm_eps) if config.qk_norm else None

    def forward(self, hidden: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """[T, hidden_size] -> [T, hidden_size]."""
        q, k, v = self.split_heads(self.qkv_proj(hidden), ctx)
        out = ctx.attention(q, k, v, ctx.kv_cache, ctx.metadata, self.scaling)
        return self.o_proj(out.flatten(1))

    def split_heads(self, qkv: torch.Tensor, ctx: ForwardContext) -> tuple[torch.Tensor, ...]:
        """q [T, num_heads, D] and k, v [T, num_kv_heads, D]; q and k normed (Qwen3) and rotated.

        qkv: [T, (num_heads + 2 * num_kv_heads) * D]. q and k are rotated alike, so in one go.
        """
        heads, kv_heads = self.num_heads, self.num_kv_heads
        qk, v = qkv.view(len(qkv), heads + 2 * kv_heads, -1).split((heads + kv_heads, kv_heads), 1)
        if self.q_norm is not None:
            q, k = qk.split((heads, kv_heads), 1)
            qk = torch.cat((self.q_norm(q), self.k_norm(k)), 1)
        q, k = apply_rotary_emb(qk, *ctx.cos_sin(qkv.dtype)).split((heads, kv_heads), 1)
        return q, k, v


class MLP(Declares, nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)) (Shazeer 2020)."""

    fusable = True

    def __init__(self, config: ModelConfig, group=None):
        super().__init__()
        hidden_size, size, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_up_proj = PackedLinear(hidden_size, {"gate_proj": size, "up_proj": size}, bias)
        self.down_proj = RowParallelLinear(size, hidden_size, bias, group)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(hidden).chunk(2, -1)
        return self.down_proj(F.silu(gate) * up)


class DecoderLayer(Declares, nn.Module):
    """x + attention(norm(x)), then the same with the MLP; the norm that comes next does the sum."""

    fusable = True

    def __init__(self, config: ModelConfig, group=None):
        super().__init__()
        self.input_layernorm = AddRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, group)
        self.post_attention_layernorm = AddRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config, group)

    def forward(
        self, hidden: torch.Tensor, residual: torch.Tensor | None, ctx: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden: [T, hidden_size]; residual: the same, or None in the first layer. Returns both.

        Their sum is the residual stream. The norm that comes next adds them.
        """
        hidden, residual = self.input_layernorm(hidden, residual)
        hidden = self.self_attn(hidden, ctx)
        hidden, residual = self.post_attention_layernorm(hidden, residual)
        return self.mlp(hidden), residual


class Decoder(Declares, nn.Module):
    """max_positions: rows of the RoPE tables, at least the length of the longest sequence.

    vocab_size: columns of the logits. layer_type: the class of the layers. group: the ranks that
    share the model, None for one; parallel.decoder.ParallelDecoder is one rank's part.
    """

    layer_type = DecoderLayer
    speaks_for = {
        "fusable": ("forward", "layers_forward"),
        "supports_cuda_graphs": ("forward", "embed", "layers_forward", "logits", "compute_logits"),
    }
    fusable = supports_cuda_graphs = True

    def __init__(self, config: ModelConfig, max_positions: int, group=None):
        super().__init__()
        self.config, self.vocab_size = config, config.vocab_size
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, group)
        layers = [self.layer_type(config, group) for _ in range(config.num_hidden_layers)]
        self.layers = nn.ModuleList(layers)
        self.norm = AddRMSNorm(config.hidden_size, config.rms_norm_eps)
        weight = self.embed_tokens.weight
        if not config.tie_word_embeddings:
            weight = nn.Parameter(torch.empty_like(weight), requires_grad=False)
        self.lm_head = ParallelLMHead(weight, config.vocab_size, group)
        self.rotary_emb = RotaryEmbedding(config, max_positions)

    def forward(self, input_ids, positions, attention, caches, metadata) -> torch.Tensor:
        """Hidden states [T, hidden_size] after the last norm.

        input_ids, positions: int64 [T]; attention: the backend, with this step's ``metadata``;
        caches: one KV tensor per layer.
        """
        hidden = self.embed(input_ids)
        return self.layers_forward(hidden, positions, attention, caches, metadata)

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.embed_tokens(input_ids)

    def layers_forward(self, hidden, positions, attention, caches, metadata) -> torch.Tensor:
        """As forward, from embedded tokens on.

        hidden: [T, hidden_size], which may be changed in place.
        """
        stored = reads_stored(attention)
        ctx, residual = ForwardContext(positions, self.rotary_emb, attention, metadata, stored), None
        for layer, cache in zip(self.layers, caches, strict=True):
            ctx.kv_cache = cache
            hidden, residual = layer(hidden, residual, ctx)
        return self.norm(hidden, residual)[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [S, hidden_size] -> float32 [S, vocab_size]. Ask only for rows that sample."""
        return self.compute_logits(hidden).float()

    def compute_logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Logits in the weights' own format, into ``out`` if given."""
        return self.lm_head(hidden, out)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy checkpoint tensors (Hugging Face names) into the parameters.

        Names and shapes were checked by loader.weights before the first tensor came.
        Errors: ValueError naming tensors that did not come.
        """
        missing = {name for name, _ in self.named_parameters()}
        parts_left = {}
        for name, value in weights:
            owner, part = self._place(name)
            if owner is None:
                continue
            if part is None:
                self.get_parameter(owner).data.copy_(value)
                missing.discard(owner)
                continue
            module, (part, kind) = self.get_submodule(owner), part
            module.load(part, kind, value)
            full = f"{owner}.{kind}"
            parts_left.setdefault(full, set(module.rows)).discard(part)
            if not parts_left[full]:
                missing.discard(full)
        if missing:
            raise ValueError(f"weights did not fill: {', '.join(sorted(missing))}")

    @property
    def tied(self) -> bool:
        return self.lm_head.weight is self.embed_tokens.weight

    def _place(self, name: str):
        """Checkpoint name -> (parameter, None); if packed (module, (part, "weight" or "bias"))."""
        if name == "lm_head.weight" and self.tied:
            return None, None
        name = name.removeprefix("model.")
        path, kind = name.rsplit(".", 1)
        parent, _, leaf = path.rpartition(".")
        packed = PACKED.get(leaf)
        return (f"{parent}.{packed}", (leaf, kind)) if packed else (name, None)


PACKED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}


@torch.inference_mode()
def full_forward(decoder: Decoder, token_ids: list[int]) -> torch.Tensor:
    """Logits [n, vocab_size] of one sequence from nothing: no cache, no blocks, no batch."""
    from nanoengine.attention.torch_attention import dense_attention

    device = decoder.embed_tokens.weight.device
    ids = torch.tensor(token_ids, dtype=torch.int64, device=device)
    positions, no_caches = torch.arange(len(ids), device=device), [None] * len(decoder.layers)
    return decoder.logits(decoder(ids, positions, dense_attention, no_caches, None))
