"""Where a request goes: room now, room for all of it later, a tested connection; ties at random, load counted."""

from __future__ import annotations

import random
from dataclasses import replace

from coordinator.placement import Demand, Placement, WorkerView, place


def view(worker_id: str, **changes: object) -> WorkerView:
    base = WorkerView(worker_id, 0, 0, 100, 100, 8, frozenset({"d1", "d2"}))
    return replace(base, **changes)  # type: ignore[arg-type]


P1, P2, D1, D2 = view("p1"), view("p2"), view("d1"), view("d2")
NEED = Demand(num_blocks=3, max_blocks=5)


def test_demand_counts_the_next_token_and_all_that_may_come() -> None:
    assert Demand.of(num_known=16, max_total=32, block_size=16) == Demand(2, 2)
    assert Demand.of(num_known=15, max_total=33, block_size=16) == Demand(1, 3)


def test_the_least_busy_of_both_pools_are_taken() -> None:
    busy = (replace(P1, num_tokens=5), replace(D1, num_requests=1))
    assert place(NEED, [busy[0], P2], [busy[1], D2]) == Placement("d2", "p2")


def test_a_decode_worker_without_room_now_is_not_taken() -> None:
    assert place(NEED, [P1], [replace(D1, num_available_blocks=2)]) is None
    assert place(NEED, [P1], [replace(D1, num_requests=8)]) is None


def test_a_decode_worker_that_could_never_finish_it_is_not_taken() -> None:
    small = replace(D1, num_blocks=4, num_available_blocks=4)
    assert place(NEED, [P1], [small]) is None
    assert place(NEED, [P1], [small, replace(D2, num_requests=7)]) == Placement("d2", "p1")


def test_a_prefill_worker_that_cannot_hold_the_prompt_is_not_taken() -> None:
    small = replace(P1, num_blocks=2)
    assert place(NEED, [small, replace(P2, num_tokens=9)], [D1]) == Placement("d1", "p2")
    assert place(NEED, [small], [D1]) == Placement("d1", None)


def test_only_tested_connections_are_used() -> None:
    assert place(NEED, [replace(P1, peers=frozenset())], [D1]) == Placement("d1", None)


def test_workers_that_failed_the_request_are_the_last_choice() -> None:
    assert place(NEED, [P1, P2], [D1, D2], frozenset({"p1", "d1"})) == Placement("d2", "p2")
    assert place(NEED, [P1], [D1], frozenset({"p1", "d1"})) == Placement("d1", "p1")


def test_a_mixed_worker_reads_for_itself_unless_the_other_has_less_to_read_or_fewer_answers_to_disturb() -> (
    None
):
    a, b = view("a", peers=frozenset({"b"})), view("b", peers=frozenset({"a"}), num_requests=3, num_tokens=9)
    assert place(NEED, [a, b], [a, b]) == Placement("a", None)
    reading = replace(a, num_requests=1, num_reading=1, num_tokens=20)
    assert place(NEED, [reading, b], [reading, b]) == Placement("a", "b")
    writing, idle = replace(a, num_requests=2), replace(b, num_requests=1, num_reading=1, num_tokens=0)
    assert place(NEED, [writing, idle], [writing, replace(idle, num_requests=8)]) == Placement("a", "b")


def test_ties_spread() -> None:
    rng = random.Random(3)
    found = {place(NEED, [P1, P2], [D1, D2], frozenset(), rng) for _ in range(50)}
    assert len(found) == 4
