"""The transport over TCP: it reaches everywhere, needs nothing, and its speed is what the kernel copies."""

from __future__ import annotations

import asyncio
import socket

from kvtransfer.door import Door, closing_on_error
from kvtransfer.doorman import MAX_UNBOUND
from kvtransfer.stream import StreamLink
from kvtransfer.transport import Link, LinkClosed

SOCKET_BUFFER_BYTES = 2 << 20  # between two processes of one machine the fastest of 0.5 to 4 MiB, by a little


class TcpTransport:
    """Listens on `host`, any port."""

    name = "tcp"

    def __init__(self, host: str) -> None:
        self._host = host
        self._door: Door | None = None

    async def listen(self) -> str:
        sock = socket.socket(_family(self._host), socket.SOCK_STREAM)
        try:
            _tune(sock)
            sock.bind((self._host, 0))
            sock.listen(MAX_UNBOUND)
        except BaseException:
            sock.close()
            raise
        self._door = Door(sock)
        host, port = sock.getsockname()[:2]
        return f"{host}:{port}"

    async def connect(self, address: str, token: bytes, timeout_s: float) -> Link:
        host, port = split_address(address)
        loop = asyncio.get_running_loop()
        sock = socket.socket(_family(host), socket.SOCK_STREAM)
        with closing_on_error(sock, address):
            _tune(sock)
            async with asyncio.timeout(timeout_s):
                await loop.sock_connect(sock, (host, port))
                await loop.sock_sendall(sock, token)
        return StreamLink(sock)

    async def accept(self, token: bytes, timeout_s: float) -> Link:
        assert self._door is not None, "accept comes after listen"
        sock = await self._door.accept(token, timeout_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return StreamLink(sock)

    async def close(self) -> None:
        if self._door is not None:
            await self._door.close()


def split_address(address: str) -> tuple[str, int]:
    """Host and port of "host:port". Raises LinkClosed on anything else."""
    host, _, port = address.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()):
        raise LinkClosed(f"expected a data address host:port but peer published {address[:80]!r}")
    return host, int(port)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _tune(sock: socket.socket) -> None:
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # Set before connect and listen, so that the window can be scaled to it; accepted sockets inherit it.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER_BYTES)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
