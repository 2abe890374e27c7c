"""What a worker is used for. Both phases run in every worker, so a role is a label that moves while requests go on.

    pool's role, epoch 0 ──Orders(role, epoch)──► duty ──Status──► every coordinator places by it

The coordinator that plans gives the orders. A worker takes one whose epoch is newer than that of its duty and drops any
other: a late order does not undo a newer one, whoever sent it. What the worker has in its old role it finishes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RoleLabel = Literal["prefill", "decode", "mixed"]
"""Of new work: reads prompts for others, writes answers, does both."""


@dataclass(frozen=True, slots=True)
class Duty:
    """A worker's label, and the epoch of the order that it comes from; 0: its pool's role, from the start."""

    role: RoleLabel
    epoch: int


@dataclass(frozen=True, slots=True)
class Orders:
    """Coordinator -> worker, from the one that plans. `duty` None: it keeps what it has. `pool_size`: replicas that its
    pool should have, for whoever asks on behalf of Serve; 0: no change is wanted.
    """

    duty: Duty | None = None
    pool_size: int = 0
