"""The transport over raw TCP sockets: payloads go from slot to socket and from socket to slot without a copy between.

    dialler:  16 bytes token, then messages        message: u64 tag | u32 length | payload
    listener: token ──accepted──► link
                └── unknown after UNBOUND_TIMEOUT_S, or too many of them: closed, nothing was allocated

A link has two tasks, one per direction. The first trouble in either shuts the socket, which ends the other; Ops fail
only after the task that used their buffer has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import socket
import struct
from collections import deque

from kvtransfer.transport import TOKEN_BYTES, Link, LinkClosed, Op, TransferTruncated

logger = logging.getLogger("baton.kvtransfer")

UNBOUND_TIMEOUT_S = 2.0
MAX_UNBOUND = 64
SOCKET_BUFFER_BYTES = 1 << 20  # between two processes of one machine, 4 MiB measured about half as fast
SCRAP_BYTES = 64 << 10
ACCEPT_RETRY_S = 0.1

_HEADER = struct.Struct(">QI")


class TcpLink:
    """One end. Owns the socket and both tasks."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._posted: dict[int, tuple[memoryview, Op]] = {}
        self._awaited: tuple[int, asyncio.Future[None]] | None = None
        self._outbox: deque[tuple[int, memoryview, Op]] = deque()
        self._has_outgoing = asyncio.Event()
        self._is_closed = False
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

    async def close(self) -> None:
        self._is_closed = True
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
            posted = self._loop.create_future()
            self._awaited = (tag, posted)
            await posted
            self._awaited = None
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

    async def _fill(self, buffer: memoryview) -> None:
        await _receive(self._loop, self._sock, buffer)

    async def _write(self) -> None:
        try:
            while True:
                while self._outbox:
                    tag, buffer, op = self._outbox[0]
                    await self._loop.sock_sendall(self._sock, _HEADER.pack(tag, len(buffer)))
                    await self._loop.sock_sendall(self._sock, buffer)
                    self._outbox.popleft()
                    op.finish(len(buffer))
                self._has_outgoing.clear()
                await self._has_outgoing.wait()
        except OSError as error:
            logger.debug("data link: %s", error)
        finally:
            self._shut()
            self._fail_sends()

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


class TcpTransport:
    """Listens on `host`, any port."""

    name = "tcp"

    def __init__(self, host: str) -> None:
        self._host = host
        self._sock: socket.socket | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_unbound = 0
        self._awaited: dict[bytes, asyncio.Future[socket.socket]] = {}
        self._arrived = asyncio.Condition()

    async def listen(self) -> str:
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        sock = self._sock = socket.socket(family, socket.SOCK_STREAM)
        _tune(sock)
        sock.bind((self._host, 0))
        sock.listen(MAX_UNBOUND)
        self._spawn(asyncio.create_task(self._serve(sock)))
        host, port = sock.getsockname()[:2]
        return f"{host}:{port}"

    async def connect(self, address: str, token: bytes, timeout_s: float) -> Link:
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit():
            raise LinkClosed(f"expected a data address host:port but peer published {address[:80]!r}")
        loop = asyncio.get_running_loop()
        sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        try:
            _tune(sock)
            async with asyncio.timeout(timeout_s):
                await loop.sock_connect(sock, (host, int(port)))
                await loop.sock_sendall(sock, token)
        except (OSError, OverflowError) as error:
            sock.close()
            raise LinkClosed(f"cannot reach data address {address}: {error}") from error
        except BaseException:
            sock.close()
            raise
        return TcpLink(sock)

    async def accept(self, token: bytes, timeout_s: float) -> Link:
        waiter: asyncio.Future[socket.socket] = asyncio.get_running_loop().create_future()
        self._awaited[token] = waiter
        try:
            async with self._arrived:
                self._arrived.notify_all()
            async with asyncio.timeout(timeout_s):
                return TcpLink(await waiter)
        except TimeoutError as error:
            raise LinkClosed(f"no data link came within {timeout_s} s") from error
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                waiter.result().close()
            raise
        finally:
            self._awaited.pop(token, None)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._sock is not None:
            self._sock.close()

    async def _serve(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _address = await loop.sock_accept(listener)
            except OSError as error:  # no file descriptor left, say: the backlog waits
                logger.warning("data port: cannot accept: %s", error)
                await asyncio.sleep(ACCEPT_RETRY_S)
                continue
            if self._num_unbound >= MAX_UNBOUND:
                sock.close()
                continue
            self._num_unbound += 1
            self._spawn(asyncio.create_task(self._bind(sock)))

    async def _bind(self, sock: socket.socket) -> None:
        """Hand `sock` to whoever awaits its token, or close it."""
        is_bound = False
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            async with asyncio.timeout(UNBOUND_TIMEOUT_S):
                token = memoryview(bytearray(TOKEN_BYTES))
                await _receive(asyncio.get_running_loop(), sock, token)
                async with self._arrived:
                    waiter = await self._arrived.wait_for(lambda: self._find(bytes(token)))
            assert waiter is not None
            if not waiter.done():
                waiter.set_result(sock)
                is_bound = True
        except (OSError, TimeoutError) as error:
            logger.warning("data port: closed a link without an expected token (%s)", type(error).__name__)
        finally:
            self._num_unbound -= 1
            if not is_bound:
                sock.close()

    def _find(self, token: bytes) -> asyncio.Future[socket.socket] | None:
        for awaited, waiter in self._awaited.items():
            if hmac.compare_digest(awaited, token):
                return waiter
        return None

    def _spawn(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _receive(loop: asyncio.AbstractEventLoop, sock: socket.socket, buffer: memoryview) -> None:
    filled = 0
    while filled < len(buffer):
        num_bytes = await loop.sock_recv_into(sock, buffer[filled:])
        if num_bytes == 0:
            raise ConnectionResetError("peer closed the data link")
        filled += num_bytes


def _tune(sock: socket.socket) -> None:
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # Set before connect and listen, so that the window can be scaled to it; accepted sockets inherit it.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER_BYTES)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
