"""A GGUF file's metadata as a Hugging Face config."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from nanoengine.loader.gguf_reader import field_value, metadata
from nanoengine.model.config import ARCHITECTURES
from nanoengine.model.fields import Fields

KEPT_DTYPES = {gguf.GGMLQuantizationType.F16: "float16", gguf.GGMLQuantizationType.BF16: "bfloat16"}
ROPE_FREQS = "rope_freqs.weight"
_INERT_ROPE_KEYS = ("rope.scaling.original_context_length", "rope.scaling.finetuned")  # and all of YaRN's


def read_config(path: Path, reader: gguf.GGUFReader, tensors: dict[str, gguf.ReaderTensor]) -> dict[str, Any]:
    """config.json's content from the metadata; eos_token_id is filled in by the caller.

    Errors: ValueError naming the file and the key that is missing, of the wrong type, or not supported.
    """
    kind = field_value(reader, "general.architecture")
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        raise ValueError(f"{path}: architecture {kind!r} is not supported; nanoengine runs {', '.join(ARCHITECTURES)}")
    keys, ids = metadata(path, reader, f"{kind}."), metadata(path, reader, "tokenizer.ggml.", only="_token_id")
    if keys.integer("expert_count", 0, least=0):
        raise ValueError(f"{path}: a mixture of experts ({kind}.expert_count) is not supported")
    embedding = tensors.get("token_embd.weight")
    if embedding is None:
        raise ValueError(f"{path}: tensor token_embd.weight is missing")
    hidden = keys.integer("embedding_length")
    heads = keys.integer("attention.head_count")  # one number, not one a layer
    head_dim = keys.integer("attention.key_length", None) or hidden // heads
    for key in ("attention.value_length", "rope.dimension_count"):
        if keys.integer(key, head_dim) != head_dim:
            raise ValueError(f"{path}: {kind}.{key} differs from the head's {head_dim}: not supported")
    theta = keys.number("rope.freq_base", 10000.0)
    return {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        "vocab_size": int(embedding.shape[-1]),  # GGUF lists dimensions innermost first
        "hidden_size": hidden,
        "intermediate_size": keys.integer("feed_forward_length"),
        "num_hidden_layers": keys.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": keys.integer("context_length"),
        "rms_norm_eps": _short(keys.number("attention.layer_norm_rms_epsilon", zero=True)),
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(path, keys, theta, head_dim, tensors.get(ROPE_FREQS)),
        "tie_word_embeddings": "output.weight" not in tensors,
        # Qwen2 has its own bias on q, k and v
        "attention_bias": "blk.0.attn_q.bias" in tensors and kind != "qwen2",
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
        "hidden_act": "silu",
        "dtype": _model_dtype(tensors),
        "bos_token_id": ids.integer("bos_token_id", None, least=0),
        "eos_token_id": None,
        "pad_token_id": ids.integer("padding_token_id", None, least=0),
    }


def _short(value: float) -> float:
    """GGUF stores float32: 9.999999747378752e-06 was 1e-05 (the shortest text of that float32)."""
    return float(str(np.float32(value)))


def _model_dtype(tensors: dict[str, gguf.ReaderTensor]) -> str:
    """The matrices' dtype where all agree on F16 or BF16 (norms are F32 even there), else float32."""
    kinds = {tensor.tensor_type for tensor in tensors.values() if len(tensor.shape) > 1}
    return KEPT_DTYPES.get(kinds.pop(), "float32") if len(kinds) == 1 else "float32"


def _rope_scaling(path: Path, keys: Fields, theta: float, head_dim: int, freqs) -> dict[str, Any] | None:
    """As llama.cpp reads the keys: scaling.type is "linear" unless said otherwise; scaling.factor counts, else
    scale_linear; 0 is 1. freqs: the tensor of divisors, or None.

    Errors: ValueError naming file and key.
    """
    _refuse_other_rope_keys(keys)
    kind = keys.text("rope.scaling.type", "linear")
    if kind not in ("linear", "none"):
        raise keys.error("rope.scaling.type", f"{kind!r:.100} is not supported, only linear and Llama 3's")
    key = "rope.scaling.factor" if "rope.scaling.factor" in keys.values else "rope.scale_linear"
    factor = _short(keys.number(key, 1.0, zero=True)) or 1.0
    has_divisors = freqs is not None and np.any(freqs.data != 1.0)
    if kind == "linear" and factor != 1.0:
        if has_divisors:
            raise keys.error(key, f"{factor:g} together with a tensor {ROPE_FREQS} is not supported")
        return {"rope_type": "linear", "factor": factor}
    if not has_divisors:
        return None
    # The converter keeps the divisors only. Every Llama 3.x has these wavelengths; make sure of it.
    original = keys.integer("rope.scaling.original_context_length", 8192)
    guess = {"rope_type": "llama3", "factor": _short(freqs.data.max()), "low_freq_factor": 1.0, "high_freq_factor": 4.0,
             "original_max_position_embeddings": original}  # fmt: skip
    if freqs.data.shape != (head_dim // 2,) or not np.allclose(
        freqs.data, llama3_divisors(guess, theta, head_dim), rtol=1e-4
    ):
        raise ValueError(f"{path}: tensor {ROPE_FREQS} does not hold Llama 3's rope scaling: not supported")
    return guess


def _refuse_other_rope_keys(keys: Fields) -> None:
    if keys.number("rope.scaling.attn_factor", 1.0) != 1.0:
        value = keys.values["rope.scaling.attn_factor"]
        raise keys.error("rope.scaling.attn_factor", f"{value} is not supported, only 1")
    read = ("rope.dimension_count", "rope.freq_base", "rope.scale_linear", "rope.scaling.type", "rope.scaling.factor",
            "rope.scaling.attn_factor", *_INERT_ROPE_KEYS)  # fmt: skip
    for name in keys.values:
        if name.startswith("rope.") and name not in read and not name.startswith("rope.scaling.yarn_"):
            raise keys.error(name, "is not supported")


def llama3_divisors(scaling: dict[str, Any], theta: float, head_dim: int) -> np.ndarray:
    """By what Llama 3's rule divides each of the head_dim / 2 rotary frequencies.

    Source: Llama 3.1's reference code (``apply_scaling``); same as transformers' ``llama3`` type.
    """
    wavelength = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    low, high, factor = (scaling[k] for k in ("low_freq_factor", "high_freq_factor", "factor"))
    smooth = np.clip((scaling["original_max_position_embeddings"] / wavelength - low) / (high - low), 0.0, 1.0)
    return 1.0 / ((1.0 - smooth) / factor + smooth)
