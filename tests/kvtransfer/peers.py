"""Endpoints in processes of their own, told what to do through a pipe.

    test ──commands──► process "p": KvEndpoint ──Wire (wires.py)──► process "d": KvEndpoint

A server that has imported everything forks them, so that one starts in milliseconds and may be killed without regret.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import multiprocessing
import os
import resource
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from contracts import wire
from contracts.errors import LeaseExpiredError
from kvtransfer.incoming import Incoming
from tests.kvtransfer.tools import (
    HOST,
    NUM_BLOCKS,
    STATE,
    Growing,
    Handoff,
    Pair,
    Side,
    make_config,
    make_info,
    make_slab,
    until,
)

CLONE_NEWNET, CLONE_NEWNS = 0x4000_0000, 0x2_0000
MS_SLAVE_ALL = 1 << 19 | 1 << 14
CALM_S = 0.002
HOARDED_BYTES = (64 << 20, 1 << 20, 64 << 10, 16 << 10)
ANSWER_S = 60.0  # a busy machine; what is waited for inside has its own, shorter limit

for _kind in wire.KINDS:
    wire._reader(_kind)  # built once, before the forks, and not in each of them

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    ["tests.kvtransfer.peers", "tests.kvtransfer.hostile", "ucxx._lib.libucxx", "ucxx._lib.arr"]
)


@dataclass(frozen=True)
class Place:
    """Where an endpoint's process is: a network namespace ("": this one), an address in it, UCX's network device."""

    namespace: str = ""
    host: str = HOST
    device: str = ""

    def enter(self) -> None:
        """For a process that has one thread. Raises OSError."""
        if self.device:
            # Both namespaces have a loopback of the same address, and UCX sees one host: it would try that one.
            os.environ |= {"UCX_NET_DEVICES": self.device, "UCX_TLS": "tcp"}
        if not self.namespace:
            return
        libc = ctypes.CDLL(None, use_errno=True)
        with open(f"/run/netns/{self.namespace}") as file:
            is_failed = libc.setns(file.fileno(), CLONE_NEWNET)
        # UCX looks for its devices in /sys, which goes on showing the namespace that it was mounted in.
        is_failed = is_failed or libc.unshare(CLONE_NEWNS)
        is_failed = is_failed or libc.mount(b"none", b"/", None, MS_SLAVE_ALL, None)
        is_failed = is_failed or libc.mount(b"sysfs", b"/sys", b"sysfs", 0, None)
        if is_failed:
            raise OSError(ctypes.get_errno(), f"cannot enter network namespace {self.namespace}")


class Process:
    """The test's end of one process."""

    def __init__(self, process: BaseProcess, conn: Connection) -> None:
        self._process, self._conn = process, conn

    async def hear(self) -> Any:
        async with asyncio.timeout(ANSWER_S):
            return await receive(self._conn)

    async def ask(self, *command: Any) -> Any:
        """The command's answer. Raises AssertionError with the other process's error."""
        self._conn.send(command)
        is_ok, answer = await self.hear()
        assert is_ok, answer
        return answer

    def signal(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    async def stopped(self) -> None:
        """Until it is, by itself."""
        stat = Path(f"/proc/{self._process.pid}/stat")
        await until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", pause_s=CALM_S)

    async def end(self) -> None:
        """Killed. A second call does nothing."""
        if self._conn.closed:
            return
        self._process.kill()
        await asyncio.to_thread(self._process.join)
        self._process.close()
        self._conn.close()


class Processes:
    """Starts them and ends those that are left."""

    def __init__(self) -> None:
        self._started: list[Process] = []

    async def start(self, target: Callable[..., None], *arguments: Any) -> Process:
        ours, theirs = _context.Pipe()
        process = _context.Process(target=target, args=(theirs, *arguments), daemon=True)
        await asyncio.to_thread(process.start)
        theirs.close()
        started = Process(process, ours)
        self._started.append(started)
        return started

    async def endpoint(
        self,
        name: str,
        incarnation: int = 1,
        version: int = wire.PROTOCOL_VERSION,
        place: Place | None = None,
        **changes: Any,
    ) -> tuple[Process, int, str]:
        """One that does what `Endpoint` can be told; its kv_port and data address."""
        process = await self.start(run_endpoint, name, incarnation, version, place or Place(), changes)
        port, address = await process.hear()
        return process, port, address

    async def end_all_but(self, *kept: Process) -> None:
        for process in [each for each in self._started if each not in kept]:
            await process.end()
            self._started.remove(process)


@contextlib.asynccontextmanager
async def processes() -> AsyncIterator[Processes]:
    started = Processes()
    try:
        yield started
    finally:
        await started.end_all_but()


async def receive(conn: Connection) -> Any:
    """One message of a pipe, without holding up the event loop. Raises EOFError."""
    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    loop.add_reader(conn.fileno(), lambda: ready.done() or ready.set_result(None))
    try:
        await ready
    finally:
        loop.remove_reader(conn.fileno())
    return conn.recv()


# --- in the other process ---------------------------------------------------------------------------------------------


async def obey(conn: Connection, commands: object) -> None:
    """Call the methods of `commands` that the test names, until it ends or leaves."""
    while True:
        try:
            name, *arguments = await receive(conn)
        except EOFError:
            return
        try:
            answer = getattr(commands, name)(*arguments)
            conn.send((True, await answer if asyncio.iscoroutine(answer) else answer))
        except Exception as error:
            conn.send((False, f"{name}: {error!r}"))


def run_endpoint(
    conn: Connection, name: str, incarnation: int, version: int, place: Place, changes: dict[str, Any]
) -> None:
    wire.PROTOCOL_VERSION = version
    place.enter()
    side = Side(name, 1 if name == "p" else 2, make_config(**changes), incarnation=incarnation)
    asyncio.run(_run_endpoint(conn, side, place.host, incarnation))


async def _run_endpoint(conn: Connection, side: Side, host: str, incarnation: int) -> None:
    port = await side.endpoint.start(host)
    conn.send((port, side.endpoint._address))
    await obey(conn, Endpoint(side, incarnation))
    await side.endpoint.close()


class Endpoint:
    """What an endpoint's process can be told. Every handoff is of all its tokens, by its id."""

    def __init__(self, side: Side, incarnation: int) -> None:
        self._side = side
        self._incarnation = incarnation
        self._handoffs: dict[str, Handoff] = {}
        self._incoming: dict[str, Incoming] = {}
        self._source = make_slab(1)
        self._untouched = side.slab.clone()
        self._num_ready = 0
        self._hoard: list[bytes] = []
        side.endpoint.on_peers_changed = self._peers_changed

    def publish(self, address: str) -> None:
        self._side.endpoint._address = address

    async def peer(self, port: int, incarnation: int = 1, host: str = HOST) -> None:
        """Connect to the decode endpoint at `port` and wait for it."""
        info = replace(make_info(port, incarnation=incarnation), host=host)
        self._side.endpoint.set_peers([info])
        await self.connected(1)

    async def connected(self, num_times: int) -> None:
        """Until the peer has become ready for the `num_times`-th time."""
        statuses = self._side.endpoint.peer_statuses
        try:
            await until(lambda: self._num_ready >= num_times, pause_s=CALM_S)
            await until(lambda: statuses()[0].is_ready, pause_s=CALM_S)
        except TimeoutError as error:
            raise AssertionError(f"ready {self._num_ready} of {num_times} times, {statuses()}") from error

    def path(self) -> tuple[str, str]:
        """Which transport the connection took, and what is noted about it."""
        (status,) = self._side.endpoint.peer_statuses()
        return status.transport, status.detail

    async def fenced(self) -> None:
        """Until the connection that there was is given up."""
        endpoint = self._side.endpoint
        await until(
            lambda: (
                not any(peer.is_ready for peer in endpoint.peer_statuses())
                and not endpoint._receiver._connections
            ),
            pause_s=CALM_S,
        )

    def _peers_changed(self) -> None:
        self._num_ready += any(peer.is_ready for peer in self._side.endpoint.peer_statuses())

    async def unready_peer(self, port: int, incarnation: int = 1) -> str:
        """Why it does not become ready."""
        self._side.endpoint.set_peers([make_info(port, incarnation=incarnation)])
        statuses = self._side.endpoint.peer_statuses
        await until(lambda: statuses()[0].detail != "connecting", pause_s=CALM_S)
        assert not statuses()[0].is_ready
        return statuses()[0].detail

    def expect(self, handoff_id: str, num_tokens: int, is_stopping: bool = False) -> None:
        """`is_stopping`: this process stops, as by SIGSTOP, at the moment when it takes the handoff over."""
        handoff = self._handoffs[handoff_id] = self._make(handoff_id, num_tokens)
        if is_stopping:
            handoff.on_over = lambda: os.kill(os.getpid(), signal.SIGSTOP)
        self._incoming[handoff_id] = handoff.expect()

    def open(
        self, handoff_id: str, num_tokens: int, num_ready: int, source: int = 1, target: int = 1
    ) -> None:
        """Tokens [0, num_ready) are computed; `source` and `target` are the incarnations in the ticket."""
        if handoff_id not in self._handoffs:
            self.prepare(handoff_id, num_tokens, source, target)
        handoff = self._handoffs[handoff_id]
        handoff.open(0)
        handoff.ready(num_ready)

    def prepare(self, handoff_id: str, num_tokens: int, source: int = 1, target: int = 1) -> None:
        """What is `open`'s, but for the endpoint."""
        lives = {"source_incarnation": source, "target_incarnation": target}
        self._handoffs[handoff_id] = self._make(handoff_id, num_tokens, **lives)

    def expect_growing(self, handoff_id: str, num_known: int, num_tokens: int) -> None:
        handoff = Growing(self._pair(), num_known, num_tokens, handoff_id=handoff_id)
        self._handoffs[handoff_id] = handoff
        self._incoming[handoff_id] = handoff.expect()

    async def migrate(self, handoff_id: str, num_known: int, num_tokens: int) -> None:
        """One token more at a time, until all full blocks are at the target; then the rest."""
        handoff = Growing(self._pair(), num_known, num_tokens, handoff_id=handoff_id)
        self._handoffs[handoff_id] = handoff
        outgoing = handoff.open()
        num_drawn = num_known
        while not handoff.sent.done() and (not handoff.num_caught_up or num_drawn < num_tokens):
            num_drawn = min(num_drawn + 1, num_tokens)
            handoff.ready(num_drawn)
            await asyncio.sleep(CALM_S)
        outgoing.finish(handoff.state)

    def ready(self, handoff_id: str, num_tokens: int) -> None:
        self._handoffs[handoff_id].ready(num_tokens)

    def finish(self, handoff_id: str) -> None:
        outgoing = self._handoffs[handoff_id].outgoing
        assert outgoing is not None
        outgoing.finish(STATE)

    def expire(self, handoff_id: str) -> None:
        """As the worker does when the lease of a reservation is over."""
        self._incoming[handoff_id].cancel(LeaseExpiredError("nobody came"))

    def cancel(self, handoff_id: str) -> int:
        """As when the client leaves. How many slots are in quarantine then."""
        self._incoming[handoff_id].cancel(None)
        return self._side.endpoint.slot_counts.quarantined

    async def arrived(self, handoff_id: str, num_tokens: int) -> None:
        """Until so many tokens are in place, and equal to prefill's."""
        handoff = self._handoffs[handoff_id]
        await until(lambda: handoff.arrived == num_tokens, pause_s=CALM_S)

    async def result(self, handoff_id: str) -> str:
        """Prefill's end of it: the error's type, or "ok"."""
        error = (await self._handoffs[handoff_id].result()).error
        return "ok" if error is None else type(error).__name__

    async def outcome(self, handoff_id: str) -> str:
        """Decode's end of it."""
        outcome = await self._handoffs[handoff_id].outcome()
        handoff = self._handoffs[handoff_id]
        wanted = handoff.state if isinstance(handoff, Growing) else STATE
        return "ok" if outcome == wanted else type(outcome).__name__

    def is_opened(self, handoff_id: str) -> bool:
        """Whether prefill's first word of it has reached us."""
        return self._incoming[handoff_id].has_started

    def is_pending(self, handoff_id: str) -> bool:
        return not self._handoffs[handoff_id].received.done()

    def starve(self) -> None:
        """From now on the system has no memory for us; what the interpreter has is enough for small objects only."""
        small = [bytes(size) for size in range(32, 512, 16) for _ in range(3000)]
        self._hoard.extend(small[::40])  # of each of its arenas, so that none is given back
        del small
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize(), most))
        for size in HOARDED_BYTES:
            with contextlib.suppress(MemoryError):
                while True:
                    self._hoard.append(bytes(size))

    def feed(self) -> None:
        """There is memory again."""
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        self._hoard.clear()

    def fork(self) -> int:
        """A child that holds whatever file we have open; its process id."""
        child = os.fork()
        while not child:
            signal.pause()
        return child

    def held(self) -> dict[str, int]:
        """What a connection costs this process."""
        maps = Path("/proc/self/maps").read_text()
        return {"files": len(os.listdir("/proc/self/fd")), "areas": maps.count("memfd:baton-kv")}

    async def holds(self, held: dict[str, int]) -> None:
        """Until it is no more than that."""
        await until(lambda: all(self.held()[name] <= most for name, most in held.items()), pause_s=CALM_S)

    async def rest(self) -> None:
        """The audit: every slot is free, nothing is expected or under way, and no block was written but of handoffs."""
        endpoint = self._side.endpoint
        await until(lambda: self._side.is_at_rest, pause_s=CALM_S)
        assert endpoint._receiver.num_expected == 0
        assert not any(sender._outgoing for sender in endpoint._senders.values())
        handoffs = self._handoffs.values() if self._side.endpoint._identity[0] == "d" else ()
        others = set(range(NUM_BLOCKS)).difference(*(handoff.targets for handoff in handoffs))
        assert torch.equal(self._side.slab[list(others)], self._untouched[list(others)])

    def _make(self, handoff_id: str, num_tokens: int, **changes: Any) -> Handoff:
        assert num_tokens <= NUM_BLOCKS * 4
        return Handoff(self._pair(), num_tokens, 0, handoff_id=handoff_id, **changes)

    def _pair(self) -> Pair:
        source = Side.__new__(Side)
        source.slab = self._source
        own = self._side
        return Pair(own, own, 0) if own.endpoint._identity[0] == "p" else Pair(source, own, 0)
