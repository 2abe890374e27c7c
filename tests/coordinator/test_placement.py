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
    assert Demand.of(num_known=16, max_total=32, block_size=16) == Demand(2, 2, 16)
    assert Demand.of(num_known=15, max_total=33, block_size=16) == Demand(1, 3, 15)


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


def mixed_pair(**of_reader: object) -> tuple[WorkerView, WorkerView]:
    reader = view("p", peers=frozenset({"d"}), home="prefill")
    return replace(reader, **of_reader), view("d", peers=frozenset({"p"}), home="decode")  # type: ignore[arg-type]


def test_a_mixed_pair_does_the_work_of_its_pools_first() -> None:
    p, d = mixed_pair()
    busy, need = replace(d, num_requests=7), replace(NEED, num_tokens=1)
    assert place(need, [p, busy], [p, busy]) == Placement("d", "p")


def test_a_mixed_writer_reads_when_the_reader_has_more_than_the_same_again_to_read() -> None:
    need = replace(NEED, num_tokens=100)
    for waiting, expected in ((99, "p"), (101, None)):
        p, d = mixed_pair(num_tokens=waiting)
        assert place(need, [p, d], [p, d]) == Placement("d", expected)


def test_a_mixed_reader_writes_when_nobody_else_has_room() -> None:
    p, d = mixed_pair()
    full, need = replace(d, num_available_blocks=0), replace(NEED, num_tokens=100)
    assert place(need, [p, full], [p, full]) == Placement("p", None)
    loaded = replace(p, num_tokens=1000)
    assert place(need, [loaded, full], [loaded, full]) == Placement("p", "d")


def test_ties_spread() -> None:
    rng = random.Random(3)
    found = {place(NEED, [P1, P2], [D1, D2], frozenset(), rng) for _ in range(50)}
    assert len(found) == 4
