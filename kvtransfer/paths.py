"""Which transports an endpoint has, which of them a pair can use, and what speed is worth an alarm.

    make_transports ──► Paths.listen ──"shm=@… ucx=host:port tcp=host:port"──► the peer's hello
    Paths.common(published) ──► the ways to that peer, best first ──connect, self-test──► the first that passes

auto: shm (which only reaches processes of one host and is the fastest there), then ucx where it loads, then tcp.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ipaddress
import logging
import mmap
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from contracts.config import TransferConfig
from contracts.errors import ConfigError
from kvtransfer import shm, ucx
from kvtransfer.memory import MemoryTransport
from kvtransfer.shm import ShmTransport
from kvtransfer.tcp import TcpTransport
from kvtransfer.transport import Link, LinkClosed, Transport
from kvtransfer.ucx import UcxTransport
from kvtransfer.wires import promised_gigabytes_per_s

logger = logging.getLogger("baton.kvtransfer")

ON_ONE_HOST = ("memory", "shm")
LEAST_SHARE_OF_MEMCPY = 0.1
LEAST_JUDGED_BYTES = 1 << 20  # a shorter self-test measures the messages around it
LEAST_SHARE_OF_WIRE = 0.1
LEAST_GIGABYTES_PER_S = 0.05  # of any network path: half of what a wire of 1 Gbit/s carries
_COPY_BYTES = 8 << 20


def make_transports(config: TransferConfig, host: str) -> list[Transport]:
    """What `transfer.transport` names, best first. Raises ConfigError if it is not there."""
    match config.transport:
        case "memory":
            return [MemoryTransport()]
        case "shm":
            return [ShmTransport(config.num_slots, config.slot_bytes)]
        case "ucx":
            return [UcxTransport(host)]
        case "tcp":
            return [TcpTransport(host)]
    transports: list[Transport] = []
    if shm.is_available():
        transports.append(ShmTransport(config.num_slots, config.slot_bytes))
    if not _is_loopback(host) and _has_ucx():  # behind a loopback address every peer is reached by shm
        transports.append(UcxTransport(host))
    return [*transports, TcpTransport(host)]


@functools.cache
def _has_ucx() -> bool:
    try:
        ucx.load_ucxx()
    except ConfigError as error:
        logger.warning("%s: not used between hosts", error)
        return False
    return True


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@dataclass(frozen=True, slots=True)
class Path:
    """One way to one peer."""

    transport: Transport
    address: str

    @property
    def name(self) -> str:
        return self.transport.name


class Paths:
    """The transports of one endpoint, listening together. `host` is the address that all of them have."""

    def __init__(self, transports: Sequence[Transport], host: str) -> None:
        self._transports = transports
        self.host = host

    async def listen(self) -> str:
        """Returns what to publish. Raises what the first transport that cannot listen raises."""
        return " ".join([f"{each.name}={await each.listen()}" for each in self._transports])

    def common(self, published: str) -> list[Path]:
        """Ways to the peer who published this, best first. Raises LinkClosed if there is none."""
        theirs = dict(part.split("=", 1) for part in published.split() if "=" in part)
        paths = [Path(each, theirs[each.name]) for each in self._transports if each.name in theirs]
        if not paths:
            ours = ", ".join(each.name for each in self._transports)
            raise LinkClosed(
                f"expected one of our transports ({ours}) but peer has {', '.join(theirs) or published[:80]!r}"
            )
        return paths

    async def accept(self, token: bytes, timeout_s: float) -> Link:
        """The link whose dialler shows `token`, by whichever way. Raises LinkClosed after `timeout_s`."""
        tasks = [asyncio.create_task(each.accept(token, timeout_s)) for each in self._transports]
        kept: Link | None = None
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            kept = next((task.result() for task in tasks if _has_link(task)), None)
        finally:
            # NOTE: nothing is awaited with a link in hand: who is cancelled there loses it.
            for task in tasks:
                task.cancel()  # a transport drops what came for somebody who has left
                task.add_done_callback(_has_link)  # which looks at its error
            for link in [task.result() for task in tasks if _has_link(task)]:
                if link is not kept:
                    await link.close()
        if kept is None:
            raise LinkClosed(f"no data link came within {timeout_s} s")
        return kept

    async def close(self) -> None:
        for each in self._transports:
            with contextlib.suppress(OSError):
                await each.close()


def _has_link(task: asyncio.Task[Link]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None


def least_gigabytes_per_s(name: str, host: str) -> float:
    """The speed under which a path of this kind from `host`, our address, is not what the hardware promises; for shm it
    measures the memory now.
    """
    if name == "shm":
        return LEAST_SHARE_OF_MEMCPY * memcpy_gigabytes_per_s()
    return max(LEAST_GIGABYTES_PER_S, LEAST_SHARE_OF_WIRE * promised_gigabytes_per_s(name, host))


def memcpy_gigabytes_per_s() -> float:
    """One copy of a few MB in this process, under the load of this moment.

    NOTE: in a mapping of its own, which the system has back at once. The heap would keep such pieces, and not at one
    place: a worker grew by 8 or 16 MiB with some of the peers that came.
    """
    area = torch.frombuffer(mmap.mmap(-1, 2 * _COPY_BYTES), dtype=torch.uint8)
    area.fill_(1)  # no page is touched for the first time below
    source, target = area.chunk(2)
    begun_s = time.monotonic()
    target.copy_(source)
    return _COPY_BYTES / max(time.monotonic() - begun_s, 1e-9) / 1e9
