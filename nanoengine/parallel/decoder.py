"""One rank's decoder: the same layers on fewer heads, and three kinds of places where ranks meet."""

from __future__ import annotations

import torch

from nanoengine.model.decoder import Decoder, DecoderLayer
from nanoengine.parallel.group import Group
from nanoengine.parallel.split import Split


class ParallelLayer(DecoderLayer):
    """DecoderLayer with two sums over the ranks: that is all that tensor parallelism adds to a layer."""

    group: Group

    def forward(self, stream, delta, rope, attention, cache, metadata, ops) -> tuple[torch.Tensor, torch.Tensor]:
        stream, qkv = ops.norm_product(stream, delta, self.input_layernorm, self.self_attn.qkv_proj)
        delta = self.group.sum(self.self_attn(qkv, rope, attention, cache, metadata, ops))
        stream, gate_up = ops.norm_product(stream, delta, self.post_attention_layernorm, self.mlp.gate_up_proj)
        return stream, self.group.sum(ops.swiglu_product(gate_up, self.mlp.down_proj))


class ParallelDecoder(Decoder):
    """A Decoder of the size of this rank's part. ``config`` is the part's; vocab_size is the whole model's.

    loaded_bytes: what load_weights was given, in the checkpoint's own format.
    """

    layer_type = ParallelLayer

    def __init__(self, split: Split, max_positions: int, group: Group):
        super().__init__(split.part(), max_positions)
        self.group, self.vocab_size, self.first_token = group, split.config.vocab_size, split.tokens.start
        self.loaded_bytes = 0
        for layer in self.layers:
            layer.group = group
            if group.rank:  # else each rank would add it to the sum
                layer.self_attn.o_proj.bias = layer.mlp.down_proj.bias = None

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Rows of the ids that this rank has, zeros for the others'; layers_forward sums over the ranks."""
        local = input_ids - self.first_token
        others = (local < 0) | (local >= len(self.embed_tokens))
        rows = self.ops.embed(local.masked_fill(others, 0), self.embed_tokens)
        return rows.masked_fill_(others[:, None], 0)

    def layers_forward(self, stream, positions, attention, caches, metadata) -> torch.Tensor:
        return super().layers_forward(self.group.sum(stream), positions, attention, caches, metadata)

    def scores(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Logits [S, vocab_size] on rank 0, which samples; [0, vocab_size] on the others."""
        if not len(hidden):
            return hidden.new_empty(0, self.vocab_size)
        parts = self.group.gather(self.ops.product(hidden, self.lm_head))
        if parts is None:
            return hidden.new_empty(0, self.vocab_size)
        out = hidden.new_empty(len(hidden), self.vocab_size) if out is None else out
        columns = out.split(parts.shape[2], 1)  # the ids in order; the last rank's part may end in padding
        for part, place in zip(parts, columns, strict=False):
            place.copy_(part[:, : place.shape[1]])
        return out

    def load_weights(self, weights) -> None:
        super().load_weights(self._counted(weights))

    def _counted(self, weights):
        for name, value in weights:
            self.loaded_bytes += value.nbytes
            yield name, value
