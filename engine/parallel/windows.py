"""The KV blocks of a rank that no other process can map, a GPU's: rank 0 copies through a window of host memory.

    rank 0   begin_gather ──GATHER──► rank: its blocks ──► window ──DONE──► finish   rank 0 reads the window
             fill window, begin_scatter ──SCATTER──► rank: window ──► its blocks ──DONE──► finish

What a window holds is the rank's own heads of tokens [low, high), as `Pages` has them on the wire. Requests have a
connection of their own and a thread of their own in the rank: neither steps nor copies wait for one another. The blocks
of a step are complete when rank 0 has its end, since each layer ends in a sum of all ranks.
"""

from __future__ import annotations

import array
import contextlib
from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from contracts.errors import EngineError, WorkerLostError
from engine.parallel.wire import Kind, Wire


class Copier(Protocol):
    """A rank's own blocks, on whatever device: kvtransfer's Pages."""

    def gather(self, block_ids: Sequence[int], low: int, high: int, out: Tensor) -> None: ...

    def scatter(self, block_ids: Sequence[int], low: int, high: int, data: Tensor) -> None: ...


class FarBlocks:
    """Rank 0's side of one rank. For one thread at a time; every `begin_` is followed by `finish`.

    `window` (uint8): what is copied; its size says how much at a time. `scales` [L, 2, K] of a float8 slab.
    """

    def __init__(
        self, wire: Wire, window: Tensor, scales: Tensor | None, on_lost: Callable[[str], None]
    ) -> None:
        """`on_lost(reason)`: the rank cannot be asked any more."""
        self.window = window
        self.scales = scales
        self._wire = wire
        self._on_lost = on_lost

    def begin_gather(self, block_ids: Sequence[int], low: int, high: int) -> None:
        """Tokens [low, high) of the sequence in `block_ids` -> the window. Raises WorkerLostError."""
        self._ask(Kind.GATHER, block_ids, low, high)

    def begin_scatter(self, block_ids: Sequence[int], low: int, high: int) -> None:
        """The window -> tokens [low, high). Raises WorkerLostError."""
        self._ask(Kind.SCATTER, block_ids, low, high)

    def finish(self) -> None:
        """Wait for the copy. Raises EngineError if it failed there, WorkerLostError if nobody answers."""
        try:
            kind, payload, _ = self._wire.receive()
        except WorkerLostError as error:
            raise self._lost(error) from error
        if kind is not Kind.DONE:
            raise EngineError(f"a rank could not copy its blocks: {payload.decode(errors='replace')}")

    def close(self) -> None:
        self._wire.close()

    def _ask(self, kind: Kind, block_ids: Sequence[int], low: int, high: int) -> None:
        try:
            self._wire.send(kind, array.array("q", [low, high, *block_ids]).tobytes())
        except WorkerLostError as error:
            raise self._lost(error) from error

    def _lost(self, error: WorkerLostError) -> WorkerLostError:
        """NOTE: an answer that comes too late would be taken for the next one's, so the connection ends here."""
        self._wire.end()
        self._on_lost(f"a rank does not copy its blocks: {error.message}")
        return error


def answer_copies(wire: Wire, window: Tensor, pages: Copier) -> None:
    """The rank's side. Returns when rank 0's end of the connection is closed."""
    with contextlib.suppress(WorkerLostError):
        while True:
            kind, payload, _ = wire.receive()
            low, high, *block_ids = array.array("q", payload)
            copy = pages.gather if kind is Kind.GATHER else pages.scatter
            try:
                copy(block_ids, low, high, window)
            except Exception as error:  # whatever it is, the one who asked hears of it
                wire.send(Kind.FAILED, repr(error).encode())
            else:
                wire.send(Kind.DONE)
