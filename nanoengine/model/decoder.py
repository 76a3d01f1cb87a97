"""Llama, Qwen2 and Qwen3 are one decoder with options.

The decoder does not know sequences, blocks or queues. It gets the new tokens of all rows laid end
to end, their positions, and an attention backend with the metadata of this step.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from nanoengine.model.config import ModelConfig
from nanoengine.model.layers import PackedLinear, RMSNorm, RotaryTable
from nanoengine.model.ops import TorchOps


class Attention(nn.Module):
    """q, k, v in one product; QK-norm (Qwen3) and RoPE; attention over the cache; output product."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        d, self.config = config.head_dim, config
        self.heads, self.kv_heads, self.scale = config.num_attention_heads, config.num_key_value_heads, d**-0.5
        parts = {"q_proj": self.heads * d, "k_proj": self.kv_heads * d, "v_proj": self.kv_heads * d}
        self.qkv_proj = PackedLinear(config.hidden_size, parts, config.attention_bias or config.qkv_bias)
        self.o_proj = PackedLinear(self.heads * d, {"o_proj": config.hidden_size}, config.attention_bias)
        self.q_norm = RMSNorm(d, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(d, config.rms_norm_eps) if config.qk_norm else None

    def forward(self, qkv, rope, attention, cache, metadata, ops) -> torch.Tensor:
        """qkv: [T, (heads + 2 * kv_heads) * head_dim]; returns [T, hidden_size]."""
        slots = metadata.slots if getattr(attention, "reads_stored", False) else None
        q, k, v = ops.turn(qkv, self, rope, cache, slots)
        out = attention(q, k, v, cache, metadata, self.scale)
        return ops.delta(out.flatten(1), self.o_proj)


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)) (Shazeer 2020)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        parts = {"gate_proj": config.intermediate_size, "up_proj": config.intermediate_size}
        self.gate_up_proj = PackedLinear(config.hidden_size, parts, config.mlp_bias)
        self.down_proj = PackedLinear(config.intermediate_size, {"down_proj": config.hidden_size}, config.mlp_bias)


class DecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, stream, delta, rope, attention, cache, metadata, ops) -> tuple[torch.Tensor, torch.Tensor]:
        """stream: [T, hidden_size]; delta: what the layer before adds to it, or None. Returns the same two."""
        stream, qkv = ops.norm_product(stream, delta, self.input_layernorm, self.self_attn.qkv_proj)
        delta = self.self_attn(qkv, rope, attention, cache, metadata, ops)
        stream, gate_up = ops.norm_product(stream, delta, self.post_attention_layernorm, self.mlp.gate_up_proj)
        return stream, ops.swiglu_product(gate_up, self.mlp.down_proj)


class Decoder(nn.Module):
    """max_positions: length of the RoPE table, at least the longest sequence.

    parallel.decoder.ParallelDecoder is one rank's part of it, with other layers and first_token: the
    token id that the first row of embed_tokens belongs to.
    """

    layer_type, first_token = DecoderLayer, 0

    def __init__(self, config: ModelConfig, max_positions: int):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size), requires_grad=False)
        self.layers = nn.ModuleList(self.layer_type(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = self.embed_tokens
        if not config.tie_word_embeddings:
            self.lm_head = nn.Parameter(torch.empty_like(self.embed_tokens), requires_grad=False)
        self.rope = RotaryTable(config, max_positions)
        self.ops = TorchOps()

    def forward(self, input_ids, positions, attention, caches, metadata) -> torch.Tensor:
        """input_ids, positions: int64 [T]; caches: one KV tensor a layer; returns hidden [T, hidden_size]."""
        return self.layers_forward(self.embed(input_ids), positions, attention, caches, metadata)

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.ops.embed(input_ids, self.embed_tokens)

    def layers_forward(self, stream, positions, attention, caches, metadata) -> torch.Tensor:
        """The same from embedded tokens on: stream [T, hidden_size], which is changed in place."""
        rope, delta = self.ops.rope(self.rope, positions, stream.dtype), None
        for layer, cache in zip(self.layers, caches, strict=True):
            stream, delta = layer(stream, delta, rope, attention, cache, metadata, self.ops)
        return self.ops.norm(stream, delta, self.norm)[1]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [S, hidden_size] -> float32 [S, vocab_size]. Ask only for rows that sample."""
        return self.scores(hidden).float()

    def scores(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Logits in the weights' own format, where a float32 copy is not wanted. out: where to write them."""
        return self.ops.product(hidden, self.lm_head, out=out)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy checkpoint tensors (Hugging Face names) into the packed parameters.

        Names and shapes were checked by loader.weights before the first tensor came.
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
