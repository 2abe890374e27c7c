"""What the HTTP edge asks of whatever generates: the flow in production, a script in tests.

One output's life:

    generate() ─► sink(Token)* ─► Finished            the good end
             ├──► sink(Token)* ─► raises BatonError   the other end; before any token it becomes an HTTP status
             └──► the sink has enough ─► None
    whoever is cancelled or has enough is forgotten everywhere; no token comes after it
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from contracts.blocks import BlockAudit, BlockOwner
from contracts.messages import Role, Status
from contracts.request import Finished, GenerateRequest, TokenSink
from contracts.roles import RoleLabel
from contracts.service import Service
from coordinator.planning import PlanRecord
from coordinator.records import Record


@dataclass(frozen=True, slots=True)
class PoolReadiness:
    """One pool: `num_ready` of `num_workers` can take work."""

    role: Role
    num_workers: int
    num_ready: int


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """A worker's last heartbeat, the role of its pool, and its label: what it is used for now."""

    role: Role
    status: Status
    label: RoleLabel


@dataclass(frozen=True, slots=True)
class Readiness:
    """Invariant 5. `reason` says what is missing; empty when ready."""

    is_ready: bool
    reason: str = ""
    pools: tuple[PoolReadiness, ...] = ()
    workers: tuple[WorkerStatus, ...] = ()


@dataclass(frozen=True, slots=True)
class WorkerAudit:
    """Invariant 3 on one worker, with who holds what."""

    worker_id: str
    role: Role
    pid: int
    incarnation: int
    audit: BlockAudit
    owners: tuple[BlockOwner, ...] = ()


@dataclass(frozen=True, slots=True)
class Capacity:
    """Limits of one request. `max_total_tokens`: prompt + output, min(context of the model, KV of a worker).

    `num_logits` is the width of the model's logits; ids below it may be biased. 0: the tokenizer's
    vocabulary.
    """

    max_total_tokens: int
    num_logits: int = 0


class Backend(Protocol):
    """Everything the edge needs."""

    async def generate(
        self,
        request: GenerateRequest,
        sink: TokenSink,
        deadline_s: float | None,
        service: Service | None = None,
    ) -> Finished | None:
        """The end, after all tokens; None if the sink had enough. `service`: class and promises; None: an interactive
        request's by default. Raises BatonError instead of an end.
        """

    def readiness(self) -> Readiness: ...

    def capacity(self) -> Capacity: ...

    async def audit(self) -> list[WorkerAudit]: ...

    def decisions(self) -> list[Record]:
        """The last placements, newest first."""

    def plans(self) -> list[PlanRecord]:
        """The last plans, newest first; none where labels never move."""
