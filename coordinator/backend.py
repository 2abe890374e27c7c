"""What the HTTP edge asks of whatever generates: the flow in production, a script in tests.

One output's life:

    generate() ─► Token* ─► Finished            the good end
             └──► Token* ─► raises BatonError   the other end; before any token it becomes an HTTP status
    aclose() at any point cancels the request everywhere; nothing comes after it
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from contracts.blocks import BlockAudit, BlockOwner
from contracts.messages import Role, Status
from contracts.request import Finished, GenerateRequest, Token
from contracts.roles import RoleLabel
from contracts.service import Service
from coordinator.planning import PlanRecord
from coordinator.predict import Record


class TokenStream(Protocol):
    """The tokens of one output, each drawn one exactly once (EOS and stop tokens too), then one `Finished`.

    An async generator is one. Raises BatonError at any point instead of `Finished`, never after it.
    """

    def __aiter__(self) -> AsyncIterator[Token | Finished]: ...

    async def __anext__(self) -> Token | Finished: ...

    async def aclose(self) -> None: ...


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
    """Everything the edge needs. `generate` returns at once; its work starts with the first `__anext__`."""

    def generate(
        self, request: GenerateRequest, deadline_s: float | None, service: Service | None = None
    ) -> TokenStream:
        """`service`: class and promises; None: an interactive request's by default."""

    def readiness(self) -> Readiness: ...

    def capacity(self) -> Capacity: ...

    async def audit(self) -> list[WorkerAudit]: ...

    def decisions(self) -> list[Record]:
        """The last placements, newest first."""

    def plans(self) -> list[PlanRecord]:
        """The last plans, newest first; none where labels never move."""
