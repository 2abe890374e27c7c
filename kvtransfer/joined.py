"""The KV of a worker whose ranks keep their blocks to themselves, as one: what Pages is where all of it can be reached.

    gather    each rank: its heads of some blocks ──► its window ──┐
                                                                   ├──► all heads, in the order of the wire
              rank 0:    the same, into a window of its own ───────┘
    scatter   the same the other way

A window is host memory; a device copies to and from nothing else. As much is copied at a time as the smallest holds.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from contracts.blocks import KvLayout, head_ranges
from contracts.errors import ConfigError
from kvtransfer.pages import Pages, moved_as


class Holder(Protocol):
    """Some heads of every block. `window` (uint8) has them, as Pages does on the wire, after `begin_gather` and
    `finish`, and must have them before `begin_scatter`. What these raise, a handoff hears of."""

    window: Tensor

    def begin_gather(self, block_ids: Sequence[int], low: int, high: int) -> None: ...

    def begin_scatter(self, block_ids: Sequence[int], low: int, high: int) -> None: ...

    def finish(self) -> None: ...


class _Near:
    """Implements Holder for blocks of this process."""

    def __init__(self, pages: Pages, window: Tensor) -> None:
        self.window = window
        self._pages = pages

    def begin_gather(self, block_ids: Sequence[int], low: int, high: int) -> None:
        self._pages.gather(block_ids, low, high, self.window)

    def begin_scatter(self, block_ids: Sequence[int], low: int, high: int) -> None:
        self._pages.scatter(block_ids, low, high, self.window)

    def finish(self) -> None: ...


class JoinedPages:
    """Stands in for Pages. Any thread may call it; one copy runs at a time."""

    def __init__(self, mine: Tensor, others: Sequence[Holder], layout: KvLayout) -> None:
        """`mine`: rank 0's slab; `layout`: with the heads of all, of which each rank has its `head_ranges`.

        Raises ConfigError if `mine` is not of that layout, or if a window does not hold one block.
        """
        self.layout = layout
        self.num_blocks = len(mine)
        held = head_ranges(layout.num_kv_heads, 1 + len(others))
        parts = [replace(layout, num_kv_heads=len(heads)) for heads in held]
        num_blocks = [
            len(far.window) // part.bytes_per_block for far, part in zip(others, parts[1:], strict=True)
        ]
        self._num_at_once = min(num_blocks)
        if self._num_at_once < 1:
            raise ConfigError(f"kv window: expected room for a block in each but got {num_blocks}")
        window = torch.empty(self._num_at_once * parts[0].bytes_per_block, dtype=torch.uint8)
        self._holders: list[Holder] = [_Near(Pages(mine, parts[0]), window), *others]
        self._heads = [slice(heads.start, heads.stop) for heads in held]
        self._dtype = moved_as(layout.dtype)
        self._copying = threading.Lock()

    def num_bytes(self, low: int, high: int) -> int:
        return (high - low) * self.layout.bytes_per_token

    def in_place(self, block_ids: Sequence[int], low: int, high: int) -> memoryview | None:
        """All heads lie together nowhere."""
        return None

    def runs(self, block_ids: Sequence[int], low: int, high: int) -> list[memoryview] | None:
        """The same."""
        return None

    def aside(self) -> AbstractContextManager[None]:
        """`blocks` are the host's already."""
        return nullcontext()

    def gather(self, block_ids: Sequence[int], low: int, high: int, out: Tensor) -> None:
        """As Pages.gather. Raises what a holder does."""
        for ids, first, last, wire in self._portions(block_ids, low, high, out):
            with self._copying:
                with ExitStack() as ends:
                    for holder in reversed(self._holders):  # rank 0 copies while the others do
                        holder.begin_gather(ids, first, last)
                        ends.callback(holder.finish)
                for place, held in self._pairs(first, last, wire):
                    place[...] = held

    def scatter(self, block_ids: Sequence[int], low: int, high: int, data: Tensor) -> None:
        """As Pages.scatter. Raises what a holder does."""
        for ids, first, last, wire in self._portions(block_ids, low, high, data):
            with self._copying:
                for place, held in self._pairs(first, last, wire):
                    held[...] = place
                with ExitStack() as ends:
                    for holder in reversed(self._holders):
                        holder.begin_scatter(ids, first, last)
                        ends.callback(holder.finish)

    def blocks(self, block_ids: Sequence[int]) -> Tensor:
        """[len(block_ids), L, 2, K, S, D], a copy."""
        layout, num_tokens = self.layout, len(block_ids) * self.layout.block_size
        out = torch.empty(self.num_bytes(0, num_tokens), dtype=torch.uint8)
        self.gather(block_ids, 0, num_tokens, out)
        shape = (layout.num_layers, 2, layout.num_kv_heads, layout.block_size, layout.head_dim)
        return out.view(self._dtype).view(-1, *shape)

    def _portions(
        self, block_ids: Sequence[int], low: int, high: int, data: Tensor
    ) -> Iterator[tuple[Sequence[int], int, int, Tensor]]:
        """(block ids, [first, last) counted from the first of them, their bytes of `data`): as much as windows hold."""
        size, position = self.layout.block_size, low
        while position < high:
            begin = position // size * size
            last = min(begin + self._num_at_once * size, high)
            ids = block_ids[begin // size : -(-last // size)]
            place = slice(self.num_bytes(low, position), self.num_bytes(low, last))
            yield ids, position - begin, last - begin, data[place]
            position = last

    def _pairs(self, low: int, high: int, wire: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """(a rank's heads in `wire`, the same in its window): first part of a block, all whole blocks, last part."""
        size, position, whole = self.layout.block_size, low, slice(0, self.layout.num_kv_heads)
        while position < high:
            last = min((position // size + 1) * size, high)
            length = last - position
            if length == size:
                last = high // size * size
            span = slice(position - low, last - low)
            numbers = self._numbers(wire, span, length, whole)
            for heads, holder in zip(self._heads, self._holders, strict=True):
                yield numbers[:, :, :, heads], self._numbers(holder.window, span, length, heads)
            position = last

    def _numbers(self, data: Tensor, span: slice, length: int, heads: slice) -> Tensor:
        """Tokens `span` of `heads` in wire form, in parts of `length`: [parts, L, 2, heads, length, D]."""
        layout = replace(self.layout, num_kv_heads=heads.stop - heads.start)
        row = (layout.num_layers, 2, layout.num_kv_heads, length, layout.head_dim)
        place = slice(span.start * layout.bytes_per_token, span.stop * layout.bytes_per_token)
        return data[place].view(self._dtype).view(-1, *row)


AnyPages = Pages | JoinedPages


def pages_of(slabs: Tensor | Sequence[Tensor | Holder], layout: KvLayout) -> AnyPages:
    """`slabs`: one, or of each rank in their order its slab; or rank 0's, and who holds the others'.

    Raises ConfigError if they are not of `layout`.
    """
    if isinstance(slabs, Tensor):
        return Pages(slabs, layout)
    reached = [slab for slab in slabs if isinstance(slab, Tensor)]
    far = [slab for slab in slabs if not isinstance(slab, Tensor)]
    return JoinedPages(reached[0], far, layout) if far else Pages(reached, layout)
