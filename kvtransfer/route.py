"""What a handoff that is sent needs of its connection, and of the blocks that it reads."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from contracts.blocks import KvLayout
from contracts.messages import Message
from kvtransfer.slots import SendSlots, Staging
from kvtransfer.stretch import OnMoved
from kvtransfer.transport import Link


class Source(Protocol):
    """A sender's blocks, as its peer wants them: tokens [low, high) of the sequence that is held in `block_ids`."""

    layout: KvLayout

    def num_bytes(self, low: int, high: int) -> int:
        """What they have on the wire."""

    def in_place(self, block_ids: Sequence[int], low: int, high: int) -> memoryview | None:
        """What `gather` would copy, if it lies in memory in one piece just so."""

    def gather(self, block_ids: Sequence[int], low: int, high: int, out: Tensor) -> None:
        """Into the first bytes of `out` (uint8)."""


@dataclass(frozen=True, slots=True)
class Route:
    """What an Outgoing needs of its connection. `tell` raises WorkerLostError when that is gone."""

    tell: Callable[[Message], None]
    link: Link
    staging: Staging
    is_summed: bool  # each chunk carries its checksum
    slots: SendSlots
    pages: Source
    slot_bytes: int
    progress_timeout_s: float
    forget: Callable[[str], None]
    on_moved: OnMoved
    kept: deque[int]  # credits of the connection: for whoever has something to send first
