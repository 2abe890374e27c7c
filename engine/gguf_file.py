"""The header of a GGUF file (versions 2 and 3, little-endian): its fields, and where each tensor lies.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. `gguf.GGUFReader` reads the same, but builds several
array objects per string and so needs seconds for a vocabulary, in each worker, at every start.
Only the standard library is needed here.

A model may be cut into files `name-00001-of-00003.gguf` (llama.cpp's gguf-split): the first has all fields; each has
some of the tensors and says which part it is (`split.no`, from 0), of how many (`split.count`), and how many tensors
there are in all (`split.tensors.count`).
"""

from __future__ import annotations

import mmap
import re
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from contracts.errors import ConfigError
from engine.spec_fields import Fields

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_DIMS = 4
# Many headers name only the end of a document; how a turn of a chat ends is told by a spelling alone.
_END_PIECES = frozenset(
    ("<|endoftext|>", "<|im_end|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>")
)
_USUAL_PIECES = {"bos": "<s>", "eos": "</s>", "unknown": "<unk>"}
_SPLIT_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """`shape` is outermost first (the file stores it innermost first); `kind` is the number of the quantization;
    `offset` counts bytes from the start of the file, which is number `part` of the model's."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int
    part: int = 0


@dataclass(frozen=True, slots=True)
class GgufFile:
    """`fields` holds every key of the first header as a plain Python value; arrays are lists. `paths`: all parts."""

    paths: tuple[Path, ...]
    fields: dict[str, Any]
    tensors: dict[str, GgufTensor]


def read_gguf(path: Path) -> GgufFile:
    """Read the header of `path`, and those of the other parts if it is the first of several.

    Raises ConfigError if a file is no GGUF file, of another version, or damaged, if it is a later part, and if parts
    are missing or do not belong together.
    """
    first = _read_header(path)
    number, count = _split_of(first)
    if count <= 1:
        return first
    paths = _part_paths(path, count)
    if number != 0:
        raise ConfigError(f"split GGUF: expected the first part, {paths[0].name}, but got {path.name}")
    tensors: dict[str, GgufTensor] = {}
    for index, part in enumerate(paths):
        if not part.is_file():
            raise ConfigError(f"split GGUF: expected {count} parts but {part} is missing")
        file = first if index == 0 else _read_header(part)
        if _split_of(file) != (index, count):
            raise ConfigError(
                f"split GGUF: expected {part} to be part {index} (from 0) of {count} but it says {_split_of(file)}"
            )
        if twice := tensors.keys() & file.tensors.keys():
            raise ConfigError(f"split GGUF: expected each tensor once but {part} has {min(twice)} again")
        tensors |= {name: replace(tensor, part=index) for name, tensor in file.tensors.items()}
    expected = first.fields.get("split.tensors.count", len(tensors))
    if len(tensors) != expected:
        raise ConfigError(f"split GGUF: expected {expected} tensors in all parts but got {len(tensors)}")
    return GgufFile(paths, first.fields, tensors)


def model_stem(path: Path) -> str:
    """The name of a GGUF file without its ending, nor that it is one of several."""
    named = _SPLIT_NAME.fullmatch(path.name)
    return named[1] if named else path.stem


def named_token_ids(fields: dict[str, Any], role: str) -> tuple[int, ...]:
    """The tokens that the header names as its `bos`, `eos`, `unknown` and so on.

    Without a name, in a SentencePiece vocabulary, the one that is spelt as usual. An id that no piece has is none: some
    writers have -1 there, unsigned. Raises ConfigError for what is no id.
    """
    tokenizer = Fields(fields, "GGUF header", "tokenizer.ggml.")
    pieces, named = tokenizer.items("tokens"), tokenizer.token_ids(f"{role}_token_id")
    usual = _USUAL_PIECES.get(role)
    if not named and usual in pieces and fields.get("tokenizer.ggml.model") == "llama":
        return (pieces.index(usual),)
    return tuple(i for i in named if not pieces or 0 <= i < len(pieces))


def end_token_ids(fields: dict[str, Any]) -> tuple[int, ...]:
    """The tokens that end an output: those that the header names, then those that are spelt like one, as in llama.cpp.

    Raises ConfigError for ids that are none.
    """
    named = [i for role in ("eos", "eot", "eom") for i in named_token_ids(fields, role)]
    pieces = Fields(fields, "GGUF header", "tokenizer.ggml.").items("tokens")
    spelt = [i for i, piece in enumerate(pieces) if piece in _END_PIECES]
    return tuple(dict.fromkeys([*named, *spelt]))


def _split_of(file: GgufFile) -> tuple[object, int]:
    """(which part, of how many); (0, 1): the only one."""
    count = file.fields.get("split.count", 1)
    if not isinstance(count, int):
        raise ConfigError(f"{file.paths[0]}: expected split.count to be a number but got {count!r}")
    return file.fields.get("split.no", 0), count


def _part_paths(path: Path, count: int) -> tuple[Path, ...]:
    named = _SPLIT_NAME.fullmatch(path.name)
    if named is None or int(named[3]) != count:
        raise ConfigError(
            f"split GGUF: expected a name like model-00001-of-{count:05}.gguf, by which the other parts are found, "
            f"but got {path.name}"
        )
    return tuple(path.with_name(f"{named[1]}-{i:05}-of-{count:05}.gguf") for i in range(1, count + 1))


def _read_header(path: Path) -> GgufFile:
    try:
        with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as buffer:
            return _parse(path, _Cursor(buffer))
    except (OSError, struct.error, ValueError, OverflowError) as exc:
        raise ConfigError(f"expected a readable GGUF file but got {path}: {exc}") from exc


def _parse(path: Path, cursor: _Cursor) -> GgufFile:
    magic = cursor.take(4)
    if magic != _MAGIC:
        raise ConfigError(f"{path}: expected a GGUF file but it starts with {magic!r}")
    version = cursor.scalar("I")
    if version.to_bytes(4, "big") in [known.to_bytes(4, "little") for known in _VERSIONS]:
        raise ConfigError(f"{path}: expected a little-endian GGUF file but it is for big-endian machines")
    if version not in _VERSIONS:
        raise ConfigError(f"{path}: expected GGUF version {_VERSIONS} but got {version}")
    num_tensors, num_fields = cursor.scalar("Q"), cursor.scalar("Q")
    fields = dict(cursor.pair() for _ in range(num_fields))
    tensors = [_tensor(cursor) for _ in range(num_tensors)]
    alignment = fields.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise ConfigError(f"{path}: expected general.alignment >= 1 but got {alignment!r}")
    start = -(-cursor.position // alignment) * alignment
    placed = {t.name: GgufTensor(t.name, t.shape, t.kind, start + t.offset) for t in tensors}
    return GgufFile((path,), fields, placed)


def _tensor(cursor: _Cursor) -> GgufTensor:
    name, num_dims = cursor.string(), cursor.scalar("I")
    if num_dims > _MAX_DIMS:
        raise ValueError(f"tensor {name}: expected at most {_MAX_DIMS} dimensions but got {num_dims}")
    sizes = [cursor.scalar("Q") for _ in range(num_dims)]
    return GgufTensor(name, tuple(reversed(sizes)), kind=cursor.scalar("I"), offset=cursor.scalar("Q"))


class _Cursor:
    """Reads values one after the other; running past the end is a struct.error."""

    def __init__(self, buffer: mmap.mmap) -> None:
        self._buffer = buffer
        self.position = 0

    def take(self, num_bytes: int) -> bytes:
        left = len(self._buffer) - self.position
        if num_bytes > left:
            raise struct.error(f"{num_bytes} bytes announced at {self.position} but {left} are left")
        taken = self._buffer[self.position : self.position + num_bytes]
        self.position += num_bytes
        return taken

    def scalar(self, code: str) -> Any:
        layout = "<" + code
        (value,) = struct.unpack_from(layout, self._buffer, self.position)
        self.position += struct.calcsize(layout)
        return value

    def string(self) -> str:
        return self.take(self.scalar("Q")).decode("utf-8")

    def pair(self) -> tuple[str, Any]:
        return self.string(), self._value(self.scalar("I"))

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array()
        if kind not in _SCALARS:
            raise ValueError(f"expected a value type of the format but got {kind}")
        return self.scalar(_SCALARS[kind])

    def _array(self) -> list[Any]:
        kind, length = self.scalar("I"), self.scalar("Q")
        if kind == _STRING:
            return self._strings(length)
        if kind not in _SCALARS:
            return [self._value(kind) for _ in range(length)]
        layout = f"<{length}{_SCALARS[kind]}"
        return list(struct.unpack(layout, self.take(struct.calcsize(layout))))

    def _strings(self, length: int) -> list[Any]:
        """A vocabulary and its merges are 100,000 strings, so this is `string` without its calls."""
        buffer, begin, size_of = self._buffer, self.position, struct.Struct("<Q").unpack_from
        num_bytes, found = len(buffer), []
        for _ in range(length):
            (size,) = size_of(buffer, begin)
            end = begin + 8 + size
            if end > num_bytes:
                raise struct.error(
                    f"{size} bytes announced at {begin + 8} but {num_bytes - begin - 8} are left"
                )
            found.append(buffer[begin + 8 : end].decode("utf-8"))
            begin = end
        self.position = begin
        return found
