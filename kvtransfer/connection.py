"""One connection of a receiver, and what is under way on it.

accepted ──► receiving (slots of which bytes or their Data are due), aborting (handoffs whose end was told) ──► fenced
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from contracts.channel import Channel
from contracts.errors import WorkerLostError
from contracts.messages import Message
from kvtransfer.landing import Landing
from kvtransfer.slots import Staging
from kvtransfer.transport import Link


@dataclass(eq=False, slots=True)
class Connection:
    """`is_rounded`: its KV comes in 8 bits (fp8.py). `receiving`: slot -> deadline of its bytes, of the Data that says
    what they are, or of their echo. `aborting`: handoff -> deadline of its AbortOk. `landings`: slot -> its receive.
    """

    number: int
    channel: Channel
    link: Link
    staging: Staging
    is_rounded: bool
    receiving: dict[int, float] = field(default_factory=dict)
    aborting: dict[str, float] = field(default_factory=dict)
    landings: dict[int, Landing] = field(default_factory=dict)

    @property
    def source(self) -> tuple[str, int]:
        return self.channel.peer.sender_id, self.channel.peer.incarnation

    def tell(self, message: Message) -> None:
        """NOTE: a connection that is gone is found out by its reader, not by whoever has something to say."""
        try:
            self.channel.send(message)
        except WorkerLostError:
            self.channel.abort()

    def echo(self, slot: int, content: Tensor, deadline_s: float, then: Callable[[], None]) -> None:
        """Send the content of `slot` back over the link; `then` is called when it is gone, unless the connection is."""
        self.receiving[slot] = deadline_s
        op = self.link.send(slot, content.numpy().data)

        def sent(final: asyncio.Future[int]) -> None:
            self.receiving.pop(slot, None)
            if final.exception() is not None:
                self.channel.abort()
            elif not self.channel.is_closed:
                then()

        op.final.add_done_callback(sent)

    async def close(self, then: Callable[[], None]) -> None:
        """Its link, and what of the link's memory was in use here. `then` is called when the link has let go of all.

        Whoever is cancelled meanwhile (the endpoint is closed), however often, hears of it afterwards. NOTE: if the
        link raises, bytes may still come: `then` is not called, and the slots stay quarantined.
        """
        self.staging.close()
        closing = asyncio.ensure_future(self.link.close())
        is_cancelled = False
        try:
            while not closing.done():
                try:
                    await asyncio.shield(closing)
                except asyncio.CancelledError:
                    is_cancelled = True
        finally:
            if closing.done() and not closing.cancelled() and closing.exception() is None:
                then()
        if is_cancelled:
            raise asyncio.CancelledError

    def is_overdue(self, now_s: float) -> bool:
        """The peer neither sends what it announced nor lets go of what it was granted."""
        deadlines = (*self.receiving.values(), *self.aborting.values())
        return bool(deadlines) and min(deadlines) < now_s
