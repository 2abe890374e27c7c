"""Placement keeps residents' promises, counts at dispatch, and takes the cheapest way that is in time."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy.chunks import Cadence
from policy.fleet import FleetView, WorkerState, drawn
from policy.place import PlaceRules, dispatch, joined, released
from policy.step_model import Work
from tests.policy.builders import make_job, make_placer, make_worker


def pools(num_prefill: int, num_decode: int, streams: int = 50) -> FleetView:
    prefills = [make_worker(f"p{n}", "prefill") for n in range(num_prefill)]
    decodes = [make_worker(f"d{n}", "decode", streams) for n in range(num_decode)]
    return FleetView([*prefills, *decodes])


def test_an_idle_prefill_worker_spares_the_streams() -> None:
    decision = make_placer().place(make_job(), pools(2, 2), 0.0)
    assert decision.chosen is not None
    assert decision.chosen.kind == "remote"
    assert decision.chosen.prefill_id.startswith("p")
    assert {option.kind for option in decision.options} == {"remote", "local"}


def test_a_busy_pool_deflects_to_the_time_streams_leave() -> None:
    fleet = pools(2, 2)
    for worker in fleet.prefills:
        worker.prefill_free_s = 5.0
    chosen = make_placer().place(make_job(prompt_tokens=300), fleet, 0.0).chosen
    assert chosen is not None
    assert chosen.kind == "local"
    assert chosen.prefill_id == chosen.decode_id


def test_a_held_prefix_draws_by_the_time_it_saves() -> None:
    fleet = pools(2, 2)
    job = make_job(prompt_tokens=8000, deadline_s=2.0, held={"d1": 7900})
    chosen = make_placer().place(job, fleet, 0.0).chosen
    assert chosen is not None
    assert (chosen.kind, chosen.decode_id) == ("local", "d1")


def test_a_held_prefix_does_not_draw_to_a_full_worker() -> None:
    fleet = pools(2, 2)
    fleet.workers["d1"].used_tokens = fleet.workers["d1"].kv_tokens
    chosen = make_placer().place(make_job(8000, 2.0, {"d1": 7900}), fleet, 0.0).chosen
    assert chosen is not None
    assert chosen.decode_id == "d0"


def test_residents_promises_bound_a_worker() -> None:
    fleet = FleetView([make_worker("p", "prefill"), make_worker("d", "decode", streams=255)])
    fleet.workers["d"].gap_s = 0.016  # 255 streams take 10 + 5.1 + 2.6 ms
    decision = make_placer().place(make_job(), fleet, 0.0)
    assert decision.chosen is not None
    assert decision.chosen.decode_id == "p"  # prefill workers decode before anybody is refused


def test_no_room_anywhere_is_an_answer() -> None:
    fleet = FleetView([make_worker("m", "mixed", streams=256)])
    decision = make_placer().place(make_job(), fleet, 0.0)
    assert (decision.chosen, decision.verdict) == (None, "no_decode_room")


def test_too_late_is_not_placed_and_says_what_was_weighed() -> None:
    decision = make_placer().place(make_job(prompt_tokens=50_000, deadline_s=0.5), pools(1, 1), 0.0)
    assert (decision.chosen, decision.verdict) == (None, "too_late")
    assert all(option.ttft_s > 0.5 or option.drawback for option in decision.options)


def test_who_may_be_late_is_served_once_late() -> None:
    job = replace(make_job(prompt_tokens=50_000, deadline_s=0.5), may_be_late=True)
    placer, fleet = make_placer(), pools(1, 1)
    assert placer.place(job, fleet, 0.0).verdict == "too_late"
    assert placer.place(job, fleet, 0.6).verdict == "placed"


def test_busy_workers_are_waited_for() -> None:
    fleet = pools(1, 1)
    for worker in fleet.workers.values():
        worker.prefill_free_s = 3.0
    assert make_placer().place(make_job(), fleet, 0.0).verdict == "workers_busy"


@pytest.mark.parametrize(
    ("gap_s", "streams", "backlog_s", "verdict"),
    [
        (0.1, 10, 0.07, "placed"),  # its next step is not full yet
        (0.1, 10, 0.09, "workers_busy"),
        (0.04, 10, 0.07, "workers_busy"),
        (0.1, 0, 0.07, "workers_busy"),  # no stream makes its steps cheaper by company
        (math.inf, 10, 0.07, "workers_busy"),  # no promise says how long a step may be
    ],
)
def test_a_worker_with_streams_is_given_what_fills_a_step(
    gap_s: float, streams: int, backlog_s: float, verdict: str
) -> None:
    worker = make_worker("m", "mixed", streams, prefill_free_s=backlog_s, gap_s=gap_s)
    job = make_job(prompt_tokens=100, tpot_s=0.1)
    assert make_placer().place(job, FleetView([worker]), 0.0).verdict == verdict


def test_a_busy_holder_of_a_prefix_is_waited_for_where_that_is_cheaper() -> None:
    def chosen_when_busy_for(backlog_s: float) -> str | None:
        fleet = pools(2, 1)
        fleet.workers["p0"].prefill_free_s = backlog_s
        job = make_job(prompt_tokens=8000, deadline_s=5.0, held={"p0": 7900})
        decision = make_placer().place(job, fleet, 0.0)
        return decision.chosen.prefill_id if decision.chosen else None

    assert chosen_when_busy_for(0.0) == "p0"
    assert chosen_when_busy_for(1.0) == "p0"  # the other would read for 0.9 s
    assert chosen_when_busy_for(4.5) == "p1"  # it would be late


def test_holders_of_a_prefix_who_are_busy_too_long_count_as_busy() -> None:
    fleet = pools(1, 1)
    for worker in fleet.workers.values():
        worker.prefill_free_s = 3.0
    job = make_job(deadline_s=1.0, held={"p0": 900})
    assert make_placer().place(job, fleet, 0.0).verdict == "workers_busy"


def test_leftover_work_leaves_room() -> None:
    streams = 240  # 10 + 4.8 + 2.4 ms: within 0.92 of 20 ms, not within 0.7
    fleet = pools(1, 1, streams)
    fleet.workers["d0"].gap_s = 0.020
    fleet.workers["p0"].max_streams = 0  # it only reads
    placer = make_placer()
    assert placer.place(make_job(100), fleet, 0.0).chosen is not None
    assert placer.place(make_job(100, is_leftover=True), fleet, 0.0).verdict == "no_decode_room"


def test_the_one_reader_of_many_that_is_free_is_found() -> None:
    for seed in range(20):
        fleet = pools(50, 2)
        for worker in [*fleet.prefills, *fleet.decodes]:
            worker.prefill_free_s = 3.0
        fleet.workers["p7"].prefill_free_s = 0.0
        chosen = make_placer(seed).place(make_job(), fleet, 0.0).chosen
        assert chosen is not None
        assert chosen.prefill_id == "p7"


def test_what_cannot_be_cheaper_than_where_the_prefix_lies_is_not_predicted() -> None:
    fleet = pools(8, 8)
    job = make_job(prompt_tokens=8000, deadline_s=2.0, held={"d1": 7900})
    decision = make_placer().place(job, fleet, 0.0)
    assert decision.chosen is not None
    assert [option.decode_id for option in decision.options] == ["d1"]
    fleet.workers["d1"].prefill_free_s = 1.9  # it would be late
    decision = make_placer().place(job, fleet, 0.0)
    assert len(decision.options) > 1


def test_load_counts_at_dispatch_so_a_burst_spreads() -> None:
    fleet, placer = pools(4, 4), make_placer()
    readers: Counter[str] = Counter()
    writers: Counter[str] = Counter()
    for _ in range(4):
        job = make_job()
        chosen = placer.place(job, fleet, 0.0).chosen
        assert chosen is not None
        dispatch(chosen, job, fleet, 0.0)
        readers[chosen.prefill_id] += 1
        writers[chosen.decode_id] += 1
    assert set(readers.values()) == {1}
    assert set(writers.values()) == {1}


def test_ties_are_broken_at_random_and_by_seed() -> None:
    def first(seed: int) -> str:
        chosen = make_placer(seed).place(make_job(), pools(8, 8), 0.0).chosen
        assert chosen is not None
        return chosen.prefill_id

    assert len({first(seed) for seed in range(20)}) > 3
    assert [first(seed) for seed in range(5)] == [first(seed) for seed in range(5)]


def test_closed_workers_get_nothing() -> None:
    fleet = pools(2, 2)
    fleet.workers["p0"].is_open = fleet.workers["d0"].is_open = False
    fleet.refresh()
    chosen = make_placer().place(make_job(), fleet, 0.0).chosen
    assert chosen is not None
    assert (chosen.prefill_id, chosen.decode_id) == ("p1", "d1")


def test_an_older_role_order_changes_nothing() -> None:
    fleet = pools(2, 2)
    assert fleet.set_role("p0", "decode", epoch=2)
    assert not fleet.set_role("p0", "prefill", epoch=1)
    assert fleet.workers["p0"].role == "decode"
    assert len(fleet.decodes) == 3


@given(
    jobs=st.lists(st.tuples(st.integers(10, 20_000), st.floats(0.05, 10.0)), min_size=1, max_size=60),
    num_prefill=st.integers(0, 5),
    num_decode=st.integers(1, 5),
    seed=st.integers(0, 1000),
)
def test_nobody_is_promised_what_a_worker_cannot_keep(
    jobs: list[tuple[int, float]], num_prefill: int, num_decode: int, seed: int
) -> None:
    fleet, placer, rules = pools(num_prefill, num_decode, streams=100), make_placer(seed), PlaceRules()
    placed = []
    for tokens, deadline_s in jobs:
        job = make_job(tokens, deadline_s)
        chosen = placer.place(job, fleet, 0.0).chosen
        if chosen is None:
            continue
        assert chosen.ttft_s <= deadline_s
        dispatch(chosen, job, fleet, 0.0)
        placed.append((chosen, job))
        writer = fleet.workers[chosen.decode_id]
        step_s = writer.model.predict_s(Work(0, 0, writer.num_streams, writer.context_tokens))
        assert step_s <= rules.gap_share * 0.040
        assert writer.used_tokens <= writer.kv_tokens * rules.kv_share
    for number, (chosen, job) in enumerate(placed):
        writer = fleet.workers[chosen.decode_id]
        if number % 2:
            joined(writer, job, writer.running_streams + 1, writer.running_context + job.prompt_tokens)
            released(writer, job, 0.040)
        else:
            released(writer, job, 0.040, was_promised=True)
    for worker in fleet.workers.values():
        streams = 100 if worker.role == "decode" else 0
        assert worker.promised_streams == worker.promised_tokens == 0
        assert worker.used_tokens == streams * 1000


@given(size=st.integers(0, 60), limit=st.integers(1, 20), seed=st.integers(0, 100))
def test_nobody_is_drawn_twice(size: int, limit: int, seed: int) -> None:
    workers: list[WorkerState] = [make_worker(str(n)) for n in range(size)]
    found = list(drawn(workers, limit, random.Random(seed)))
    assert len({worker.worker_id for worker in found}) == len(found) == min(size, limit)


def test_what_a_worker_has_in_hand_is_read_beside_the_streams_that_it_has() -> None:
    placer, cadence = make_placer(), Cadence(0.040)
    alone_s = make_worker("w").model.prefill_s(3000, 0, PlaceRules().prefill_chunk)
    writer = make_worker("d", "decode", streams=50)
    assert placer.unread_s(writer, cadence, 0) == 0.0
    assert placer.unread_s(make_worker("d", "decode"), cadence, 3000) == alone_s
    assert placer.unread_s(make_worker("d", "decode", promised_streams=1), cadence, 3000) == alone_s
    assert placer.unread_s(writer, cadence, 3000) > alone_s
    writer.gap_s = 0.011  # its steps alone take 11.5 ms
    assert placer.unread_s(writer, cadence, 3000) == math.inf


def test_options_carry_the_numbers_for_whoever_asks_why() -> None:
    decision = make_placer().place(make_job(), pools(1, 1), 0.0)
    chosen = decision.chosen
    assert chosen is not None
    assert chosen in decision.options
    assert chosen._asdict()["ttft_s"] == pytest.approx(0.005 + 0.1 + 0.001 + 0.002, rel=0.01)
