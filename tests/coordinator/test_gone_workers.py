"""Workers come and go; of those that are gone a coordinator keeps nothing, however many there were."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from contracts.channel import Channel
from contracts.messages import Prefill
from contracts.steps import StepReport
from coordinator import records
from coordinator.line import Pace
from tests.coordinator.fake_worker import FakeWorker, finish, hand_off, send_tokens
from tests.coordinator.flow_scene import Scene, collect, expected, request, scene, until
from tests.held import held_by

STEPS = StepReport((0.010, 20e-6, 10e-9), (0.005, 100e-6, 1e-9, 100e-6, 10e-9), 1.0, 0.0, True, True)


def pair_of_life(number: int) -> tuple[FakeWorker, FakeWorker]:
    prefill = FakeWorker("prefill", f"p{number}", peers=(f"d{number}",))
    decode = FakeWorker("decode", f"d{number}")

    def answer(channel: Channel, command: Prefill) -> None:
        request_id = command.request.request_id
        send_tokens(channel, request_id, 0)
        hand_off(channel, request_id)
        send_tokens(decode.channels[-1], request_id, 1, 2, 3)
        finish(decode.channels[-1], request_id)

    prefill.on_prefill = answer
    for worker in (prefill, decode):
        worker.steps = STEPS
    return prefill, decode


async def replaced(s: Scene, old: Iterable[FakeWorker], new: tuple[FakeWorker, FakeWorker]) -> None:
    """Serve lists the new pair, the old one dies, and the new one answers a request."""
    infos = [await worker.start() for worker in new]
    for info in infos:
        s.fleet.sync(info.role, [info])
    for worker in old:
        await worker.kill()
    await until(lambda: [view.worker_id for view in s.fleet.views("prefill")] == [new[0].worker_id])
    await until(lambda: [view.worker_id for view in s.fleet.views("decode")] == [new[1].worker_id])
    assert (await collect(s, request(prompt_len=64)))[:-1] == expected(4)


@pytest.mark.parametrize("slo_ms", [None, 5000.0])
async def test_of_workers_that_are_gone_a_coordinator_keeps_nothing(
    slo_ms: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What is kept of the last ones, whoever they were, is full before it is counted.
    monkeypatch.setattr(records, "NUM_RECORDS", 4)
    monkeypatch.setattr(Pace, "WINDOW", 4)
    pair = pair_of_life(0)
    async with scene(*pair, slo__ttft_ms=slo_ms, slo__itl_ms=slo_ms) as s:
        counts = []
        for life in range(1, 31):
            new = pair_of_life(life)
            await replaced(s, pair, new)
            pair = new
            if life in (10, 30):
                while s.flow.predictor._index.tidy():
                    pass
                counts.append(held_by([s.flow, s.fleet]))
        for worker in pair:
            await worker.kill()
        assert counts[0] == counts[1]
        assert counts[1]["WorkerLink"] == counts[1]["Channel"] == 2
