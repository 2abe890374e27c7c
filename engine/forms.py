"""What a checkpoint offers, and in which form each of its matrices is kept."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from engine.parallel.shards import Part, Shard
from engine.quantization import GROUP, BlockKind, Quantization, row_bytes
from engine.spec import ModelSpec
from engine.tensor_names import fused_with

ROUNDING: tuple[Quantization, ...] = ("int8", "int4")
"""Those that make less of a matrix of numbers."""
_ROUTER = ".mlp.gate.weight"
_VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")


class TensorSource(Protocol):
    """A checkpoint under Hugging Face tensor names."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def files(self) -> Sequence[Path]: ...

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]: ...

    def file_of(self, name: str) -> int:
        """Which of the files holds the tensor; any numbers that tell them apart."""

    def read_into(self, name: str, target: Tensor, part: Part) -> None: ...

    def is_quantized(self, name: str) -> bool:
        """Whether the file has less than 16 bits for a number of it."""

    def block_kind(self, name: str) -> BlockKind | None:
        """How the file holds the matrix, if it does so in blocks that need not be expanded."""

    def read_blocks(self, name: str, target: Tensor, part: Part) -> None:
        """The blocks of such a matrix [out, in], as they are, into target [out, in / 32 * block_bytes] uint8;
        columns of `part` are whole blocks."""


class Forms:
    """In which form each matrix is kept: a kind of block, or None for numbers.

    Blocks that are kept are never rounded again. What is rounded here, when asked: every other matrix whose rows are
    whole blocks, but no router; the embedding and the head to 8 bits even if 4 are asked for, as GGUF files do.
    """

    def __init__(self, source: TensorSource, quantization: Quantization, shard: Shard) -> None:
        self._source = source
        self._quantization = quantization
        self.parts = shard.tensors(source.spec)

    def of(self, names: Sequence[str]) -> BlockKind | None:
        """The form of matrices that are kept as one."""
        shape = self.parts[names[0]].shape
        if self._quantization == "none" or len(shape) != 2 or names[0].endswith(_ROUTER) or shape[1] % GROUP:
            return None
        stored = {self._source.block_kind(name) for name in names}
        if stored != {None}:
            return stored.pop() if len(stored) == 1 else None
        if self._quantization == "auto":
            return None
        is_whole = self._quantization == "int8" or names[0] in _VOCABULARY
        return BlockKind.Q8_0 if is_whole else BlockKind.Q4_1

    def rounded_again(self) -> list[str]:
        """What is quantized in the file, in blocks that are not kept, and rounded to others: it loses more by it."""
        stored = {
            name: self._source.block_kind(name) for name in self.parts if self._source.is_quantized(name)
        }
        return [name for name, kind in stored.items() if self.of(fused_with(name)) not in (None, kind)]

    def num_bytes(self, name: str, dtype: torch.dtype) -> int:
        """What the tensor takes in memory."""
        shape = self.parts[name].shape
        kind = self.of(fused_with(name))
        if kind is not None:
            return shape[0] * row_bytes(kind, shape[1])
        return torch.Size(shape).numel() * dtype.itemsize

    def total(self, dtype: torch.dtype) -> int:
        """What all of them take."""
        return sum(self.num_bytes(name, dtype) for name in self.parts)
