"""Between paged KV and the flat bytes of a slot: gather, scatter, checksum.

Slab [N blocks, L, 2, K, S, D] (one block is one run of bytes). Wire layout of tokens [low, high): the blocks they
touch, one after the other, each as [L, 2, K, t, D] with t = its tokens in the range. Whole blocks with consecutive ids
are thus one plain copy together (a pool hands out neighbours where it can); a part of a block is one strided copy.
Both sides of a wire have the same layout, the target's: a sender whose slab differs converts (reshard.py).

A worker of several tensor-parallel ranks has a slab for each, with some of the heads (`head_ranges`), and rank 0 maps
them all. On the wire there are all heads, so nobody asks how many ranks the other side has; it costs a strided copy per
rank instead of a plain one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import xxhash
from torch import Tensor

from contracts.blocks import KvLayout, head_ranges
from contracts.errors import ConfigError


class Pages:
    """The slab, or those of all ranks, seen as bytes. Who may touch which block is the caller's business."""

    def __init__(self, slabs: Tensor | Sequence[Tensor], layout: KvLayout) -> None:
        """`layout`: with the heads of all slabs. Raises ConfigError if a slab does not have it, or not in one piece."""
        given = [slabs] if isinstance(slabs, Tensor) else list(slabs)
        held = head_ranges(layout.num_kv_heads, len(given))
        for slab, heads in zip(given, held, strict=True):
            shape = (layout.num_layers, 2, len(heads), layout.block_size, layout.head_dim)
            dtype = str(slab.dtype).removeprefix("torch.")
            if slab.dim() != 6 or tuple(slab.shape[1:]) != shape or dtype != layout.dtype:
                raise ConfigError(
                    f"kv slab: expected [N, {shape}] {layout.dtype} but got {tuple(slab.shape)} {dtype}"
                )
            if not slab.is_contiguous() or len(slab) != len(given[0]):
                raise ConfigError(f"kv slab: expected a contiguous tensor of {len(given[0])} blocks")
        self._dtype = moved_as(layout.dtype)
        self._slabs = [
            (slab.view(self._dtype), slice(heads.start, heads.stop))
            for slab, heads in zip(given, held, strict=True)
        ]
        self._is_host = given[0].device.type == "cpu"
        self._raw = [(self._as_copied(slab.view(torch.uint8)), heads) for slab, heads in self._slabs]
        # Of one slab, whole blocks need no look at their inside.
        flat = self._raw[0][0].reshape(-1)
        self._flat = flat if len(given) == 1 else None
        self._view = memoryview(flat) if len(given) == 1 and self._is_host else None
        self._token_bytes = layout.bytes_per_token
        self._stream = torch.cuda.Stream(given[0].device) if given[0].is_cuda else None  # type: ignore[no-untyped-call]
        self.layout = layout
        self.num_blocks = len(given[0])

    def num_bytes(self, low: int, high: int) -> int:
        return (high - low) * self._token_bytes

    def in_place(self, block_ids: Sequence[int], low: int, high: int) -> memoryview | None:
        """What `gather` would copy, if it lies in memory in one piece just so: neighbouring whole blocks."""
        runs = self.runs(block_ids, low, high)
        return runs[0] if runs is not None and len(runs) == 1 else None

    def runs(self, block_ids: Sequence[int], low: int, high: int) -> list[memoryview] | None:
        """The memory of whole blocks, neighbours together, in the wire's order. None unless it can be copied as it is:
        the host's, of one slab, and no part of a block."""
        if self._view is None:
            return None
        found = []
        for block, first, last, _offset, size in self._pieces(block_ids, low, high):
            if (last - first) % self.layout.block_size:
                return None
            start = block * self.layout.block_size * self._token_bytes
            found.append(self._view[start : start + size])
        return found

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Copies of a GPU's blocks run on a stream of their own, and are over at the end.

        NOTE: on the engine's stream they would wait for its step, and the caller, an event loop, with them. What is
        copied is complete before anybody is told of it (engine.runner), so there is nothing else to wait for.
        """
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield
        self._stream.synchronize()

    def gather(self, block_ids: Sequence[int], low: int, high: int, out: Tensor) -> None:
        """Tokens [low, high) of the sequence held in `block_ids` -> the first bytes of `out` (uint8)."""
        with self.aside():
            for held, wire in self._pairs(block_ids, low, high, out):
                wire[...] = held

    def scatter(self, block_ids: Sequence[int], low: int, high: int, data: Tensor) -> None:
        """The inverse: the first bytes of `data` (uint8) -> tokens [low, high). Nothing else is written."""
        with self.aside():
            for held, wire in self._pairs(block_ids, low, high, data):
                held[...] = wire

    def blocks(self, block_ids: Sequence[int]) -> Tensor:
        """[len(block_ids), L, 2, K, S, D], a copy. To be asked within `aside`."""
        ids = list(block_ids)
        if len(self._slabs) == 1:
            return self._slabs[0][0][ids]
        shape = (len(ids), self.layout.num_layers, 2, self.layout.num_kv_heads)
        whole = torch.empty(
            (*shape, self.layout.block_size, self.layout.head_dim), dtype=self._slabs[0][0].dtype
        )
        for slab, heads in self._slabs:
            whole[:, :, :, heads] = slab[ids]
        return whole

    def _as_copied(self, data: Tensor) -> Any:
        """`data` (uint8) as it is copied best. NOTE: between the host's memory by numpy, whose copy of a run is the C
        library's and faster than torch's, and whose views cost a fraction."""
        return data.numpy() if self._is_host else data

    def _pairs(
        self, block_ids: Sequence[int], low: int, high: int, data: Tensor
    ) -> Iterator[tuple[Any, Any]]:
        """(a piece of a slab, its place in `data`), of the same shape."""
        layout, flat = self.layout, self._as_copied(data)
        size = layout.block_size
        row = layout.num_layers, 2, layout.num_kv_heads
        for block, first, last, offset, num_bytes in self._pieces(block_ids, low, high):
            piece = flat[offset : offset + num_bytes]
            count, rest = divmod(last - first, size)
            if count and self._flat is not None:
                begin = block * size * self._token_bytes
                yield self._flat[begin : begin + num_bytes], piece
                continue
            wire = piece.reshape(max(count, 1), *row, rest or size, -1)
            for slab, heads in self._raw:
                held = slab[block : block + max(count, 1), :, :, :, first : first + (rest or size)]
                yield held, wire[:, :, :, heads]

    def _pieces(
        self, block_ids: Sequence[int], low: int, high: int
    ) -> Iterator[tuple[int, int, int, int, int]]:
        """(block id, first, last token in it, byte offset, byte size) of each part of a block, or run of whole ones.

        A run has the first of consecutive block ids, and `last` beyond the first block's end.
        """
        size, offset = self.layout.block_size, 0
        index, end = low // size, -(-high // size)
        while index < end:
            first, last = max(low - index * size, 0), min(high - index * size, size)
            count = 1
            if last - first == size:
                most = high // size - index  # whole blocks from here on
                while count < most and block_ids[index + count] == block_ids[index] + count:
                    count += 1
                last = count * size
            num_bytes = (last - first) * self._token_bytes
            yield block_ids[index], first, last, offset, num_bytes
            offset += num_bytes
            index += count


def moved_as(dtype: str) -> torch.dtype:
    """What numbers of a layout's dtype are copied as: float8, which torch hardly computes with, as bytes."""
    found: torch.dtype = getattr(torch, dtype)
    return torch.uint8 if found.itemsize == 1 else found


class Checksum:
    """Of bytes that come in parts: in the end what `checksum` is of all of them."""

    def __init__(self) -> None:
        self._digest = xxhash.xxh3_64()

    def add(self, part: memoryview) -> None:
        self._digest.update(part)

    @property
    def value(self) -> int:
        return self._digest.intdigest() or 1


def checksum(data: Tensor | memoryview) -> int:
    """xxh3 of `data` (uint8, contiguous, on the CPU), 64 bits. Never 0, which on the wire means: not computed."""
    return xxhash.xxh3_64_intdigest(data.numpy().data if isinstance(data, Tensor) else data) or 1
