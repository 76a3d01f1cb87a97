"""Llama and Qwen3 are one decoder with options.

The decoder does not know sequences, blocks or queues. It gets the new tokens of all rows laid end
to end, their positions, and an attention backend with the metadata of this step.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import nn

from nanoengine.model.config import ModelConfig
from nanoengine.model.layers import PackedLinear, RMSNorm, RotaryTable, linear, rotate


class Attention(nn.Module):
    """q, k, v in one product; QK-norm (Qwen3) and RoPE; attention over the cache; output product."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        d, self.config = config.head_dim, config
        self.heads, self.kv_heads, self.scale = config.num_attention_heads, config.num_key_value_heads, d**-0.5
        parts = {"q_proj": self.heads * d, "k_proj": self.kv_heads * d, "v_proj": self.kv_heads * d}
        self.qkv_proj = PackedLinear(config.hidden_size, parts, config.attention_bias)
        self.o_proj = PackedLinear(self.heads * d, {"o_proj": config.hidden_size}, config.attention_bias)
        if config.qk_norm:
            self.q_norm, self.k_norm = RMSNorm(d, config.rms_norm_eps), RMSNorm(d, config.rms_norm_eps)

    def forward(self, x, rope, attention, cache, metadata) -> torch.Tensor:
        heads, kv_heads, d = self.heads, self.kv_heads, self.config.head_dim
        qkv = self.qkv_proj(x).view(len(x), heads + 2 * kv_heads, d)
        qk, v = qkv.split((heads + kv_heads, kv_heads), 1)
        if self.config.qk_norm:
            q, k = qk.split((heads, kv_heads), 1)
            qk = torch.cat((self.q_norm(q), self.k_norm(k)), 1)
        q, k = rotate(qk, *rope).split((heads, kv_heads), 1)
        out = attention(q, k, v, cache, metadata, self.scale)
        return self.o_proj(out.flatten(1))


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)) (Shazeer 2020)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        parts = {"gate_proj": config.intermediate_size, "up_proj": config.intermediate_size}
        self.gate_up_proj = PackedLinear(config.hidden_size, parts, config.mlp_bias)
        self.down_proj = PackedLinear(config.intermediate_size, {"down_proj": config.hidden_size}, config.mlp_bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        return self.down_proj(F.silu(gate) * up)


class DecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x, rope, attention, cache, metadata) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rope, attention, cache, metadata)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """max_positions: length of the RoPE table, at least the longest sequence."""

    def __init__(self, config: ModelConfig, max_positions: int):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size), requires_grad=False)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = self.embed_tokens
        if not config.tie_word_embeddings:
            self.lm_head = nn.Parameter(torch.empty_like(self.embed_tokens), requires_grad=False)
        self.rope = RotaryTable(config, max_positions)

    def forward(self, input_ids, positions, attention, caches, metadata) -> torch.Tensor:
        """input_ids, positions: int64 [T]; caches: one KV tensor a layer; returns hidden [T, hidden_size]."""
        x = F.embedding(input_ids, self.embed_tokens)
        rope = self.rope(positions, x.dtype)
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, rope, attention, cache, metadata)
        return self.norm(x)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [S, hidden_size] -> float32 [S, vocab_size]. Ask only for rows that sample."""
        return linear(hidden, self.lm_head).float()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy checkpoint tensors (Hugging Face names) into the packed parameters.

        Names and shapes were checked by model.weights before the first tensor came.
        Errors: ValueError naming tensors that did not come.
        """
        missing = {name for name, _ in self.named_parameters()} - ({"lm_head"} if self.tied else set())
        parts_left = {}
        for name, value in weights:
            owner, part = self._place(name)
            if owner is None:
                continue
            if isinstance(part, tuple):
                module = self.get_submodule(owner)
                module.load(*part, value)
                full = f"{owner}.{part[1]}"
                parts_left.setdefault(full, set(module.rows)).discard(part[0])
                if parts_left[full]:
                    continue
                missing.discard(full)
            else:
                self.get_parameter(owner).data.copy_(value)
                missing.discard(owner)
        if missing:
            raise ValueError(f"weights did not fill: {', '.join(sorted(missing))}")

    @property
    def tied(self) -> bool:
        return self.lm_head is self.embed_tokens

    def _place(self, name: str):
        """Checkpoint name -> (parameter name, None), or (module name, (part, "weight" or "bias"))."""
        if name == "lm_head.weight":
            return (None, None) if self.tied else ("lm_head", None)
        name = name.removeprefix("model.")
        if name == "embed_tokens.weight":
            return "embed_tokens", None
        path, kind = name.rsplit(".", 1)
        parent, _, leaf = path.rpartition(".")
        packed = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj",
                  "gate_proj": "gate_up_proj", "up_proj": "gate_up_proj",
                  "o_proj": "o_proj", "down_proj": "down_proj"}.get(leaf)  # fmt: skip
        return (f"{parent}.{packed}", (leaf, kind)) if packed else (name, None)


@torch.inference_mode()
def full_forward(decoder: Decoder, token_ids: list[int]) -> torch.Tensor:
    """Logits [n, vocab_size] of one sequence computed from nothing: no cache, no blocks, no batch."""
    from nanoengine.attention.torch_attention import dense_attention

    ids = torch.tensor(token_ids, dtype=torch.int64, device=decoder.embed_tokens.device)
    no_caches = [None] * len(decoder.layers)
    return decoder.logits(decoder(ids, torch.arange(len(ids), device=ids.device), dense_attention, no_caches, None))
