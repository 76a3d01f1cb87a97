"""What a folder of safetensors files holds, read from the headers alone.

A safetensors file is: 8 bytes, the header's length n (little endian); n bytes of JSON, from tensor
name to dtype, shape and data_offsets; then the data, whose first byte is offset 0.
(https://github.com/huggingface/safetensors#format)
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath

from nanoengine.model.fields import read_json

INDEX_NAME = "model.safetensors.index.json"
CONVERTED_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
_FLOAT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_METADATA = "__metadata__"  # the one key of a header that is no tensor
_HEADER_LIMIT = 100_000_000  # bytes; the format's own bound


@dataclass(slots=True, frozen=True)
class TensorEntry:
    """One tensor of one file: its shape (elements), its dtype in the format's own spelling.

    begin, end: its bytes in the file.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int = 0
    end: int = 0


def read_header(file: Path) -> dict[str, TensorEntry]:
    """Names, dtypes and shapes in one safetensors file, none of the data read.

    Errors: ValueError naming the file, and the first tensor that the file is too short for.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(size - 8, _HEADER_LIMIT):
            raise ValueError(
                f"{file} is cut short or no safetensors file: its header should take {length} bytes "
                f"of {size} in the file. Download or convert it again."
            )
        try:
            header = json.loads(stream.read(length))
            entries = {name: _parse(file, raw, 8 + length) for name, raw in header.items() if name != _METADATA}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{file} is damaged: its header cannot be read ({error!r})") from None
    for name, entry in sorted(entries.items(), key=lambda item: item[1].end):
        if entry.end > size:
            raise ValueError(
                f"{file} is cut short: tensor {name} ends at byte {entry.end}, the file at byte {size}. "
                "Download or convert it again."
            )
        width, held = _FLOAT_BYTES.get(entry.dtype), entry.end - entry.begin
        if width is not None and held != width * math.prod(entry.shape) or entry.begin < 8 + length:
            raise ValueError(f"{file} is damaged: tensor {name} {entry.shape} {entry.dtype} holds {held} bytes")
    return entries


def _parse(file: Path, raw: dict, data: int) -> TensorEntry:
    begin, end = map(int, raw["data_offsets"])
    return TensorEntry(file, raw["dtype"], tuple(map(int, raw["shape"])), data + begin, data + end)


def list_tensors(folder: Path) -> dict[str, TensorEntry]:
    """Every tensor of a model folder. Which files count: see weight_files.

    Errors: FileNotFoundError if there is no safetensors file (saying what is there) or a shard of
    the index is missing; ValueError for a damaged file, or a tensor that two files hold.
    """
    index = folder / INDEX_NAME
    if index.exists():
        return _from_index(folder, index)
    found: dict[str, TensorEntry] = {}
    for file in weight_files(folder):
        for name, entry in read_header(file).items():
            if name in found:
                raise ValueError(f"tensor {name} is in both {found[name].file} and {file}: remove one of the files")
            found[name] = entry
    return found


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that hold the model: those of ``model.safetensors.index.json`` if it is there, else
    ``model.safetensors`` alone, else all ``*.safetensors``.

    Errors: FileNotFoundError if there is none; ValueError for a damaged index.
    """
    index = folder / INDEX_NAME
    if index.exists():
        return [folder / shard for shard in _shards(index)]
    single = folder / "model.safetensors"
    files = [single] if single.exists() else sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(_nothing_found(folder))
    return files


def unread_tensors(folder: Path) -> dict[Path, list[str]]:
    """Of the files that hold the model: tensors that the index does not look for there. Errors: as list_tensors."""
    index = folder / INDEX_NAME
    shards = _shards(index) if index.exists() else {}
    unread = {folder / shard: set(read_header(folder / shard)) - set(names) for shard, names in shards.items()}
    return {file: sorted(names) for file, names in unread.items() if names}


def _shards(index: Path) -> dict[str, list[str]]:
    """Shard -> names, by the index. A shard lies in the index's folder, or in one below it."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ValueError(f"{index} is damaged: it needs a 'weight_map' from tensor to file")
    by_shard: dict[str, list[str]] = {}
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not _stays_inside(shard):
            raise ValueError(
                f"{index}: weight_map puts tensor {name} into {shard!r:.200}, which is no file of this folder: "
                "only names of files in it are followed"
            )
        by_shard.setdefault(shard, []).append(name)
    return dict(sorted(by_shard.items()))


def _stays_inside(shard: str) -> bool:
    """By its name alone: a file of a Hugging Face snapshot is itself a link to elsewhere, and that is fine."""
    for path in (PurePosixPath(shard), PureWindowsPath(shard)):  # no other machine may see it differently
        if not path.name or path.is_absolute() or path.drive or path.root or ".." in path.parts:
            return False
    return "\0" not in shard


def _from_index(folder: Path, index: Path) -> dict[str, TensorEntry]:
    found = {}
    for shard, names in _shards(index).items():
        file = folder / shard
        if not file.is_file():
            raise FileNotFoundError(f"{file} is missing: {index.name} puts {_some(names)} there. Download it again.")
        header = read_header(file)
        absent = [name for name in names if name not in header]
        if absent:
            raise ValueError(f"{file} lacks {_some(absent)}, which {index.name} says is there")
        found.update({name: header[name] for name in names})
    return found


def is_complete(folder: Path) -> bool:
    """True if ``folder`` holds a converted model: all files there, no safetensors file cut short."""
    if not all((folder / name).is_file() for name in CONVERTED_FILES):
        return False
    try:
        return bool(list_tensors(folder))
    except (ValueError, OSError):
        return False


def check_tensors(
    folder: Path, expected: Mapping[str, tuple[int, ...]], ignored: Iterable[str] = ()
) -> dict[str, Path]:
    """The file that holds each expected tensor, after a check of every header in ``folder``.

    ignored: names that may be there and are not wanted. Leftover ``rotary_emb.inv_freq`` buffers
    (old Llama exports) are always ignored: they are computed, not learned.

    Errors: as ``list_tensors``; ValueError that names the tensors that are missing, unexpected, of
    another shape, or of a dtype that is no float (quantised checkpoints).
    """
    found = list_tensors(folder)
    skip = set(ignored)
    extra = [n for n in found if n not in expected and n not in skip and not n.endswith("rotary_emb.inv_freq")]
    missing = [name for name in expected if name not in found]
    if missing:
        hint = f" (unexpected instead: {_some(extra)})" if extra else ""
        raise ValueError(f"{folder}: missing {_some(missing)} in its safetensors files{hint}")
    if extra:
        raise ValueError(f"{found[extra[0]].file}: unexpected {_some(extra)}; config.json describes another model")
    for name, shape in expected.items():
        entry = found[name]
        if entry.dtype not in _FLOAT_BYTES:
            raise ValueError(
                f"{entry.file}: tensor {name} has dtype {entry.dtype}; only {', '.join(_FLOAT_BYTES)} can be loaded"
            )
        if entry.shape != tuple(shape):
            raise ValueError(f"{entry.file}: tensor {name} has shape {entry.shape}, config.json asks for {shape}")
    return {name: found[name].file for name in expected}


def _some(names: list[str], limit: int = 4) -> str:
    """'tensor a', or 'tensors a, b, c, d and 7 more'."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return f"tensor{'s' if len(names) > 1 else ''} {', '.join(names[:limit])}{more}"


def _nothing_found(folder: Path) -> str:
    if not folder.is_dir():
        return f"{folder} is not a folder"
    there = sorted(path.name for path in folder.iterdir())
    hint = ""
    if any(name.endswith((".bin", ".pt", ".pth")) for name in there):
        hint = "; PyTorch pickles are not read: save the model with save_pretrained(..., safe_serialization=True)"
    elif "adapter_config.json" in there:
        hint = "; an adapter is not applied by itself: merge it into its base model first"
    elif any(name.endswith(".gguf") for name in there):
        hint = "; to run a GGUF file give its path, not its folder"
    return f"{folder} holds no *.safetensors file, only {', '.join(there[:8]) or 'nothing'}{hint}"
