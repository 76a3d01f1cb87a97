"""What a model folder leaves open, decided by one rule each and told in a warning that names the
file.

* Weights: the index counts, then ``model.safetensors``, then all ``*.safetensors``. Any other
  ``*.safetensors`` file (a stale one, an adapter) and any tensor that the index looks for elsewhere
  is not read.
* Tied head: ``tie_word_embeddings`` ties if the files hold no ``lm_head.weight``, or one whose
  bytes are those of the embedding. Another one is loaded as the head (as transformers does).
* generation_config.json: its end tokens count, its sampling values do not: SamplingParams alone
  says how to sample.
* Adapters (``adapter_config.json``) are not applied.
"""

from __future__ import annotations

import dataclasses
import mmap
from pathlib import Path

from nanoengine.loader.checkpoint import (
    INDEX_NAME,
    TensorEntry,
    list_tensors,
    unread_tensors,
    weight_files,
)
from nanoengine.model.config import ModelConfig
from nanoengine.model.fields import read_json, warn

_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_PIECE = 16 << 20  # bytes compared at a time
_SAMPLING = {  # what SamplingParams can say, and the value there that is its default
    "do_sample": True,
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}


def review(folder: Path, config: ModelConfig) -> ModelConfig:
    """Warn of what is in the folder and not used; the config with ``tie_word_embeddings`` as the
    files have it.

    Damaged or missing weights are left to who loads them. Errors: ValueError for a damaged
    generation_config.json.
    """
    try:
        _warn_of_files(folder)
        config = _settle_head(folder, config)
    except (ValueError, OSError):
        pass  # read_weights refuses them, with all that it knows
    _warn_of_sampling(folder / "generation_config.json")
    return config


def _warn_of_files(folder: Path) -> None:
    used = set(weight_files(folder))
    rule = INDEX_NAME if (folder / INDEX_NAME).exists() else "model.safetensors"
    for file in sorted(set(folder.glob("*.safetensors")) - used):
        warn(f"{file} is not read: {rule} counts. Remove one of them.")
    for file, names in unread_tensors(folder).items():
        warn(
            f"{file} holds {len(names)} tensor(s) that {INDEX_NAME} does not look for there; "
            f"they are not read: {', '.join(names[:4])}"
        )
    if (folder / "adapter_config.json").exists():
        warn(f"{folder / 'adapter_config.json'} is not applied: merge the adapter into the model")


def _settle_head(folder: Path, config: ModelConfig) -> ModelConfig:
    if not config.tie_word_embeddings:
        return config
    found = list_tensors(folder)
    if _HEAD not in found or _EMBEDDING not in found or _equal(found[_HEAD], found[_EMBEDDING]):
        return config
    warn(
        f"{folder / 'config.json'} says tie_word_embeddings, but {found[_HEAD].file} holds an "
        "lm_head.weight that is not the embedding: it is used as the head, untied. Say false there "
        "if that is right, or remove the tensor."
    )
    return dataclasses.replace(config, tie_word_embeddings=False)


def _equal(one: TensorEntry, other: TensorEntry) -> bool:
    """Byte for byte; two that differ end this at the first difference, so only equal ones are
    read whole."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    with one.file.open("rb") as first, other.file.open("rb") as second:
        with (
            mmap.mmap(first.fileno(), 0, access=mmap.ACCESS_READ) as a,
            mmap.mmap(second.fileno(), 0, access=mmap.ACCESS_READ) as b,
        ):
            size = one.end - one.begin
            starts = range(0, size, _PIECE)
            return all(
                a[one.begin + i : one.begin + min(i + _PIECE, size)]
                == b[other.begin + i : other.begin + min(i + _PIECE, size)]
                for i in starts
            )


def _warn_of_sampling(file: Path) -> None:
    if not file.exists():
        return
    asked = {name: value for name, value in read_json(file).items() if name in _SAMPLING}
    changed = [
        f"{name}={value}"
        for name, value in asked.items()
        if value is not None and value != _SAMPLING[name]
    ]
    if changed:
        values = ", ".join(changed)
        warn(f"{file} asks for {values}, which is not used: say it in SamplingParams(...)")
