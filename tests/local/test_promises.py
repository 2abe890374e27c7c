"""Placement by predicted times on real workers: the answers are those of placement by load, every decision is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.local.cluster import LocalCluster, greedy, local_cluster

PROMPTS = [[3 + number, *(3 + i % 40 for i in range(20 + number))] for number in range(6)]


async def answers(cluster: LocalCluster) -> list[list[int]]:
    """One at a time."""
    return [
        (await cluster.run(greedy(f"r{number}", prompt, 8, ignore_eos=True)))[0]
        for number, prompt in enumerate(PROMPTS)
    ]


async def test_promises_change_the_way_and_never_the_answer(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.sweep.SWEEP_S", 60.0)
    async with local_cluster(tiny_model) as cluster:
        by_load = await answers(cluster)
        assert {record.verdict for record in cluster.backend.decisions()} == {"no promise"}
    promises = {"slo__ttft_ms": 60_000.0, "slo__itl_ms": 60_000.0}
    async with local_cluster(tiny_model, **promises) as cluster:
        assert await answers(cluster) == by_load
        first = cluster.backend.decisions()[-1]
        assert (first.request_id, first.rule) == ("r0.1", "predicted")  # steps were measured at the start
        await cluster.run(greedy("last", [60, *PROMPTS[0]], 8))
        newest = cluster.backend.decisions()[0]
        assert (newest.request_id, newest.rule) == ("last.1", "predicted")
        assert {option.kind for option in newest.options} == {"remote", "local"}
