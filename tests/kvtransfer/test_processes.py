"""A link whose far end is killed or stopped ends, or can be ended, and lets go of its buffers."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvtransfer.transport import Link, LinkClosed, Transport
from tests.kvtransfer.link_process import TOKEN
from tests.kvtransfer.links import make_transport

ROOT = Path(__file__).parents[2]
START_S = 60.0  # a process that imports torch, on a busy machine
LIMIT_S = 5.0
transports = pytest.mark.parametrize("transport", ["shm", "ucx", "tcp"])


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
