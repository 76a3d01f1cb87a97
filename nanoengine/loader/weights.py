"""Which tensors a decoder needs, and where they come from: a folder, or random numbers."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from nanoengine.loader.checkpoint import check_tensors
from nanoengine.model.config import ModelConfig

if TYPE_CHECKING:
    import torch

HEAD = "lm_head.weight"


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Hugging Face name -> shape (elements) of every weight; a linear layer is (out, in).

    With ``tie_word_embeddings`` the head is not listed: it is the embedding itself.
    """
    hidden, ffn, dim = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_attention_heads * dim, config.num_key_value_heads * dim
    qkv, o = {"q_proj": (q, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden)}, {"o_proj": (hidden, q)}
    mlp = {"gate_proj": (ffn, hidden), "up_proj": (ffn, hidden), "down_proj": (hidden, ffn)}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        shapes[prefix + "input_layernorm.weight"] = (hidden,)
        shapes |= _linears(prefix + "self_attn.", qkv, config.attention_bias or config.qkv_bias)
        shapes |= _linears(prefix + "self_attn.", o, config.attention_bias)
        if config.qk_norm:
            shapes[prefix + "self_attn.q_norm.weight"] = (dim,)
            shapes[prefix + "self_attn.k_norm.weight"] = (dim,)
        shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
        shapes |= _linears(prefix + "mlp.", mlp, config.mlp_bias)
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes[HEAD] = (config.vocab_size, hidden)
    return shapes


def _linears(prefix: str, layers: dict[str, tuple[int, int]], bias: bool) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in layers.items():
        shapes[f"{prefix}{name}.weight"] = shape
        if bias:
            shapes[f"{prefix}{name}.bias"] = shape[:1]
    return shapes


def read_weights(
    folder: str | Path, config: ModelConfig, take: Callable | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (Hugging Face name, CPU tensor in the file's dtype) for every expected tensor.

    All headers are checked first, when this is called: nothing is read from a folder that does not
    fit. The tensors are views of the mapped file, so copy what has to outlive or change it.
    A tied head that is stored all the same is skipped (resolve_model unties it if it is another matrix).

    take: (name, source) -> the part that is wanted, or None for nothing of it. ``source`` is indexed
    like a tensor, and only what is indexed is read (see parallel.split).

    Errors: FileNotFoundError or ValueError naming file and tensor (see ``check_tensors``).
    """
    where = check_tensors(Path(folder), expected_tensors(config), ignored=(HEAD,) if config.tie_word_embeddings else ())
    return _read(where, take)


def _read(where: dict[str, Path], take: Callable | None) -> Iterator[tuple[str, torch.Tensor]]:
    from safetensors import safe_open

    for file in dict.fromkeys(where.values()):
        with safe_open(file, framework="pt", device="cpu") as opened:
            for name, source in where.items():
                if source == file:
                    part = opened.get_tensor(name) if take is None else take(name, opened.get_slice(name))
                    if part is not None:
                        yield name, part


def dummy_weights(
    config: ModelConfig, seed: int = 0, *, dtype: torch.dtype | None = None, device: str | torch.device = "cpu",
    take: Callable | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Random weights under the same names: norms 1, everything else N(0, 0.02²), biases too: one lost would show.

    Each tensor's numbers depend on ``seed``, its name, the dtype and the kind of device only, so
    any subset in any order gives the same values. dtype: float32 unless given. take: as in
    read_weights; a tensor is drawn whole and then cut, or its numbers would depend on the cut.
    """
    import torch

    dtype = dtype or torch.float32
    for name, shape in expected_tensors(config).items():
        if name.endswith("norm.weight"):
            whole = torch.ones(shape, dtype=dtype, device=device)
        else:
            generator = torch.Generator(device=device).manual_seed(_tensor_seed(seed, name))
            whole = torch.empty(shape, dtype=dtype, device=device).normal_(0.0, 0.02, generator=generator)
        part = whole if take is None else take(name, whole)
        if part is not None:
            yield name, part


def _tensor_seed(seed: int, name: str) -> int:
    return zlib.crc32(f"{seed}/{name}".encode())
