"""What this machine carries between two processes without any code of ours: the measure for our own transports.

    memcpy  source ──copy──► shared memory ──copy──► target, 1 MiB pieces, 4 in flight, semaphores between
    ucx     ping-pong of one message, both sides polling; GB/s of one way
    tcp     one message one way over asyncio's sockets, then a byte back

Each `…_ping` runs here, each `…_pong` in the other process; both are told the same sizes and repetitions.
"""

from __future__ import annotations

import asyncio
import importlib
import socket
import time
from collections.abc import Callable, Coroutine, Iterator
from multiprocessing.connection import Connection
from multiprocessing.shared_memory import SharedMemory
from typing import Any, TypeVar

import numpy as np
import uvloop
from numpy.typing import NDArray

PIECE_BYTES = 1 << 20
NUM_PIECES = 4
HOST = "127.0.0.1"

Bytes = NDArray[np.uint8]
_Answer = TypeVar("_Answer")


def gigabytes_per_s(num_bytes: int, times_s: list[float]) -> float:
    """By the shortest time: what else the machine does only ever adds, and adds to both sides of a ratio unequally."""
    return num_bytes / min(times_s) / 1e9


def on_fast_loop(work: Coroutine[Any, Any, _Answer]) -> _Answer:
    """The loop that Ray gives its workers."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


def timed(num_times: int, work: Callable[[], object]) -> list[float]:
    """Seconds of each run, after one that does not count."""
    work()
    times_s = []
    for _ in range(num_times):
        begun_s = time.perf_counter()
        work()
        times_s.append(time.perf_counter() - begun_s)
    return times_s


def filled(num_bytes: int) -> Bytes:
    """Memory whose pages are all there."""
    return np.full(num_bytes, 7, dtype=np.uint8)


# --- shared memory ----------------------------------------------------------------------------------------------------


class Ring:
    """Shared memory and its semaphores; made here, given to the other process when it starts."""

    def __init__(self, context: Any) -> None:
        self.full, self.free, self.done = (
            context.Semaphore(0),
            context.Semaphore(NUM_PIECES),
            context.Semaphore(0),
        )

    def pieces(self, num_bytes: int) -> Iterator[tuple[int, int, int]]:
        """(place in the ring, low, high) of each piece."""
        for number, low in enumerate(range(0, num_bytes, PIECE_BYTES)):
            yield number % NUM_PIECES, low, min(low + PIECE_BYTES, num_bytes)


def memcpy_ping(conn: Connection, ring: Ring, num_bytes: int, num_times: int) -> float:
    shared = SharedMemory(create=True, size=PIECE_BYTES * NUM_PIECES)
    try:
        conn.send(shared.name)
        area, source = shared.buf, filled(num_bytes).data
        assert area is not None

        def send() -> None:
            for place, low, high in ring.pieces(num_bytes):
                ring.free.acquire()
                area[place * PIECE_BYTES : place * PIECE_BYTES + high - low] = source[low:high]
                ring.full.release()
            ring.done.acquire()

        return gigabytes_per_s(num_bytes, timed(num_times, send))
    finally:
        conn.recv()
        shared.close()
        shared.unlink()


def memcpy_pong(conn: Connection, ring: Ring, num_bytes: int, num_times: int) -> None:
    shared = SharedMemory(name=conn.recv())
    area, target = shared.buf, filled(num_bytes).data
    assert area is not None
    for _ in range(num_times + 1):
        for place, low, high in ring.pieces(num_bytes):
            ring.full.acquire()
            target[low:high] = area[place * PIECE_BYTES : place * PIECE_BYTES + high - low]
            ring.free.release()
        ring.done.release()
    shared.close()
    conn.send("done")


# --- UCX --------------------------------------------------------------------------------------------------------------


class _Ucx:
    """One side: a worker, and an endpoint made by `dial` or by the listener. Progress is by polling."""

    def __init__(self, options: dict[str, str]) -> None:
        self.api = importlib.import_module("ucxx._lib.libucxx")
        self.array = importlib.import_module("ucxx._lib.arr").Array
        self.worker = self.api.UCXWorker(self.api.UCXContext(options))
        self.endpoint: Any = None

    def listen(self) -> Any:
        def arrived(endpoint: Any) -> None:
            self.endpoint = endpoint

        return self.api.UCXListener.create(self.worker, 0, arrived, deliver_endpoint=True)

    def dial(self, port: int) -> None:
        self.endpoint = self.api.UCXEndpoint.create(self.worker, HOST, port, True)

    def until(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            self.worker.progress()

    def send(self, buffer: Bytes, tag: int) -> None:
        self._wait(self.endpoint.tag_send(self.array(buffer), self.api.UCXXTag(tag)))

    def receive(self, buffer: Bytes, tag: int) -> None:
        self._wait(self.endpoint.tag_recv(self.array(buffer), self.api.UCXXTag(tag)))

    def _wait(self, request: Any) -> None:
        self.until(lambda: bool(request.completed))
        request.check_error()

    def close(self) -> None:
        self.endpoint.close_blocking(10_000_000, 100)


def ucx_ping(conn: Connection, options: dict[str, str], num_bytes: int, num_times: int) -> float:
    side, buffer = _Ucx(options), filled(num_bytes)
    side.dial(conn.recv())

    def there_and_back() -> None:
        side.send(buffer, 1)
        side.receive(buffer, 2)

    speed = 2 * gigabytes_per_s(num_bytes, timed(num_times, there_and_back))
    conn.send("done")
    side.until(lambda: conn.poll(0))
    conn.recv()
    side.close()
    return speed


def ucx_pong(conn: Connection, options: dict[str, str], num_bytes: int, num_times: int) -> None:
    side, buffer = _Ucx(options), filled(num_bytes)
    listener = side.listen()
    conn.send(listener.port)
    side.until(lambda: side.endpoint is not None)
    for _ in range(num_times + 1):
        side.receive(buffer, 1)
        side.send(buffer, 2)
    side.until(lambda: conn.poll(0))
    conn.recv()
    side.close()
    conn.send("done")


# --- asyncio ----------------------------------------------------------------------------------------------------------


def tcp_ping(conn: Connection, num_bytes: int, num_times: int) -> float:
    return on_fast_loop(_tcp_ping(conn.recv(), num_bytes, num_times))


async def _tcp_ping(port: int, num_bytes: int, num_times: int) -> float:
    loop, source, answer = asyncio.get_running_loop(), filled(num_bytes).data, bytearray(1)
    with socket.socket() as sock:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await loop.sock_connect(sock, (HOST, port))
        times_s = []
        for _ in range(num_times + 1):
            begun_s = time.perf_counter()
            await loop.sock_sendall(sock, source)
            await loop.sock_recv_into(sock, answer)
            times_s.append(time.perf_counter() - begun_s)
        return gigabytes_per_s(num_bytes, times_s[1:])


def tcp_pong(conn: Connection, num_bytes: int, num_times: int) -> None:
    on_fast_loop(_tcp_pong(conn, num_bytes, num_times))


async def _tcp_pong(conn: Connection, num_bytes: int, num_times: int) -> None:
    loop, target = asyncio.get_running_loop(), filled(num_bytes).data
    with socket.socket() as listener:
        listener.setblocking(False)
        listener.bind((HOST, 0))
        listener.listen(1)
        conn.send(listener.getsockname()[1])
        sock, _address = await loop.sock_accept(listener)
        with sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for _ in range(num_times + 1):
                filled_bytes = 0
                while filled_bytes < num_bytes:
                    filled_bytes += await loop.sock_recv_into(sock, target[filled_bytes:])
                await loop.sock_sendall(sock, b"1")
