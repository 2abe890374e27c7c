"""What placement sees of the fleet: always as it is now, and only what changed is made again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from contracts.roles import Duty
from coordinator.fleet import Fleet
from coordinator.placement import WorkerView
from tests.coordinator.fake_worker import FakeWorker
from tests.coordinator.flow_scene import pair, scene


def by_id(fleet: Fleet) -> dict[str, WorkerView]:
    return {view.worker_id: view for view in fleet.all_views()}


async def until(fleet: Fleet, holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not holds():
            await fleet.changed(1.0)


async def test_a_request_makes_the_view_of_its_own_worker_anew() -> None:
    async with scene(*pair(), FakeWorker("decode", "d2")) as s:
        before, link = by_id(s.fleet), s.fleet.link("p1")
        link.open("r", lambda _: None, 20, is_answered_here=False)
        during = by_id(s.fleet)
        assert [during["p1"].num_requests, during["p1"].num_tokens, during["p1"].num_reading] == [1, 20, 1]
        assert during["p1"].peers is before["p1"].peers
        assert all(during[other] is before[other] for other in ("d1", "d2"))
        link.was_read("r")
        assert by_id(s.fleet)["p1"].num_tokens == 0
        link.close("r", cancel=False)
        assert by_id(s.fleet) == before


async def test_a_worker_that_tells_anew_comes_and_goes_by_its_label() -> None:
    async with scene(*pair(), FakeWorker("decode", "d2")) as s:
        before = by_id(s.fleet)
        s["d1"].num_free = 7
        s["d1"].duty = Duty("mixed", 1)
        s["d1"].tell()
        await until(s.fleet, lambda: by_id(s.fleet)["d1"].num_available_blocks == 7)
        assert {view.worker_id for view in s.fleet.views("prefill")} == {"p1", "d1"}
        assert {view.worker_id for view in s.fleet.views("decode")} == {"d1", "d2"}
        assert by_id(s.fleet)["d2"] is before["d2"]
        assert s.fleet.num_open("prefill") == 2
        assert (s.fleet.num_ready("prefill"), s.fleet.num_ready("decode")) == (1, 2)


async def test_who_drains_is_lost_or_unlisted_is_not_seen() -> None:
    async with scene(*pair(), FakeWorker("decode", "d2"), FakeWorker("decode", "d3")) as s:
        s["d1"].is_draining = True
        s["d1"].tell()
        await until(s.fleet, lambda: "d1" not in by_id(s.fleet))
        await s["d2"].kill()
        await until(s.fleet, lambda: "d2" not in by_id(s.fleet))
        s.fleet.sync("decode", [])
        assert set(by_id(s.fleet)) == {"p1"}
