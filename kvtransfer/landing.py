"""What becomes of the bytes that come into one slot of a receiver: stored, as soon as it is known what they are.

    posted ──announced (Data or Probe, event loop)──┐
       └─────arrived (bytes, the link's thread)─────┴─► both: stored by whichever was last ──final──► through

A slot that a connection keeps is posted before anything is announced for it: then its bytes may be the first, since
they travel beside the control connection. Bytes that come after it are stored part by part where they can be. The rest
is the event loop's, when the link has let go of the slot as well.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from torch import Tensor

from contracts.messages import Data, Probe
from kvtransfer.filling import Filling
from kvtransfer.incoming import Incoming, Stored


class Landing:
    """Of one slot, once. `content(num_bytes)` are the slot's first bytes."""

    __slots__ = (
        "_all",
        "_content",
        "_filling",
        "_incoming",
        "_is_whole_only",
        "_lock",
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
        self._filling: Filling | None = None
        self._is_whole_only = False
        self._all: memoryview | None = None  # what came before it was known what it is
        self._lock = threading.Lock()

    @property
    def content(self) -> Tensor:
        """What came, when it is final."""
        return self._content(self.num_bytes)

    def announce(self, message: Data | Probe, incoming: Incoming | None) -> None:
        """On the event loop. Without `incoming`, nobody wants the bytes."""
        with self._lock:
            self.message, self._incoming = message, incoming
            here = self._all
        if here is not None:
            self._take(message, here, True)

    def arrived(self, here: memoryview, is_all: bool) -> bool:
        """A transport.OnBytes, on the link's thread perhaps."""
        with self._lock:
            message = self.message
            if message is None and is_all:
                self._all = here
        return message is not None and self._take(message, here, is_all)

    def _take(self, message: Data | Probe, here: memoryview, is_all: bool) -> bool:
        if isinstance(message, Probe):
            return False  # its bytes are looked at together
        if self._incoming is None:
            return True
        if self._filling is None and not is_all and not self._is_whole_only:
            self._filling = self._incoming.begin(message)
            self._is_whole_only = self._filling is None
        if self._filling is not None:
            self.result = self._incoming.store_part(message, self._filling, here)
            return True
        if is_all:
            self.result = self._incoming.store(message, self._content(len(here)))
        return False
