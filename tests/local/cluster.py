"""Real workers, real sockets, the real flow, without Ray: what the composition root wires, in one process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contracts.config import BatonConfig, load_config
from contracts.messages import Role
from contracts.request import Finished, GenerateRequest, SamplingParams, Token
from coordinator.cluster import ClusterBackend
from coordinator.fleet import Fleet
from coordinator.flow import Flow
from coordinator.metrics import Metrics
from coordinator.phases import make_phases
from coordinator.planning import Planning, make_planning
from tests.coordinator.streams import Stream
from worker.ranks import StartRank
from worker.worker import Worker

SECRET = b"t" * 32


@dataclass
class LocalCluster:
    config: BatonConfig
    fleet: Fleet
    flow: Flow
    backend: ClusterBackend
    workers: dict[str, Worker]
    planning: Planning | None
    """Of promises; nobody runs it but the test."""

    async def run(self, request: GenerateRequest, timeout_s: float = 120.0) -> tuple[list[int], Finished]:
        """All token ids and the one end."""
        tokens: list[Token] = []
        async for event in Stream(self.backend, request, timeout_s):
            if isinstance(event, Finished):
                return [token.token_id for token in tokens], event
            assert event.index == len(request.output_ids) + len(tokens)
            tokens.append(event)
        raise AssertionError("no terminal event")

    async def settled(self) -> None:
        """Wait until no worker holds a block for anybody; fails after 5 s."""
        async with asyncio.timeout(5):
            while True:
                audits = await self.backend.audit()
                assert all(audit.audit.is_balanced for audit in audits)
                if all(a.audit.free + a.audit.cached == a.audit.total for a in audits) and len(audits) == len(
                    self.workers
                ):
                    return
                await self.fleet.changed(0.05)


def overrides(**sections: Any) -> dict[str, Any]:
    """Small, float32, quick to fail; `engine__max_chunk_tokens=16` style keys on top."""
    base: dict[str, Any] = {
        "model.dtype": "float32",
        "engine.num_blocks": 700,
        "transfer.host": "127.0.0.1",
        "transfer.probe_bytes": 1 << 16,
        "coordinator.queue_timeout_s": 30.0,
    }
    return base | {key.replace("__", "."): value for key, value in sections.items()}


@asynccontextmanager
async def local_cluster(
    model: Path,
    num_prefills: int = 1,
    num_decodes: int = 1,
    start_rank: StartRank | None = None,
    **sections: Any,
) -> AsyncIterator[LocalCluster]:
    """Started, connected, self-tested; torn down with every block accounted for."""
    config = load_config(overrides=overrides(**sections) | {"prefill.num_replicas": num_prefills})
    fleet = Fleet(config, SECRET)
    workers: dict[str, Worker] = {}
    roles: list[tuple[Role, int]] = [("prefill", num_prefills), ("decode", num_decodes)]
    try:
        for role, count in roles:
            infos = []
            for number in range(count):
                worker = Worker(role, f"{role}-{number}", config, SECRET, make_phases, start_rank=start_rank)
                infos.append(await worker.start(model, "127.0.0.1"))
                workers[infos[-1].worker_id] = worker
            fleet.sync(role, infos)
        metrics = Metrics()
        flow = Flow(config, fleet, SECRET, lambda *_: None, metrics, frozenset({2}))
        planning = make_planning(config, fleet, metrics)
        backend = ClusterBackend(config, fleet, flow, planning)
        cluster = LocalCluster(config, fleet, flow, backend, workers, planning)
        async with asyncio.timeout(20):
            while not cluster.backend.readiness().is_ready:
                await fleet.changed(1.0)
        yield cluster
        await cluster.settled()
    finally:
        await fleet.close()
        await asyncio.gather(*(worker.close() for worker in workers.values()), return_exceptions=False)


def greedy(request_id: str, prompt_ids: list[int], max_tokens: int, **sampling: Any) -> GenerateRequest:
    params = SamplingParams(max_tokens=max_tokens, **({"temperature": 0.0} | sampling))
    return GenerateRequest(request_id, tuple(prompt_ids), params)
