"""KV as 8-bit floats on the wire, for pairs whose network is slower than their arithmetic.

    slab ──gather, in the target's layout──► [blocks, L, 2, K, t, D] ──÷ scale, round──► scales | e4m3 bytes
    slab ◄──scatter────────────────────────── the same ◄──× scale──────────────────────── on the other side

One scale per block (or part of one), layer, side and head: its largest magnitude becomes 448, the largest of e4m3
(Micikevicius et al., arXiv:2209.05433). What is lost: of each number up to a sixteenth of itself, or 2**-10 of the
scale if that is more. A half of bfloat16's bytes, a quarter of float32's.

Both ends of a connection say so in their Hello (transfer.wire_dtype), or it is not done. Only what is handed over is
rounded; what a worker computes itself is not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from contracts.blocks import KvLayout
from contracts.errors import ConfigError
from contracts.messages import Hello

FP8 = "fp8"
LARGEST = 448.0
_SCALE_BYTES = 4


class Blocks(Protocol):
    """Pages, or Reshard at a sender whose peer has another layout."""

    layout: KvLayout

    def num_bytes(self, low: int, high: int) -> int: ...

    def gather(self, block_ids: Sequence[int], low: int, high: int, out: Tensor) -> None: ...


class Target(Blocks, Protocol):
    """Pages."""

    def runs(self, block_ids: Sequence[int], low: int, high: int) -> list[memoryview] | None: ...

    def scatter(self, block_ids: Sequence[int], low: int, high: int, data: Tensor) -> None: ...


def is_agreed(ours: Hello, theirs: Hello) -> bool:
    """Whether KV between these two is rounded."""
    return ours.wire_dtype == theirs.wire_dtype == FP8


def check_layout(layout: KvLayout) -> None:
    """Raises ConfigError if the rounded form would not be the smaller one, so that it may not fit a slot."""
    if layout.head_dim < _SCALE_BYTES:
        raise ConfigError(
            f"transfer.wire_dtype: fp8 needs head_dim >= {_SCALE_BYTES} but got {layout.head_dim}"
        )


class _Fp8:
    """Wire form of tokens [low, high): the scales of each block they touch, float32 [L, 2, K] each; then, block after
    block, [L, 2, K, t, D] e4m3."""

    def __init__(self, layout: KvLayout) -> None:
        """Raises ConfigError, see `check_layout`."""
        check_layout(layout)
        self.layout = layout
        self._dtype: torch.dtype = getattr(torch, layout.dtype)
        self._num_scales = 2 * layout.num_layers * layout.num_kv_heads

    def num_bytes(self, low: int, high: int) -> int:
        return self._scale_bytes(low, high) + (high - low) * self._num_scales * self.layout.head_dim

    def in_place(self, block_ids: Sequence[int], low: int, high: int) -> memoryview | None:
        """Nothing lies anywhere as it travels."""
        return None

    def runs(self, block_ids: Sequence[int], low: int, high: int) -> list[memoryview] | None:
        """The same."""
        return None

    def _scale_bytes(self, low: int, high: int) -> int:
        size = self.layout.block_size
        return (-(-high // size) - low // size) * self._num_scales * _SCALE_BYTES

    def _parts(
        self, low: int, high: int, plain: Tensor, wire: Tensor
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """(values [n, L·2·K, t·D], scales [n, L·2·K, 1], e4m3 bytes [n, L·2·K, t·D]) of a first part of a block, of all
        whole blocks, of a last part; those that there are."""
        size, rows = self.layout.block_size, self._num_scales
        values = plain.view(self._dtype)
        begin = self._scale_bytes(low, high)
        scales, small = wire[:begin].view(torch.float32).view(-1, rows, 1), wire[begin:]
        first, position, block = low, 0, 0
        while first < high:
            last = min((first // size + 1) * size, high)
            count = 1
            if last - first == size:
                count = (high - first) // size
                last = first + count * size
            length = (last - first) * rows * self.layout.head_dim
            shape = (count, rows, -1)
            place = slice(position, position + length)
            yield values[place].view(shape), scales[block : block + count], small[place].view(shape)
            first, position, block = last, position + length, block + count


class Fp8Source(_Fp8):
    """Stands in for Pages, or Reshard, at a sender."""

    def __init__(self, inner: Blocks) -> None:
        super().__init__(inner.layout)
        self._inner = inner

    def gather(self, block_ids: Sequence[int], low: int, high: int, out: Tensor) -> None:
        """Tokens [low, high) of the sequence in `block_ids` -> the first bytes of `out` (uint8), rounded."""
        plain = torch.empty(self._inner.num_bytes(low, high), dtype=torch.uint8)
        self._inner.gather(block_ids, low, high, plain)
        for values, scales, small in self._parts(low, high, plain, out[: self.num_bytes(low, high)]):
            wide = values.float()
            scale = wide.abs().amax(-1, keepdim=True) / LARGEST
            scale[scale == 0] = 1.0
            scales.copy_(scale)
            small.copy_((wide / scale).to(torch.float8_e4m3fn).view(torch.uint8))


class Fp8Target(_Fp8):
    """Stands in for Pages at a receiver."""

    def __init__(self, inner: Target) -> None:
        super().__init__(inner.layout)
        self._inner = inner

    def scatter(self, block_ids: Sequence[int], low: int, high: int, data: Tensor) -> None:
        """The first bytes of `data` (uint8) -> tokens [low, high). Nothing else is written."""
        plain = torch.empty(self._inner.num_bytes(low, high), dtype=torch.uint8)
        for values, scales, small in self._parts(low, high, plain, data[: self.num_bytes(low, high)]):
            values.copy_(small.contiguous().view(torch.float8_e4m3fn).float() * scales)
        self._inner.scatter(block_ids, low, high, plain)
