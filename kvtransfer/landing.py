"""What becomes of the bytes that come into one slot of a receiver: stored, as soon as it is known what they are.

    posted ──announced (Data or Probe, event loop)──┐
       └─────arrived (bytes, the link's thread)─────┴─► both: stored by whichever was last ──final──► through

A slot that a connection keeps is posted before anything is announced for it: then its bytes may be the first, since
they travel beside the control connection. The rest is the event loop's, when the link has let go of the slot as well.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from torch import Tensor

from contracts.messages import Data, Probe
from kvtransfer.incoming import Incoming, Stored


class Landing:
    """Of one slot, once. `content(num_bytes)` are the slot's first bytes."""

    __slots__ = (
        "_content",
        "_incoming",
        "_lock",
        "_num_here",
        "is_final",
        "message",
        "num_bytes",
        "result",
        "slot",
    )

    def __init__(self, slot: int, content: Callable[[int], Tensor]) -> None:
        self.slot = slot
        self.message: Data | Probe | None = None
        self.result: Stored = False  # of a chunk that somebody wants; stays so for one that was too long
        self.is_final = False  # the event loop's: the link is through with the slot
        self.num_bytes = 0  # then: how many came
        self._content = content
        self._incoming: Incoming | None = None
        self._num_here: int | None = None
        self._lock = threading.Lock()

    @property
    def content(self) -> Tensor:
        """What came, when it is final."""
        return self._content(self.num_bytes)

    def announce(self, message: Data | Probe, incoming: Incoming | None) -> None:
        """On the event loop. Without `incoming`, nobody wants the bytes."""
        with self._lock:
            self.message, self._incoming = message, incoming
            num_here = self._num_here
        if num_here is not None:
            self._store(num_here)

    def arrived(self, num_bytes: int) -> None:
        """On the link's thread perhaps."""
        with self._lock:
            self._num_here = num_bytes
            is_announced = self.message is not None
        if is_announced:
            self._store(num_bytes)

    def _store(self, num_bytes: int) -> None:
        if self._incoming is not None and isinstance(self.message, Data):
            self.result = self._incoming.store(self.message, self._content(num_bytes))
