"""Labels move on real workers under load: no request is lost, no answer changes, no block stays."""

from __future__ import annotations

import asyncio
from pathlib import Path

from contracts.messages import Role
from contracts.roles import Duty, RoleLabel
from coordinator.fleet import Fleet
from coordinator.planning import running
from tests.local.cluster import SECRET, LocalCluster, greedy, local_cluster
from worker.steps import KNOWN_STEPS

PROMISES = {"slo__ttft_ms": 60_000.0, "slo__itl_ms": 60_000.0}
ROLES: tuple[Role, Role] = ("prefill", "decode")
NUM_STREAMS = 6
# No two begin alike, so that none is answered from another's cache.
PROMPTS = [[3 + number, *(3 + (7 * i + number) % 40 for i in range(40 + number))] for number in range(24)]


async def answer(cluster: LocalCluster, name: str, number: int) -> list[int]:
    tokens, _ = await cluster.run(greedy(name, PROMPTS[number], 12, ignore_eos=True))
    return tokens


async def until_label(cluster: LocalCluster, worker_id: str, role: RoleLabel) -> None:
    async with asyncio.timeout(5):
        while cluster.fleet.link(worker_id).label != role:
            await cluster.fleet.changed(1.0)


async def until_tested(cluster: LocalCluster, worker_id: str, peer_ids: set[str]) -> None:
    async with asyncio.timeout(10):
        while True:
            [view] = [view for view in cluster.fleet.all_views() if view.worker_id == worker_id]
            if peer_ids <= view.peers:
                return
            await cluster.fleet.changed(1.0)


def has_decoded(cluster: LocalCluster, worker_id: str) -> bool:
    placements = [record.placement for record in cluster.backend.decisions() if record.placement]
    return any(placement.decode_id == worker_id for placement in placements)


async def test_roles_are_swapped_under_load_and_nobody_notices(tiny_model: Path) -> None:
    async with local_cluster(tiny_model, 2, 2, **PROMISES) as cluster:
        expected = [await answer(cluster, f"calm{number}", number) for number in range(len(PROMPTS))]
        told: dict[str, list[int]] = {}
        is_over = asyncio.Event()

        async def stream(first: int) -> None:
            turn = 0
            while not is_over.is_set():
                number = (first + turn * NUM_STREAMS) % len(PROMPTS)
                told[f"{first}-{turn}-{number}"] = await answer(cluster, f"busy{first}-{turn}", number)
                turn += 1

        async with asyncio.TaskGroup() as group:
            for first in range(NUM_STREAMS):
                group.create_task(stream(first))
            cluster.fleet.order("decode-0", Duty("prefill", 1))
            await until_label(cluster, "decode-0", "prefill")
            await until_tested(cluster, "decode-0", {"decode-1"})
            cluster.fleet.order("prefill-0", Duty("decode", 2))
            await until_label(cluster, "prefill-0", "decode")
            await until_tested(cluster, "decode-0", {"prefill-0", "decode-1"})
            # Late orders of an older epoch, and of the same one, change nothing.
            cluster.fleet.order("prefill-0", Duty("prefill", 1))
            cluster.fleet.order("prefill-0", Duty("mixed", 2))
            num_before = len(told)
            async with asyncio.timeout(60):  # which of two workers is taken is the predictions' business
                while len(told) < num_before + 3 * NUM_STREAMS or not has_decoded(cluster, "prefill-0"):
                    await cluster.fleet.changed(1.0)
            is_over.set()
        assert cluster.fleet.link("prefill-0").label == "decode"
        assert {view.worker_id for view in cluster.fleet.views("prefill")} == {"prefill-1", "decode-0"}
        assert {view.worker_id for view in cluster.fleet.views("decode")} == {"decode-1", "prefill-0"}
        for name, tokens in told.items():
            assert tokens == expected[int(name.rsplit("-", 1)[1])], name
        await cluster.settled()


async def test_a_pair_becomes_mixed_once_its_steps_are_known(tiny_model: Path) -> None:
    async with local_cluster(tiny_model, planner__interval_s=0.05, **PROMISES) as cluster:
        assert cluster.planning is not None
        async with running(cluster.planning):
            numbers = range(KNOWN_STEPS + 4)
            before = [await answer(cluster, f"first{number}", number) for number in numbers]
            await until_label(cluster, "prefill-0", "mixed")
            await until_label(cluster, "decode-0", "mixed")
            await until_tested(cluster, "decode-0", {"prefill-0"})
            assert cluster.backend.readiness().is_ready
            again = await asyncio.gather(*(answer(cluster, f"again{number}", number) for number in numbers))
            assert list(again) == before
        plans = cluster.backend.plans()
        assert sum(len(record.plan.flips) for record in plans if record.plan) == 2
        await cluster.settled()


async def test_the_workers_tell_the_ingress_replicas_of_each_other(tiny_model: Path) -> None:
    async with local_cluster(tiny_model, **PROMISES) as cluster:
        assert cluster.fleet.is_leader
        other = Fleet(cluster.config, SECRET)
        for role in ROLES:
            other.sync(role, [worker.info for worker in cluster.workers.values() if worker.info.role == role])
        async with asyncio.timeout(10):
            while cluster.fleet.num_coordinators < 2 or other.num_coordinators < 2:
                await cluster.fleet.changed(0.1)
            while cluster.fleet.is_leader is other.is_leader:
                await cluster.fleet.changed(0.1)
            await other.close()
            while cluster.fleet.num_coordinators > 1 or not cluster.fleet.is_leader:
                await cluster.fleet.changed(0.1)
