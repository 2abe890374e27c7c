"""What one coordinator is told of the load that others have brought: each counts its own by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from contracts.messages import Status
from worker.desk import Reply


def told_to(reader: Reply, status: Status, requests: Sequence[tuple[Reply, int]]) -> Status:
    """`status` for `reader`; `requests`: whose each one is, and its prompt tokens that are still to be read."""
    foreign = [num_tokens for owner, num_tokens in requests if owner is not reader]
    if not foreign:
        return status
    return replace(status, num_foreign=len(foreign), num_foreign_tokens=sum(foreign))
