"""Between paged KV and the flat bytes of a slot: gather, scatter, checksum.

Slab [N blocks, L, 2, K, S, D] (one block is one run of bytes). Wire layout of tokens [low, high): the blocks they
touch, one after the other, each as [L, 2, K, t, D] with t = its tokens in the range. Whole blocks with consecutive ids
are thus one plain copy together (a pool hands out neighbours where it can); a part of a block is one strided copy.
Both sides of a wire have the same layout, the target's: a sender whose slab differs converts (reshard.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import xxhash
from torch import Tensor

from contracts.blocks import KvLayout
from contracts.errors import ConfigError


class Pages:
    """`slab` seen as bytes. Who may touch which block is the caller's business."""

    def __init__(self, slab: Tensor, layout: KvLayout) -> None:
        """Raises ConfigError if `slab` does not have `layout`, or is not contiguous."""
        shape = (layout.num_layers, 2, layout.num_kv_heads, layout.block_size, layout.head_dim)
        dtype = str(slab.dtype).removeprefix("torch.")
        if slab.dim() != 6 or tuple(slab.shape[1:]) != shape or dtype != layout.dtype:
            raise ConfigError(
                f"kv slab: expected [N, {shape}] {layout.dtype} but got {tuple(slab.shape)} {dtype}"
            )
        if not slab.is_contiguous():
            raise ConfigError("kv slab: expected a contiguous tensor")
        self.slab = slab
        self._bytes = slab.view(-1).view(torch.uint8)
        self.layout = layout
        self.num_blocks = slab.shape[0]

    def num_bytes(self, low: int, high: int) -> int:
        return (high - low) * self.layout.bytes_per_token

    def gather(self, block_ids: Sequence[int], low: int, high: int, out: Tensor) -> None:
        """Tokens [low, high) of the sequence held in `block_ids` -> the first bytes of `out` (uint8)."""
        for block, first, last, offset, size in self._pieces(block_ids, low, high):
            piece = out[offset : offset + size]
            if last - first >= self.layout.block_size:
                piece.copy_(self._run(block, size))
            else:
                source = self.slab[block, :, :, :, first:last]
                piece.view(self.slab.dtype).view(source.shape).copy_(source)

    def scatter(self, block_ids: Sequence[int], low: int, high: int, data: Tensor) -> None:
        """The inverse: the first bytes of `data` (uint8) -> tokens [low, high). Nothing else is written."""
        for block, first, last, offset, size in self._pieces(block_ids, low, high):
            piece = data[offset : offset + size]
            if last - first >= self.layout.block_size:
                self._run(block, size).copy_(piece)
            else:
                target = self.slab[block, :, :, :, first:last]
                target.copy_(piece.view(self.slab.dtype).view(target.shape))

    def _run(self, block: int, num_bytes: int) -> Tensor:
        """Whole blocks from `block` on, as they lie in the slab."""
        begin = block * self.layout.bytes_per_block
        return self._bytes[begin : begin + num_bytes]

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
            num_bytes = (last - first) * self.layout.bytes_per_token
            yield block_ids[index], first, last, offset, num_bytes
            offset += num_bytes
            index += count


def checksum(data: Tensor) -> int:
    """xxh3 of `data` (uint8, contiguous, on the CPU), 64 bits. Never 0, which on the wire means: not computed."""
    return xxhash.xxh3_64_intdigest(data.numpy().data) or 1
