"""Placement by predicted times on views made by hand: which way wins, and when load decides instead."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from contracts.blocks import block_hashes
from contracts.cached import Cached, packed
from contracts.config import BatonConfig, load_config
from contracts.request import GenerateRequest, SamplingParams
from contracts.service import Service
from contracts.steps import LinkReport, StepReport
from coordinator.ask import RULES, Ask
from coordinator.placement import NotNow, Placement, WorkerView
from coordinator.predict import Predictor
from coordinator.records import NUM_RECORDS, Record

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
        (("d1", LinkReport(0.001, 1e10)),),
        bytes_per_token=1000,
        steps=STEPS,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


P1, D1, D2 = view("p1"), view("d1"), view("d2")
# Of a pool whose label never moved: each has seen its own kind of step.
READER = replace(P1, steps=replace(STEPS, is_decode_known=False))
WRITER = replace(D1, steps=replace(STEPS, is_mixed_known=False))


def predictor(
    ttft_ms: float | None = 500.0, itl_ms: float | None = 50.0, clock: Callable[[], float] = lambda: 0.0
) -> Predictor:
    config: BatonConfig = load_config(overrides={"slo.ttft_ms": ttft_ms, "slo.itl_ms": itl_ms})
    return Predictor(config, random.Random(0), clock)


def request(num_tokens: int = len(PROMPT), name: str = "r", salt: str = "") -> GenerateRequest:
    return GenerateRequest(name, PROMPT[:num_tokens], SamplingParams(max_tokens=64), salt=salt)


def put(
    p: Predictor,
    req: GenerateRequest,
    waited_s: float,
    prefills: Sequence[WorkerView],
    decodes: Sequence[WorkerView],
    avoid: frozenset[str] = frozenset(),
    **changes: Any,
) -> Placement | NotNow:
    ask = Ask(req, p._slo.service(), waited_s, p.service_s(req), avoid)
    return p.place(replace(ask, **changes), prefills, decodes)


def last(p: Predictor) -> Record:
    return p.records[-1]


def test_an_idle_fleet_reads_on_the_prefill_worker() -> None:
    p = predictor()
    assert put(p, request(), 0.0, [P1], [D1]) == Placement("d1", "p1")
    assert (last(p).rule, last(p).verdict) == ("predicted", "placed")
    assert {option.kind for option in last(p).options} == {"remote", "local"}


def test_a_prompt_behind_a_long_line_is_read_where_it_is_answered() -> None:
    """Load alone would queue it behind 100,000 tokens."""
    p = predictor()
    assert put(p, request(), 0.0, [replace(P1, num_tokens=100_000)], [D1]) == Placement("d1", None)
    assert last(p).rule == "predicted"


def test_a_short_prompt_is_not_read_among_streams_that_leave_no_time() -> None:
    p = predictor(itl_ms=11.5)
    busy = replace(
        D1, num_requests=2, gap_s=0.0115, steps=replace(STEPS, mixed=(0.011, 100e-6, 1e-9, 100e-6, 10e-9))
    )
    assert put(p, request(100), 0.0, [P1], [busy]) == Placement("d1", "p1")
    [drawback] = [option.drawback for option in last(p).options if option.kind == "local"]
    assert drawback == "its streams leave no time"


def test_a_prefix_that_the_decode_worker_holds_is_used_there() -> None:
    p = predictor()
    turn = request(960)
    p.answered(turn, ["d1"])
    assert put(p, request(), 0.0, [P1], [D1]) == Placement("d1", None)


def test_what_the_decode_worker_has_evicted_is_forgotten_when_it_says_so() -> None:
    p = predictor()
    p.answered(request(960), ["d1"])
    p.granted(request(960), "d1", num_cached=0)
    assert put(p, request(), 0.0, [P1], [D1]) == Placement("d1", "p1")


def told(num_tokens: int, salt: str = "") -> bytes:
    """Of that many tokens of the prompt, as a worker tells it."""
    return packed(block_hashes(PROMPT[:num_tokens], 16, salt))


def test_what_a_worker_tells_of_its_cache_counts_whoever_filled_it() -> None:
    p = predictor()
    p.cached("d1", Cached(told(960), is_all=True))  # before it can be used at all
    assert put(p, request(), 0.0, [P1], [D1]) == Placement("d1", None)
    assert put(p, request(salt="other"), 0.0, [P1], [D1]) == Placement("d1", "p1")
    p.cached("d1", Cached(evicted=told(960)))
    assert put(p, request(), 0.0, [P1], [D1]) == Placement("d1", "p1")
    p.cached("d1", Cached(told(960)))
    assert put(p, request(), 0.0, [P1], [D1]) == Placement("d1", None)


def test_of_a_lost_worker_nothing_is_known_until_it_tells_again() -> None:
    p = predictor()
    p.cached("d1", Cached(told(960)))
    p.cached("d1", Cached(is_all=True))
    assert not p._index._slots
    assert put(p, request(), 0.0, [P1], [D1]) == Placement("d1", "p1")


def test_without_promises_nothing_is_kept_of_what_workers_tell() -> None:
    p = predictor(None, None)
    p.cached("d1", Cached(told(960), is_all=True))
    assert not len(p._index)


def test_another_salt_finds_no_prefix() -> None:
    p = predictor()
    p.answered(request(960), ["d1"])
    assert put(p, request(salt="other"), 0.0, [P1], [D1]) == Placement("d1", "p1")


def test_a_prompt_that_is_computed_whole_finds_no_prefix_and_lets_none_be_forgotten() -> None:
    p = predictor()
    p.answered(request(960), ["d1"])
    judged = replace(request(), sampling=SamplingParams(max_tokens=64, num_prompt_logprobs=0))
    assert put(p, judged, 0.0, [P1], [D1]) == Placement("d1", "p1")
    p.granted(judged, "d1", num_cached=0)
    assert put(p, request(), 0.0, [P1], [D1]) == Placement("d1", None)


def test_a_prompt_is_hashed_once_per_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []

    def counted(token_ids: Sequence[int], *rest: object) -> list[bytes]:
        hashed.append(len(token_ids))
        return block_hashes(token_ids, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr("coordinator.predict.block_hashes", counted)
    p = predictor()
    for attempt in (request(name="r.1"), replace(request(name="r.2"), output_ids=(1, 2))):
        for _ in range(3):
            put(p, attempt, 0.0, [P1], [D1])
        p.granted(attempt, "d1", num_cached=0)
        p.answered(attempt, ["d1"])
    assert hashed == [len(PROMPT), len(PROMPT) + 2]


def test_a_worker_that_is_gone_holds_nothing() -> None:
    p = predictor()
    p.answered(request(960), ["d1"])
    put(p, request(), 0.0, [P1], [D2])
    assert put(p, request(), 0.0, [P1], [D1]) == Placement("d1", "p1")


@pytest.mark.parametrize(
    ("p", "prefills", "decodes", "verdict"),
    [
        (predictor(None, None), [P1], [D1], "no promise"),
        (predictor(), [replace(P1, steps=None)], [WRITER], "a worker is still learning"),
        (predictor(), [READER], [replace(D1, steps=None)], "a worker is still learning"),
        (predictor(itl_ms=1.0), [P1], [D1], "no_decode_room"),
    ],
    ids=["no promise", "prefill learns", "decode learns", "gaps too long"],
)
def test_load_decides_where_predictions_cannot(
    p: Predictor, prefills: list[WorkerView], decodes: list[WorkerView], verdict: str
) -> None:
    assert put(p, request(), 0.0, prefills, decodes) == Placement("d1", "p1")
    assert (last(p).rule, last(p).verdict) == ("load", verdict)


def test_a_decode_worker_that_never_read_a_prompt_is_judged_by_the_prefill_workers() -> None:
    p = predictor()
    fresh = replace(D1, steps=replace(STEPS, is_mixed_known=False, mixed=(9.0, 9.0, 9.0, 9.0, 9.0)))
    assert put(p, request(), 0.0, [replace(P1, num_tokens=100_000)], [fresh]) == Placement("d1", None)


def test_a_worker_that_is_new_in_its_role_is_judged_by_the_others() -> None:
    """A reader that writes since a moment ago, and one that has just started."""
    p = predictor()
    flipped = replace(READER, worker_id="d2")
    assert put(p, request(), 0.0, [P1], [replace(D1, num_requests=60), flipped]) is not None
    assert last(p).rule == "predicted"
    assert put(p, request(), 0.0, [replace(P1, steps=None)], [D1]) == Placement("d1", "p1")
    assert last(p).rule == "predicted"


def test_a_mixed_worker_is_weighed_both_ways_and_what_it_reads_for_others_is_no_stream_of_its_own() -> None:
    p = predictor()
    a = view("a", peers=frozenset({"b"}), num_requests=3, num_reading=3)
    b = view("b", peers=frozenset({"a"}), num_requests=1)
    assert put(p, request(), 0.0, [a, b], [a, b]) is not None
    options = {(option.kind, option.prefill_id, option.decode_id) for option in last(p).options}
    assert options == {("remote", "b", "a"), ("local", "a", "a"), ("local", "b", "b")}


def test_a_mixed_pair_does_the_work_of_its_pools_first_and_the_others_where_it_must() -> None:
    p = predictor(itl_ms=12.0)
    a = view("a", peers=frozenset({"b"}), home="prefill")
    b = view("b", peers=frozenset({"a"}), num_requests=1, home="decode")
    assert put(p, request(), 0.0, [a, b], [a, b]) == Placement("b", "a")
    crowded = replace(b, num_requests=60, gap_s=0.012)  # one more would break the promise of all
    assert put(p, request(), 0.0, [a, crowded], [a, crowded]) == Placement("a", None)
    assert last(p).rule == "predicted"


def test_where_all_are_mixed_by_plan_pools_do_not_matter() -> None:
    """More than three: the planner weighed readers, and found none that is worth it."""
    names = ("a", "b", "c", "d")
    views = [
        view(name, peers=frozenset(names) - {name}, num_requests=number, home=home)
        for name, number, home in zip(
            names, (0, 9, 9, 9), ("prefill", "prefill", "decode", "decode"), strict=True
        )
    ]
    placement = put(predictor(), request(), 0.0, views, views)
    assert isinstance(placement, Placement)
    assert placement.decode_id == "a"


def test_a_pair_without_a_tested_connection_is_never_chosen() -> None:
    p = predictor()
    assert put(p, request(), 0.0, [replace(P1, peers=frozenset())], [D1]) == Placement("d1", None)


def test_no_room_is_no_placement() -> None:
    p = predictor()
    answer = put(p, request(), 0.0, [P1], [replace(D1, num_available_blocks=1)])
    assert answer == NotNow("no room", 63)
    assert (last(p).rule, last(p).placement) == ("wait", None)


def test_workers_that_failed_the_request_are_avoided() -> None:
    p = predictor()
    placement = put(p, request(), 0.0, [P1], [D1, D2], frozenset({"d1"}))
    assert placement == Placement("d2", "p1")


def test_a_stream_that_is_late_already_is_still_placed() -> None:
    p = predictor()
    assert isinstance(put(p, request(), 9.0, [P1], [D1]), Placement)
    assert last(p).rule == "predicted"
    assert last(p).slack_s == pytest.approx(0.47 - 9.0 - 0.102)  # nominal: nobody has told yet


def test_the_last_decisions_are_kept_one_for_each_request() -> None:
    p = predictor()
    for number in range(NUM_RECORDS + 10):
        for _ in range(2):
            put(p, request(16, name=f"r{number}"), 0.0, [P1], [D1])
    assert len(p.records) == NUM_RECORDS
    assert last(p).request_id == f"r{NUM_RECORDS + 9}"


BUSY = replace(P1, num_tokens=100_000)
BUSY_D1 = replace(D1, num_tokens=100_000, num_requests=1, gap_s=0.050)


def test_nobody_is_bound_to_workers_that_have_enough_to_read() -> None:
    p = predictor()
    answer = put(p, request(), 0.0, [BUSY], [BUSY_D1])
    assert isinstance(answer, NotNow)
    assert (answer.verdict, answer.from_blocks, answer.is_hopeless) == ("workers_busy", 0, False)
    assert answer.opens_in_s == pytest.approx(p._models["p1"][1].prefill_s(100_000, 0, 256) - RULES.horizon_s)


def test_a_reader_is_open_again_when_what_it_reads_should_be_read() -> None:
    """Its unread tokens are known at once, how far it has come only by the time that has passed."""
    now_s = [0.0]
    p = predictor(clock=lambda: now_s[0])
    assert put(p, request(), 0.0, [P1], [D1]) == Placement("d1", "p1")
    reading, writing = replace(P1, num_tokens=1000), replace(D1, num_requests=2, num_tokens=1000, gap_s=0.05)
    assert isinstance(put(p, request(name="next"), 0.0, [reading], [writing]), NotNow)
    now_s[0] = p._models["p1"][1].prefill_s(1000, 0, 256) - 0.8 * RULES.horizon_s
    assert put(p, request(name="next"), 0.0, [reading], [writing]) == Placement("d1", "p1")


def test_a_writer_reads_what_it_has_in_the_time_that_its_streams_leave() -> None:
    """As the simulator has it; alone it would be through in 0.1 s."""
    p = predictor(itl_ms=12.0)
    writing = replace(D1, num_requests=2, num_tokens=1000, gap_s=0.012)
    answer = put(p, request(), 0.0, [BUSY], [writing])
    assert isinstance(answer, NotNow)
    assert 0.15 < answer.opens_in_s < 0.25


def test_gaps_are_kept_until_the_newcomer_itself_is_late() -> None:
    p = predictor(itl_ms=10.5)
    full = replace(D1, num_requests=50, gap_s=0.0105)
    answer = put(p, request(), 0.0, [P1], [full])
    assert (answer, last(p).verdict) == (NotNow("no_decode_room", 63), "no_decode_room")
    assert put(p, request(), 1.0, [P1], [full]) == Placement("d1", "p1")
    assert (last(p).rule, last(p).verdict) == ("load", "no_decode_room")


def test_who_is_not_kept_is_told_when_the_promise_is_lost() -> None:
    p = predictor()
    assert put(p, request(), 1.0, [P1], [D1], is_kept=False) == NotNow("too_late", is_hopeless=True)
    never = predictor(itl_ms=1.0)
    assert put(never, request(), 0.0, [P1], [D1], is_kept=False) == NotNow("no_decode_room", is_hopeless=True)
    assert last(never).placement is None


def test_a_request_is_placed_by_its_own_promises() -> None:
    p = predictor(itl_ms=1.0)
    patient = Service(ttft_s=0.5, itl_s=0.05)
    assert put(p, request(), 0.0, [P1], [D1], service=patient) == Placement("d1", "p1")
    assert last(p).rule == "predicted"


BATCH = Service("batch")


@pytest.mark.parametrize("p", [predictor(), predictor(None, None)], ids=["by predictions", "by load"])
def test_leftover_requests_take_what_interactive_ones_leave(p: Predictor) -> None:
    nothing = NotNow("nothing is left over", 0)
    assert put(p, request(), 0.0, [P1], [D1], service=BATCH) == Placement("d1", "p1")
    assert put(p, request(), 0.0, [replace(P1, num_tokens=1)], [D1], service=BATCH) == nothing
    assert put(p, request(), 0.0, [P1], [replace(D1, num_tokens=1, num_requests=1)], service=BATCH) == nothing
    half = replace(D1, num_requests=40, num_leftover=32, gap_s=0.05)
    assert put(p, request(), 0.0, [P1], [half], service=BATCH) == nothing
    blocks = replace(D1, num_requests=9, num_leftover=1, leftover_blocks=450, gap_s=0.05)
    assert put(p, request(), 0.0, [P1], [blocks], service=BATCH) == nothing
    for view in (half, blocks):
        assert put(p, request(), 0.0, [P1], [view]) == Placement("d1", "p1")
        resumed = put(p, request(), 0.0, [P1], [view], service=BATCH, is_resumed=True)
        assert resumed == Placement("d1", "p1")


def test_without_prefill_workers_leftover_prompts_are_read_one_at_a_time() -> None:
    p = predictor(None, None)
    assert put(p, request(), 0.0, [], [D1], service=BATCH) == Placement("d1", None)
    assert isinstance(put(p, request(), 0.0, [], [replace(D1, num_tokens=5)], service=BATCH), NotNow)


def test_one_leftover_request_may_be_larger_than_its_share() -> None:
    p = predictor(None, None)
    small = replace(D1, num_blocks=100, num_available_blocks=100)
    assert put(p, request(), 0.0, [P1], [small], service=BATCH) == Placement("d1", "p1")


def test_who_was_seen_to_take_long_to_hand_over_does_not_read() -> None:
    """Both were equally fast in their self-tests; what one tells changes with its transfers."""
    fast, slow = (("d1", LinkReport(0.001, 1e10)),), (("d1", LinkReport(0.2, 1e7)),)
    p1, p2 = replace(P1, links=fast), replace(P1, worker_id="p2", links=fast)
    for seed in range(8):
        p = predictor()
        p._rng.seed(seed)
        put(p, request(name="before"), 0.0, [p1, p2], [D1])
        assert put(p, request(), 0.0, [replace(p1, links=slow), p2], [D1]) == Placement("d1", "p2")


def test_nothing_is_kept_of_workers_that_are_gone_whether_or_not_they_ever_answered() -> None:
    p = predictor()
    for number in range(10):
        links = ((f"d{number}", LinkReport(0.001, 1e10)),)
        reader = replace(P1, worker_id=f"p{number}", links=links, peers=frozenset({f"d{number}"}))
        put(p, request(name=f"r{number}"), 0.0, [reader], [replace(D1, worker_id=f"d{number}")])
    put(p, request(name="last"), 0.0, [], [replace(D2, steps=None)])
    assert (p._models, p._reading_since, p._links._pairs) == ({}, {"d2": 0.0}, {})
    assert p._known == {"d2"}


def test_a_large_fleet_is_looked_at_in_part_and_by_whoever_holds_the_prefix() -> None:
    p = predictor()
    readers = [replace(P1, worker_id=f"p{n}", links=()) for n in range(500)]
    writers = [replace(D1, worker_id=f"d{n}") for n in range(500)]
    put(p, request(name="first"), 0.0, readers, writers)
    p.answered(request(960), ["d7"])
    put(p, request(), 0.0, readers, writers)
    assert len(p._models) < 300
    assert "d7" in {option.decode_id for option in last(p).options}


def test_a_refusal_is_told_like_a_placement() -> None:
    p = predictor()
    p.refused(Ask(request(), BATCH), "queue_full")
    assert (last(p).rule, last(p).verdict, last(p).service_class) == ("refused", "queue_full", "batch")
    assert (last(p).left_s, last(p).slack_s) == (None, None)


def test_reading_takes_what_the_fastest_worker_needs() -> None:
    p = predictor()
    slow = replace(D1, steps=replace(STEPS, mixed=(9.0, 9.0, 9.0, 9.0, 9.0)))
    put(p, request(name="first"), 0.0, [P1], [slow])
    assert p.service_s(request()) == pytest.approx(0.002 + p._models["p1"][1].prefill_s(1000, 0, 256))


def test_predictions_that_refuse_everybody_are_tried_after_a_while() -> None:
    now_s = [100.0]
    p = predictor(clock=lambda: now_s[0])
    for passed_s, is_placed in (
        (0.0, False),
        (29.0, False),
        (1.0, True),
        (1.0, False),
        (29.0, False),
        (1.0, True),
    ):
        now_s[0] += passed_s
        answer = put(p, request(), 1.0, [P1], [D1], is_kept=False)
        assert isinstance(answer, Placement) == is_placed
