"""Two processes: one is killed or stopped in the middle of a handoff, the other one notices and has everything back."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from contracts.errors import WorkerLostError
from kvtransfer.transport import Link, LinkClosed, Transport
from tests.kvtransfer.link_process import TOKEN
from tests.kvtransfer.links import make_transport
from tests.kvtransfer.peer_process import NUM_READY, NUM_TOKENS
from tests.kvtransfer.tools import HOST, Handoff, Pair, Side, decode_side, make_config, make_info, until

ROOT = Path(__file__).parents[2]
START_S = 60.0  # a process that imports torch, on a busy machine
LIMIT_S = 5.0
signals = (
    pytest.mark.parametrize(  # death shows by the end of the connection alone, a stopped peer by its silence
        ("number", "peer_timeout_s"), [(signal.SIGKILL, 60.0), (signal.SIGSTOP, 0.5)], ids=["kill", "stop"]
    )
)
transports = pytest.mark.parametrize("transport", ["shm", "ucx", "tcp"])


@contextlib.asynccontextmanager
async def peer(
    role: str, transport: str, port: int = 0
) -> AsyncIterator[tuple[asyncio.subprocess.Process, int]]:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.kvtransfer.peer_process", role, transport, str(port),
        cwd=ROOT, stdin=pipe, stdout=pipe,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        async with asyncio.timeout(START_S):
            own_port = int(await process.stdout.readline())
        yield process, own_port
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


@transports
@signals
async def test_prefill_notices_that_decode_is_gone(
    transport: str, number: signal.Signals, peer_timeout_s: float
) -> None:
    tasks = asyncio.all_tasks()
    prefill = Side("p", 1, make_config(transport=transport, peer_timeout_s=peer_timeout_s))
    await prefill.endpoint.start(HOST)
    async with peer("decode", transport) as (process, port):
        prefill.endpoint.set_peers([make_info(port)])
        await until(lambda: prefill.endpoint.peer_statuses()[0].is_ready)
        handoff = Handoff(Pair(prefill, prefill, port), NUM_TOKENS, 0, handoff_id="h")
        out = handoff.open(NUM_READY)
        await until(lambda: out._num_bytes > 0)
        process.send_signal(number)
        begun_s = time.monotonic()
        assert isinstance((await handoff.result()).error, WorkerLostError)
        assert time.monotonic() - begun_s < LIMIT_S
        await until(lambda: prefill.is_at_rest and not prefill.endpoint.peer_statuses()[0].is_ready)
    await prefill.endpoint.close()
    await until(lambda: asyncio.all_tasks() <= tasks)


@transports
@signals
async def test_decode_notices_that_prefill_is_gone(
    transport: str, number: signal.Signals, peer_timeout_s: float
) -> None:
    async with decode_side(make_config(transport=transport, peer_timeout_s=peer_timeout_s)) as (decode, port):
        source = Side("p", 1, make_config())  # the same slab as the other process has
        handoff = Handoff(Pair(source, decode, port), NUM_TOKENS, 0, handoff_id="h")
        handoff.expect()
        async with peer("prefill", transport, port) as (process, _):
            await until(lambda: handoff.arrived == NUM_READY)
            process.send_signal(number)
            begun_s = time.monotonic()
            assert isinstance(await handoff.outcome(), WorkerLostError)
            assert time.monotonic() - begun_s < LIMIT_S
            await until(lambda: decode.is_at_rest)


@contextlib.asynccontextmanager
async def far_end(transport: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, Link, Transport]]:
    """A link to a process that posts no receive."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.kvtransfer.link_process", transport, cwd=ROOT, stdin=pipe, stdout=pipe
    )  # fmt: skip
    dialler = make_transport(transport)
    try:
        assert process.stdout is not None
        async with asyncio.timeout(START_S):
            address = (await process.stdout.readline()).decode().strip()
            link = await dialler.connect(address, TOKEN, START_S)
            assert await process.stdout.readline() == b"accepted\n"
        yield process, link, dialler
        await link.close()
    finally:
        await dialler.close()
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


@transports
async def test_a_link_to_a_killed_process_ends_by_itself(transport: str) -> None:
    async with far_end(transport) as (process, link, _):
        ops = [link.send(1, memoryview(bytearray(30 << 20))), link.post_recv(2, memoryview(bytearray(10)))]
        process.kill()
        for op in ops:
            with pytest.raises(LinkClosed):
                async with asyncio.timeout(LIMIT_S):
                    await op.wait()


@transports
async def test_a_link_to_a_stopped_process_can_be_closed_and_its_buffers_are_ours(transport: str) -> None:
    async with far_end(transport) as (process, link, _):
        process.send_signal(signal.SIGSTOP)
        ops = [link.send(1, memoryview(bytearray(30 << 20))), link.post_recv(2, memoryview(bytearray(10)))]
        async with asyncio.timeout(LIMIT_S):
            await link.close()
        for op in ops:
            assert isinstance(op.final.exception(), LinkClosed)
