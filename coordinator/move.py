"""A running request's way from one decode worker to another, as its coordinator sees it.

    Reserve ──► target ──Reserved──► Migrate ──► source: streams on, pauses, HandedOff ──► the target streams
                   └── refused, lost, or the source tells Stayed: over; the request goes on where it was

Two words say that it has moved, in any order: HandedOff of the source, and the target's first token.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from contracts.blocks import prompt_hash
from contracts.messages import Migrate, Reserve
from contracts.request import GenerateRequest
from contracts.ticket import Ticket, sign
from coordinator.links import WorkerLink

ROOM_TOKENS = 64
"""Room at the target for tokens that are drawn while the KV is copied. A request that fills it pauses earlier."""

RETRY_S = 1.0
"""Between two tries to move one request."""

Find = Callable[[GenerateRequest, WorkerLink, float], WorkerLink | None]
"""(request as it stands, its decode worker, share of blocks that must be free) -> another one with room for it that
this one can reach, or None.
"""


@dataclass(slots=True)
class Move:
    """One try. `request` is what the target gets: all tokens but the last have KV at the source."""

    request: GenerateRequest
    source: WorkerLink
    target: WorkerLink
    is_handed_off: bool = False
    has_spoken: bool = False
    _handoff_id: str = field(default_factory=lambda: secrets.token_hex(8))

    @property
    def is_through(self) -> bool:
        return self.is_handed_off and self.has_spoken

    @property
    def _num_more(self) -> int:
        return max(0, min(ROOM_TOKENS, self.request.max_total_tokens - self.request.num_known_tokens))

    def reserve(self, lease_s: float) -> None:
        """Raises WorkerLostError if the target is gone."""
        self.target.send(Reserve(self.request, self._handoff_id, lease_s, self._num_more))

    def begin(self, request_id: str, num_cached: int, secret: bytes) -> None:
        """The target has room: let the source, which knows the request as `request_id`, hand it over.

        Raises WorkerLostError if the source is gone.
        """
        ticket = ticket_of(self._handoff_id, self.request, self.source, self.target)
        max_tokens = self.request.num_known_tokens + self._num_more
        self.source.send(Migrate(request_id, sign(ticket, secret), num_cached, max_tokens))


def as_moved(request: GenerateRequest, output_ids: list[int], number: int) -> GenerateRequest:
    """`request` with `output_ids` out, as another worker gets it, under an id of its own."""
    moved_id = f"{request.request_id}m{number}"
    return replace(request, request_id=moved_id, output_ids=tuple(output_ids[:-1]))


def ticket_of(handoff_id: str, request: GenerateRequest, source: WorkerLink, target: WorkerLink) -> Ticket:
    """For the KV of all tokens of `request`, between these lives of two workers."""
    return Ticket(
        handoff_id,
        request.request_id,
        source.info.worker_id,
        source.info.incarnation,
        target.info.worker_id,
        target.info.incarnation,
        request.num_known_tokens,
        prompt_hash(request.prompt_ids + request.output_ids, request.salt),
    )
