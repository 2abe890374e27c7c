"""Links over stream sockets: payloads go from slot to socket and from socket to slot without a copy between.

    dialler:  16 bytes token, then messages        message: u64 tag | u32 length | payload
    listener: token ──accepted──► link
                └── awaited by nobody, or too many of them: closed, nothing was allocated (doorman.py)

A link has two tasks, one per direction. The first trouble in either shuts the socket, which ends the other; Ops fail
only after the task that used their buffer has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import select
import socket
import struct
from collections import deque
from collections.abc import Awaitable, Callable, Iterator

from kvtransfer.doorman import UNBOUND_TIMEOUT_S, Doorman
from kvtransfer.transport import TOKEN_BYTES, LinkClosed, Op, TransferTruncated

logger = logging.getLogger("baton.kvtransfer")

SCRAP_BYTES = 64 << 10
ACCEPT_RETRY_S = 0.1

_HEADER = struct.Struct(">QI")


class StreamLink:
    """One end. Owns the socket and both tasks."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._posted: dict[int, tuple[memoryview, Op]] = {}
        self._awaited: tuple[int, asyncio.Future[None]] | None = None
        self._outbox: deque[tuple[int, memoryview, Op]] = deque()
        self._has_outgoing = asyncio.Event()
        self._is_closed = False
        self._closing: asyncio.Task[None] | None = None
        self._reader = asyncio.create_task(self._read())
        self._writer = asyncio.create_task(self._write())

    def post_recv(self, tag: int, buffer: memoryview) -> Op:
        op = Op()
        if self._is_closed or self._reader.done():
            op.fail(LinkClosed("link is closed"))
            return op
        assert tag not in self._posted, f"tag {tag} is in use"
        self._posted[tag] = (buffer, op)
        if self._awaited is not None and self._awaited[0] == tag and not self._awaited[1].done():
            self._awaited[1].set_result(None)
        return op

    def send(self, tag: int, buffer: memoryview) -> Op:
        op = Op()
        if self._is_closed or self._writer.done():
            op.fail(LinkClosed("link is closed"))
            return op
        self._outbox.append((tag, buffer, op))
        self._has_outgoing.set()
        return op

    def staging(self, tag: int) -> memoryview | None:
        return None

    async def close(self) -> None:
        """Done to the end even if the caller is cancelled meanwhile, as when both ends of a pair stop at once."""
        self._is_closed = True
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        if self._outbox:
            # What is cut off is worth nothing: without this, TCP would tell the peer of the end only behind it.
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._reader.cancel()
        self._writer.cancel()
        await asyncio.gather(self._reader, self._writer, return_exceptions=True)
        # NOTE: a task that was cancelled before its first step never ran its own clean-up.
        self._fail_receives()
        self._fail_sends()
        self._sock.close()

    async def _read(self) -> None:
        header = memoryview(bytearray(_HEADER.size))
        try:
            while True:
                await self._fill(header)
                tag, length = _HEADER.unpack(header)
                await self._take(tag, length)
        except OSError as error:
            logger.debug("data link: %s", error)
        finally:
            self._shut()
            self._fail_receives()

    async def _take(self, tag: int, length: int) -> None:
        """One payload into its buffer. The Op stays in the table meanwhile, so that a failure reaches it."""
        if tag not in self._posted:
            await self._until_posted(tag)
        buffer, op = self._posted[tag]
        if length <= len(buffer):
            await self._fill(buffer[:length])
            del self._posted[tag]
            op.finish(length)
            return
        scrap = memoryview(bytearray(SCRAP_BYTES))
        left = length
        while left:
            await self._fill(scrap[: min(left, SCRAP_BYTES)])
            left -= min(left, SCRAP_BYTES)
        del self._posted[tag]
        op.fail(TransferTruncated(f"expected at most {len(buffer)} bytes but peer sent {length}"))

    async def _until_posted(self, tag: int) -> None:
        """Raises OSError if the peer leaves first. With its payload unread no read would ever tell."""
        posted = self._loop.create_future()
        self._awaited = (tag, posted)
        with _left(self._loop, self._sock, posted):
            await posted
        self._awaited = None

    async def _fill(self, buffer: memoryview) -> None:
        await receive(self._loop, self._sock, buffer)

    async def _write(self) -> None:
        try:
            while True:
                while self._outbox:
                    tag, buffer, op = self._outbox[0]
                    await self._send_all(_HEADER.pack(tag, len(buffer)), buffer)
                    self._outbox.popleft()
                    op.finish(len(buffer))
                self._has_outgoing.clear()
                await self._has_outgoing.wait()
        except OSError as error:
            logger.debug("data link: %s", error)
        finally:
            self._shut()
            self._fail_sends()

    async def _send_all(self, header: bytes, buffer: memoryview) -> None:
        """Both in one system call, as far as the socket takes them: each call wakes the peer."""
        try:
            num_sent = self._sock.sendmsg([header, buffer])
        except BlockingIOError:
            num_sent = 0
        if num_sent < len(header):
            await self._loop.sock_sendall(self._sock, header[num_sent:])
            num_sent = len(header)
        await self._loop.sock_sendall(self._sock, buffer[num_sent - len(header) :])

    def _shut(self) -> None:
        self._is_closed = True
        self._has_outgoing.set()
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        if not self._writer.done() and self._reader is asyncio.current_task():
            self._writer.cancel()
        if not self._reader.done() and self._writer is asyncio.current_task():
            self._reader.cancel()

    def _fail_receives(self) -> None:
        for _buffer, op in self._posted.values():
            op.fail(LinkClosed("data link ended"))
        self._posted.clear()

    def _fail_sends(self) -> None:
        for _tag, _buffer, op in self._outbox:
            op.fail(LinkClosed("data link ended"))
        self._outbox.clear()


class Door:
    """The listening socket: who shows an awaited token is let in, anybody else is closed."""

    def __init__(
        self, sock: socket.socket, greet: Callable[[socket.socket], Awaitable[None]] | None = None
    ) -> None:
        """`greet(sock)`, if any, comes before the token is read; an OSError of it closes the connection."""
        self._sock = sock
        self._greet = greet
        self._doorman = Doorman[socket.socket](lambda late: late.close())
        self._tasks: set[asyncio.Task[None]] = set()
        self._spawn(asyncio.create_task(self._serve()))

    async def accept(self, token: bytes, timeout_s: float) -> socket.socket:
        """The connection that showed `token`. Raises LinkClosed after `timeout_s`."""
        return await self._doorman.accept(token, timeout_s)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._sock.close()

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _address = await loop.sock_accept(self._sock)
            except OSError as error:  # no file descriptor left, say: the backlog waits
                logger.warning("data port: cannot accept: %s", error)
                await asyncio.sleep(ACCEPT_RETRY_S)
                continue
            if self._doorman.is_full:
                sock.close()
                continue
            self._spawn(asyncio.create_task(self._bind(sock)))

    async def _bind(self, sock: socket.socket) -> None:
        """Hand `sock` to whoever awaits its token, or close it."""
        is_bound = False
        try:
            with self._doorman.place():
                sock.setblocking(False)
                token = memoryview(bytearray(TOKEN_BYTES))
                async with asyncio.timeout(UNBOUND_TIMEOUT_S):
                    if self._greet is not None:
                        await self._greet(sock)
                    await receive(asyncio.get_running_loop(), sock, token)
                is_bound = await self._doorman.present(bytes(token), sock)
        except (OSError, TimeoutError) as error:
            logger.warning("data port: closed a link without an expected token (%s)", type(error).__name__)
        finally:
            if not is_bound:
                sock.close()

    def _spawn(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


@contextlib.contextmanager
def _left(
    loop: asyncio.AbstractEventLoop, sock: socket.socket, future: asyncio.Future[None]
) -> Iterator[None]:
    """Within, `future` fails when the other end of `sock` closes, unread bytes or not. On Linux; elsewhere the owner of
    the link, whose control connection ends as well, has to close it.
    """
    if not hasattr(select, "epoll"):
        yield
        return

    def fail() -> None:
        if not future.done():
            future.set_exception(ConnectionResetError("peer closed the data link"))

    with select.epoll() as hangup:
        hangup.register(sock, select.EPOLLRDHUP)
        loop.add_reader(hangup.fileno(), fail)
        try:
            yield
        finally:
            loop.remove_reader(hangup.fileno())


async def receive(loop: asyncio.AbstractEventLoop, sock: socket.socket, buffer: memoryview) -> None:
    """Fill `buffer`. Raises OSError if the connection ends before."""
    filled = 0
    while filled < len(buffer):
        num_bytes = await loop.sock_recv_into(sock, buffer[filled:])
        if num_bytes == 0:
            raise ConnectionResetError("peer closed the data link")
        filled += num_bytes


@contextlib.contextmanager
def closing_on_error(sock: socket.socket, address: str) -> Iterator[None]:
    """While dialling: whatever goes wrong closes `sock`; the network's errors become LinkClosed."""
    try:
        yield
    except (OSError, OverflowError) as error:
        sock.close()
        raise LinkClosed(f"cannot reach data address {address}: {error}") from error
    except BaseException:
        sock.close()
        raise
