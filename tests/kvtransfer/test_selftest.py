"""How the self-test finds its speed: by the best of its rounds, and a speed that is too low is doubted for a while."""

from __future__ import annotations

from collections import deque
from typing import Any, cast

import pytest
import torch

from contracts.messages import Message, Probe, Want
from kvtransfer.route import Route
from kvtransfer.selftest import LONGEST_DOUBT_S, SelfTest
from kvtransfer.slots import SendSlots

MIB = 1 << 20
LEAST = 1.5  # GB/s


class Staged:
    """A connection whose slots are shared memory, and a clock."""

    def __init__(self) -> None:
        self.said: list[Message] = []
        self.is_closed = False
        self.now_s = 100.0
        self._slot = torch.empty(MIB, dtype=torch.uint8)

    def send(self, message: Message) -> None:
        self.said.append(message)

    def tensor(self, slot: int) -> torch.Tensor:
        return self._slot

    def post_recv(self, tag: int, buffer: memoryview) -> Any:
        raise AssertionError("the small probes are not of interest here")


def make_test(s: Staged) -> SelfTest:
    route = Route(
        s.send, cast(Any, s), cast(Any, s), False, SendSlots(1, MIB), cast(Any, None), MIB, 1.0, lambda _: None,
        lambda _bytes, _seconds: None, deque(),
    )  # fmt: skip
    return SelfTest(MIB, cast(Any, s), route, LEAST, lambda: s.now_s)


async def bulk_round(s: Staged, test: SelfTest, gigabytes_per_s: float) -> None:
    assert isinstance(s.said.pop(), Want)
    test.granted([0])
    probe = s.said.pop()
    assert isinstance(probe, Probe)
    assert probe.num_bytes == MIB
    s.now_s += MIB / gigabytes_per_s / 1e9
    await test.probe_done(0, True)


@pytest.fixture
async def staged() -> tuple[Staged, SelfTest]:
    """The pages of one slot are touched; what comes now is timed."""
    s = Staged()
    test = make_test(s)
    test._rounds.popleft()  # the small ones
    test.start()
    await bulk_round(s, test, 0.9)
    assert not test.is_passed
    return s, test


async def test_a_good_path_is_timed_once(staged: tuple[Staged, SelfTest]) -> None:
    s, test = staged
    await bulk_round(s, test, 8.0)
    assert test.is_passed
    assert test.gigabytes_per_s == pytest.approx(8.0)
    assert not s.said


async def test_a_slot_that_nobody_had_touched_makes_no_slow_path(staged: tuple[Staged, SelfTest]) -> None:
    """Slots go to whoever asks: with two newcomers at once, the timed round may be in another one than the first."""
    s, test = staged
    for speed in (1.4, 1.2):
        await bulk_round(s, test, speed)
        assert not test.is_passed
    await bulk_round(s, test, 8.0)
    assert test.is_passed
    assert test.gigabytes_per_s == pytest.approx(8.0)


async def test_a_path_that_stays_slow_is_told_by_its_best_round(staged: tuple[Staged, SelfTest]) -> None:
    s, test = staged
    begun_s, num_rounds = s.now_s, 0
    while not test.is_passed:
        await bulk_round(s, test, 0.02 if num_rounds == 1 else 0.01)
        num_rounds += 1
    assert test.gigabytes_per_s == pytest.approx(0.02)
    assert LONGEST_DOUBT_S <= s.now_s - begun_s < LONGEST_DOUBT_S + 0.2


async def test_a_path_so_slow_that_a_round_takes_long_is_timed_once(staged: tuple[Staged, SelfTest]) -> None:
    s, test = staged
    await bulk_round(s, test, MIB / 1e9 / (2 * LONGEST_DOUBT_S))
    assert test.is_passed
