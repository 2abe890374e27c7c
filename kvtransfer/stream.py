"""Links over stream sockets: payloads go from memory to socket and from socket to slot without a copy between.

    message: u64 tag | u32 length | payload

    reading:  header ──► payload, part by part, into the buffer posted for its tag ──► Op final ──► header …
                └── nobody has posted it: nothing is read, only the peer's end is watched, until somebody does
    writing:  in the order of `send`, header and payload in one call, as much as the socket takes

Everything happens in callbacks of the event loop, none of which waits: a buffer is touched within one, or not any more.
The first trouble in either direction ends both.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import select
import socket
import struct
from collections import deque
from collections.abc import Callable

from kvtransfer.transport import LinkClosed, OnBytes, Op, TransferTruncated

logger = logging.getLogger("baton.kvtransfer")

PART_BYTES = 512 << 10  # of a payload, told as they come: while they are in the second-level cache
MAX_CALLS = 8  # of the system in a row, before the event loop's other work has its turn

_HEADER = struct.Struct(">QI")


class StreamLink:
    """One end. Owns the socket, which does not block."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._posted: dict[int, tuple[memoryview, Op, OnBytes | None]] = {}
        self._outbox: deque[tuple[int, memoryview, Op]] = deque()
        self._num_sent = 0  # bytes of the first message in the outbox, header included
        self._is_writing = False
        self._is_ended = False
        self._header = memoryview(bytearray(_HEADER.size))
        self._target = self._header  # what is filled now
        self._num_filled = 0
        self._message: tuple[int, int] | None = None  # tag and length of the payload that comes next
        self._into = self._header  # where it goes: the buffer, or scrap if it is too long for that
        self._part_end = 0  # of the part that is filled now, in there
        self._num_left = 0  # bytes of it beyond that part
        self._hangup: _Hangup | None = None
        self._loop.add_reader(sock.fileno(), self._read)

    def post_recv(self, tag: int, buffer: memoryview, on_bytes: OnBytes | None = None) -> Op:
        op = Op()
        if self._is_ended:
            op.fail(LinkClosed("link is closed"))
            return op
        assert tag not in self._posted, f"tag {tag} is in use"
        self._posted[tag] = (buffer, op, on_bytes)
        if self._hangup is not None and self._message is not None and self._message[0] == tag:
            self._hangup.close()
            self._hangup = None
            self._begin(*self._message)
            self._loop.add_reader(self._sock.fileno(), self._read)
            self._loop.call_soon(self._read)
        return op

    def send(self, tag: int, buffer: memoryview) -> Op:
        op = Op()
        if self._is_ended:
            op.fail(LinkClosed("link is closed"))
            return op
        self._outbox.append((tag, buffer, op))
        if not self._is_writing:
            self._is_writing = True
            self._loop.call_soon(self._write)  # what was said before on another connection goes first
        return op

    def staging(self, tag: int) -> memoryview | None:
        return None

    async def close(self) -> None:
        if self._outbox and not self._is_ended:
            # What is cut off is worth nothing: without this, TCP would tell the peer of the end only behind it.
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._end("closed")
        self._sock.close()

    # --- reading ----------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        try:
            for _ in range(MAX_CALLS):
                if self._is_ended or self._hangup is not None:
                    return
                num_bytes = self._sock.recv_into(self._target[self._num_filled :])
                if num_bytes == 0:
                    raise ConnectionResetError("peer closed the data link")
                self._num_filled += num_bytes
                if self._num_filled == len(self._target):
                    self._filled()
        except (BlockingIOError, InterruptedError):
            pass
        except (OSError, MemoryError) as error:
            self._end(repr(error))

    def _filled(self) -> None:
        if self._message is None:
            tag, length = self._message = _HEADER.unpack(self._header)
            if tag in self._posted:
                self._begin(tag, length)
                return
            self._loop.remove_reader(self._sock.fileno())
            self._hangup = _Hangup(self._loop, self._sock, lambda: self._end("peer closed the data link"))
        else:
            self._part_filled(*self._message)

    def _begin(self, tag: int, length: int) -> None:
        buffer = self._posted[tag][0]
        self._into = buffer if length <= len(buffer) else memoryview(bytearray(min(length, PART_BYTES)))
        self._num_left = length
        self._next_part(0)
        if not length:
            self._part_filled(tag, length)

    def _next_part(self, at: int) -> None:
        num_bytes = min(self._num_left, PART_BYTES)
        self._part_end = at + num_bytes
        self._num_left -= num_bytes
        self._aim(self._into[at : self._part_end])

    def _part_filled(self, tag: int, length: int) -> None:
        buffer, op, on_bytes = self._posted[tag]
        is_scrap, is_all = length > len(buffer), not self._num_left
        is_taken = is_scrap or (on_bytes is not None and on_bytes(self._into[: self._part_end], is_all))
        if not is_all:
            self._next_part(0 if is_taken else self._part_end)
            return
        del self._posted[tag]
        if is_scrap:
            op.fail(TransferTruncated(f"expected at most {len(buffer)} bytes but peer sent {length}"))
        else:
            op.finish(length)
        self._message = None
        self._into = self._header
        self._aim(self._header)

    def _aim(self, target: memoryview) -> None:
        self._target, self._num_filled = target, 0

    # --- writing ----------------------------------------------------------------------------------------------------

    def _write(self) -> None:
        is_full = False
        try:
            for _ in range(MAX_CALLS):
                if self._is_ended or not self._outbox or is_full:
                    break
                is_full = not self._write_some()
        except (OSError, MemoryError) as error:
            self._end(repr(error))
        if self._is_ended:
            return
        if is_full:
            self._loop.add_writer(self._sock.fileno(), self._write_again)
        elif self._outbox:
            self._loop.call_soon(self._write)
        else:
            self._is_writing = False

    def _write_again(self) -> None:
        self._loop.remove_writer(self._sock.fileno())
        self._write()

    def _write_some(self) -> bool:
        """One call of the system: each one wakes the peer. False if the socket takes no more."""
        tag, buffer, op = self._outbox[0]
        left = self._num_sent - _HEADER.size
        parts: list[bytes | memoryview] = [buffer[max(left, 0) :]]
        if left < 0:
            parts.insert(0, _HEADER.pack(tag, len(buffer))[self._num_sent :])
        try:
            self._num_sent += self._sock.sendmsg(parts)
        except (BlockingIOError, InterruptedError):
            return False
        if self._num_sent < _HEADER.size + len(buffer):
            return False
        self._num_sent = 0
        self._outbox.popleft()
        op.finish(len(buffer))
        return True

    # --- the end ----------------------------------------------------------------------------------------------------

    def _end(self, why: str) -> None:
        """No buffer is touched any more."""
        if self._is_ended:
            return
        self._is_ended = True
        logger.debug("data link: %s", why)
        if self._hangup is not None:
            self._hangup.close()
            self._hangup = None
        self._loop.remove_reader(self._sock.fileno())
        self._loop.remove_writer(self._sock.fileno())
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        for _buffer, op, _on_bytes in self._posted.values():
            op.fail(LinkClosed("data link ended"))
        for _tag, _buffer, op in self._outbox:
            op.fail(LinkClosed("data link ended"))
        self._posted.clear()
        self._outbox.clear()


class _Hangup:
    """Calls `tell` when the other end of `sock` closes, unread bytes or not: no read would ever say so. On Linux;
    elsewhere the owner of the link, whose control connection ends as well, has to close it.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, sock: socket.socket, tell: Callable[[], None]
    ) -> None:
        self._loop = loop
        self._poll = select.epoll() if hasattr(select, "epoll") else None
        if self._poll is not None:
            self._poll.register(sock, select.EPOLLRDHUP)
            loop.add_reader(self._poll.fileno(), tell)

    def close(self) -> None:
        if self._poll is not None:
            self._loop.remove_reader(self._poll.fileno())
            self._poll.close()
