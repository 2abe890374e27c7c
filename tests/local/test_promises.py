"""Placement by predicted times on real workers: the answers are those of placement by load, every decision is told."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.local.cluster import LocalCluster, greedy, local_cluster
from worker.steps import FIRST_STEPS, KNOWN_STEPS

# No two begin alike: a prompt that is cached teaches nothing about reading.
PROMPTS = [[3 + number, *(3 + i % 40 for i in range(20 + number))] for number in range(KNOWN_STEPS + 4)]


async def answers(cluster: LocalCluster) -> list[list[int]]:
    """One at a time, so that each prompt is a step."""
    return [
        (await cluster.run(greedy(f"r{number}", prompt, 8, ignore_eos=True)))[0]
        for number, prompt in enumerate(PROMPTS)
    ]


async def test_promises_change_the_way_and_never_the_answer(tiny_model: Path) -> None:
    assert FIRST_STEPS <= KNOWN_STEPS
    async with local_cluster(tiny_model) as cluster:
        by_load = await answers(cluster)
        assert {record.verdict for record in cluster.backend.decisions()} == {"no promise"}
    promises = {"slo__ttft_ms": 60_000.0, "slo__itl_ms": 60_000.0}
    async with local_cluster(tiny_model, **promises) as cluster:
        assert await answers(cluster) == by_load
        assert cluster.backend.decisions()[-1].verdict == "a worker is still learning"
        async with asyncio.timeout(10):  # the next beat tells
            while not all(
                view.steps and view.steps.is_mixed_known for view in cluster.fleet.views("prefill")
            ):
                await cluster.fleet.changed(1.0)
        await cluster.run(greedy("last", [60, *PROMPTS[0]], 8))
        newest = cluster.backend.decisions()[0]
        assert (newest.request_id, newest.rule) == ("last.1", "predicted")
        assert {option.kind for option in newest.options} == {"remote", "local"}
