"""A GGUF file's header: opened with checks, and its metadata as a Hugging Face config."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from nanoengine.model.config import ARCHITECTURES

KEPT_DTYPES = {gguf.GGMLQuantizationType.F16: "float16", gguf.GGMLQuantizationType.BF16: "bfloat16"}
ROPE_FREQS = "rope_freqs.weight"


class _Reader(gguf.GGUFReader):
    """Names the tensor that a cut-short file has lost (the base class says 'cannot reshape')."""

    def _build_tensors(self, start_offs: int, fields: list[gguf.ReaderField]) -> None:
        for field in fields:
            _, name, _, dims, kind, offset = field.parts
            block, width = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(int(kind[0]))]
            end = int(start_offs + int(offset[0]) + math.prod(int(d) for d in dims) // block * width)
            if end > len(self.data):
                text = f"tensor {bytes(name).decode()} ends at byte {end}, the file at byte {len(self.data)}"
                raise ValueError(f"it is cut short: {text}")
        super()._build_tensors(start_offs, fields)


def open_gguf(path: Path) -> gguf.GGUFReader:
    """The file's header, every tensor checked to lie inside the file.

    Errors: FileNotFoundError; ValueError naming the file, and the tensor where it is cut short.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist or is no file")
    with path.open("rb") as stream:
        magic = stream.read(4)
    if magic != b"GGUF":
        raise ValueError(f"{path} is not a GGUF file: it starts with {magic!r}, not b'GGUF'")
    try:
        return _Reader(path)
    except ValueError as error:
        raise ValueError(f"{path} cannot be read as GGUF: {error}") from error
    except (IndexError, KeyError, OverflowError, MemoryError) as error:
        raise ValueError(f"{path} is cut short or damaged: its metadata cannot be read") from error


def field_value(reader: gguf.GGUFReader, key: str, default: Any = None) -> Any:
    """The value of a metadata key as plain Python, or ``default``."""
    field = reader.get_field(key)
    return default if field is None else field.contents()


def read_config(path: Path, reader: gguf.GGUFReader, tensors: dict[str, gguf.ReaderTensor]) -> dict[str, Any]:
    """config.json's content from the metadata; eos_token_id is filled in by the caller.

    Errors: ValueError naming the file and the key that is missing or not supported.
    """
    kind = field_value(reader, "general.architecture")
    if kind not in ARCHITECTURES:
        raise ValueError(f"{path}: architecture {kind!r} is not supported; nanoengine runs {', '.join(ARCHITECTURES)}")

    def need(key: str) -> Any:
        value = field_value(reader, f"{kind}.{key}")
        if value is None:
            raise ValueError(f"{path}: the metadata key {kind}.{key} is missing")
        return value

    if field_value(reader, f"{kind}.expert_count", 0):
        raise ValueError(f"{path}: a mixture of experts ({kind}.expert_count) is not supported")
    embedding = tensors.get("token_embd.weight")
    if embedding is None:
        raise ValueError(f"{path}: tensor token_embd.weight is missing")
    heads = need("attention.head_count")
    if not isinstance(heads, int) or heads < 1:  # some models list one number a layer
        raise ValueError(f"{path}: {kind}.attention.head_count must be one positive number, got {heads!r}")
    head_dim = field_value(reader, f"{kind}.attention.key_length") or need("embedding_length") // heads
    for key in ("attention.value_length", "rope.dimension_count"):
        if field_value(reader, f"{kind}.{key}", head_dim) != head_dim:
            raise ValueError(f"{path}: {kind}.{key} differs from the head's {head_dim}: not supported")
    theta = float(field_value(reader, f"{kind}.rope.freq_base", 10000.0))
    return {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        "vocab_size": int(embedding.shape[-1]),  # GGUF lists dimensions innermost first
        "hidden_size": need("embedding_length"),
        "intermediate_size": need("feed_forward_length"),
        "num_hidden_layers": need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": field_value(reader, f"{kind}.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": need("context_length"),
        "rms_norm_eps": _short(need("attention.layer_norm_rms_epsilon")),
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(path, reader, kind, theta, head_dim, tensors.get(ROPE_FREQS)),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
        "hidden_act": "silu",
        "dtype": _model_dtype(tensors),
        "bos_token_id": field_value(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": None,
        "pad_token_id": field_value(reader, "tokenizer.ggml.padding_token_id"),
    }


def _short(value: float) -> float:
    """GGUF stores float32: 9.999999747378752e-06 was 1e-05 (the shortest text of that float32)."""
    return float(str(np.float32(value)))


def _model_dtype(tensors: dict[str, gguf.ReaderTensor]) -> str:
    """The matrices' dtype where all agree on F16 or BF16 (norms are F32 even there), else float32."""
    kinds = {tensor.tensor_type for tensor in tensors.values() if len(tensor.shape) > 1}
    return KEPT_DTYPES.get(kinds.pop(), "float32") if len(kinds) == 1 else "float32"


def _rope_scaling(path, reader, kind, theta, head_dim, freqs: gguf.ReaderTensor | None) -> dict[str, Any] | None:
    scaling = field_value(reader, f"{kind}.rope.scaling.type", "none")
    if scaling == "linear":
        return {"rope_type": "linear", "factor": _short(field_value(reader, f"{kind}.rope.scaling.factor", 1.0))}
    if scaling != "none":
        raise ValueError(f"{path}: {kind}.rope.scaling.type {scaling!r} is not supported, only linear and Llama 3's")
    if freqs is None or not np.any(freqs.data != 1.0):
        return None
    # The converter keeps the divisors only. Every Llama 3.x has these wavelengths; make sure of it.
    original = field_value(reader, f"{kind}.rope.scaling.original_context_length", 8192)
    guess = {"rope_type": "llama3", "factor": _short(freqs.data.max()), "low_freq_factor": 1.0, "high_freq_factor": 4.0,
             "original_max_position_embeddings": original}  # fmt: skip
    if not np.allclose(freqs.data, llama3_divisors(guess, theta, head_dim), rtol=1e-4):
        raise ValueError(f"{path}: tensor {ROPE_FREQS} does not hold Llama 3's rope scaling: not supported")
    return guess


def llama3_divisors(scaling: dict[str, Any], theta: float, head_dim: int) -> np.ndarray:
    """By what Llama 3's rule divides each of the head_dim / 2 rotary frequencies.

    Source: Llama 3.1's reference code (``apply_scaling``); same as transformers' ``llama3`` type.
    """
    wavelength = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    low, high, factor = (scaling[k] for k in ("low_freq_factor", "high_freq_factor", "factor"))
    smooth = np.clip((scaling["original_max_position_embeddings"] / wavelength - low) / (high - low), 0.0, 1.0)
    return 1.0 / ((1.0 - smooth) / factor + smooth)
