"""Between two layouts of the same model's KV: other block size, other dtype.

    source slab [N, L, 2, K, S, D] ──gather, cast──► wire, in the TARGET's layout ──scatter──► target slab

All conversion is done in the sender's gather, so that the receiver copies as if the pair were equal. `check_layouts`
says which pairs can be converted: block sizes of which one is a multiple of the other, float32 and bfloat16. From
float32 to bfloat16 each number is rounded to the nearest; the other way nothing is lost.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from contracts.blocks import KvLayout
from contracts.errors import ConfigError
from kvtransfer.joined import AnyPages
from kvtransfer.pages import moved_as

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
    if ours.scales != theirs.scales:
        wrong.append(f"scales={ours.scales!r} but peer has {theirs.scales!r}")
    if wrong:
        raise ConfigError(f"kv layout: expected {'; '.join(wrong)}")


class Reshard:
    """`pages` as a target of layout `target` wants them; stands in for Pages at a sender."""

    def __init__(self, pages: AnyPages, target: KvLayout) -> None:
        """Raises ConfigError if blocks cannot be converted."""
        check_layouts(pages.layout, target)
        self.layout = target
        self._pages = pages
        self._dtype = moved_as(target.dtype)

    def num_bytes(self, low: int, high: int) -> int:
        return (high - low) * self.layout.bytes_per_token

    def in_place(self, block_ids: Sequence[int], low: int, high: int) -> memoryview | None:
        """Nothing lies anywhere as the target wants it."""
        return None

    def gather(self, block_ids: Sequence[int], low: int, high: int, out: Tensor) -> None:
        """Tokens [low, high) of the sequence in the source's `block_ids` -> the first bytes of `out`, cast."""
        with self._pages.aside():
            self._convert(block_ids, low, high, out)

    def _convert(self, block_ids: Sequence[int], low: int, high: int, out: Tensor) -> None:
        dense = self._dense(block_ids, low, high)
        size, offset, position = self.layout.block_size, 0, low
        while position < high:
            end = min((position // size + 1) * size, high)
            num_bytes = self.num_bytes(position, end)
            piece = dense[:, :, :, position - low : end - low]
            out[offset : offset + num_bytes].view(self._dtype).view(piece.shape).copy_(piece)
            offset, position = offset + num_bytes, end

    def _dense(self, block_ids: Sequence[int], low: int, high: int) -> Tensor:
        """[L, 2, K, high - low, D] in the source's dtype."""
        size = self._pages.layout.block_size
        first, last = low // size, -(-high // size)
        tokens = self._pages.blocks(block_ids[first:last]).permute(1, 2, 3, 0, 4, 5).flatten(3, 4)
        return tokens[:, :, :, low - first * size : high - first * size]
