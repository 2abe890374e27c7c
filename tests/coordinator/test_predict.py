"""Placement by predicted times on views made by hand: which way wins, and when load decides instead."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from contracts.blocks import block_hashes
from contracts.config import BatonConfig, load_config
from contracts.request import GenerateRequest, SamplingParams
from contracts.steps import StepReport
from coordinator.placement import Placement, WorkerView
from coordinator.predict import NUM_RECORDS, Predictor, Record

# 10 ms to read the weights, 100 µs a prompt token; nobody's predictions are off.
STEPS = StepReport((0.010, 20e-6, 10e-9), (0.005, 100e-6, 1e-9, 100e-6, 10e-9), 1.0, 0.0, True, True)
PROMPT = tuple(range(1000))


def view(worker_id: str, **changes: object) -> WorkerView:
    base = WorkerView(
        worker_id,
        0,
        0,
        1000,
        1000,
        64,
        frozenset({"d1", "d2"}),
        (("d1", 1e10),),
        bytes_per_token=1000,
        steps=STEPS,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


P1, D1, D2 = view("p1"), view("d1"), view("d2")
# Of a pool whose label never moved: each has seen its own kind of step.
READER = replace(P1, steps=replace(STEPS, is_decode_known=False))
WRITER = replace(D1, steps=replace(STEPS, is_mixed_known=False))


def predictor(ttft_ms: float | None = 500.0, itl_ms: float | None = 50.0) -> Predictor:
    config: BatonConfig = load_config(overrides={"slo.ttft_ms": ttft_ms, "slo.itl_ms": itl_ms})
    return Predictor(config, random.Random(0), clock=lambda: 0.0)


def request(num_tokens: int = len(PROMPT), name: str = "r", salt: str = "") -> GenerateRequest:
    return GenerateRequest(name, PROMPT[:num_tokens], SamplingParams(max_tokens=64), salt=salt)


def last(p: Predictor) -> Record:
    return p.records[-1]


def test_an_idle_fleet_reads_on_the_prefill_worker() -> None:
    p = predictor()
    assert p.place(request(), 0.0, [P1], [D1]) == Placement("d1", "p1")
    assert (last(p).rule, last(p).verdict) == ("predicted", "placed")
    assert {option.kind for option in last(p).options} == {"remote", "local"}


def test_a_prompt_behind_a_long_line_is_read_where_it_is_answered() -> None:
    """Load alone would queue it behind 100,000 tokens."""
    p = predictor()
    assert p.place(request(), 0.0, [replace(P1, num_tokens=100_000)], [D1]) == Placement("d1", None)
    assert last(p).rule == "predicted"


def test_a_short_prompt_is_not_read_among_streams_that_leave_no_time() -> None:
    p = predictor(itl_ms=11.5)
    busy = replace(D1, num_requests=2, steps=replace(STEPS, mixed=(0.011, 100e-6, 1e-9, 100e-6, 10e-9)))
    assert p.place(request(100), 0.0, [P1], [busy]) == Placement("d1", "p1")
    [drawback] = [option.drawback for option in last(p).options if option.kind == "local"]
    assert drawback == "its streams leave no time"


def test_a_prefix_that_the_decode_worker_holds_is_used_there() -> None:
    p = predictor()
    turn = request(960)
    p.answered(turn, ["d1"])
    assert p.place(request(), 0.0, [P1], [D1]) == Placement("d1", None)


def test_what_the_decode_worker_has_evicted_is_forgotten_when_it_says_so() -> None:
    p = predictor()
    p.answered(request(960), ["d1"])
    p.granted(request(960), "d1", num_cached=0)
    assert p.place(request(), 0.0, [P1], [D1]) == Placement("d1", "p1")


def test_another_salt_finds_no_prefix() -> None:
    p = predictor()
    p.answered(request(960), ["d1"])
    assert p.place(request(salt="other"), 0.0, [P1], [D1]) == Placement("d1", "p1")


def test_a_prompt_that_is_computed_whole_finds_no_prefix_and_lets_none_be_forgotten() -> None:
    p = predictor()
    p.answered(request(960), ["d1"])
    judged = replace(request(), sampling=SamplingParams(max_tokens=64, num_prompt_logprobs=0))
    assert p.place(judged, 0.0, [P1], [D1]) == Placement("d1", "p1")
    p.granted(judged, "d1", num_cached=0)
    assert p.place(request(), 0.0, [P1], [D1]) == Placement("d1", None)


def test_a_prompt_is_hashed_once_per_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []

    def counted(token_ids: Sequence[int], *rest: object) -> list[bytes]:
        hashed.append(len(token_ids))
        return block_hashes(token_ids, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr("coordinator.predict.block_hashes", counted)
    p = predictor()
    for attempt in (request(name="r.1"), replace(request(name="r.2"), output_ids=(1, 2))):
        for _ in range(3):
            p.place(attempt, 0.0, [P1], [D1])
        p.granted(attempt, "d1", num_cached=0)
        p.answered(attempt, ["d1"])
    assert hashed == [len(PROMPT), len(PROMPT) + 2]


def test_a_worker_that_is_gone_holds_nothing() -> None:
    p = predictor()
    p.answered(request(960), ["d1"])
    p.place(request(), 0.0, [P1], [D2])
    assert p.place(request(), 0.0, [P1], [D1]) == Placement("d1", "p1")


@pytest.mark.parametrize(
    ("p", "prefills", "decodes", "verdict"),
    [
        (predictor(None, None), [P1], [D1], "no promise"),
        (predictor(), [replace(P1, steps=None)], [WRITER], "a worker is still learning"),
        (predictor(), [READER], [replace(D1, steps=None)], "a worker is still learning"),
        (predictor(ttft_ms=1.0), [P1], [D1], "too_late"),
        (predictor(itl_ms=1.0), [P1], [D1], "no_decode_room"),
    ],
    ids=["no promise", "prefill learns", "decode learns", "first token too late", "gaps too long"],
)
def test_load_decides_where_predictions_cannot(
    p: Predictor, prefills: list[WorkerView], decodes: list[WorkerView], verdict: str
) -> None:
    assert p.place(request(), 0.0, prefills, decodes) == Placement("d1", "p1")
    assert (last(p).rule, last(p).verdict) == ("load", verdict)


def test_a_decode_worker_that_never_read_a_prompt_is_judged_by_the_prefill_workers() -> None:
    p = predictor()
    fresh = replace(D1, steps=replace(STEPS, is_mixed_known=False, mixed=(9.0, 9.0, 9.0, 9.0, 9.0)))
    assert p.place(request(), 0.0, [replace(P1, num_tokens=100_000)], [fresh]) == Placement("d1", None)


def test_a_worker_that_is_new_in_its_role_is_judged_by_the_others() -> None:
    """A reader that writes since a moment ago, and one that has just started."""
    p = predictor()
    flipped = replace(READER, worker_id="d2")
    assert p.place(request(), 0.0, [P1], [replace(D1, num_requests=60), flipped]) is not None
    assert last(p).rule == "predicted"
    assert p.place(request(), 0.0, [replace(P1, steps=None)], [D1]) == Placement("d1", "p1")
    assert last(p).rule == "predicted"


def test_a_mixed_worker_is_weighed_both_ways_and_what_it_reads_for_others_is_no_stream_of_its_own() -> None:
    p = predictor()
    a = view("a", peers=frozenset({"b"}), num_requests=3, num_reading=3)
    b = view("b", peers=frozenset({"a"}), num_requests=1)
    assert p.place(request(), 0.0, [a, b], [a, b]) is not None
    options = {(option.kind, option.prefill_id, option.decode_id) for option in last(p).options}
    assert options == {("remote", "b", "a"), ("local", "a", "a"), ("local", "b", "b")}


def test_a_mixed_pair_does_the_work_of_its_pools_first_and_the_others_where_it_must() -> None:
    p = predictor(itl_ms=12.0)
    a = view("a", peers=frozenset({"b"}), home="prefill")
    b = view("b", peers=frozenset({"a"}), num_requests=1, home="decode")
    assert p.place(request(), 0.0, [a, b], [a, b]) == Placement("b", "a")
    crowded = replace(b, num_requests=60)  # one more would break the promise of all
    assert p.place(request(), 0.0, [a, crowded], [a, crowded]) == Placement("a", None)
    assert last(p).rule == "predicted"


def test_a_pair_without_a_tested_connection_is_never_chosen() -> None:
    p = predictor()
    assert p.place(request(), 0.0, [replace(P1, peers=frozenset())], [D1]) == Placement("d1", None)


def test_no_room_is_no_placement() -> None:
    p = predictor()
    assert p.place(request(), 0.0, [P1], [replace(D1, num_available_blocks=1)]) is None
    assert last(p).placement is None


def test_workers_that_failed_the_request_are_avoided() -> None:
    p = predictor()
    placement = p.place(request(), 0.0, [P1], [D1, D2], frozenset({"d1"}))
    assert placement == Placement("d2", "p1")


def test_a_stream_that_is_late_already_is_still_placed() -> None:
    p = predictor()
    assert p.place(request(), 9.0, [P1], [D1]) is not None
    assert last(p).rule == "predicted"


def test_the_last_decisions_are_kept_one_for_each_request() -> None:
    p = predictor()
    for number in range(NUM_RECORDS + 10):
        for _ in range(2):
            p.place(request(16, name=f"r{number}"), 0.0, [P1], [D1])
    assert len(p.records) == NUM_RECORDS
    assert last(p).request_id == f"r{NUM_RECORDS + 9}"
