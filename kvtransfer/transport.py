"""What a data transport is: tagged messages into buffers that the receiver chose, over one link per pair of workers.

    listen ──address──► peer: connect(address, token) ┐
    accept(token) ────────────────────────────────────┴─► Link ──post_recv/send──► Op ──► final
                                                            └── close: every open Op ends with LinkClosed

The token comes from the authenticated control connection; a link that does not begin with an expected one is closed.

Lifetime of a buffer: from `post_recv`/`send` until `Op.final` is done, or until `Link.close` has returned, the link may
touch it and nobody else may. Cancelling a task that waits for an Op does NOT stop the transfer: only `final` or `close`
makes the buffer safe.

Staging, where a link has it (shm): memory that both ends have mapped, one slot per tag. The dialler fills the slot and
tells the listener over the control connection; no Op is needed, nothing is copied in between. Until it has told, the
slot is the dialler's (who got it as a credit); from then on the listener's, until it grants the tag again. After
`close` no slot is looked at any more; a peer that still writes hurts nobody, since each link has slots of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from contracts.errors import HandoffError

TOKEN_BYTES = 16

OnBytes = Callable[[memoryview, bool], bool]
"""`on_bytes(here, is_all)`: what has come of a message and was not taken yet, in one piece; `is_all`: no more comes.

True: they are taken. The link puts what comes next into the same memory, which is in the cache, and all later bytes
are taken too. False: they stay where they are, at the beginning of the buffer.
"""


class LinkClosed(HandoffError):
    """The link ended, by either side, before the transfer did."""


class TransferTruncated(HandoffError):
    """The message was longer than the buffer posted for it. The excess was thrown away; the link goes on."""


class Op:
    """One transfer under way. `final` is done exactly once: with the number of bytes, or with a HandoffError."""

    __slots__ = ("final",)

    def __init__(self) -> None:
        self.final: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.final.add_done_callback(_retrieve)  # an Op that nobody waits for any more is no news

    async def wait(self) -> int:
        """The number of bytes. Cancelling the waiter leaves the transfer alone."""
        return await asyncio.shield(self.final)

    def finish(self, num_bytes: int) -> None:
        """For the link only."""
        if not self.final.done():
            self.final.set_result(num_bytes)

    def fail(self, error: HandoffError) -> None:
        """For the link only."""
        if not self.final.done():
            self.final.set_exception(error)


class Link(Protocol):
    """One pair's connection. Messages are matched by tag; one tag is in use once at a time per direction.

    A message whose tag nobody has posted yet waits, and may hold up those behind it.
    """

    def post_recv(self, tag: int, buffer: memoryview, on_bytes: OnBytes | None = None) -> Op:
        """Take the message `tag` into `buffer`; it may be shorter. Fails with LinkClosed or TransferTruncated.

        `on_bytes` is called as they come, once at least and the last time before `final`, where they came: on the event
        loop or on the link's own thread, while they are in that core's cache. It must not raise. A message that is too
        long is none of its business; of one that the link's end cuts off it may have seen a part.
        """

    def send(self, tag: int, buffer: memoryview) -> Op:
        """Send all of `buffer` as message `tag`. Final means that the buffer is ours again, not that it arrived."""

    def staging(self, tag: int) -> memoryview | None:
        """The shared memory for message `tag`, or None: send it and receive it."""

    async def close(self) -> None:
        """End the link; all open Ops fail with LinkClosed. After return no buffer is touched any more."""


class Transport(Protocol):
    """How links come about. `name` is what PeerStatus shows."""

    @property
    def name(self) -> str: ...

    async def listen(self) -> str:
        """Take connections from now on; returns the address to publish."""

    async def connect(self, address: str, token: bytes, timeout_s: float) -> Link:
        """Dial `address`. Raises LinkClosed if nobody listens there or it takes longer."""

    async def accept(self, token: bytes, timeout_s: float) -> Link:
        """The link whose dialler shows `token`. Raises LinkClosed after `timeout_s`."""

    async def close(self) -> None:
        """Stop listening and close what was not accepted. Links live on: their owners close them."""


def _retrieve(future: asyncio.Future[int]) -> None:
    if not future.cancelled():
        future.exception()
