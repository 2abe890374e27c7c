"""The planner at work on scripted workers: labels follow the demand, one replica plans, every look says why."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest

from contracts.config import BatonConfig, load_config
from contracts.errors import OverloadedError
from contracts.messages import Message, Peers
from contracts.request import Finished, GenerateRequest, SamplingParams, Token
from contracts.roles import Duty, Orders, RoleLabel
from contracts.steps import StepReport
from coordinator.demand import DemandMeter
from coordinator.fleet import Fleet
from coordinator.placement import WorkerView
from coordinator.planning import Planning, PlanRecord, make_planning, running
from tests.coordinator.fake_worker import SECRET, FakeWorker

# 10 ms to read the weights, 100 µs a prompt token.
STEPS = StepReport((0.010, 20e-6, 10e-9), (0.005, 100e-6, 1e-9, 100e-6, 10e-9), 1.0, 0.0, True, True)
SLO = {"slo.ttft_ms": 5000.0, "slo.itl_ms": 50.0}


@dataclass
class Flips:
    """An observer."""

    seen: list[tuple[RoleLabel, RoleLabel, str]] = field(default_factory=list)

    def flipped(self, from_role: RoleLabel, to_role: RoleLabel, reason: str) -> None:
        self.seen.append((from_role, to_role, reason))


class Replica:
    """One ingress replica on a clock of its own."""

    def __init__(self, config: BatonConfig) -> None:
        self.now_s = 0.0
        self.config = config
        self.fleet = Fleet(config, SECRET)
        self.flips = Flips()
        self.meter = DemandMeter(0.050, config.planner.window_s, lambda: self.now_s)
        self.planning = Planning(config, self.fleet, self.meter, self.flips, lambda: self.now_s)

    async def serve(self, seconds: int, per_s: int, prompt_len: int, num_tokens: int) -> None:
        """`per_s` requests in each of the next seconds, and a look at the end of each."""
        for _ in range(seconds):
            for _ in range(per_s):
                drained(self.meter, prompt_len, num_tokens)
            self.now_s += 1.0
            await self.look()

    async def look(self) -> PlanRecord:
        """One plan, and its orders heard of."""
        record = self.planning.step()
        if record.plan is not None:
            for flip in record.plan.flips:
                await self.until(lambda flip=flip: self.labels()[flip.worker_id] == flip.role)
        return record

    def labels(self) -> dict[str, RoleLabel]:
        return {view.worker_id: view.role for view in self.fleet.all_views()}

    async def until(self, holds: object) -> None:
        assert callable(holds)
        async with asyncio.timeout(5):
            while not holds():
                await self.fleet.changed(0.05)


def drained(meter: DemandMeter, prompt_len: int, num_tokens: int, num_cached: int = 0) -> None:
    request = GenerateRequest("r", (1,) * prompt_len, SamplingParams(max_tokens=num_tokens))
    with meter.measured(request, lambda _token: True) as measured:
        for index in range(num_tokens):
            assert measured.sink(Token(index, 7))
        measured.ended(Finished("length", num_cached_tokens=num_cached))


@contextlib.asynccontextmanager
async def replicas(*workers: FakeWorker, count: int = 1, **keys: object) -> AsyncIterator[list[Replica]]:
    """`count` ingress replicas that see all `workers` ready; the one that plans comes first."""
    config = load_config(overrides=SLO | {key.replace("__", "."): value for key, value in keys.items()})
    infos = [await worker.start() for worker in workers]
    made = [Replica(config) for _ in range(count)]
    for replica in made:
        for role in ("prefill", "decode"):
            replica.fleet.sync(role, [info for info in infos if info.role == role])
    try:
        for replica in made:
            await replica.until(lambda replica=replica: len(replica.labels()) == len(workers))
        for worker in workers:
            worker.tell()
        for replica in made:
            await replica.until(lambda replica=replica: replica.fleet.num_coordinators == count)
        made.sort(key=lambda replica: not replica.fleet.is_leader)
        yield made
    finally:
        for replica in made:
            await replica.fleet.close()
        for worker in workers:
            await worker.kill()


def fakes(num_prefill: int, num_decode: int, steps: StepReport | None = STEPS) -> list[FakeWorker]:
    made = [FakeWorker("prefill", f"p{n}", 100_000) for n in range(num_prefill)]
    made += [FakeWorker("decode", f"d{n}", 100_000) for n in range(num_decode)]
    for worker in made:
        worker.steps = steps
    return made


async def is_told_of(worker: FakeWorker, workers: set[str]) -> None:
    """One that only wrote has heard of others, not of itself, before."""
    await worker.wait_for(
        lambda message: isinstance(message, Peers) and {info.worker_id for info in message.workers} == workers
    )


async def test_a_pair_becomes_mixed_and_knows_each_other() -> None:
    prefill, decode = fakes(1, 1)
    async with replicas(prefill, decode) as [replica]:
        await replica.look()
        assert replica.labels() == {"p0": "mixed", "d0": "mixed"}
        assert set(replica.flips.seen) == {("prefill", "mixed", "small"), ("decode", "mixed", "small")}
        for role in ("prefill", "decode"):
            assert {view.worker_id for view in replica.fleet.views(role)} == {"p0", "d0"}
        for worker in (prefill, decode):
            await is_told_of(worker, {"p0", "d0"})


async def test_what_does_nothing_is_told_once_with_how_often() -> None:
    async with replicas(*fakes(1, 1)) as [replica]:
        for _ in range(4):
            await replica.look()
        carried_out, idle = replica.planning.records
        assert len(carried_out.plan.flips if carried_out.plan else ()) == 2
        assert (idle.verdict, idle.num_times) == ("small", 3)


async def test_labels_follow_the_demand_there_and_back_with_rising_epochs() -> None:
    workers = fakes(2, 2)
    async with replicas(*workers) as [replica]:
        await replica.serve(4, 4, prompt_len=6000, num_tokens=4)
        assert sorted(replica.labels().values()).count("prefill") == 3
        [flip] = [record for record in replica.planning.records if not record.is_idle]
        assert flip.plan is not None
        assert (flip.verdict, set(flip.plan.rates)) == ("starving", {0, 1, 2, 3})
        assert sorted(replica.labels().values()).count("mixed") == 1  # who does not read for others is mixed
        flipped = next(worker for worker in workers if worker.duty.epoch and worker.duty.role == "prefill")
        await is_told_of(flipped, {worker.worker_id for worker in workers})
        assert flipped.worker_id not in {view.worker_id for view in replica.fleet.views("decode")}
        first_epoch = flipped.duty.epoch
        await replica.serve(40, 4, prompt_len=20, num_tokens=900)
        assert set(replica.labels().values()) == {"mixed"}
        assert max(worker.duty.epoch for worker in workers) > first_epoch


async def test_what_is_only_read_here_is_no_stream_of_this_worker() -> None:
    async with replicas(*fakes(1, 1)) as [replica]:
        link = replica.fleet.link("p0")
        link.open("read", lambda _event: None, 5, is_answered_here=False)
        link.open("answered", lambda _event: None, 0)
        [view] = [view for view in replica.fleet.all_views() if view.worker_id == "p0"]
        assert (view.num_requests, view.num_reading, view.num_streams) == (2, 1, 1)
        link.close("read", cancel=False)
        link.close("answered", cancel=False)
        assert (link.num_requests, link.num_reading) == (0, 0)


async def test_nobody_plans_before_steps_are_known_or_without_workers() -> None:
    async with replicas(*fakes(1, 1, steps=None)) as [replica]:
        record = await replica.look()
        assert record.verdict == "the workers are still learning what steps cost"
        assert set(replica.labels().values()) == {"prefill", "decode"}
    async with replicas() as [replica]:
        assert (await replica.look()).verdict == "no worker is ready"


async def test_one_replica_plans_and_another_takes_over_with_newer_orders() -> None:
    workers = fakes(1, 1)
    async with replicas(*workers, count=2) as [leader, follower]:
        assert (await follower.look()).verdict == "another ingress replica plans"
        assert (await leader.look()).verdict == "small"
        await follower.until(lambda: set(follower.labels().values()) == {"mixed"})
        epoch = max(worker.duty.epoch for worker in workers)
        await leader.fleet.close()
        for worker in workers:
            await worker.until(lambda worker=worker: len(worker.coordinators) == 1)
        workers[0].duty = Duty("prefill", epoch)
        for worker in workers:
            worker.tell()
        await follower.until(lambda: follower.fleet.is_leader)
        await follower.until(lambda: "prefill" in follower.labels().values())
        await follower.look()
        assert workers[0].duty == Duty("mixed", epoch + 1)


async def test_the_planner_looks_again_after_a_look_that_failed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with replicas(*fakes(1, 1), planner__interval_s=0.01) as [replica]:
        views = [ValueError("bad"), *[list[WorkerView]()] * 10]

        def fail_once() -> list[WorkerView]:
            view = views.pop(0)
            if isinstance(view, ValueError):
                raise view
            return view

        monkeypatch.setattr(replica.fleet, "all_views", fail_once)
        async with running(replica.planning):
            await replica.until(lambda: bool(replica.planning.records))
        assert "a plan failed" in caplog.text


def is_orders(message: Message) -> bool:
    return isinstance(message, Orders) and message.pool_size > 0


async def test_workers_of_a_pool_whose_number_moves_are_told_how_many_they_should_be() -> None:
    workers = fakes(1, 2)
    async with replicas(*workers, decode__num_replicas=2, decode__max_replicas=6) as [replica]:
        await replica.serve(3, 40, prompt_len=500, num_tokens=200)
        assert await workers[0].wait_for(is_orders) == Orders(pool_size=1)
        told = await workers[1].wait_for(is_orders)
        assert isinstance(told, Orders)
        assert 2 < told.pool_size <= 6


async def test_where_no_number_moves_nobody_is_told_one() -> None:
    workers = fakes(2, 2)
    async with replicas(*workers) as [replica]:
        await replica.serve(3, 4, prompt_len=6000, num_tokens=4)
        assert not any(is_orders(message) for worker in workers for message in worker.heard)


@pytest.mark.parametrize(
    "keys",
    [
        {"slo.ttft_ms": None, "slo.itl_ms": None},
        {"planner.enabled": False},
        {"prefill.num_replicas": 0},
    ],
)
async def test_without_promises_planner_or_prefill_pool_labels_never_move(keys: dict[str, object]) -> None:
    config = load_config(overrides=SLO | keys)
    fleet = Fleet(config, SECRET)
    assert make_planning(config, fleet, Flips()) is None
    async with running(None):
        pass
    await fleet.close()


async def test_demand_is_what_clients_ask_for_and_what_no_cache_holds() -> None:
    now_s = 0.0
    meter = DemandMeter(0.050, 10.0, lambda: now_s)
    assert meter.mix(1) is None
    for number in range(600):
        now_s = number / 10
        drained(meter, 100, 20, num_cached=60)
    mix = meter.mix(1)
    assert mix is not None
    assert mix.requests_per_s == pytest.approx(10.0, rel=0.05)
    assert (mix.prompt_tokens, mix.new_tokens) == (pytest.approx(100), pytest.approx(40, abs=1.0))
    assert mix.output_tokens == pytest.approx(20, rel=0.1)
    three = meter.mix(3)
    assert three is not None
    assert three.requests_per_s == pytest.approx(3 * mix.requests_per_s)


async def test_a_request_that_was_refused_is_demand_too() -> None:
    meter = DemandMeter(0.050, 10.0, lambda: 5.0)
    request = GenerateRequest("r", (1,) * 50, SamplingParams(max_tokens=4))
    with pytest.raises(OverloadedError), meter.measured(request, lambda _token: True):
        raise OverloadedError("no room")
    mix = meter.mix(1)
    assert mix is not None
    assert mix.prompt_tokens == pytest.approx(50)


async def test_what_is_refused_is_asked_for_but_nothing_to_plan_readers_for() -> None:
    meter = DemandMeter(0.050, 10.0, lambda: 5.0)
    drained(meter, 50, 4)
    before = meter.mix(1)
    request = GenerateRequest("r", (1,) * 9950, SamplingParams(max_tokens=4))
    with pytest.raises(OverloadedError), meter.measured(request, lambda _token: True):
        raise OverloadedError("no room")
    mix = meter.mix(1)
    assert mix is not None
    assert before is not None
    assert mix.requests_per_s == pytest.approx(2 * before.requests_per_s)
    assert (mix.new_tokens, mix.of_all().new_tokens) == (pytest.approx(50), pytest.approx(5000))
