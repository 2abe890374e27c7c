"""The fault matrix: every trouble of a peer, at every state of a handoff, between two processes.

    RESERVED    decode expects it, nobody has opened it          RECEIVING   60 of 100 tokens are there
    RECEIVED    all tokens are there, prefill has not finished   DELIVERED   decode has taken over

Each ends in success or in one typed error within its deadline, with every slot back on both sides; and the pair goes
on by itself: the next handoff arrives.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator

import pytest

from contracts.messages import PROTOCOL_VERSION
from tests.kvtransfer.peers import Process, processes
from tests.kvtransfer.scene import (
    NUM_TOKENS,
    OTHER,
    SILENCE_S,
    STATES,
    VICTIMS,
    Scene,
    at_once,
    check_survivor,
    scene,
)

every_transport = pytest.mark.parametrize("transport", ["tcp", "shm", "ucx"])
victims = pytest.mark.parametrize("victim", VICTIMS)


@every_transport
@victims
async def test_a_peer_is_killed_and_comes_back_at_the_same_address(transport: str, victim: str) -> None:
    async def check(state: str) -> None:
        async with scene(transport) as s:
            survivor = s.at(OTHER[victim])
            held = await survivor.ask("held")
            await s.reach(state, "h")
            s.at(victim).signal(signal.SIGKILL)
            await check_survivor(s, OTHER[victim], state)
            await s.restart(victim)
            await s.check_again(1)
            await survivor.ask("holds", held)  # of the life before, nothing is left

    await at_once(check, STATES)


@every_transport
async def test_a_peer_is_killed_and_a_child_of_it_holds_its_connections_open(transport: str) -> None:
    """No end is told then, as if it were stopped."""

    async def check(victim: str, state: str) -> None:
        async with scene(transport, SILENCE_S) as s:
            await s.reach(state, "h")
            killed = s.at(victim)
            child = await killed.ask("fork")
            try:
                killed.signal(signal.SIGKILL)
                await check_survivor(s, OTHER[victim], state)
                await s.at(OTHER[victim]).ask("fenced")
                await s.restart(victim)
                await s.check_again(1)
            finally:
                os.kill(child, signal.SIGKILL)

    await at_once(check, VICTIMS, STATES)


@every_transport
@pytest.mark.parametrize("which", ["control", "data"])
async def test_a_connection_that_breaks_ends_both_sides_and_is_made_again(transport: str, which: str) -> None:
    """The processes are well: whatever was under way has one typed error, on both sides, and what was not goes on."""
    if which == "data" and transport != "tcp":
        which = "control"  # the data's needs no wire; test_hostile.py closes it

    async def check(state: str) -> None:
        async with scene(transport) as s:
            held = await asyncio.gather(s.prefill.ask("held"), s.decode.ask("held"))
            await s.reach(state, "h")
            s.wires[which == "data"].reset()
            if state in ("receiving", "received"):
                assert await s.prefill.ask("result", "h") == "WorkerLostError"
                assert await s.decode.ask("outcome", "h") == "WorkerLostError"
            await s.prefill.ask("connected", 2)
            if state == "reserved":
                await complete(s, state)
            await s.check_again(2)
            await asyncio.gather(s.prefill.ask("holds", held[0]), s.decode.ask("holds", held[1]))

    await at_once(check, STATES)


@every_transport
@victims
async def test_a_ticket_for_the_life_before_the_restart_is_worker_lost(transport: str, victim: str) -> None:
    async with scene(transport) as s:
        await s.reach("reserved", "h")
        s.at(victim).signal(signal.SIGKILL)
        await s.restart(victim)
        if victim == "decode":
            await s.decode.ask("expect", "h", NUM_TOKENS)
        await s.prefill.ask("open", "h", NUM_TOKENS, NUM_TOKENS, 1, 1)
        assert await s.prefill.ask("result", "h") == (
            "HandoffError" if victim == "prefill" else "WorkerLostError"
        )
        assert await s.decode.ask("is_pending", "h")
        await s.decode.ask("expire", "h")
        await s.check_again(1)


@every_transport
async def test_a_peer_is_stopped_and_goes_on(transport: str) -> None:
    async def check(victim: str, state: str) -> None:
        async with scene(transport, SILENCE_S) as s:
            await s.reach(state, "h")
            stopped = s.at(victim)
            stopped.signal(signal.SIGSTOP)
            await check_survivor(s, OTHER[victim], state)
            await s.at(OTHER[victim]).ask("fenced")
            stopped.signal(signal.SIGCONT)
            await check_other_end(s, victim, state)
            await s.check_again(2)

    await at_once(check, VICTIMS, STATES)


async def check_other_end(s: Scene, victim: str, state: str) -> None:
    """The one that was away hears of the end as well."""
    if state in ("receiving", "received"):
        ask = s.prefill.ask("result", "h") if victim == "prefill" else s.decode.ask("outcome", "h")
        assert await ask == "WorkerLostError"
    elif state == "reserved" and victim == "decode":
        if not await s.decode.ask("is_pending", "h"):
            assert await s.decode.ask("outcome", "h") == "WorkerLostError"  # an Open had reached it
        await s.decode.ask("expire", "h")


@every_transport
async def test_a_partition_ends_both_sides_and_heals(transport: str) -> None:
    """Over shm and ucx of the control connection only: the data's is whole, and must be given up all the same."""

    async def check(state: str) -> None:
        async with scene(transport, SILENCE_S) as s:
            await s.reach(state, "h")
            for wire in s.wires:
                wire.cut()
            await check_survivor(s, "prefill", state)
            await check_survivor(s, "decode", state)
            await asyncio.gather(s.prefill.ask("fenced"), s.decode.ask("fenced"))
            for wire in s.wires:
                wire.heal()
            await s.check_again(2)

    await at_once(check, STATES)


@every_transport
async def test_a_slow_wire_is_no_failure(transport: str) -> None:
    """Over shm and ucx the control connection's."""

    async def check(state: str) -> None:
        async with scene(transport) as s:
            await s.reach(state, "h")
            for wire in s.wires:
                wire.delay_s = 0.01
            await complete(s, state)
            await s.check_again(1)

    await at_once(check, STATES)


async def complete(s: Scene, state: str) -> None:
    if state == "reserved":
        await s.open("h", NUM_TOKENS)
    elif state == "receiving":
        await s.prefill.ask("ready", "h", NUM_TOKENS)
    if state != "delivered":
        await s.finish("h")


@contextlib.asynccontextmanager
async def halting(process: Process) -> AsyncIterator[None]:
    """It runs for a tenth of the time."""

    async def halt() -> None:
        while True:
            process.signal(signal.SIGSTOP)
            await asyncio.sleep(0.02)
            process.signal(signal.SIGCONT)
            await asyncio.sleep(0.002)

    task = asyncio.create_task(halt())
    try:
        yield
    finally:
        task.cancel()
        process.signal(signal.SIGCONT)


@every_transport
@victims
async def test_a_slow_peer_is_no_failure(transport: str, victim: str) -> None:
    async def check(state: str) -> None:
        async with scene(transport) as s:
            await s.reach(state, "h")
            async with halting(s.at(victim)):
                await complete(s, state)
                await s.check_again(1)

    await at_once(check, STATES)


@every_transport
@victims
async def test_a_peer_has_no_memory_for_a_while(transport: str, victim: str) -> None:
    """For real: the system refuses whatever is larger than a small object."""

    async def check(state: str) -> None:
        async with scene(transport) as s:
            await s.reach(state, "h")
            starving = s.at(victim)
            if state == "reserved":
                await s.prefill.ask("prepare", "h", NUM_TOKENS)  # tickets are the coordinator's
            await starving.ask("starve")
            ends = await go_on(s, state)
            assert ends <= {"ok", "HandoffError", "WorkerLostError"}
            if ends - {"ok"}:
                await asyncio.gather(s.prefill.ask("fenced"), s.decode.ask("fenced"))
            await starving.ask("feed")
            await s.check_again(2 if ends - {"ok"} else 1)

    await at_once(check, STATES)


async def go_on(s: Scene, state: str) -> set[str]:
    """To the end of the handoff, whatever it is: what both sides heard of it."""
    if state == "delivered":
        return set()
    if state == "reserved":
        await s.open("h", NUM_TOKENS)
    elif state == "receiving":
        await s.prefill.ask("ready", "h", NUM_TOKENS)
    await s.prefill.ask("finish", "h")
    ends = {await s.prefill.ask("result", "h")}
    if await s.decode.ask("is_opened", "h"):
        ends.add(await s.decode.ask("outcome", "h"))
    else:
        await s.decode.ask("expire", "h")
    return ends


@every_transport
@victims
async def test_a_peer_that_comes_back_with_another_version_is_refused(transport: str, victim: str) -> None:
    """In the middle of a rolling update, say."""

    async def check(state: str) -> None:
        async with scene(transport) as s:
            await s.reach(state, "h")
            s.at(victim).signal(signal.SIGKILL)
            await check_survivor(s, OTHER[victim], state)
            await s.start_anew(victim, PROTOCOL_VERSION + 1)
            ours, theirs = PROTOCOL_VERSION + (victim == "prefill"), PROTOCOL_VERSION + (victim == "decode")
            why = await s.prefill.ask("unready_peer", s.port, s.decode_life)
            assert why == f"expected protocol version {ours} but peer sent {theirs}"
            await s.rest()

    await at_once(check, STATES)


@every_transport
@victims
async def test_another_protocol_version_is_refused_with_both_sides_values(
    transport: str, victim: str
) -> None:
    async with processes() as started:
        newer = PROTOCOL_VERSION + 1
        theirs = newer if victim == "decode" else PROTOCOL_VERSION
        ours = newer if victim == "prefill" else PROTOCOL_VERSION
        decode, port, _ = await started.endpoint("d", version=theirs, transport=transport)
        prefill, _, _ = await started.endpoint("p", version=ours, transport=transport)
        await decode.ask("expect", "h", NUM_TOKENS)
        why = await prefill.ask("unready_peer", port)
        assert why == f"expected protocol version {ours} but peer sent {theirs}"
        await prefill.ask("open", "h", NUM_TOKENS, NUM_TOKENS)
        assert await prefill.ask("result", "h") == "WorkerLostError"
        await decode.ask("expire", "h")
        await asyncio.gather(prefill.ask("rest"), decode.ask("rest"))
