"""The signed right to hand one request's KV from one worker life to another.

Minted by the coordinator, shown by prefill to decode. It names no block, address or port, so a forged or replayed one
can at worst name a reservation that decode knows to be somebody else's, and is refused.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass, replace

import msgpack


@dataclass(frozen=True, slots=True)
class Ticket:
    """`num_tokens` is how many tokens' KV the handoff covers (prompt + outputs already sent)."""

    handoff_id: str
    request_id: str
    source_id: str
    source_incarnation: int
    target_id: str
    target_incarnation: int
    num_tokens: int
    prompt_hash: bytes
    mac: bytes = b""


def sign(ticket: Ticket, secret: bytes) -> Ticket:
    """The same ticket with its HMAC-SHA256 over all other fields."""
    return replace(ticket, mac=_mac(ticket, secret))


def is_genuine(ticket: Ticket, secret: bytes) -> bool:
    """True if `ticket` was signed with `secret` and not altered since. Constant time."""
    return hmac.compare_digest(ticket.mac, _mac(ticket, secret))


def _mac(ticket: Ticket, secret: bytes) -> bytes:
    fields = (
        ticket.handoff_id,
        ticket.request_id,
        ticket.source_id,
        ticket.source_incarnation,
        ticket.target_id,
        ticket.target_incarnation,
        ticket.num_tokens,
        ticket.prompt_hash,
    )
    return hmac.new(secret, msgpack.packb(fields), hashlib.sha256).digest()
