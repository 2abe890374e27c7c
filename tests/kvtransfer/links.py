"""One way to make each transport. Imports no torch: a process that only has a link starts fast."""

from __future__ import annotations

from collections.abc import Callable

from kvtransfer.memory import MemoryTransport
from kvtransfer.shm import ShmTransport
from kvtransfer.tcp import TcpTransport
from kvtransfer.transport import Transport
from kvtransfer.ucx import UcxTransport

LOCALHOST = "127.0.0.1"
MAKERS: dict[str, Callable[[], Transport]] = {
    "memory": MemoryTransport,
    "shm": lambda: ShmTransport(4, 100_000),
    "ucx": lambda: UcxTransport(LOCALHOST),
    "tcp": lambda: TcpTransport(LOCALHOST),
}


def make_transport(name: str) -> Transport:
    return MAKERS[name]()
