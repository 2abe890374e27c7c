"""Invariants 1, 3 and 4 on real engines: a running request whose KV moves to another decode worker answers the same."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from contracts.request import Finished
from tests.local.cluster import LocalCluster, greedy, local_cluster
from tests.local.gate import Gate, gate_before
from tests.local.test_continuations import PROMPT, events_of, num_attempts, state_of
from tests.local.test_continuations import STATES as SHORT_STATES

NUM_TOKENS = 40
# Its answers end at min_tokens: none may end while it is asked to move.
STATES = SHORT_STATES | {"min_tokens": SHORT_STATES["min_tokens"] | {"min_tokens": 35}}


@pytest.fixture(autouse=True)
def may_move_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coordinator.run.RETRY_S", 0.0)


@asynccontextmanager
async def two_decodes(model: Path, num_prefills: int = 1, **sections: Any) -> AsyncIterator[LocalCluster]:
    """Both connected to each other; no migration becomes a second reading unseen."""
    async with local_cluster(
        model, num_prefills, 2, engine__num_blocks=64, coordinator__max_continuations=0, **sections
    ) as cluster:
        async with asyncio.timeout(20):
            while not all_meet(cluster):
                await cluster.fleet.changed(0.05)
        yield cluster


def leave(cluster: LocalCluster) -> None:
    """Serve takes away the decode worker that is busy, and gives the other one back."""
    busy = {link.info.worker_id for link in cluster.fleet.links() if link.num_requests}
    infos = [worker.info for worker in cluster.workers.values() if worker.info.role == "decode"]
    cluster.fleet.sync("decode", [info for info in infos if info.worker_id not in busy])


def listed_again(cluster: LocalCluster) -> None:
    cluster.fleet.sync("decode", [w.info for w in cluster.workers.values() if w.info.role == "decode"])


def num_read(cluster: LocalCluster) -> float:
    """Tokens that any worker has computed as prompt."""
    return sum(worker._counters()["baton_worker_prefill_tokens_total"] for worker in cluster.workers.values())


def num_moved(cluster: LocalCluster) -> int:
    return sum(
        cluster.workers[name]._desk.num_handoffs for name in cluster.workers if name.startswith("decode")
    )


def num_running(cluster: LocalCluster) -> int:
    """Streams that decode workers write."""
    return sum(worker._phases.decode.num_running for worker in cluster.workers.values())


def all_meet(cluster: LocalCluster) -> bool:
    """Each decode worker is listed, and has reached the other one."""
    return [len(view.peers) for view in cluster.fleet.views("decode")] == [1, 1]


async def take_away(cluster: LocalCluster) -> None:
    """The worker that decodes, until its stream has moved."""
    before = num_moved(cluster)
    async with asyncio.timeout(20):
        while not all_meet(cluster):
            await cluster.fleet.changed(0.05)
        leave(cluster)
        while num_moved(cluster) == before:
            await cluster.fleet.changed(0.05)
    listed_again(cluster)


@pytest.mark.parametrize(
    ("state", "num_prefills"), [*((state, 1) for state in STATES), ("greedy", 0), ("penalties", 0)]
)
async def test_a_stream_that_moves_is_the_one_that_stays(
    tiny_model: Path, state: str, num_prefills: int
) -> None:
    async with two_decodes(tiny_model, num_prefills) as cluster:
        request = greedy("stays", PROMPT, NUM_TOKENS, **({"ignore_eos": True} | STATES[state]))
        whole = await events_of(cluster, request)
        for number, leave_at in enumerate([{1}, {9}, {2, 14, 25}]):
            before = num_moved(cluster)
            moved = await events_of(
                cluster, replace(request, request_id=f"moves{number}"), leave_at, take_away
            )
            assert state_of(moved) == state_of(whole), leave_at
            assert num_moved(cluster) == before + len(leave_at)
            await cluster.settled()


async def test_a_move_reads_no_prompt_again(tiny_model: Path) -> None:
    async with two_decodes(tiny_model) as cluster:
        request = greedy("warm", PROMPT, NUM_TOKENS, ignore_eos=True)
        before = num_read(cluster)
        events = await events_of(cluster, request, [3], take_away)
        assert num_read(cluster) - before == len(PROMPT)
        assert num_moved(cluster) == 1
        assert num_attempts(events) == 1
        assert isinstance(events[-1], Finished)
        assert events[-1].num_cached_tokens == 0


async def test_many_streams_move_at_once_and_every_block_comes_back(tiny_model: Path) -> None:
    async with two_decodes(tiny_model) as cluster:
        requests = [greedy(f"r{i}", PROMPT[i:], 60, ignore_eos=True) for i in range(6)]
        alone = [(await cluster.run(request))[0] for request in requests]
        before = num_moved(cluster)

        async def disturb(gate: Gate) -> None:
            """One decode worker after the other is taken away, until nobody is there."""
            async with asyncio.timeout(20):
                while num_running(cluster) < len(requests):
                    await cluster.fleet.changed(0.05)
            infos = [worker.info for worker in cluster.workers.values() if worker.info.role == "decode"]
            for number in range(4):
                away = infos[number % 2].worker_id
                gate.move(20 + 10 * number)
                cluster.fleet.sync("decode", [info for info in infos if info.worker_id != away])
                while any(
                    link.info.worker_id == away and link.num_requests for link in cluster.fleet.links()
                ):
                    await cluster.fleet.changed(1.0)
                listed_again(cluster)
                async with asyncio.timeout(20):
                    while not any(
                        view.worker_id == away and view.peers for view in cluster.fleet.views("decode")
                    ):
                        await cluster.fleet.changed(1.0)
            gate.move()

        with gate_before(cluster.workers.values(), 10) as gate:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(disturb(gate))
                runs = [
                    tasks.create_task(cluster.run(replace(r, request_id=f"m{r.request_id}")))
                    for r in requests
                ]
        assert [run.result()[0] for run in runs] == alone
        assert num_moved(cluster) >= before + len(requests)
        await cluster.settled()


async def test_a_cut_between_the_workers_while_one_moves_is_not_noticed(tiny_model: Path) -> None:
    """Before the stop the request stays; after it, it is read again: the answer is the same."""
    async with two_decodes(tiny_model) as cluster:
        request = greedy("stays", PROMPT, NUM_TOKENS, ignore_eos=True)
        whole = await events_of(cluster, request)
    async with local_cluster(tiny_model, 1, 2, engine__num_blocks=64) as cluster:
        is_leaving = False

        async def disturb(cluster: LocalCluster) -> None:
            nonlocal is_leaving
            if not is_leaving:
                leave(cluster)
                is_leaving = True
                return
            for worker in cluster.workers.values():
                if worker.info.role == "decode":
                    for connection in list(worker._kv._receiver._connections.values()):
                        connection.channel.abort()

        told = await events_of(cluster, replace(request, request_id="cut"), [2, 3, 4, 5], disturb)
        assert state_of(told) == state_of(whole)
        listed_again(cluster)
        await cluster.settled()
