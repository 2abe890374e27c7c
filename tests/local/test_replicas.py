"""Two ingress replicas on the same workers: each sees the other's load, and leaves nothing behind when it dies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path

from contracts.request import Token
from coordinator.fleet import Fleet
from coordinator.flow import Flow
from coordinator.metrics import Metrics
from coordinator.placement import WorkerView
from tests.coordinator.streams import Stream
from tests.local.cluster import SECRET, LocalCluster, greedy, local_cluster
from tests.local.gate import gate_before
from tests.local.test_handoffs import held_up

PROMPT = [3 + i % 50 for i in range(100)]


@asynccontextmanager
async def second_replica(cluster: LocalCluster) -> AsyncIterator[tuple[Fleet, Flow]]:
    fleet = Fleet(cluster.config, SECRET)
    for role in ("prefill", "decode"):
        fleet.sync(role, [worker.info for worker in cluster.workers.values() if worker.info.role == role])
    flow = Flow(cluster.config, fleet, SECRET, lambda *_: None, Metrics(), frozenset({2}))
    try:
        async with asyncio.timeout(10):
            while not (fleet.views("prefill") and fleet.views("decode")):
                await fleet.changed(1.0)
        yield fleet, flow
    finally:
        await fleet.close()


async def sees(fleet: Fleet, is_so: Callable[[WorkerView], bool]) -> None:
    async with asyncio.timeout(5):
        while not all(is_so(view) for view in fleet.views("decode")):
            await fleet.changed(0.5)


async def test_each_replica_counts_the_others_streams_and_forgets_them_with_it(tiny_model: Path) -> None:
    """The decode worker takes no step meanwhile, so that no stream ends by itself."""
    async with (
        local_cluster(tiny_model, engine__num_blocks=64) as cluster,
        second_replica(cluster) as (fleet, flow),
    ):
        request = greedy("mine", PROMPT, 50, ignore_eos=True)
        with held_up(cluster.workers["decode-0"]):
            async with aclosing(Stream(cluster.flow, request, 30.0)) as mine:
                async with aclosing(Stream(flow, replace(request, request_id="theirs"), 30.0)) as theirs:
                    assert isinstance(await anext(mine), Token)
                    assert isinstance(await anext(theirs), Token)
                    # as the one that has it counts it, and as the other is told of it
                    await sees(fleet, lambda view: view.num_requests == 2)
                    await sees(cluster.fleet, lambda view: view.num_requests == 2)
                await sees(cluster.fleet, lambda view: view.num_requests == 1)
                await sees(fleet, lambda view: view.num_requests == 1)
        await cluster.settled()


async def test_a_replica_that_dies_with_its_streams_leaves_no_block_and_disturbs_nobody(
    tiny_model: Path,
) -> None:
    async with local_cluster(tiny_model, engine__num_blocks=64) as cluster:
        expected, _ = await cluster.run(greedy("alone", PROMPT, 100, ignore_eos=True))
        async with second_replica(cluster) as (fleet, flow), asyncio.TaskGroup() as tasks:
            with gate_before(cluster.workers.values(), 50):
                mine = tasks.create_task(cluster.run(greedy("mine", PROMPT, 100, ignore_eos=True)))
                theirs = Stream(flow, greedy("theirs", PROMPT, 150, ignore_eos=True), 30.0)
                assert isinstance(await anext(theirs), Token)
                for link in fleet.links():  # a SIGKILL: nothing is told, the connections just end
                    assert link._channel is not None
                    link._channel.abort()
            assert (await mine)[0] == expected
            await theirs.aclose()
        await cluster.settled()


async def test_a_replica_knows_where_the_prefixes_of_another_ones_clients_are_and_what_was_written(
    tiny_model: Path,
) -> None:
    """The next turn of a chat may come to any replica: prompt and answer of the last one are found, until evicted."""
    promises = {"slo__ttft_ms": 60_000, "slo__itl_ms": 10_000}
    async with (
        local_cluster(tiny_model, engine__num_blocks=16, **promises) as cluster,
        second_replica(cluster) as (fleet, flow),
    ):
        written, _ = await cluster.run(greedy("first", PROMPT, 60, ignore_eos=True))
        turn = greedy("second", [*PROMPT, *written, 5, 6], 4)

        async def is_held(num_tokens: int) -> None:
            async with asyncio.timeout(5):
                while flow.predictor._held(turn).get("decode-0", 0) != num_tokens:
                    await fleet.changed(0.5)

        await is_held((len(PROMPT) + 60 - 1) // 16 * 16)  # the last token's KV was never needed
        await cluster.run(greedy("all blocks", [7 + i % 40 for i in range(240)], 16, ignore_eos=True))
        await is_held(0)
