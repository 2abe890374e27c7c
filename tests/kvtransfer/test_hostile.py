"""Frames that are truncated, duplicated, reordered, stale or hostile, at every state of a handoff.

Who gets one goes on, or ends the handoff with one typed error, or drops the connection; the blocks of a handoff that
goes on are right, and every slot comes back.
"""

from __future__ import annotations

import pytest

from tests.kvtransfer.hostile import ENDING, NUM_CHUNKS, NUM_TOKENS, run_receiver, run_sender
from tests.kvtransfer.peers import Process, Processes, processes
from tests.kvtransfer.scene import SILENCE_S, STATES, at_once

transports = pytest.mark.parametrize("transport", ["tcp", "shm", "ucx"])

# What a receiver makes of it while the handoff is open; before and after, nothing of it concerns the handoff.
GOES_ON = (
    "duplicate", "duplicate_bytes", "reordered", "stale", "stale_slot", "forged", "damaged", "all_slots", "keeps",
)  # fmt: skip
FAILS = ("open_after_abort", "wrong_range", "wrong_size", "negative", "another_range")
TYPED = ("HandoffError", "ProtocolError", "WorkerLostError")


async def tell_decode(
    started: Processes, decode: Process, port: int, state: str, frame: str, handoff_id: str
) -> None:
    """A hostile prefill says `frame` at `state`; decode's handoff ends as it should."""
    await decode.ask("expect", handoff_id, NUM_TOKENS)
    stranger = await started.start(run_sender, port, handoff_id)
    assert await stranger.hear() == "connected"
    await stranger.ask("reach", state)
    answer = await stranger.ask("say", frame)
    is_broken = frame in ENDING
    assert answer == ("ended" if is_broken else "lives")
    if state == "delivered":
        assert await decode.ask("outcome", handoff_id) == "ok"
    elif state == "reserved" and is_broken:
        assert await decode.ask("is_pending", handoff_id)
        again = await started.start(run_sender, port, handoff_id)
        await again.hear()
        await again.ask("complete")
    elif is_broken:
        assert await decode.ask("outcome", handoff_id) in TYPED
        return
    elif state == "reserved" or frame in GOES_ON:
        await stranger.ask("complete")
    elif frame == "early_fin" and state == "received":
        pass  # right, as it happens
    else:
        assert await decode.ask("outcome", handoff_id) in TYPED
        return
    assert await decode.ask("outcome", handoff_id) == "ok"
    await decode.ask("arrived", handoff_id, NUM_TOKENS)


@transports
@pytest.mark.parametrize("frame", [*GOES_ON, *FAILS, "early_fin", *ENDING])
async def test_decode_survives(frame: str, transport: str) -> None:
    async with processes() as started:
        decode, port, _ = await started.endpoint("d", transport=transport)
        for state in STATES:
            await tell_decode(started, decode, port, state, frame, f"{state}-{frame}")
        await started.end_all_but(decode)
        await decode.ask("rest")


@transports
async def test_bytes_that_nobody_awaits_hold_up_their_own_connection_only(transport: str) -> None:
    """Where bytes come in a row, those behind them do not come; then it ends by silence."""

    async def check(state: str) -> None:
        async with processes() as started:
            decode, port, _ = await started.endpoint("d", transport=transport, peer_timeout_s=SILENCE_S)
            for handoff_id in ("h", "again"):
                await decode.ask("expect", handoff_id, NUM_TOKENS)
                stranger = await started.start(run_sender, port, handoff_id)
                await stranger.hear()
                await stranger.ask("reach", state)
                if handoff_id == "again":
                    await stranger.ask("complete")
                    is_through = True
                else:
                    is_through = await stranger.ask("complete_behind")
                    assert is_through or (transport == "tcp" and state in ("reserved", "receiving"))
                outcome = await decode.ask("outcome", handoff_id)
                assert outcome in (("ok",) if is_through else TYPED)
            await decode.ask("arrived", "again", NUM_TOKENS)
            await started.end_all_but(decode)
            await decode.ask("rest")

    await at_once(check, STATES)


FROM_DECODE = {
    "grant for nobody": True,
    "grant of no slot": False,
    "chunks that were not sent": True,
    "duplicates": True,
    "early commit": True,
    "unasked grant": True,
    "abort of an old one": True,
    "abort": False,
    **dict.fromkeys(ENDING, False),
}


@transports
@pytest.mark.parametrize("frame", FROM_DECODE)
async def test_prefill_survives(frame: str, transport: str) -> None:
    async def check(state: str) -> None:
        async with processes() as started:
            decode = await started.start(run_receiver, transport)
            port = await decode.hear()
            prefill, _, _ = await started.endpoint("p", transport=transport, probe_bytes=0)
            await prefill.ask("peer", port)
            await prefill.ask("open", "h", NUM_TOKENS, 0 if state == "reserved" else NUM_TOKENS)
            if state == "delivered":
                await prefill.ask("finish", "h")
            await decode.ask("reach", state)
            await decode.ask("say", frame)
            if frame in ENDING:
                await decode.ask("gone")
            if state == "delivered":
                assert await prefill.ask("result", "h") == "ok"
            elif FROM_DECODE[frame]:
                await prefill.ask("ready", "h", NUM_TOKENS)
                await prefill.ask("finish", "h")
                await decode.ask("complete", NUM_CHUNKS[state])
                assert await prefill.ask("result", "h") == "ok"
            else:
                await prefill.ask("ready", "h", NUM_TOKENS)
                assert await prefill.ask("result", "h") in TYPED
            await decode.end()
            await prefill.ask("rest")

    await at_once(check, STATES)
