"""Requests on real workers in one process: every way to end one gives every block back."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import pytest

from contracts.channel import connect
from contracts.errors import ContextLengthError, LeaseExpiredError, OverloadedError, from_wire
from contracts.messages import Ended, Hello, Reserve, Reserved, Status
from contracts.request import Finished, Token
from coordinator.backend import Backend
from tests.coordinator.backend_conformance import BackendConformance
from tests.coordinator.streams import Stream
from tests.local.cluster import SECRET, LocalCluster, greedy, local_cluster
from tests.local.gate import gate_before

PROMPT = [3 + i % 50 for i in range(100)]


async def first_tokens(
    cluster: LocalCluster, name: str, count: int, max_tokens: int = 150
) -> list[Token | Finished]:
    """Take `count` tokens and leave."""
    events: list[Token | Finished] = []
    request = greedy(name, PROMPT, max_tokens, ignore_eos=True)
    async with aclosing(Stream(cluster.flow, request, 30.0)) as stream:
        async for event in stream:
            events.append(event)
            if len(events) == count:
                break
    return events


class TestRealBackend(BackendConformance):
    prompt_ids = tuple(PROMPT[:20])

    @pytest.fixture
    async def backend(self, tiny_model: Path) -> AsyncIterator[Backend]:
        async with local_cluster(tiny_model, engine__num_blocks=64) as cluster:
            self.cluster = cluster
            yield cluster.backend

    async def settled(self, backend: Backend) -> None:
        await self.cluster.settled()


@pytest.mark.parametrize("num_prefills", [0, 1])
@pytest.mark.parametrize("count", [1, 2, 5])
async def test_blocks_return_when_the_client_leaves(tiny_model: Path, num_prefills: int, count: int) -> None:
    async with local_cluster(tiny_model, num_prefills, engine__num_blocks=64) as cluster:
        assert len(await first_tokens(cluster, "leaver", count)) == count
        await cluster.settled()


async def test_blocks_return_when_the_client_leaves_at_any_moment(tiny_model: Path) -> None:
    """Cancelled after a random number of turns of the event loop: in the line, reserving, prefilling, handing off."""
    rng = random.Random(5)
    async with local_cluster(tiny_model, engine__num_blocks=64, engine__max_chunk_tokens=16) as cluster:
        for number in range(60):
            task = asyncio.create_task(first_tokens(cluster, f"c{number}", 20))
            for _ in range(rng.randrange(200)):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await cluster.settled()
        assert len(await first_tokens(cluster, "after", 3)) == 3


async def test_more_requests_than_fit_wait_and_all_are_answered(tiny_model: Path) -> None:
    """16 blocks on each worker: reservations are refused, sequences preempted, and all answers stay the same."""
    async with local_cluster(tiny_model, engine__num_blocks=64) as cluster:
        alone = [(await cluster.run(greedy(f"a{i}", PROMPT[i:], 40, ignore_eos=True)))[0] for i in range(6)]
    async with local_cluster(tiny_model, engine__num_blocks=16) as cluster:
        runs = [cluster.run(greedy(f"r{i}", PROMPT[i % 6 :], 40, ignore_eos=True)) for i in range(18)]
        answers = await asyncio.gather(*runs)
        assert [ids for ids, _ in answers] == [alone[i % 6] for i in range(18)]
        assert {end.reason for _, end in answers} == {"length"}


async def test_a_full_line_refuses_and_the_others_are_answered(tiny_model: Path) -> None:
    async with local_cluster(
        tiny_model, engine__num_blocks=16, engine__max_num_seqs=1, coordinator__max_queue=2
    ) as cluster:
        runs = [cluster.run(greedy(f"r{i}", PROMPT, 40, ignore_eos=True)) for i in range(6)]
        results = await asyncio.gather(*runs, return_exceptions=True)
        refused = [result for result in results if isinstance(result, BaseException)]
        assert {type(error) for error in refused} == {OverloadedError}
        assert 0 < len(refused) < 6


async def test_a_reservation_nobody_fills_ends_with_its_lease(tiny_model: Path) -> None:
    async with local_cluster(tiny_model, num_prefills=0) as cluster:
        info = cluster.workers["decode-0"].info
        channel = await connect("127.0.0.1", info.port, Hello("other", 1, "commands", b""), SECRET)
        request = greedy("leased", PROMPT, 4)
        channel.send(Reserve(request, "handoff", 0.05))
        seen = [message async for message in _messages(channel) if not isinstance(message, Status)]
        assert isinstance(seen[0], Reserved)
        assert isinstance(seen[1], Ended)
        assert seen[1].error is not None
        assert isinstance(from_wire(seen[1].error), LeaseExpiredError)
        await cluster.settled()
        channel.abort()


async def test_blocks_return_when_a_coordinator_dies(tiny_model: Path) -> None:
    async with local_cluster(tiny_model, num_prefills=0) as cluster:
        info = cluster.workers["decode-0"].info
        channel = await connect("127.0.0.1", info.port, Hello("other", 1, "commands", b""), SECRET)
        channel.send(Reserve(greedy("orphan", PROMPT, 4), "handoff", 60.0))
        while not isinstance(await channel.receive(), Reserved):
            pass
        channel.abort()
        await cluster.settled()


async def test_a_stopped_decode_worker_hands_its_streams_to_another(tiny_model: Path) -> None:
    async with local_cluster(tiny_model, num_decodes=1) as cluster:
        expected, _ = await cluster.run(greedy("whole", PROMPT, 60, ignore_eos=True))
    async with local_cluster(tiny_model, num_decodes=2) as cluster:
        tokens: list[int] = []
        request = greedy("moved", PROMPT, 60, ignore_eos=True)
        with gate_before(cluster.workers.values(), 8) as gate:
            async with aclosing(Stream(cluster.flow, request, 60.0)) as stream:
                async for event in stream:
                    if isinstance(event, Token):
                        tokens.append(event.token_id)
                    if len(tokens) == 5 and isinstance(event, Token):
                        await stop_the_busy(cluster)
                        gate.move()
        assert tokens == expected


async def stop_the_busy(cluster: LocalCluster) -> None:
    """The decode worker that has a request: Serve lists it no more, and ends it."""
    audits = await cluster.backend.audit()
    (busy,) = (audit.worker_id for audit in audits if audit.role == "decode" and audit.owners)
    infos = [worker.info for worker in cluster.workers.values() if worker.info.role == "decode"]
    cluster.fleet.sync("decode", [info for info in infos if info.worker_id != busy])
    await cluster.workers.pop(busy).close()


async def test_a_request_beyond_the_pool_is_refused_before_any_work(tiny_model: Path) -> None:
    async with local_cluster(tiny_model, num_prefills=0, engine__num_blocks=4) as cluster:
        with pytest.raises(ContextLengthError, match="at most 64 tokens but got 104"):
            await cluster.run(greedy("too-long", PROMPT, 4))


async def _messages(channel):  # type: ignore[no-untyped-def]
    async with asyncio.timeout(5):
        for _ in range(20):
            message = await channel.receive()
            yield message
            if isinstance(message, Ended):
                return


async def test_a_worker_with_too_much_in_quarantine_is_not_ready_until_it_is_back(tiny_model: Path) -> None:
    async with local_cluster(tiny_model, engine__num_blocks=64) as cluster:
        slots = cluster.workers["decode-0"]._kv._receiver._slots
        flow = (99, "h")
        while slots.counts().free:
            slots.grant(flow)
        slots.quarantine(flow)
        async with asyncio.timeout(10):
            while cluster.backend.readiness().is_ready:
                await cluster.fleet.changed(1.0)
        assert not cluster.fleet.views("decode")
        [status] = [each.status for each in cluster.backend.readiness().workers if each.role == "decode"]
        assert "staging slots in quarantine" in status.reason
        slots.release_unused(flow)
        async with asyncio.timeout(10):
            while not cluster.backend.readiness().is_ready:
                await cluster.fleet.changed(1.0)
        assert len((await cluster.run(greedy("after", PROMPT, 4, ignore_eos=True)))[0]) == 4
