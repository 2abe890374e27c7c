"""What a handoff tells of its link: bytes and seconds, without the time in which there was nothing to send."""

from __future__ import annotations

import pytest

from kvtransfer.stretch import Stretches
from tests.kvtransfer.tools import LAYOUT, STATE, connected, make_config, until

transports = pytest.mark.parametrize("transport", ["memory", "shm", "tcp"])


def test_time_without_anything_to_send_does_not_count() -> None:
    now_s, told = [10.0], list[tuple[int, float]]()
    stretches = Stretches(lambda num_bytes, seconds: told.append((num_bytes, seconds)), lambda: now_s[0])
    for num_bytes in (100, 50):
        stretches.begin()
        stretches.add(num_bytes)
        now_s[0] += 2.0
        stretches.begin()
        stretches.end()
        stretches.end()
        now_s[0] += 100.0  # the next tokens are computed
    assert told == [(100, 2.0), (50, 2.0)]


@transports
async def test_a_handoff_beside_its_prefill_is_a_stretch_for_each_time_that_it_caught_up(
    transport: str,
) -> None:
    async with connected(make_config(transport=transport)) as pair:
        told: list[tuple[str, int, float]] = []
        pair.prefill.endpoint.on_moved = lambda *stretch: told.append(stretch)
        handoff = pair.handoff(40)
        handoff.expect()
        outgoing = handoff.open(24)
        await until(lambda: len(told) == 1)
        handoff.ready(40)
        outgoing.finish(STATE)
        assert (await handoff.result()).error is None
        assert [(peer, num_bytes) for peer, num_bytes, _ in told] == [
            ("d", 24 * LAYOUT.bytes_per_token), ("d", 16 * LAYOUT.bytes_per_token),
        ]  # fmt: skip
        assert all(seconds > 0 for *_, seconds in told)
        await pair.rest()


async def test_a_handoff_that_fails_tells_nothing() -> None:
    async with connected(make_config(transport="memory")) as pair:
        told: list[tuple[str, int, float]] = []
        pair.prefill.endpoint.on_moved = lambda *stretch: told.append(stretch)
        handoff = pair.handoff(40)
        outgoing = handoff.open(40)  # nobody expects it
        outgoing.finish(STATE)
        assert (await handoff.result()).error is not None
        assert told == []
        await pair.rest()
