"""Who has what: the part of a model that one of k ranks holds.

A layer is two pairs of linear layers. Each pair is cut so that its middle never has to travel:

    x [T, hidden]                      on every rank, whole
      column-parallel  q, k, v         rows of W: some of the heads, complete
        attention                      each rank its heads, its KV cache
      row-parallel     o               columns of W: a partial sum [T, hidden]  --> all-reduce (1)
      column-parallel  gate, up        rows of W: some of the intermediate values, complete
        silu(gate) * up
      row-parallel     down            columns of W: a partial sum [T, hidden]  --> all-reduce (2)

("Rows" and "columns" are those of the stored matrix [out, in]; Megatron-LM, Shoeybi et al. 2019, named
the two kinds by its transpose.) embed_tokens and lm_head are cut along the vocabulary.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch.nn.functional as F

from nanoengine.model.config import ModelConfig

COLUMN_PARALLEL = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
ROW_PARALLEL = ("o_proj", "down_proj")
VOCABULARY = ("embed_tokens", "lm_head")


def check_split(config: ModelConfig, size: int) -> None:
    """ValueError if ``size`` ranks cannot share this model's heads."""
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if heads % size:
        raise ValueError(
            f"tensor_parallel_size={size} does not divide the model's {heads} query heads; {_possible(config)} would do"
        )
    if kv_heads % size and size % kv_heads:
        raise ValueError(
            f"tensor_parallel_size={size} neither divides the model's {kv_heads} KV heads nor is a multiple of them; "
            f"{_possible(config)} would do"
        )


def _possible(config: ModelConfig) -> str:
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    sizes = [k for k in range(1, heads + 1) if heads % k == 0 and (kv_heads % k == 0 or k % kv_heads == 0)]
    return ", ".join(map(str, sizes))


@dataclass(slots=True, frozen=True)
class Split:
    """Rank ``rank``'s part of a model with ``config``, shared by ``size`` ranks; every part is a slice.

    Errors: ValueError (see check_split).
    """

    config: ModelConfig
    rank: int
    size: int

    def __post_init__(self) -> None:
        check_split(self.config, self.size)

    def share(self, n: int) -> slice:
        """This rank's part of n things; where k does not divide n, some ranks have one more than others."""
        return slice(n * self.rank // self.size, n * (self.rank + 1) // self.size)

    @property
    def heads(self) -> slice:
        return self.share(self.config.num_attention_heads)

    @property
    def kv_heads(self) -> slice:
        """The KV heads that this rank's query heads read. Ranks that share one each hold a copy of it."""
        if self.size <= self.config.num_key_value_heads:
            return self.share(self.config.num_key_value_heads)
        one = self.heads.start // (self.config.num_attention_heads // self.config.num_key_value_heads)
        return slice(one, one + 1)

    @property
    def rows_of_vocabulary(self) -> int:
        """Rows of embed_tokens and lm_head, equally many on all ranks, because a gather wants that.

        The last may be padding.
        """
        return -(-self.config.vocab_size // self.size)

    @property
    def tokens(self) -> slice:
        """The ids whose rows this rank has."""
        rows, n = self.rows_of_vocabulary, self.config.vocab_size
        return slice(min(n, self.rank * rows), min(n, (self.rank + 1) * rows))

    def part(self) -> ModelConfig:
        """The shape of this rank's part: a decoder of its own, but for the all-reduces."""
        return dataclasses.replace(
            self.config,
            num_attention_heads=length(self.heads),
            num_key_value_heads=length(self.kv_heads),
            intermediate_size=length(self.share(self.config.intermediate_size)),
            vocab_size=self.rows_of_vocabulary,
        )

    def shard(self, name: str, source):
        """This rank's part of the checkpoint tensor ``name``; None if it has none.

        source: whatever is indexed like a tensor, such as a slice of a safetensors file: then only the
        part is read. The bias of a row-parallel layer is rank 0's alone: it must enter the sum once.
        """
        layer, kind = name.split(".")[-2:]
        if layer in COLUMN_PARALLEL:
            return source[self._outputs(layer)]
        if layer in ROW_PARALLEL:
            if kind == "bias":
                return source[:] if self.rank == 0 else None
            return source[:, self._outputs("q_proj" if layer == "o_proj" else "up_proj")]
        if layer in VOCABULARY:
            rows = source[self.tokens]
            return F.pad(rows, (0, 0, 0, self.rows_of_vocabulary - len(rows)))
        return source[:]

    def _outputs(self, layer: str) -> slice:
        """Rows of a column-parallel weight; those of q and up are also the columns of o and down."""
        if layer in ("gate_proj", "up_proj"):
            return self.share(self.config.intermediate_size)
        heads, d = self.heads if layer == "q_proj" else self.kv_heads, self.config.head_dim
        return slice(heads.start * d, heads.stop * d)


def length(part: slice) -> int:
    return part.stop - part.start
