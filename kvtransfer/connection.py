"""One connection of a receiver, and what is under way on it.

accepted ──► receiving (slots whose bytes were announced), aborting (handoffs whose end was told) ──► fenced
"""

from __future__ import annotations

from dataclasses import dataclass, field

from contracts.channel import Channel
from contracts.errors import WorkerLostError
from contracts.messages import Message
from kvtransfer.slots import Staging
from kvtransfer.transport import Link


@dataclass(eq=False, slots=True)
class Connection:
    """`is_rounded`: its KV comes in 8 bits (fp8.py). `receiving`: slot -> deadline of its bytes, or of their echo.
    `aborting`: handoff -> deadline of its AbortOk.
    """

    number: int
    channel: Channel
    link: Link
    staging: Staging
    is_rounded: bool
    receiving: dict[int, float] = field(default_factory=dict)
    aborting: dict[str, float] = field(default_factory=dict)

    @property
    def source(self) -> tuple[str, int]:
        return self.channel.peer.sender_id, self.channel.peer.incarnation

    def tell(self, message: Message) -> None:
        """NOTE: a connection that is gone is found out by its reader, not by whoever has something to say."""
        try:
            self.channel.send(message)
        except WorkerLostError:
            self.channel.abort()

    def is_overdue(self, now_s: float) -> bool:
        """The peer neither sends what it announced nor lets go of what it was granted."""
        deadlines = (*self.receiving.values(), *self.aborting.values())
        return bool(deadlines) and min(deadlines) < now_s
