"""The shape of a decoder, read from a Hugging Face config.json. Needs no torch."""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_LLAMA, _QWEN3 = "LlamaForCausalLM", "Qwen3ForCausalLM"
ARCHITECTURES = {"llama": _LLAMA, "qwen3": _QWEN3}
_LLAMA3_FIELDS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_ROPE_FIELDS: dict[str, tuple[str, ...]] = {"default": (), "linear": ("factor",), "llama3": _LLAMA3_FIELDS}


@dataclass(slots=True, frozen=True)
class ModelConfig:
    """Llama and Qwen3 are one decoder with options; sizes are numbers of elements.

    qk_norm: RMSNorm over each query and key head before RoPE (Qwen3). attention_bias: bias on q,
    k, v and o (some Llamas). tie_word_embeddings: the head is the embedding's transpose.
    eos_token_ids: every id that ends an answer (generation_config.json first, then config.json).
        An id from a file that lies outside the vocabulary cannot be drawn: it is left out, with a
        warning that names file, field and id.
    rope_scaling: None, or Llama 3's {"rope_type": "llama3", factor, low_freq_factor,
    high_freq_factor, original_max_position_embeddings}, or {"rope_type": "linear", "factor"}.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    dtype: str = "bfloat16"
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    name: str = field(default="", compare=False)

    def kv_bytes_per_token(self, bytes_per_element: int) -> int:
        """Bytes of K and V of one token over all layers."""
        return 2 * self.num_hidden_layers * self.num_key_value_heads * self.head_dim * bytes_per_element

    def num_parameters(self) -> int:
        """Weights of the decoder, a tied head counted once."""
        h, d = self.hidden_size, self.head_dim
        q, kv = self.num_attention_heads * d, self.num_key_value_heads * d
        attention = 2 * h * q + 2 * h * kv + (q + 2 * kv + h if self.attention_bias else 0)
        mlp = 3 * h * self.intermediate_size
        mlp += (2 * self.intermediate_size + h) if self.mlp_bias else 0
        layer = attention + mlp + 2 * h + (2 * d if self.qk_norm else 0)
        heads = 1 if self.tie_word_embeddings else 2
        return heads * self.vocab_size * h + self.num_hidden_layers * layer + h


def config_from_dict(
    raw: dict[str, Any], *, generation: dict[str, Any] | None = None, source: str = "config.json",
    generation_source: str = "generation_config.json",
) -> ModelConfig:  # fmt: skip
    """Build a ModelConfig from the parsed config.json (and generation_config.json).

    Errors: ValueError naming the file and the field that is missing, wrong or not supported.
    """
    model_type = raw.get("model_type")
    if model_type not in ARCHITECTURES:
        known = " and ".join(sorted(ARCHITECTURES))
        raise ValueError(f"{source}: model_type {model_type!r} is not supported; nanoengine runs {known}")
    if raw.get("quantization_config"):
        raise ValueError(f"{source}: quantised weights (quantization_config) are not supported; take the bf16 model")
    try:
        heads = _positive(raw["num_attention_heads"], "num_attention_heads", source)
        hidden = _positive(raw["hidden_size"], "hidden_size", source)
        sizes = {
            k: _positive(raw[k], k, source)
            for k in ("vocab_size", "intermediate_size", "num_hidden_layers", "max_position_embeddings")
        }
    except KeyError as missing:
        raise ValueError(f"{source}: the field {missing.args[0]!r} is missing") from None
    kv_heads = _positive(raw.get("num_key_value_heads") or heads, "num_key_value_heads", source)
    if heads % kv_heads:
        raise ValueError(f"{source}: num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}")
    if raw.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ValueError(f"{source}: hidden_act {raw['hidden_act']!r} is not supported, only 'silu'")
    if raw.get("use_sliding_window") or set(raw.get("layer_types") or ()) - {"full_attention"}:
        raise ValueError(f"{source}: sliding-window attention is not supported")
    # transformers 5 writes one rope_parameters dict; older files have rope_theta and rope_scaling
    rope = dict(raw.get("rope_scaling") or raw.get("rope_parameters") or {})
    kind = rope.setdefault("rope_type", rope.get("type", "default"))
    if kind not in _ROPE_FIELDS:
        raise ValueError(f"{source}: rope type {kind!r} is not supported, only default, linear and llama3")
    for key in _ROPE_FIELDS[kind]:
        number = rope.get(key)
        if isinstance(number, bool) or not isinstance(number, (int, float)) or number <= 0:
            raise ValueError(f"{source}: rope type {kind!r} needs {key} as a positive number, got {number!r}")
    theta = raw.get("rope_theta") or rope.get("rope_theta") or 10000.0
    eos = _token_ids(generation or {}, "eos_token_id", sizes["vocab_size"], generation_source)
    eos = eos or _token_ids(raw, "eos_token_id", sizes["vocab_size"], source)
    bos = _token_ids(raw, "bos_token_id", sizes["vocab_size"], source)
    return ModelConfig(
        architecture=ARCHITECTURES[model_type],
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=_positive(raw.get("head_dim") or _default_head_dim(model_type, hidden, heads), "head_dim", source),
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope_theta=float(theta),
        rope_scaling=None if kind == "default" else rope,
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        attention_bias=bool(raw.get("attention_bias", False)),
        mlp_bias=bool(raw.get("mlp_bias", False)),
        qk_norm=model_type == "qwen3",
        dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "bfloat16").removeprefix("torch."),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=eos,
        name=str(raw.get("_name_or_path", "")),
        **sizes,
    )


def load_model_config(folder: str | Path) -> ModelConfig:
    """Read ``config.json`` (and ``generation_config.json``) of a model folder.

    Errors: FileNotFoundError naming the file; ValueError where the text is no JSON or not served.
    """
    folder = Path(folder)
    raw = _read_json(folder / "config.json")
    generation_file = folder / "generation_config.json"
    generation = _read_json(generation_file) if generation_file.exists() else None
    return config_from_dict(
        raw, generation=generation, source=str(folder / "config.json"), generation_source=str(generation_file)
    )


def _default_head_dim(model_type: str, hidden_size: int, num_heads: int) -> int:
    return 128 if model_type == "qwen3" else hidden_size // num_heads  # transformers' own defaults


def _token_ids(raw: dict[str, Any], name: str, vocab_size: int, source: str) -> tuple[int, ...]:
    """The ids of a field that holds one, several or none, without those outside the vocabulary.

    Errors: ValueError for what is no integer.
    """
    value = raw.get(name)
    found = [] if value is None else value if isinstance(value, (list, tuple)) else [value]
    for token in found:
        if isinstance(token, bool) or not isinstance(token, int):
            raise ValueError(f"{source}: {name} must be a token id or a list of them, got {value!r}")
    outside = [token for token in found if not 0 <= token < vocab_size]
    if outside:
        text = f"{source}: {name} {', '.join(map(str, outside))} is outside the vocabulary [0, {vocab_size})"
        warnings.warn(f"{text}: left out, the model cannot draw it", stacklevel=3)
    return tuple(token for token in found if 0 <= token < vocab_size)


def _positive(value: Any, name: str, source: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{source}: {name} must be a positive integer, got {value!r}")
    return value


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist: a model folder needs it (is this the right folder?)")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(raw).__name__}")
    return raw


# Shapes for load_format="dummy": random weights, for tests and benchmarks. Sources: the public
# model cards of Qwen/Qwen3-0.6B, Qwen/Qwen3-8B and HuggingFaceTB/SmolLM2-135M-Instruct.
NAMED_CONFIGS: dict[str, ModelConfig] = {
    "qwen3-0.6b": ModelConfig(_QWEN3, 151936, 1024, 3072, 28, 16, 8, 128, 40960, 1e-6, 1e6,
                              tie_word_embeddings=True, qk_norm=True, bos_token_id=151643,
                              eos_token_ids=(151645, 151643), name="qwen3-0.6b"),
    "qwen3-8b": ModelConfig(_QWEN3, 151936, 4096, 12288, 36, 32, 8, 128, 40960, 1e-6, 1e6,
                            qk_norm=True, bos_token_id=151643, eos_token_ids=(151645, 151643), name="qwen3-8b"),
    "smollm2-135m": ModelConfig(_LLAMA, 49152, 576, 1536, 30, 9, 3, 64, 8192, 1e-5, 1e5,
                                tie_word_embeddings=True, bos_token_id=1, eos_token_ids=(2,), name="smollm2-135m"),
    "tiny-qwen3": ModelConfig(_QWEN3, 1024, 128, 256, 4, 8, 2, 32, 2048, 1e-6, 1e6, tie_word_embeddings=True,
                              qk_norm=True, dtype="float32", eos_token_ids=(2,), name="tiny-qwen3"),
    "tiny-llama": ModelConfig(_LLAMA, 1024, 128, 256, 4, 8, 2, 32, 2048, 1e-5, 1e4, dtype="float32",
                              eos_token_ids=(2,), name="tiny-llama"),
}
