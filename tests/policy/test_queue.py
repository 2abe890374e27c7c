"""Nobody is lost, most are in time, no tenant pays for another."""

from __future__ import annotations

import math
from itertools import combinations

import pytest
from hypothesis import given, settings
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


def can_all_be_in_time(jobs: tuple[tuple[int, int], ...]) -> bool:
    """One machine, earliest deadline first, which is optimal."""
    now = 0
    for deadline, service in sorted(jobs):
        now += service
        if now > deadline:
            return False
    return True


@settings(deadline=None)
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


@settings(deadline=None)
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
