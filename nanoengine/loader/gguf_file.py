"""A GGUF file (Llama, Qwen2 or Qwen3 family) as an ordinary Hugging Face model folder.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. What llama.cpp's converter
did on the way in (conversion/llama.py and qwen.py there), and so what is undone here:

* tensor names are shortened (``blk.0.attn_q`` for ``model.layers.0.self_attn.q_proj``);
* for ``llama`` the rows of q and k are permuted, because llama.cpp rotates neighbouring pairs
  where Hugging Face rotates halves; for ``qwen2`` and ``qwen3`` they are not;
* Llama 3's rope scaling is a tensor of divisors, ``rope_freqs.weight``, not a set of numbers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import safetensors
from safetensors import TensorSpec
from tqdm.auto import tqdm

from nanoengine.loader.checkpoint import INDEX_NAME
from nanoengine.loader.gguf_metadata import KEPT_DTYPES, ROPE_FREQS, read_config
from nanoengine.loader.gguf_reader import GgufModel, Tensor, can_dequantize, open_model
from nanoengine.loader.gguf_tokenizer import end_token_ids, write_tokenizer
from nanoengine.loader.weights import HEAD, expected_tensors
from nanoengine.model.config import ARCHITECTURES, ModelConfig, config_from_dict

CONVERTER_VERSION = 2  # part of the cache's key: raise it when the output changes
SHARD_BYTES = 4 << 30  # bytes held in memory before a safetensors file is written
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_TOP_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    HEAD: "output.weight",
}


def convert_gguf(path: str | Path, out_folder: str | Path, *, progress: bool = True) -> Path:
    """Write config, weights and tokenizer of the GGUF file ``path`` into ``out_folder``; return it.

    Of a model that was split into several files ``path`` is any one; the others must lie beside it.

    Quantised tensors are dequantised to float32, F16 and BF16 are kept as they are: no bit of what
    the file says is lost. progress: show a bar over the tensors.

    Errors: FileNotFoundError; ValueError naming the file and the tensor or key that is missing, cut
    short, of the wrong shape or type or not supported; all tensors
    are looked at before the first is written. ``out_folder`` may then hold part of the result.
    """
    path, out_folder = Path(path), Path(out_folder)
    try:
        return _convert(path, out_folder, progress)
    except UnicodeDecodeError as error:  # the gguf package decodes each text when it is asked for
        raise ValueError(f"{path} is damaged: a text in its metadata is not UTF-8 ({error})") from error


def _convert(path: Path, out_folder: Path, progress: bool) -> Path:
    model = open_model(path)
    path, reader = model.path, model.reader
    raw = read_config(path, reader, {name: each.tensor for name, each in model.tensors.items()})
    config = config_from_dict(raw, source=str(path))
    wanted = {name: _gguf_name(name) for name in expected_tensors(config)}
    _check(model, config, wanted)
    out_folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(path, reader, out_folder)
    with tqdm(total=len(wanted), desc=f"converting {path.name}", unit="tensor", disable=not progress) as bar:
        _write_weights(out_folder, config, {hf: model.tensors[name].tensor for hf, name in wanted.items()}, bar)
    end_ids = end_token_ids(reader)
    raw["eos_token_id"] = end_ids[0] if len(end_ids) == 1 else end_ids
    _write_json(out_folder / "config.json", {k: v for k, v in raw.items() if v is not None})
    generation = {"bos_token_id": raw["bos_token_id"], "eos_token_id": end_ids, "pad_token_id": raw["pad_token_id"]}
    _write_json(out_folder / "generation_config.json", {k: v for k, v in generation.items() if v is not None})
    return out_folder


def _gguf_name(name: str) -> str:
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    module, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{_LAYER_NAMES[module]}.{kind}"


def _check(model: GgufModel, config: ModelConfig, wanted: dict[str, str]) -> None:
    path, tensors = model.path, model.tensors
    missing = [name for name in wanted.values() if name not in tensors]
    if missing:
        raise ValueError(f"{path}: missing {len(missing)} tensor(s): {', '.join(missing[:4])}")
    extra = sorted(set(tensors) - set(wanted.values()) - {ROPE_FREQS})
    if extra:
        raise ValueError(
            f"{tensors[extra[0]].file}: {len(extra)} unexpected tensor(s), not supported: {', '.join(extra[:4])}"
        )
    for (hf, shape), name in zip(expected_tensors(config).items(), wanted.values(), strict=True):
        _check_tensor(tensors[name], name, hf, shape)


def _check_tensor(found: Tensor, name: str, hf: str, shape: tuple[int, ...]) -> None:
    have, kind = tuple(int(d) for d in reversed(found.tensor.shape)), found.tensor.tensor_type
    if have != shape:
        raise ValueError(f"{found.file}: tensor {name} has shape {have}, the metadata asks for {shape} ({hf})")
    if not can_dequantize(kind):
        raise ValueError(
            f"{found.file}: tensor {name} is of type {kind.name}, which cannot be read: take another quantisation"
        )


def unpermute(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo llama.cpp's order of q or k rows (out, ...): pair (2i, 2i+1) of a head is (i, i + head_dim/2) again."""
    pairs = rows.reshape(num_heads, rows.shape[0] // num_heads // 2, 2, *rows.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)


def _tensor(config: ModelConfig, name: str, tensor: gguf.ReaderTensor) -> tuple[str, np.ndarray]:
    """(dtype's name, array); a bfloat16 array is held as uint16."""
    dtype = KEPT_DTYPES.get(tensor.tensor_type, "float32")
    if dtype == "bfloat16":
        array = tensor.data.view(np.uint16)
    else:
        array = tensor.data if dtype == "float16" else gguf.dequantize(tensor.data, tensor.tensor_type)
    if config.architecture == ARCHITECTURES["llama"]:
        if ".q_proj." in name:
            array = unpermute(array, config.num_attention_heads)
        elif ".k_proj." in name:
            array = unpermute(array, config.num_key_value_heads)
    return dtype, np.ascontiguousarray(array)


def _write_weights(folder: Path, config: ModelConfig, tensors: dict[str, gguf.ReaderTensor], bar: tqdm) -> None:
    shards: list[dict[str, tuple[str, np.ndarray]]] = [{}]
    where: dict[str, int] = {}
    held = total = 0
    for name, tensor in tensors.items():
        dtype, array = _tensor(config, name, tensor)
        if held and held + array.nbytes > SHARD_BYTES:
            _write_shard(folder / f"shard-{len(shards)}", shards[-1])
            shards[-1] = {}  # its memory can go
            shards.append({})
            held = 0
        shards[-1][name] = (dtype, array)
        where[name] = len(shards)
        held += array.nbytes
        total += array.nbytes
        bar.update()
    if len(shards) == 1:
        return _write_shard(folder / "model.safetensors", shards[0])
    _write_shard(folder / f"shard-{len(shards)}", shards[-1])
    names = {i: f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)}
    for i, final in names.items():
        (folder / f"shard-{i}").rename(folder / final)
    weight_map = {name: names[shard] for name, shard in where.items()}
    _write_json(folder / INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _write_shard(file: Path, tensors: dict[str, tuple[str, np.ndarray]]) -> None:
    specs = {
        name: TensorSpec(dtype=dtype, shape=list(array.shape), data_ptr=array.ctypes.data, data_len=array.nbytes)
        for name, (dtype, array) in tensors.items()
    }
    safetensors.serialize_file(specs, file, {"format": "pt"})
    file.chmod(0o644)  # the library writes 0600; a class may share one cache


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
