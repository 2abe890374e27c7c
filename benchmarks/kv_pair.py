"""Two endpoints in two processes, and handoffs between them, for `benchmarks/kv_bandwidth.py`.

here: prefill's endpoint ──open, ready, finish──► the other process: decode's endpoint, told to expect them
"""

from __future__ import annotations

import asyncio
import signal
import statistics
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch

from benchmarks import kv_raw
from contracts.blocks import KvLayout
from contracts.channel import connect
from contracts.config import TransferConfig
from contracts.messages import Abort, AbortOk, Grant, HandoffState, Hello, Open, Want, WorkerInfo
from contracts.request import Token
from contracts.ticket import Ticket, sign
from kvtransfer.endpoint import KvEndpoint
from kvtransfer.outgoing import Outgoing, OutgoingResult
from kvtransfer.tcp import TcpTransport

SECRET = b"benchmark" * 4
STATE = HandoffState(Token(0, 0))
TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Job:
    """A handoff that both processes know of."""

    handoff_id: str
    num_tokens: int
    block_ids: tuple[int, ...]

    def ticket(self) -> Ticket:
        ticket = Ticket(self.handoff_id, self.handoff_id, "p", 1, "d", 1, self.num_tokens, b"prompt", b"")
        return sign(ticket, SECRET)


def block_order(num_blocks: int, run_length: int) -> tuple[int, ...]:
    """Ids of `num_blocks` blocks in runs of `run_length` consecutive ones, no two runs adjoining."""
    runs = [range(low, min(low + run_length, num_blocks)) for low in range(0, num_blocks, run_length)]
    half = -(-len(runs) // 2)
    shuffled = [run for pair in zip(runs[:half], [*runs[half:], range(0)], strict=False) for run in pair]
    return tuple(block for run in shuffled for block in run)


def make_endpoint(name: str, transport: str, slab: torch.Tensor, layout: KvLayout) -> KvEndpoint:
    config = TransferConfig(transport=transport, connect_timeout_s=TIMEOUT_S, progress_timeout_s=TIMEOUT_S)
    return KvEndpoint((name, 1), "bench", layout, slab, config, SECRET)


def make_slab(num_blocks: int, layout: KvLayout) -> torch.Tensor:
    shape = (num_blocks, layout.num_layers, 2, layout.num_kv_heads, layout.block_size, layout.head_dim)
    raw = kv_raw.filled(
        num_blocks * layout.bytes_per_block
    )  # as the engine does: numpy's memory has large pages
    return torch.from_numpy(raw).view(getattr(torch, layout.dtype)).view(shape)


# --- the other process ------------------------------------------------------------------------------------------------


def other_process(conn: Connection, ring: kv_raw.Ring) -> None:
    """Does what it is told until it is told "end"."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    while (command := conn.recv())[0] != "end":
        match command:
            case ("memcpy", num_bytes, num_times):
                kv_raw.memcpy_pong(conn, ring, num_bytes, num_times)
            case ("ucx", options, num_bytes, num_times):
                kv_raw.ucx_pong(conn, options, num_bytes, num_times)
            case ("tcp", num_bytes, num_times):
                kv_raw.tcp_pong(conn, num_bytes, num_times)
            case ("decode", transport, num_blocks, layout):
                kv_raw.on_fast_loop(decode(conn, transport, num_blocks, layout))


async def decode(conn: Connection, transport: str, num_blocks: int, layout: KvLayout) -> None:
    """An endpoint that expects whatever jobs it is sent, until it is sent none."""
    endpoint = make_endpoint("d", transport, make_slab(num_blocks, layout), layout)
    conn.send(await endpoint.start(kv_raw.HOST))
    while jobs := await asyncio.to_thread(conn.recv):
        for job in jobs:
            endpoint.expect(
                job.handoff_id, job.handoff_id, b"prompt", job.num_tokens, 0, job.block_ids, on_done=lambda _: None
            )  # fmt: skip
        conn.send("expected")
    await endpoint.close()
    conn.send("closed")


# --- this process -----------------------------------------------------------------------------------------------------


class Pair:
    """Our endpoint, connected to the one in the other process."""

    def __init__(self, conn: Connection, transport: str, slab: torch.Tensor, layout: KvLayout) -> None:
        self._conn = conn
        self._slab, self.layout = slab, layout
        self._number = 0
        self.endpoint = make_endpoint("p", transport, slab, layout)
        conn.send(("decode", transport, slab.shape[0], layout))

    async def __aenter__(self) -> Pair:
        self.port = await asyncio.to_thread(self._conn.recv)
        await self.endpoint.start(kv_raw.HOST)
        ready = asyncio.Event()
        self.endpoint.on_peers_changed = lambda: (
            ready.set() if any(peer.is_ready for peer in self.endpoint.peer_statuses()) else None
        )
        info = WorkerInfo(
            "d", "decode", 0, 1, kv_raw.HOST, 0, self.port, "bench", self.layout, self._slab.shape[0], 8, 8192
        )  # fmt: skip
        self.endpoint.set_peers([info])
        async with asyncio.timeout(TIMEOUT_S):
            await ready.wait()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.endpoint.close()
        self._conn.send([])
        await asyncio.to_thread(self._conn.recv)

    async def expect(self, num_jobs: int, num_tokens: int, block_ids: tuple[int, ...]) -> list[Job]:
        """Jobs that the other process has reserved blocks for."""
        jobs = []
        for _ in range(num_jobs):
            self._number += 1
            jobs.append(Job(f"h{self._number}", num_tokens, block_ids))
        self._conn.send(jobs)
        await asyncio.to_thread(self._conn.recv)
        return jobs

    def open(self, job: Job) -> tuple[Outgoing, asyncio.Future[OutgoingResult]]:
        """The handoff, and what it will come to."""
        done: asyncio.Future[OutgoingResult] = asyncio.get_running_loop().create_future()
        return self.endpoint.open(job.ticket(), 0, done.set_result), done

    async def hand_over(self, job: Job) -> None:
        """One handoff, everything computed before it begins. Raises what ended it."""
        out, done = self.open(job)
        out.ready(job.num_tokens, job.block_ids)
        out.finish(STATE)
        raise_failure(await done)


def raise_failure(result: OutgoingResult) -> OutgoingResult:
    if result.error is not None:
        raise result.error
    return result


async def control_rtt_ms(pair: Pair, num_times: int) -> float:
    """Over tcp, the median of Open + Want → Grant: the reservation is claimed, the first slot is granted."""
    jobs = await pair.expect(num_times, pair.layout.block_size, (0,))
    hello = Hello("p", 1, "kv", b"", "bench", pair.layout)
    channel = await connect(kv_raw.HOST, pair.port, hello, SECRET)
    address = channel.peer.data_address.removeprefix("tcp=")
    link = await TcpTransport(kv_raw.HOST).connect(address, channel.peer.bind_token, TIMEOUT_S)
    times_s = []
    try:
        for job in jobs:
            begun_s = time.perf_counter()
            channel.send(Open(job.ticket(), 0))
            channel.send(Want(job.handoff_id, 1))
            while not isinstance(await channel.receive(), Grant):
                pass
            times_s.append(time.perf_counter() - begun_s)
            channel.send(Abort(job.handoff_id, None))
            while not isinstance(await channel.receive(), AbortOk):
                pass
    finally:
        await link.close()
        await channel.close()
    return statistics.median(times_s) * 1e3
