"""GGUF files opened with checks: one file, or all files of a model that was split."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from nanoengine.model.fields import Fields

_PART = re.compile(
    r"(.+)-(\d{5})-of-(\d{5})(\.gguf)", re.IGNORECASE
)  # as llama.cpp's splitter names them


class _Reader(gguf.GGUFReader):
    """Names the tensor that a cut-short file has lost, or whose type is unknown (the base class
    says neither)."""

    def _build_tensors(self, start_offs: int, fields: list[gguf.ReaderField]) -> None:
        for field in fields:
            _, raw_name, _, dims, kind, offset = field.parts
            name, number = bytes(raw_name).decode(), int(kind[0])
            try:
                known = gguf.GGMLQuantizationType(number)
            except ValueError:
                raise ValueError(
                    f"tensor {name} has the unknown or removed type {number}: not supported"
                ) from None
            block, width = gguf.GGML_QUANT_SIZES[known]
            if int(dims[0]) % block:
                raise ValueError(
                    f"tensor {name} has rows of {dims[0]} values, {known.name} needs multiples of {block}"
                )
            end = int(
                start_offs + int(offset[0]) + math.prod(int(d) for d in dims) // block * width
            )
            if end > len(self.data):
                text = f"tensor {name} ends at byte {end}, the file at byte {len(self.data)}"
                raise ValueError(f"it is cut short: {text}")
        super()._build_tensors(start_offs, fields)


@dataclass(slots=True, frozen=True)
class Tensor:
    """One tensor and the file it is in."""

    file: Path
    tensor: gguf.ReaderTensor


@dataclass(slots=True, frozen=True)
class GgufModel:
    """path: the file with the metadata (of a split model its first); reader: its header;
    tensors: those of all files."""

    path: Path
    reader: gguf.GGUFReader
    tensors: dict[str, Tensor]


def open_model(path: Path) -> GgufModel:
    """All of the model that ``path`` is, or is a part of; every tensor checked to lie inside its
    file.

    Errors: FileNotFoundError naming each file of a split model that is not there; ValueError naming
    the file, and the tensor where it is cut short or of a type that cannot be read.
    """
    readers = {path: open_gguf(path)}
    count = metadata(path, readers[path], "split.").integer("count", 1)
    parts = split_parts(path) if count > 1 else [path]
    if len(parts) != count:
        raise ValueError(
            f"{path} is one of {count} files of a split model: they must be named …-00001-of-{count:05d}.gguf and so on"
        )
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise FileNotFoundError(
            f"{path} is one of {count} files of a split model; not beside it: {', '.join(missing)}. "
            "Put all of them into one folder."
        )
    for number, part in enumerate(parts):
        if part not in readers:
            readers[part] = open_gguf(part)
        split = metadata(part, readers[part], "split.")
        if count > 1 and (split.integer("no", least=0), split.integer("count")) != (number, count):
            raise split.error(
                "no", f"is {split.values['no']} of {split.values['count']}: the name says otherwise"
            )
    return GgufModel(parts[0], readers[parts[0]], _all_tensors(parts, readers))


def _all_tensors(parts: list[Path], readers: dict[Path, gguf.GGUFReader]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for part in parts:
        for tensor in readers[part].tensors:
            if tensor.name in found:
                raise ValueError(
                    f"tensor {tensor.name} is in both {found[tensor.name].file} and {part}"
                )
            found[tensor.name] = Tensor(part, tensor)
    if len(parts) > 1:
        total = metadata(parts[0], readers[parts[0]], "split.").integer(
            "tensors.count", len(found), least=0
        )
        if total != len(found):
            raise ValueError(
                f"{parts[0]}: split.tensors.count is {total}, the {len(parts)} files hold {len(found)}"
            )
    return found


def split_parts(path: Path) -> list[Path]:
    """The files of a split model by the name of one of them, in order; ``[path]`` for any other
    name."""
    match = _PART.fullmatch(path.name)
    if match is None or not 1 <= int(match[2]) <= int(match[3]):
        return [path]
    return [
        path.with_name(f"{match[1]}-{i:05d}-of-{match[3]}{match[4]}")
        for i in range(1, int(match[3]) + 1)
    ]


def open_gguf(path: Path) -> gguf.GGUFReader:
    """The header of one file.

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
    except (IndexError, KeyError, OverflowError, MemoryError, TypeError) as error:
        raise ValueError(f"{path} is cut short or damaged: its metadata cannot be read") from error


def field_value(reader: gguf.GGUFReader, key: str, default: Any = None) -> Any:
    """The value of a metadata key as plain Python, or ``default``."""
    field = reader.get_field(key)
    return default if field is None else field.contents()


def metadata(path: Path, reader: gguf.GGUFReader, prefix: str, only: str = "") -> Fields:
    """The keys that begin with ``prefix`` (and end with ``only``), without it."""
    names = [key for key in reader.fields if key.startswith(prefix) and key.endswith(only)]
    return Fields(
        {key.removeprefix(prefix): field_value(reader, key) for key in names}, path, prefix
    )


@cache
def can_dequantize(kind: gguf.GGMLQuantizationType) -> bool:
    """True if the gguf package can turn this type into float32. Tried on one block of zeros."""
    if kind in (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16):
        return True
    try:
        gguf.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True
