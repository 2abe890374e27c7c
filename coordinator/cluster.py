"""The live cluster as the HTTP edge sees it: requests through the flow, readiness and audit from the fleet."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from contracts.config import BatonConfig
from contracts.errors import WorkerLostError
from contracts.messages import Role
from contracts.request import Finished, GenerateRequest, TokenSink
from contracts.service import Service
from coordinator.backend import Capacity, PoolReadiness, Readiness, WorkerAudit, WorkerStatus
from coordinator.fleet import Fleet
from coordinator.flow import Flow
from coordinator.links import WorkerLink
from coordinator.planning import Planning, PlanRecord
from coordinator.records import Record

AUDIT_TIMEOUT_S = 5.0


class ClusterBackend:
    """A `Backend` (coordinator/backend.py) over real workers."""

    def __init__(
        self, config: BatonConfig, fleet: Fleet, flow: Flow, planning: Planning | None = None
    ) -> None:
        self._config = config
        self._fleet = fleet
        self._flow = flow
        self._planning = planning

    async def generate(
        self,
        request: GenerateRequest,
        sink: TokenSink,
        deadline_s: float | None,
        service: Service | None = None,
    ) -> Finished | None:
        if self._planning is None:
            return await self._flow.generate(request, sink, deadline_s, service)
        with self._planning.demand.measured(request, sink) as measured:
            end = await self._flow.generate(request, measured.sink, deadline_s, service)
            measured.ended(end)
            return end

    def readiness(self) -> Readiness:
        """Ready: a worker that answers, and (unless colocated) one that reads and has passed the transfer self-test
        with it, or is the same one; by their labels, not by their pools.
        """
        pools = tuple(self._pool(role) for role in ("prefill", "decode"))
        workers = tuple(
            WorkerStatus(link.info.role, link.status, link.label)
            for link in self._fleet.links()
            if link.status is not None
        )
        reason = self._missing()
        return Readiness(not reason, reason, pools, workers)

    def capacity(self) -> Capacity:
        """Raises OverloadedError before any decode worker was seen."""
        return Capacity(max_total_tokens=self._fleet.max_total_tokens())

    async def audit(self) -> list[WorkerAudit]:
        """Every live worker's audit; one that does not answer in time is left out."""
        audits = await asyncio.gather(*(self._audit(link) for link in self._fleet.links()))
        return [audit for audit in audits if audit is not None]

    def decisions(self) -> list[Record]:
        """The last placements, newest first."""
        return list(reversed(self._flow.predictor.records))

    def plans(self) -> list[PlanRecord]:
        """The last plans, newest first."""
        return [] if self._planning is None else list(reversed(self._planning.records))

    async def _audit(self, link: WorkerLink) -> WorkerAudit | None:
        with suppress(WorkerLostError):
            reply = await link.audit(AUDIT_TIMEOUT_S)
            info = link.info
            return WorkerAudit(
                info.worker_id, info.role, info.pid, info.incarnation, reply.audit, reply.owners
            )
        return None

    def _pool(self, role: Role) -> PoolReadiness:
        links = [link for link in self._fleet.links() if link.info.role == role]
        return PoolReadiness(role, len(links), self._fleet.num_ready(role))

    def _missing(self) -> str:
        decodes = {view.worker_id for view in self._fleet.views("decode")}
        if not decodes:
            return "no decode worker is ready"
        if self._config.is_colocated:
            return ""
        prefills = self._fleet.views("prefill")
        if not prefills:
            return "no prefill worker is ready"
        if not any({view.worker_id, *view.peers} & decodes for view in prefills):
            return "no prefill worker has passed the transfer self-test with a decode worker"
        return ""
