"""One message over UCX: its length, then its bytes in parts, all with one tag; UCX matches what has one tag in order.

    sender:    length, part, part, …          all at once
    receiver:  length and the first part posted at once; the rest when the length is here, two at a time

A part that was taken (transport.OnBytes) leaves its memory to the next one, so that a long message goes through little
of it, which stays in the cache. Everything but the making runs on the engine thread.
"""

from __future__ import annotations

import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from kvtransfer.transport import LinkClosed, OnBytes, Op, TransferTruncated
from kvtransfer.ucx_engine import UcxEngine

PART_BYTES = 2 << 20
NUM_AHEAD = 2  # parts posted while one is stored
TAG_BITS = 22
_PAYLOAD = 1 << TAG_BITS


class Library(Protocol):
    """What is needed of ucxx."""

    array: Any
    truncated: type[Exception]
    engine: UcxEngine

    def tag(self, value: int) -> Any: ...


class Line(Protocol):
    """What is needed of a link, on the engine thread. While a transfer is open its endpoint is there."""

    @property
    def library(self) -> Library: ...

    @property
    def open_endpoint(self) -> Any | None:
        """None when nothing may be asked of it any more: UCX would never return."""

    def opened(self) -> None: ...

    def closed(self) -> None: ...


class Transfer:
    """An Op, and the requests of UCX that it is made of."""

    def __init__(self, line: Line, buffer: memoryview, base: int) -> None:
        """`base`: the tag with what is the link's own."""
        self.op = Op()
        self._line = line
        self._buffer = buffer
        self._base = base
        self._length = array.array("Q", [len(buffer)])
        self._num_left = 0
        self._error: Exception | None = None

    def start(self) -> None:
        line = self._line
        if line.open_endpoint is None:
            line.library.engine.tell(lambda: self.op.fail(LinkClosed("link is closed")))
            return
        line.opened()
        self._num_left = 1
        self._attempt(self._begin)
        self._done(None)

    def _begin(self) -> None:
        raise NotImplementedError

    def _attempt(self, begin: Callable[[], None]) -> None:
        try:
            begin()
        except Exception as error:
            self._error = self._error or error

    def _ask(self, method: str, tag: int, buffer: Any, on_final: Callable[[Exception | None], None]) -> None:
        """NOTE: an empty payload has an address too: UCX takes none from an empty buffer."""
        line, endpoint = self._line, self._line.open_endpoint
        if endpoint is None:
            raise LinkClosed("link is closed")
        content = line.library.array(buffer if len(buffer) else array.array("Q"))
        request = getattr(endpoint, method)(content, line.library.tag(tag))
        self._num_left += 1
        line.library.engine.watch(request, on_final)

    def _done(self, error: Exception | None) -> None:
        self._error = self._error or error
        self._num_left -= 1
        if not self._num_left:
            self._line.library.engine.tell(self._finish)
            self._line.closed()

    def _too_long(self) -> TransferTruncated:
        return TransferTruncated(
            f"expected at most {len(self._buffer)} bytes but peer sent {self._length[0]}"
        )

    def _finish(self) -> None:
        """On the event loop."""
        if self._error is None:
            self.op.finish(self._length[0])
        elif isinstance(self._error, (self._line.library.truncated, TransferTruncated)):
            self.op.fail(self._too_long())
        else:
            self.op.fail(LinkClosed(f"data link ended: {self._error}"))


class Sending(Transfer):
    """All of `buffer`."""

    def _begin(self) -> None:
        self._ask("tag_send", self._base, self._length, self._done)
        for low in range(0, max(len(self._buffer), 1), PART_BYTES):
            part = self._buffer[low : low + PART_BYTES]
            self._ask("tag_send", self._base | _PAYLOAD, part, self._done)


@dataclass(slots=True)
class _Part:
    at: int  # in the buffer
    is_here: bool = False


class Receiving(Transfer):
    """Into `buffer`, or nowhere if the message is too long for it."""

    def __init__(self, line: Line, buffer: memoryview, base: int, on_bytes: OnBytes | None) -> None:
        super().__init__(line, buffer, base)
        self._on_bytes = on_bytes
        self._is_length_here = self._is_taken = False
        self._posted: deque[_Part] = deque()
        self._free: list[int] = []  # places of parts that were taken
        self._next = 0  # the first place that no part had
        self._num_parts = self._num_through = 0  # parts posted; bytes of those that are through

    def _begin(self) -> None:
        self._ask("tag_recv", self._base, self._length, self._length_here)
        self._post()

    def _post(self) -> None:
        at = self._free.pop() if self._free else self._next
        part = _Part(at)
        room = self._buffer[at : at + PART_BYTES]
        self._ask("tag_recv", self._base | _PAYLOAD, room, partial(self._part_here, part))
        self._next = max(self._next, at + len(room))
        self._posted.append(part)
        self._num_parts += 1

    def _length_here(self, error: Exception | None) -> None:
        if error is None:
            self._is_length_here = True
            if self._length[0] > len(self._buffer):
                self._error = self._too_long()
            self._attempt(self._go_on)
        self._done(error)

    def _part_here(self, part: _Part, error: Exception | None) -> None:
        part.is_here = True
        self._error = self._error or error
        if error is None or isinstance(error, self._line.library.truncated):
            self._attempt(self._go_on)
        self._done(None)

    def _go_on(self) -> None:
        """Parts are through in order, and each makes room for one more."""
        if not self._is_length_here:
            return
        while self._posted and self._posted[0].is_here:
            self._through(self._posted.popleft().at)
        num_parts = max(-(-self._length[0] // PART_BYTES), 1)
        while len(self._posted) < NUM_AHEAD and self._num_parts < num_parts:
            self._post()

    def _through(self, at: int) -> None:
        left = self._length[0] - self._num_through
        size = min(left, PART_BYTES)
        self._num_through += size
        if self._on_bytes is not None and self._error is None:
            here = self._buffer[at if self._is_taken else 0 : at + size]
            self._is_taken = self._on_bytes(here, size == left)
        if self._is_taken or self._error is not None:
            self._free.append(at)
