"""The shape of a decoder, read from a Hugging Face config.json."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanoengine.model.fields import Fields, read_json, warn
from nanoengine.model.rope_config import read_rope

_LLAMA, _QWEN2, _QWEN3 = "LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"
ARCHITECTURES = {"llama": _LLAMA, "qwen2": _QWEN2, "qwen3": _QWEN3}  # model_type, which is also GGUF's name
DTYPES = ("float32", "bfloat16", "float16", "float64")


@dataclass(slots=True, frozen=True)
class ModelConfig:
    """Llama, Qwen2 and Qwen3 are one decoder with options; sizes are numbers of elements.

    qk_norm: RMSNorm over each query and key head before RoPE (Qwen3). attention_bias: bias on q,
    k, v and o (some Llamas). qkv_bias: bias on q, k and v alone (Qwen2). tie_word_embeddings: the
    head is the embedding's transpose.
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
    qkv_bias: bool = False
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
        attention = 2 * h * q + 2 * h * kv + (h if self.attention_bias else 0)
        attention += q + 2 * kv if self.attention_bias or self.qkv_bias else 0
        mlp = 3 * h * self.intermediate_size
        mlp += (2 * self.intermediate_size + h) if self.mlp_bias else 0
        layer = attention + mlp + 2 * h + (2 * d if self.qk_norm else 0)
        heads = 1 if self.tie_word_embeddings else 2
        return heads * self.vocab_size * h + self.num_hidden_layers * layer + h


def model_type(config: ModelConfig) -> str:
    """config.json's name of this kind of decoder; GGUF's ``general.architecture`` is the same."""
    return next(name for name, architecture in ARCHITECTURES.items() if architecture == config.architecture)


def config_from_dict(
    raw: dict[str, Any], *, generation: dict[str, Any] | None = None, source: str = "config.json",
    generation_source: str = "generation_config.json",
) -> ModelConfig:  # fmt: skip
    """Build a ModelConfig from the parsed config.json (and generation_config.json).

    Errors: ValueError naming the file and the field that is missing, wrong or not supported.
    """
    fields = Fields(raw, source)
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
        *others, last = sorted(ARCHITECTURES)
        known = f"{', '.join(others)} and {last}"
        raise ValueError(f"{source}: model_type {model_type!r:.100} is not supported; nanoengine runs {known}")
    if raw.get("quantization_config"):
        raise ValueError(f"{source}: quantised weights (quantization_config) are not supported; take the bf16 model")
    heads, hidden = fields.integer("num_attention_heads"), fields.integer("hidden_size")
    kv_heads = fields.integer("num_key_value_heads", None) or heads
    if heads % kv_heads:
        raise ValueError(f"{source}: num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}")
    layers, vocab_size = fields.integer("num_hidden_layers"), fields.integer("vocab_size")
    _refuse_other_layers(fields, model_type, layers)
    rope = read_rope(fields, model_type)
    eos = _token_ids(Fields(generation or {}, generation_source), "eos_token_id", vocab_size)
    eos = eos or _token_ids(fields, "eos_token_id", vocab_size)
    bos = _token_ids(fields, "bos_token_id", vocab_size)
    return ModelConfig(
        architecture=ARCHITECTURES[model_type],
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size"),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=_head_dim(fields, model_type, hidden, heads),
        max_position_embeddings=fields.integer("max_position_embeddings"),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6, zero=True),
        rope_theta=rope.theta,
        rope_scaling=rope.scaling,
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        # Qwen2's own code has bias on q, k and v whatever the file says, and none on o
        attention_bias=fields.flag("attention_bias", False) and model_type != "qwen2",
        mlp_bias=fields.flag("mlp_bias", False),
        qk_norm=model_type == "qwen3",
        qkv_bias=model_type == "qwen2",
        dtype=_dtype(fields),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=eos,
        name=fields.text("_name_or_path", None) or "",
    )


def _refuse_other_layers(fields: Fields, model_type: str, layers: int) -> None:
    """ValueError naming what makes a layer another than those that are served."""
    fields.text("hidden_act", "silu", ("silu", "swish"))
    if fields.flag("use_sliding_window", False):
        raise fields.error("use_sliding_window", "true (sliding-window attention) is not supported")
    for i, kind in enumerate(fields.texts("layer_types", None) or ()):
        if kind != "full_attention":
            raise fields.error(f"layer_types[{i}]", f"{kind!r} (sliding-window attention, say) is not supported")
    if raw_types := fields.values.get("layer_types"):
        if len(raw_types) != layers:
            raise fields.error("layer_types", f"lists {len(raw_types)} layers, num_hidden_layers is {layers}")
    if fields.flag("mlp_bias", False) and model_type != "llama":
        raise fields.error("mlp_bias", f"true is not supported for model_type {model_type!r}: only Llamas have it")


def _head_dim(fields: Fields, model_type: str, hidden: int, heads: int) -> int:
    dim = fields.integer("head_dim", None)
    if dim is None:
        if model_type != "qwen3" and hidden % heads:
            raise fields.error("hidden_size", f"{hidden} is not a multiple of num_attention_heads={heads}, "
                                              "and there is no head_dim")  # fmt: skip
        dim = 128 if model_type == "qwen3" else hidden // heads  # transformers' own defaults
    if dim % 2:
        raise fields.error("head_dim", f"{dim} is odd: rotary embeddings turn pairs")
    return dim


def _dtype(fields: Fields) -> str:
    name = "dtype" if fields.values.get("dtype") is not None else "torch_dtype"
    value = (fields.text(name, None) or "bfloat16").removeprefix("torch.")
    if value not in DTYPES:
        raise fields.error(name, f"{value!r:.100} is not supported, only {', '.join(DTYPES)}")
    return value


def _token_ids(fields: Fields, name: str, vocab_size: int) -> tuple[int, ...]:
    """The ids of a field that holds one, several or none, without those outside the vocabulary.

    Errors: ValueError for what is no integer.
    """
    value = fields.values.get(name)
    if value is None:
        return ()
    found = list(value) if isinstance(value, (list, tuple)) else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in found):
        raise fields.error(name, f"must be a token id or a list of them, got {value!r:.100}")
    outside = [token for token in found if not 0 <= token < vocab_size]
    if outside:
        ids = ", ".join(map(str, outside))
        warn(
            f"{fields.source}: {name} {ids} is outside the vocabulary [0, {vocab_size}): "
            "left out, the model cannot draw it"
        )
    return tuple(token for token in found if 0 <= token < vocab_size)


def load_model_config(folder: str | Path) -> ModelConfig:
    """Read ``config.json`` (and ``generation_config.json``) of a model folder.

    Errors: FileNotFoundError naming the file; ValueError where the text is no JSON or not served.
    """
    folder = Path(folder)
    if not (folder / "config.json").exists() and (folder / "adapter_config.json").exists():
        raise FileNotFoundError(
            f"{folder} holds an adapter (adapter_config.json) and no model: merge it into its base model first, "
            "with merge_and_unload() and save_pretrained() of the peft package"
        )
    raw = read_json(folder / "config.json")
    generation_file = folder / "generation_config.json"
    generation = read_json(generation_file) if generation_file.exists() else None
    return config_from_dict(
        raw, generation=generation, source=str(folder / "config.json"), generation_source=str(generation_file)
    )


# Shapes for load_format="dummy": random weights, for tests and benchmarks. Sources: the public
# model cards of Qwen/Qwen3-0.6B, Qwen/Qwen3-8B, Qwen/Qwen2.5-0.5B-Instruct and HuggingFaceTB/SmolLM2-135M-Instruct.
NAMED_CONFIGS: dict[str, ModelConfig] = {
    "qwen3-0.6b": ModelConfig(_QWEN3, 151936, 1024, 3072, 28, 16, 8, 128, 40960, 1e-6, 1e6,
                              tie_word_embeddings=True, qk_norm=True, bos_token_id=151643,
                              eos_token_ids=(151645, 151643), name="qwen3-0.6b"),
    "qwen3-8b": ModelConfig(_QWEN3, 151936, 4096, 12288, 36, 32, 8, 128, 40960, 1e-6, 1e6,
                            qk_norm=True, bos_token_id=151643, eos_token_ids=(151645, 151643), name="qwen3-8b"),
    "qwen2.5-0.5b": ModelConfig(_QWEN2, 151936, 896, 4864, 24, 14, 2, 64, 32768, 1e-6, 1e6,
                                tie_word_embeddings=True, qkv_bias=True, bos_token_id=151643,
                                eos_token_ids=(151645, 151643), name="qwen2.5-0.5b"),
    "smollm2-135m": ModelConfig(_LLAMA, 49152, 576, 1536, 30, 9, 3, 64, 8192, 1e-5, 1e5,
                                tie_word_embeddings=True, bos_token_id=1, eos_token_ids=(2,), name="smollm2-135m"),
    "tiny-qwen3": ModelConfig(_QWEN3, 1024, 128, 256, 4, 8, 2, 32, 2048, 1e-6, 1e6, tie_word_embeddings=True,
                              qk_norm=True, dtype="float32", eos_token_ids=(2,), name="tiny-qwen3"),
    "tiny-qwen2": ModelConfig(_QWEN2, 1024, 128, 256, 4, 8, 2, 16, 2048, 1e-6, 1e6, tie_word_embeddings=True,
                              qkv_bias=True, dtype="float32", eos_token_ids=(2,), name="tiny-qwen2"),
    "tiny-llama": ModelConfig(_LLAMA, 1024, 128, 256, 4, 8, 2, 32, 2048, 1e-5, 1e4, dtype="float32",
                              eos_token_ids=(2,), name="tiny-llama"),
}
