"""Faults at moments of a handoff that pass at once, so that they must be held: COMMITTED, and slots in QUARANTINE.

COMMITTED    decode stops itself (SIGSTOP) when it takes over: all is there, and Commit has not been said
QUARANTINED  decode's client has left while prefill holds credits and has announced bytes that did not come
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Awaitable, Callable, Iterator

import pytest

from tests.kvtransfer.hostile import NUM_TOKENS as NUM_HELD_TOKENS
from tests.kvtransfer.hostile import run_sender
from tests.kvtransfer.peers import Process, Processes, processes
from tests.kvtransfer.scene import NUM_TOKENS, SILENCE_S, Scene, scene

every_transport = pytest.mark.parametrize("transport", ["tcp", "shm", "ucx"])


@contextlib.contextmanager
def noted(fault: Callable[..., object]) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        error.add_note(f"when {fault.__name__}")
        raise


async def decode_is_killed(s: Scene) -> None:
    s.decode.signal(signal.SIGKILL)
    assert await s.prefill.ask("result", "h") == "WorkerLostError"
    await s.prefill.ask("rest")
    await s.restart("decode")
    await s.check_again(1)


async def decode_goes_on_too_late(s: Scene) -> None:
    """Each side tells the coordinator what it saw; the KV that decode has is right."""
    assert await s.prefill.ask("result", "h") == "WorkerLostError"
    await s.prefill.ask("fenced")
    s.decode.signal(signal.SIGCONT)
    await check_taken_over(s)
    await s.check_again(2)


async def prefill_is_killed(s: Scene) -> None:
    s.prefill.signal(signal.SIGKILL)
    s.decode.signal(signal.SIGCONT)
    await check_taken_over(s)
    await s.restart("prefill")
    await s.check_again(1)


async def the_wires_are_cut(s: Scene) -> None:
    for wire in s.wires:
        wire.cut()
    s.decode.signal(signal.SIGCONT)
    await check_taken_over(s)
    assert await s.prefill.ask("result", "h") == "WorkerLostError"
    await asyncio.gather(s.prefill.ask("fenced"), s.decode.ask("fenced"))
    for wire in s.wires:
        wire.heal()
    await s.check_again(2)


async def decode_goes_on(s: Scene) -> None:
    s.decode.signal(signal.SIGCONT)
    await check_taken_over(s)
    assert await s.prefill.ask("result", "h") == "ok"
    await s.check_again(1)


async def check_taken_over(s: Scene) -> None:
    assert await s.decode.ask("outcome", "h") == "ok"
    await s.decode.ask("arrived", "h", NUM_TOKENS)
    await s.decode.ask("rest")


@every_transport
async def test_a_fault_while_decode_takes_over(transport: str) -> None:
    async def check(fault: Callable[[Scene], Awaitable[None]], silence_s: float) -> None:
        async with scene(transport, silence_s) as s:
            await s.decode.ask("expect", "h", NUM_TOKENS, True)
            await s.open("h", NUM_TOKENS)
            await s.prefill.ask("finish", "h")
            await s.decode.stopped()
            with noted(fault):
                await fault(s)

    async with asyncio.TaskGroup() as group:
        for fault in (decode_goes_on_too_late, the_wires_are_cut):
            group.create_task(check(fault, SILENCE_S))
        for fault in (decode_is_killed, prefill_is_killed, decode_goes_on):
            group.create_task(check(fault, 60.0))


async def is_killed(stranger: Process) -> None:
    stranger.signal(signal.SIGKILL)


async def is_stopped(stranger: Process) -> None:
    stranger.signal(signal.SIGSTOP)


async def closes_its_link(stranger: Process) -> None:
    assert await stranger.ask("say", "link closed") == "ended"


async def is_cut_off_within_a_frame(stranger: Process) -> None:
    assert await stranger.ask("say", "truncated") == "ended"


async def talks_on_and_lets_nothing_go(stranger: Process) -> None:
    await stranger.ask("talk")


async def lets_go(stranger: Process) -> None:
    await stranger.ask("let_go")


SILENT = is_stopped, talks_on_and_lets_nothing_go  # only a deadline tells
TELLING = is_killed, closes_its_link, is_cut_off_within_a_frame, lets_go


@every_transport
async def test_slots_in_quarantine_come_back_whatever_becomes_of_prefill(transport: str) -> None:
    """And the client's blocks were free at once: what comes late is not in them."""

    async def check(fault: Callable[[Process], Awaitable[None]], limit_s: float) -> None:
        async with processes() as started:
            decode, port, _ = await started.endpoint(
                "d", transport=transport, peer_timeout_s=limit_s, progress_timeout_s=limit_s
            )
            await decode.ask("expect", "h", NUM_HELD_TOKENS)
            stranger = await connected(started, port, "h")
            await stranger.ask("hold", transport != "shm")
            assert await decode.ask("cancel", "h") == 2
            with noted(fault):
                await fault(stranger)
                await decode.ask("rest")
            await decode.ask("arrived", "h", 0)
            await decode.ask("expect", "again", NUM_HELD_TOKENS)
            await (await connected(started, port, "again")).ask("complete")
            await decode.ask("arrived", "again", NUM_HELD_TOKENS)

    for faults, limit_s in ((SILENT, SILENCE_S), (TELLING, 60.0)):
        async with asyncio.TaskGroup() as group:
            for fault in faults:
                group.create_task(check(fault, limit_s))


async def connected(started: Processes, port: int, handoff_id: str) -> Process:
    stranger = await started.start(run_sender, port, handoff_id)
    assert await stranger.hear() == "connected"
    return stranger
