"""Between two layouts of the same model's KV: other block size, other dtype, other share of the heads.

    source slab [N, L, 2, K, S, D] ──gather, cast──► wire, in the TARGET's layout ──scatter──► target slab

All conversion is done in the sender's gather, so that the receiver copies as if the pair were equal. `check_layouts`
says which pairs can be converted: block sizes of which one is a multiple of the other, float32 and bfloat16. From
float32 to bfloat16 each number is rounded to the nearest; the other way nothing is lost.

Heads: rank r of a tensor-parallel group holds a range of the kv heads (`head_ranges`); `plan_heads` says which rank
sends which heads to which, so that every target rank gets each of its heads exactly once. The plan is the same on both
sides, since it follows from the two degrees alone. A worker is one rank today, so endpoints exchange all heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from contracts.blocks import KvLayout
from contracts.errors import ConfigError
from kvtransfer.pages import Pages

CASTS = frozenset({"float32", "bfloat16"})


def check_layouts(ours: KvLayout, theirs: KvLayout) -> None:
    """Raises ConfigError, naming each field that differs with both values, if blocks cannot be converted."""
    wrong = [
        f"{name}={getattr(ours, name)} but peer has {getattr(theirs, name)}"
        for name in ("num_layers", "num_kv_heads", "head_dim")
        if getattr(ours, name) != getattr(theirs, name)
    ]
    small, large = sorted((ours.block_size, theirs.block_size))
    if small < 1 or large % small:
        wrong.append(
            f"block_size={ours.block_size}, a multiple or a part of it, but peer has {theirs.block_size}"
        )
    if ours.dtype != theirs.dtype and not {ours.dtype, theirs.dtype} <= CASTS:
        wrong.append(f"dtype={ours.dtype} (float32 and bfloat16 convert) but peer has {theirs.dtype}")
    if wrong:
        raise ConfigError(f"kv layout: expected {'; '.join(wrong)}")


class Reshard:
    """`pages` as a target of layout `target` wants them; stands in for Pages at a sender."""

    def __init__(self, pages: Pages, target: KvLayout, heads: range | None = None) -> None:
        """`heads`: of the source, to be sent alone; the target's layout has so many. Raises ConfigError."""
        heads = range(pages.layout.num_kv_heads) if heads is None else heads
        check_layouts(replace(pages.layout, num_kv_heads=len(heads)), target)
        self.layout = target
        self._pages = pages
        self._heads = slice(heads.start, heads.stop)
        self._dtype: torch.dtype = getattr(torch, target.dtype)

    def num_bytes(self, low: int, high: int) -> int:
        return (high - low) * self.layout.bytes_per_token

    def gather(self, block_ids: Sequence[int], low: int, high: int, out: Tensor) -> None:
        """Tokens [low, high) of the sequence in the source's `block_ids` -> the first bytes of `out`, cast."""
        dense = self._dense(block_ids, low, high)
        size, offset, position = self.layout.block_size, 0, low
        while position < high:
            end = min((position // size + 1) * size, high)
            num_bytes = self.num_bytes(position, end)
            piece = dense[:, :, :, position - low : end - low]
            out[offset : offset + num_bytes].view(self._dtype).view(piece.shape).copy_(piece)
            offset, position = offset + num_bytes, end

    def _dense(self, block_ids: Sequence[int], low: int, high: int) -> Tensor:
        """[L, 2, k, high - low, D] in the source's dtype."""
        size = self._pages.layout.block_size
        first, last = low // size, -(-high // size)
        blocks = self._pages.slab[list(block_ids[first:last]), :, :, self._heads]
        tokens = blocks.permute(1, 2, 3, 0, 4, 5).flatten(3, 4)
        return tokens[:, :, :, low - first * size : high - first * size]


def scatter_heads(
    pages: Pages, heads: range, block_ids: Sequence[int], low: int, high: int, data: Tensor
) -> None:
    """What a source rank gathered for these `heads` of the target (counted within its slab) -> tokens [low, high)."""
    size, offset, position = pages.layout.block_size, 0, low
    token_bytes = pages.layout.bytes_per_token // pages.layout.num_kv_heads * len(heads)
    while position < high:
        index = position // size
        end = min((index + 1) * size, high)
        target = pages.slab[block_ids[index], :, :, heads.start : heads.stop]
        target = target[:, :, :, position - index * size : end - index * size]
        num_bytes = (end - position) * token_bytes
        target.copy_(data[offset : offset + num_bytes].view(target.dtype).view(target.shape))
        offset, position = offset + num_bytes, end


# --- heads ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HeadMove:
    """`source_heads` of a source rank's slab become `target_heads` of a target rank's."""

    source_rank: int
    target_rank: int
    source_heads: range
    target_heads: range


def head_ranges(num_kv_heads: int, degree: int) -> list[range]:
    """The kv heads that each of `degree` ranks holds: as even as can be, the first ranks have one more.

    With more ranks than heads, neighbours hold the same head. Raises ConfigError if a number is not positive.
    """
    if num_kv_heads < 1 or degree < 1:
        raise ConfigError(f"expected num_kv_heads and degree >= 1 but got {num_kv_heads} and {degree}")
    if degree > num_kv_heads:
        return [range(head, head + 1) for head in (rank * num_kv_heads // degree for rank in range(degree))]
    each, more = divmod(num_kv_heads, degree)
    starts = [rank * each + min(rank, more) for rank in range(degree + 1)]
    return [range(low, high) for low, high in pairwise(starts)]


def plan_heads(num_kv_heads: int, source_degree: int, target_degree: int) -> list[HeadMove]:
    """Who sends what to whom. A head that several source ranks hold is sent by the first of them."""
    sources = head_ranges(num_kv_heads, source_degree)
    moves = []
    for target_rank, wanted in enumerate(head_ranges(num_kv_heads, target_degree)):
        reached = wanted.start
        for source_rank, held in enumerate(sources):
            low, high = max(reached, held.start), min(wanted.stop, held.stop)
            if low < high:
                moves.append(
                    HeadMove(
                        source_rank,
                        target_rank,
                        range(low - held.start, high - held.start),
                        range(low - wanted.start, high - wanted.start),
                    )
                )
                reached = high
    return moves
