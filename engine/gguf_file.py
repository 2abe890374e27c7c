"""The header of a GGUF file (versions 2 and 3, little-endian) and views of its tensors' bytes.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. `gguf.GGUFReader` reads the same, but builds several
array objects per string and so needs seconds for a vocabulary; each worker would pay that at every start.
The file stays memory-mapped for as long as a tensor's `data` is held.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from contracts.errors import ConfigError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_SCALARS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9
_MAX_DIMS = 4


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """`shape` is outermost first (GGUF stores it innermost first); `data` [num_bytes] uint8, read-only."""

    name: str
    shape: tuple[int, ...]
    quantization: GGMLQuantizationType
    data: npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class GgufFile:
    """`fields` holds every key of the header as a plain Python value; arrays are lists."""

    path: Path
    fields: dict[str, Any]
    tensors: dict[str, GgufTensor]


def read_gguf(path: Path) -> GgufFile:
    """Map `path` and read its header. Raises ConfigError if it is not a whole GGUF file this reader knows."""
    try:
        with path.open("rb") as stream:
            buffer = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as exc:
        raise ConfigError(f"expected a GGUF file but could not read {path}: {exc}") from exc
    try:
        return _parse(path, _Cursor(buffer))
    except (struct.error, ValueError, OverflowError) as exc:
        raise ConfigError(f"expected a whole GGUF file but {path} is damaged: {exc}") from exc


def _parse(path: Path, cursor: _Cursor) -> GgufFile:
    magic = cursor.take(4)
    if magic != _MAGIC:
        raise ConfigError(f"{path}: expected it to begin with {_MAGIC!r} but got {magic!r}")
    version = cursor.scalar("<I")
    if version not in _VERSIONS:
        raise ConfigError(f"{path}: expected GGUF version {_VERSIONS} but got {version}")
    num_tensors, num_fields = cursor.scalar("<Q"), cursor.scalar("<Q")
    fields: dict[str, Any] = {}
    for _ in range(num_fields):
        name = cursor.string()
        fields[name] = cursor.value(cursor.scalar("<I"))
    infos = [_tensor_info(cursor) for _ in range(num_tensors)]
    alignment = fields.get("general.alignment", _DEFAULT_ALIGNMENT)
    start = -(-cursor.position // alignment) * alignment
    tensors = {name: _tensor(cursor, start + offset, name, *rest) for name, offset, *rest in infos}
    return GgufFile(path, fields, tensors)


def _tensor_info(cursor: _Cursor) -> tuple[str, int, tuple[int, ...], int]:
    name = cursor.string()
    num_dims = cursor.scalar("<I")
    if num_dims > _MAX_DIMS:
        raise ValueError(f"tensor {name}: expected at most {_MAX_DIMS} dimensions but got {num_dims}")
    sizes = [cursor.scalar("<Q") for _ in range(num_dims)]
    kind = cursor.scalar("<I")
    return name, cursor.scalar("<Q"), tuple(reversed(sizes)), kind


def _tensor(cursor: _Cursor, offset: int, name: str, shape: tuple[int, ...], kind: int) -> GgufTensor:
    quantization = GGMLQuantizationType(kind)
    block_elements, block_bytes = GGML_QUANT_SIZES[quantization]
    num_bytes = math.prod(shape) // block_elements * block_bytes
    data = np.frombuffer(cursor.buffer, dtype=np.uint8, count=num_bytes, offset=offset)
    return GgufTensor(name, shape, quantization, data)


class _Cursor:
    """Reads values one after the other; running past the end is a struct.error."""

    def __init__(self, buffer: mmap.mmap) -> None:
        self.buffer = buffer
        self.position = 0

    def take(self, num_bytes: int) -> bytes:
        if num_bytes > len(self.buffer) - self.position:
            raise struct.error(f"{num_bytes} bytes asked for at {self.position} of {len(self.buffer)}")
        taken = self.buffer[self.position : self.position + num_bytes]
        self.position += num_bytes
        return taken

    def scalar(self, layout: str) -> Any:
        (value,) = struct.unpack_from(layout, self.buffer, self.position)
        self.position += struct.calcsize(layout)
        return value

    def string(self) -> str:
        # Vocabularies may hold byte pieces that are no UTF-8 on their own.
        return self.take(self.scalar("<Q")).decode("utf-8", errors="surrogateescape")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array()
        if kind not in _SCALARS:
            raise ValueError(f"expected a known value type but got {kind}")
        return self.scalar(_SCALARS[kind])

    def _array(self) -> list[Any]:
        kind, length = self.scalar("<I"), self.scalar("<Q")
        if kind not in _SCALARS:
            return [self.value(kind) for _ in range(length)]
        packed = self.take(struct.calcsize(_SCALARS[kind]) * length)
        return list(np.frombuffer(packed, dtype=np.dtype(_SCALARS[kind])).tolist())
