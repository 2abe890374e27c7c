"""The listening socket of links over streams, and what its dialler does.

dialler:  16 bytes token, then messages (stream.py)
listener: token ──accepted──► link
            └── awaited by nobody, or too many of them: closed, nothing was allocated (doorman.py)
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Awaitable, Callable, Iterator

from kvtransfer.doorman import UNBOUND_TIMEOUT_S, Doorman
from kvtransfer.transport import TOKEN_BYTES, LinkClosed

logger = logging.getLogger("baton.kvtransfer")

ACCEPT_RETRY_S = 0.1


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
