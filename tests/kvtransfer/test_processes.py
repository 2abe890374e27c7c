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


@contextlib.asynccontextmanager
async def peer(role: str, port: int = 0) -> AsyncIterator[tuple[asyncio.subprocess.Process, int]]:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.kvtransfer.peer_process", role, str(port), cwd=ROOT, stdin=pipe, stdout=pipe
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


@signals
async def test_prefill_notices_that_decode_is_gone(number: signal.Signals, peer_timeout_s: float) -> None:
    tasks = asyncio.all_tasks()
    prefill = Side("p", 1, make_config(peer_timeout_s=peer_timeout_s))
    await prefill.endpoint.start(HOST)
    async with peer("decode") as (process, port):
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


@signals
async def test_decode_notices_that_prefill_is_gone(number: signal.Signals, peer_timeout_s: float) -> None:
    async with decode_side(make_config(peer_timeout_s=peer_timeout_s)) as (decode, port):
        source = Side("p", 1, make_config())  # the same slab as the other process has
        handoff = Handoff(Pair(source, decode, port), NUM_TOKENS, 0, handoff_id="h")
        handoff.expect()
        async with peer("prefill", port) as (process, _):
            await until(lambda: handoff.arrived == NUM_READY)
            process.send_signal(number)
            begun_s = time.monotonic()
            assert isinstance(await handoff.outcome(), WorkerLostError)
            assert time.monotonic() - begun_s < LIMIT_S
            await until(lambda: decode.is_at_rest)
