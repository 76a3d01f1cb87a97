"""From what a user calls a model to its files: embedded, folder, GGUF file, hub id, or random weights.

Needs neither torch nor transformers, so that a wrong name fails at once.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from nanoengine.loader.cache import build_once, cache_root
from nanoengine.loader.checkpoint import CONVERTED_FILES, is_complete
from nanoengine.loader.embedded import embedded_model_folder
from nanoengine.loader.review import review
from nanoengine.model.config import NAMED_CONFIGS, ModelConfig, load_model_config

EMBEDDED_NAMES = ("smollm2", "smollm2-135m-instruct")
LOAD_FORMATS = ("auto", "dummy")
_REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_SMALL_FILES = (*CONVERTED_FILES, "chat_template.jinja")
_WEIGHT_FILES = ("*.safetensors", "model.safetensors.index.json")


@dataclass(slots=True, frozen=True)
class ModelFiles:
    """A model that can be loaded.

    folder: Hugging Face layout; None for a named config with random weights. load_format:
    ``safetensors``, or ``dummy`` if the weights are to be random.
    """

    folder: Path | None
    config: ModelConfig
    load_format: str


def resolve_model(model: str | Path | None = None, *, load_format: str = "auto", progress: bool = True) -> ModelFiles:
    """Find, download or convert ``model``.

    model: None or "smollm2" (embedded); a folder with config.json and safetensors; a ``.gguf`` file
    (converted into the cache once; any file of a split one); a Hugging Face repo id such as ``Qwen/Qwen3-0.6B``. With
    load_format="dummy" also a name in ``NAMED_CONFIGS``, or a folder without weights. Which files of a folder
    count, and what of it is not used: see loader.review.

    Errors: ValueError listing what is possible; FileNotFoundError and OSError for a path or a repo
    id that cannot be had, saying the ways out.
    """
    if load_format not in LOAD_FORMATS:
        raise ValueError(f"load_format must be one of {', '.join(LOAD_FORMATS)}, got {load_format!r}")
    if not (model is None or isinstance(model, (str, Path)) and str(model)):
        raise ValueError(f"model must be None, a name or a path, got {model!r}. {_what_is_possible()}")
    name = "smollm2" if model is None else str(model)
    if load_format == "dummy":
        return _dummy(name, progress)
    path = Path(name).expanduser()
    if path.is_dir():
        folder = path
    elif path.is_file():
        folder = _from_file(path, progress)
    elif name.lower() in EMBEDDED_NAMES:
        folder = embedded_model_folder(progress=progress)
    elif name in NAMED_CONFIGS:
        raise ValueError(f"{name!r} is a shape without weights: use load_format='dummy'. {_what_is_possible()}")
    elif _is_repo_id(name):
        folder = _download(name, _SMALL_FILES + _WEIGHT_FILES, progress)
    else:
        raise ValueError(f"no model {name!r}: no such folder or file. {_what_is_possible()}")
    config = review(folder, load_model_config(folder))
    return ModelFiles(folder, _named(config, folder, name), "safetensors")


def _dummy(name: str, progress: bool) -> ModelFiles:
    path = Path(name).expanduser()
    if path.is_dir():
        return ModelFiles(path, _named(load_model_config(path), path, name), "dummy")
    key = "smollm2-135m" if name.lower() in EMBEDDED_NAMES else name
    if key in NAMED_CONFIGS:
        return ModelFiles(None, NAMED_CONFIGS[key], "dummy")
    if _is_repo_id(name):
        folder = _download(name, _SMALL_FILES, progress)
        return ModelFiles(folder, _named(load_model_config(folder), folder, name), "dummy")
    raise ValueError(f"no model {name!r} to fill with random weights. {_what_is_possible()}")


def _named(config: ModelConfig, folder: Path, name: str) -> ModelConfig:
    """A snapshot's folder is called after a commit: the name that was asked for says more."""
    return dataclasses.replace(config, name=name if _is_repo_id(name) else folder.name)


def _is_repo_id(name: str) -> bool:
    return _REPO_ID.fullmatch(name) is not None and not name.endswith(".gguf")


def _from_file(path: Path, progress: bool) -> Path:
    if path.suffix.lower() != ".gguf":
        raise ValueError(f"{path} is a file; nanoengine reads .gguf files and folders. {_what_is_possible()}")
    from nanoengine.loader.gguf_file import CONVERTER_VERSION, convert_gguf
    from nanoengine.loader.gguf_reader import split_parts

    parts = [part for part in split_parts(path) if part.is_file()]
    path = parts[0]  # a split model is the same one by whichever of its files it is named
    prints = [_fingerprint(part) for part in parts]
    if len(prints) > 1:
        prints = [hashlib.sha256("".join(prints).encode()).hexdigest()[:12]]
    target = cache_root() / f"{path.stem}-{prints[0]}-v{CONVERTER_VERSION}"
    return build_once(target, lambda folder: convert_gguf(path, folder, progress=progress), is_complete)


def _fingerprint(path: Path) -> str:
    """Changes when the file does: size, time, first and last MiB (hashing 8 GB would take longer than loading)."""
    stat = path.stat()
    digest = hashlib.sha256(f"{stat.st_size} {stat.st_mtime_ns}".encode())
    with path.open("rb") as stream:
        digest.update(stream.read(1 << 20))
        stream.seek(max(0, stat.st_size - (1 << 20)))
        digest.update(stream.read())
    return digest.hexdigest()[:12]


def _download(repo_id: str, patterns: tuple[str, ...], progress: bool) -> Path:
    """The repo's snapshot; huggingface_hub honours HF_ENDPOINT, HF_HUB_OFFLINE, HF_HOME and tokens."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    quiet = not progress and not are_progress_bars_disabled()
    if quiet:
        disable_progress_bars()
    try:
        # Mistral's consolidated.safetensors holds the same weights a second time
        folder = snapshot_download(repo_id, allow_patterns=list(patterns), ignore_patterns=["consolidated*", "*/*"])
    except Exception as error:  # the library's HTTP errors have changed their base class with each version
        raise OSError(_no_hub(repo_id, error)) from error
    finally:
        if quiet:
            enable_progress_bars()
    return Path(folder)


def _no_hub(repo_id: str, error: Exception) -> str:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    offline = " (HF_HUB_OFFLINE is set: only what is in the local cache is used)" if _offline() else ""
    return (
        f"{repo_id!r} is no folder here, and could not be had from {endpoint}{offline}: {reason}\n"
        "Ways out: (1) a mirror: set HF_ENDPOINT=https://... before Python starts; "
        "(2) a local folder: download config.json, tokenizer.json, tokenizer_config.json and *.safetensors "
        "elsewhere and give the folder's path; (3) the embedded model: leave model out, or say 'smollm2'."
    )


def _offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def _what_is_possible() -> str:
    return (
        f"Possible are: {', '.join(map(repr, EMBEDDED_NAMES))} (embedded, the default); the path of a folder with "
        "config.json and *.safetensors; the path of a .gguf file; a Hugging Face repo id such as 'Qwen/Qwen3-0.6B'; "
        f"and with load_format='dummy' (random weights) {', '.join(NAMED_CONFIGS)}."
    )
