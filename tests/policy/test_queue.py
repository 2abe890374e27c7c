"""Nobody is lost, most are in time, no tenant pays for another."""

from __future__ import annotations

import math
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy.queue import Waiting, WaitingQueue
from tests.policy.builders import make_waiting

JOBS = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 10)), min_size=1, max_size=7)


def order(queue: WaitingQueue, now_s: float = 0.0) -> list[str]:
    return [entry.request_id for entry in queue.candidates(now_s, 100)]


def test_least_slack_first() -> None:
    queue = WaitingQueue()
    queue.add(make_waiting("late-but-long", deadline_s=2.0, service_s=1.5))
    queue.add(make_waiting("soon-but-short", deadline_s=1.0, service_s=0.1))
    assert order(queue) == ["late-but-long", "soon-but-short"]


def test_where_more_wait_than_can_be_tried_half_the_tries_are_for_others_than_just_now() -> None:
    queue = WaitingQueue()
    for number in range(8):
        queue.add(make_waiting(str(number), deadline_s=1.0 + number))

    def tried(now_s: float, limit: int = 4) -> str:
        entries = queue.candidates(now_s, limit)
        for entry in entries:
            queue.tried(entry.request_id, now_s)
        return "".join(entry.request_id for entry in entries)

    assert tried(0.0) == "0123"
    assert tried(0.01) == "0145"
    assert tried(0.02) == "0167"
    assert tried(0.03, limit=8) == "01234567"  # all can be
    assert tried(0.03 + 2 * queue.REST_S) == "0123"


def can_all_be_in_time(jobs: tuple[tuple[int, int], ...]) -> bool:
    """One machine, earliest deadline first, which is optimal."""
    now = 0
    for deadline, service in sorted(jobs):
        now += service
        if now > deadline:
            return False
    return True


@given(jobs=JOBS)
def test_triage_keeps_as_many_as_can_be_in_time(jobs: list[tuple[int, int]]) -> None:
    queue = WaitingQueue()
    for number, (deadline, service) in enumerate(jobs):
        queue.add(make_waiting(str(number), float(deadline), float(service)))
    hopeless = queue.triage(0.0, 1.0)
    assert all(entry.latest_start_s < 0 for entry in hopeless)
    best = max(
        size
        for size in range(len(jobs) + 1)
        if any(can_all_be_in_time(subset) for subset in combinations(jobs, size))
    )
    assert len(queue._ready) == best
    assert len(queue) + len(hopeless) == len(jobs)


@given(
    jobs=JOBS,
    steps=st.lists(st.tuples(st.sampled_from(["take", "remove", "triage"]), st.integers(0, 6)), max_size=12),
)
def test_everyone_leaves_once(jobs: list[tuple[int, int]], steps: list[tuple[str, int]]) -> None:
    queue, gone = WaitingQueue(), []
    for number, (deadline, service) in enumerate(jobs):
        queue.add(make_waiting(str(number), float(deadline), float(service)))
    for now, (action, number) in enumerate(steps):
        if action == "triage":
            gone += [entry.request_id for entry in queue.triage(float(now), 1.5)]
        elif str(number) in queue:
            entry = queue.take(str(number), now) if action == "take" else queue.remove(str(number))
            assert entry is not None
            gone.append(entry.request_id)
    assert sorted(gone + order(queue, 50.0)) == sorted(str(n) for n in range(len(jobs)))
    assert queue.backlog_s == pytest.approx(sum(e.service_s for e in queue.candidates(50.0, 100)))


def test_the_crowded_out_come_back_when_there_is_room() -> None:
    queue = WaitingQueue()
    queue.add(make_waiting("a", 10.0, 6.0))
    queue.add(make_waiting("b", 11.0, 7.0))
    assert queue.triage(0.0, 1.0) == []
    assert order(queue) == ["a", "b"]
    assert [e.request_id for _, _, e in queue._late] == ["b"]
    queue.triage(0.0, 2.0)
    assert not queue._late


def test_a_tenant_beyond_its_share_makes_room_first() -> None:
    queue = WaitingQueue()
    for number in range(20):
        queue.add(make_waiting(f"old-{number}", tenant="greedy"))
        queue.take(f"old-{number}", 0.0)
    queue.add(make_waiting("modest-old", tenant="modest"))
    queue.take("modest-old", 0.0)
    queue.add(make_waiting("modest", 1.0, 0.6, tenant="modest"))
    queue.add(make_waiting("greedy", 1.0, 0.5, tenant="greedy"))
    queue.triage(0.0, 1.0)
    assert order(queue) == ["modest", "greedy"]
    assert [e.request_id for _, _, e in queue._late] == ["greedy"]


def test_classes_wait_for_interactive_and_batch_ages() -> None:
    queue = WaitingQueue(age_cap_s=30.0)
    queue.add(make_waiting("effort", math.inf, arrived_s=0.0, service_class="best_effort"))
    queue.add(make_waiting("batch", math.inf, arrived_s=5.0, service_class="batch"))
    queue.add(make_waiting("chat", 41.0, arrived_s=40.0))
    assert order(queue, 20.0) == ["chat", "batch", "effort"]
    assert order(queue, 40.0) == ["batch", "chat", "effort"]


def test_a_kept_one_is_late_but_never_refused_and_rises_with_age() -> None:
    queue = WaitingQueue(age_cap_s=30.0)
    queue.add(make_waiting("kept", 1.0, is_kept=True))
    queue.add(make_waiting("dropped", 1.0))
    queue.add(make_waiting("fresh", 12.0, arrived_s=11.0))
    assert [entry.request_id for entry in queue.triage(11.0, 1.0)] == ["dropped"]
    assert order(queue, 11.0) == ["fresh", "kept"]


def test_retry_after_is_when_the_backlog_has_drained() -> None:
    queue = WaitingQueue()
    for number in range(40):
        queue.add(make_waiting(str(number), 100.0, 1.0))
    assert queue.retry_after_s(num_servers=4.0, service_s=1.0, ttft_s=2.0) == 9
    assert queue.retry_after_s(num_servers=0.0, service_s=1.0, ttft_s=2.0) == WaitingQueue.MAX_RETRY_S
    assert WaitingQueue().retry_after_s(1.0, 0.5, 1.0) == 1


def test_an_id_waits_once() -> None:
    queue = WaitingQueue()
    entry: Waiting = make_waiting("a")
    queue.add(entry)
    with pytest.raises(ValueError, match="'a' again"):
        queue.add(entry)
    assert queue.remove("b") is None
    with pytest.raises(KeyError):
        queue.take("b", 0.0)


def test_order_is_by_class_whatever_came_first() -> None:
    queue = WaitingQueue()
    for arrived_s, name in enumerate(("best_effort", "batch", "interactive")):
        queue.add(make_waiting(name, math.inf, arrived_s=float(arrived_s), service_class=name))  # type: ignore[arg-type]
    queue.add(make_waiting("promised", 9.0, arrived_s=3.0))
    queue.add(make_waiting("resumed", math.inf, arrived_s=4.0, is_resumed=True))
    assert order(queue) == ["resumed", "promised", "interactive", "batch", "best_effort"]
    assert queue.num_newcomers == 4


def test_the_resumed_are_neither_triaged_nor_surplus() -> None:
    queue = WaitingQueue()
    queue.add(make_waiting("resumed", math.inf, is_resumed=True))
    assert queue.triage(100.0, 1.0) == []
    assert queue.surplus() is None
    assert queue.next_due_s(0.0) == math.inf


def test_every_second_place_is_for_whoever_is_too_old() -> None:
    queue = WaitingQueue(age_cap_s=30.0)
    for number in range(4):
        queue.add(make_waiting(f"old-{number}", math.inf, arrived_s=0.1 * number))
    for number in range(2):
        queue.add(make_waiting(f"chat-{number}", 41.0 + number, arrived_s=40.0))
    assert order(queue, 20.0)[:2] == ["chat-0", "chat-1"]
    expected = ["old-0", "chat-0", "old-1", "chat-1", "old-2", "old-3"]
    assert order(queue, 40.0) == expected
    for name in expected:  # and so it is when they are taken one by one
        assert order(queue, 40.0)[0] == name
        queue.take(name, 40.0)


def test_a_refused_place_is_paid_back() -> None:
    queue = WaitingQueue()
    queue.add(make_waiting("a", tenant="t"))
    entry = queue.take("a", 0.0)
    queue.give_back(entry, 0.0)
    assert order(queue) == ["a"]
    assert queue.shares.excess("t", 2) == 1.0


def test_the_next_due_is_the_next_latest_start_that_has_not_passed() -> None:
    queue = WaitingQueue()
    queue.add(make_waiting("a", 1.0, 0.5))
    queue.add(make_waiting("b", 3.0, 0.5))
    assert (queue.next_due_s(0.0), queue.next_due_s(1.0), queue.next_due_s(3.0)) == (0.5, 2.5, math.inf)


SERVICE_S = 0.1
LIMIT = 64


def waits_of_modest(greedy_per_s: float, modest_per_s: float, ttft_s: float) -> list[float]:
    """One server, FIFO arrivals of two tenants for a minute; how long the modest one's requests waited."""
    arrivals = sorted(
        (number / rate + 0.001 * offset, tenant)
        for offset, (tenant, rate) in enumerate((("greedy", greedy_per_s), ("modest", modest_per_s)))
        if rate
        for number in range(int(60 * rate))
    )
    queue, waits, now_s, number = WaitingQueue(), [], 0.0, 0
    while number < len(arrivals) or len(queue):
        if not len(queue):
            now_s = max(now_s, arrivals[number][0])
        while number < len(arrivals) and arrivals[number][0] <= now_s:
            arrived_s, tenant = arrivals[number]
            queue.add(
                make_waiting(
                    f"{tenant}-{number}", arrived_s + ttft_s, SERVICE_S, arrived_s, tenant, is_kept=True
                )
            )
            if len(queue) > LIMIT:
                surplus = queue.surplus()
                assert surplus is not None
                assert surplus.tenant == "greedy"
                queue.remove(surplus.request_id)
            number += 1
        queue.triage(now_s, 1.0)
        entry = queue.take(queue.candidates(now_s, 1)[0].request_id, now_s)
        if entry.tenant == "modest":
            waits.append(now_s - entry.arrived_s)
        now_s += SERVICE_S
    return waits


@pytest.mark.parametrize("ttft_s", [math.inf, 1.0, 30.0], ids=["no promise", "tight", "loose"])
def test_a_tenant_that_offers_ten_times_as_much_does_not_make_the_other_wait(ttft_s: float) -> None:
    alone = waits_of_modest(0.0, 3.0, ttft_s)
    beside = waits_of_modest(30.0, 3.0, ttft_s)
    assert len(beside) == len(alone)  # nothing of it is refused
    assert max(alone) < 1e-9
    assert max(beside) <= 2.5 * SERVICE_S  # whoever is being served is not interrupted
    assert sum(beside) / len(beside) < SERVICE_S


ENTRIES = st.lists(
    st.tuples(
        st.sampled_from(["interactive", "batch", "best_effort"]),
        st.sampled_from(["a", "b", "c"]),
        st.one_of(st.just(math.inf), st.floats(0.5, 50.0)),
        st.booleans(),
    ),
    max_size=12,
)


@given(entries=ENTRIES, taken=st.lists(st.integers(0, 11), max_size=6), now_s=st.floats(0.0, 60.0))
def test_everyone_is_in_the_order_once_and_classes_never_mix(
    entries: list[tuple[str, str, float, bool]], taken: list[int], now_s: float
) -> None:
    queue = WaitingQueue(age_cap_s=30.0)
    made = {}
    for number, (service_class, tenant, deadline_s, is_resumed) in enumerate(entries):
        name = str(number)
        made[name] = make_waiting(
            name,
            math.inf if is_resumed else deadline_s,
            0.2,
            0.1 * number,
            tenant,
            service_class,  # type: ignore[arg-type]
            is_kept=True,
            is_resumed=is_resumed,
        )
        queue.add(made[name])
    for number in taken:
        if str(number) in queue:
            queue.take(str(number), 0.0)
            del made[str(number)]
    queue.triage(now_s, 1.0)
    found = order(queue, now_s)
    assert sorted(found) == sorted(made)
    resumed = [name for name in found if made[name].is_resumed]
    assert found[: len(resumed)] == resumed
    rest = [made[name] for name in found[len(resumed) :]]
    fresh = [e for e in rest if now_s - e.arrived_s < 30.0]
    ranks = [("interactive", "batch", "best_effort").index(e.service_class) for e in fresh]
    assert ranks == sorted(ranks)
