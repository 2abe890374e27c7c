"""Several coordinators on one worker: each hears of the others' load, and never of its own."""

from __future__ import annotations

from contracts.blocks import BlockAudit
from contracts.messages import Message, Status
from worker.foreign import told_to

STATUS = Status("w", 1, True, 0.0, 0, 0, BlockAudit(1, 1, 0, 0, 0, 0, 0))


class Coordinator:
    def send(self, message: Message) -> None:
        raise AssertionError(message)


def test_each_is_told_what_the_others_have_brought() -> None:
    one, other, idle = Coordinator(), Coordinator(), Coordinator()
    requests = [(one, 100), (other, 20), (other, 0)]
    told = {who: told_to(who, STATUS, requests) for who in (one, other, idle)}
    assert [(t.num_foreign, t.num_foreign_tokens) for t in told.values()] == [(2, 20), (1, 100), (3, 120)]


def test_a_coordinator_that_is_alone_is_told_of_nobody() -> None:
    alone = Coordinator()
    assert told_to(alone, STATUS, [(alone, 7)]) is STATUS
    assert told_to(alone, STATUS, []) is STATUS
