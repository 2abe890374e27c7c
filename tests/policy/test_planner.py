"""Plans follow the mix, not the noise; flips are few, ordered and explained."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.roles import RoleLabel
from policy.chunks import Cadence
from policy.fleet import FleetView
from policy.planner import Demand, Mix, Plan, Planner, PlanRules, sustainable_rate
from policy.step_model import Coefficients, StepModel
from tests.policy.builders import make_model, make_worker

KV = 1 << 20


def mix(rate: float = 10.0, prompt: float = 1000, output: float = 200) -> Mix:
    return Mix(rate, prompt, prompt, output, Cadence(0.040))


def fleet_of(num_prefill: int, num_others: int, others: RoleLabel = "mixed") -> FleetView:
    prefills = [make_worker(f"p{n}", "prefill") for n in range(num_prefill)]
    return FleetView([*prefills, *(make_worker(f"d{n}", others, 10 + n) for n in range(num_others))])


def carry_out(plan: Plan, fleet: FleetView) -> None:
    for flip in plan.flips:
        assert fleet.set_role(flip.worker_id, flip.role, flip.epoch)


def test_long_prompts_want_readers_and_long_answers_writers() -> None:
    def wanted(prompt: float, output: float) -> int:
        plan = Planner(PlanRules(), KV).plan(
            mix(10.0, prompt, output), list(fleet_of(4, 4).workers.values()), 0.0
        )
        return plan.wanted_prefill

    assert wanted(8000, 20) > wanted(1000, 200) > wanted(100, 2000)


def test_a_shift_is_followed_after_confirmation_with_least_loaded_first() -> None:
    fleet, planner = fleet_of(2, 6), Planner(PlanRules(), KV)
    calm = mix(0.1, 8000, 20)
    first = planner.plan(calm, list(fleet.workers.values()), 0.0)
    assert first.flips == ()
    assert "confirmed" in first.reason
    second = planner.plan(calm, list(fleet.workers.values()), 1.0)
    assert [flip.worker_id for flip in second.flips][:2] == ["d0", "d1"]
    carry_out(second, fleet)
    assert sum(worker.role == "prefill" for worker in fleet.workers.values()) == second.wanted_prefill


def test_starvation_needs_no_confirmation() -> None:
    plan = Planner(PlanRules(), KV).plan(mix(1000.0, 8000, 20), list(fleet_of(1, 7).workers.values()), 0.0)
    assert plan.flips
    assert "starving" in plan.reason


def test_whoever_is_no_reader_is_mixed() -> None:
    """A label that forbids reading gains nothing: a writer without time left reads nothing anyway."""
    fleet, planner = fleet_of(4, 4, "decode"), Planner(PlanRules(dead_band=10.0), KV)
    plan = planner.plan(mix(1.0, 8000, 20), list(fleet.workers.values()), 0.0)
    assert (plan.cause, plan.reason) == ("labels", "labels of 4 readers")
    assert {(flip.worker_id, flip.role) for flip in plan.flips} == {(f"d{n}", "mixed") for n in range(4)}


def test_where_specialists_carry_no_more_all_are_mixed_and_stay_so() -> None:
    fleet, planner = fleet_of(4, 4), Planner(PlanRules(), KV)
    answers = mix(0.1, 20, 2000)
    for now in range(2):
        plan = planner.plan(answers, list(fleet.workers.values()), float(now))
        carry_out(plan, fleet)
    assert (plan.cause, plan.wanted_prefill) == ("gain", 0)
    assert {worker.role for worker in fleet.workers.values()} == {"mixed"}
    calm = planner.plan(answers, list(fleet.workers.values()), 2.0)
    assert (calm.cause, calm.flips) == ("dead_band", ())


def test_specialists_must_be_worth_two_dead_bands_to_begin_and_nothing_to_stay() -> None:
    """What is barely better than all mixed is neither begun nor given up, so that it is not done in turns."""

    def first_word(num_prefill: int, dead_band: float) -> Plan:
        workers, rules = (
            fleet_of(num_prefill, 8 - num_prefill),
            PlanRules(dead_band=dead_band, confirmations=1),
        )
        return Planner(rules, KV).plan(mix(0.1, 8000, 100), list(workers.workers.values()), 0.0)

    rates = first_word(0, 0.0).rates
    best = max(rates, key=rates.__getitem__)
    gain = rates[best] / rates[0] - 1.0
    assert 0.05 < gain < 0.5
    assert first_word(0, gain / 3).cause == "gain"
    assert first_word(0, gain * 2 / 3).cause == "dead_band"
    assert first_word(best, gain * 2 / 3).cause == "dead_band"


def test_who_starts_as_a_reader_where_all_are_mixed_becomes_mixed_at_once() -> None:
    planner, workers, answers = (
        Planner(PlanRules(), KV),
        list(fleet_of(0, 4).workers.values()),
        mix(0.1, 20, 2000),
    )
    assert planner.plan(answers, workers, 0.0).flips == ()
    plan = planner.plan(answers, [*workers, make_worker("new", "prefill")], 1.0)
    assert [(flip.worker_id, flip.role) for flip in plan.flips] == [("new", "mixed")]
    assert plan.cause == "labels"


def test_readers_alone_get_somebody_who_writes() -> None:
    plan = Planner(PlanRules(), KV).plan(mix(1.0, 8000, 20), list(fleet_of(5, 0).workers.values()), 0.0)
    assert plan.cause == "labels"
    assert {flip.role for flip in plan.flips} == {"mixed"}


def test_no_way_back_before_the_cool_down() -> None:
    fleet, planner = fleet_of(4, 4), Planner(PlanRules(cool_down_s=10.0), KV)
    back = mix(1000.0, 50, 2000)
    for now, demand in enumerate(
        (back, mix(1000.0, 8000, 20))
    ):  # the first, made knowing least, may be corrected
        plan = planner.plan(demand, list(fleet.workers.values()), float(now))
        assert plan.cause == "starving"
        carry_out(plan, fleet)
    early = planner.plan(back, list(fleet.workers.values()), 5.0)
    assert early.flips == ()
    assert "cool-down" in early.reason
    assert planner.plan(back, list(fleet.workers.values()), 11.0).flips


def test_a_small_gain_moves_nobody() -> None:
    fleet, planner = fleet_of(4, 4), Planner(PlanRules(dead_band=10.0), KV)
    for now in range(5):
        plan = planner.plan(mix(1.0, 8000, 20), list(fleet.workers.values()), float(now))
        assert plan.flips == ()
        assert "dead-band" in plan.reason


@pytest.mark.parametrize("size", [1, 2, 3])
def test_three_or_fewer_are_all_mixed(size: int) -> None:
    fleet = fleet_of(size, 0)
    carry_out(Planner(PlanRules(), KV).plan(mix(), list(fleet.workers.values()), 0.0), fleet)
    assert {worker.role for worker in fleet.workers.values()} == {"mixed"}


@settings(max_examples=30)
@given(
    size=st.integers(4, 40),
    steps=st.lists(
        st.tuples(st.floats(0.1, 1000), st.floats(10, 20_000), st.floats(2, 3000)), min_size=1, max_size=8
    ),
)
def test_somebody_reads_and_somebody_writes_always_and_epochs_grow(
    size: int, steps: list[tuple[float, float, float]]
) -> None:
    fleet, planner = fleet_of(size // 2, size - size // 2, "decode"), Planner(PlanRules(), KV)
    newest = 0
    for now, (rate, prompt, output) in enumerate(steps):
        plan = planner.plan(mix(rate, prompt, output), list(fleet.workers.values()), now * 20.0)
        for flip in plan.flips:
            assert flip.epoch > newest
            newest = flip.epoch
        carry_out(plan, fleet)
        assert fleet.prefills
        assert fleet.decodes
        assert plan.wanted_prefill in plan.rates
        assert 0 in plan.rates
        assert {worker.role for worker in fleet.workers.values()} <= {"prefill", "mixed"}
        assert plan.num_workers >= 2


def test_replicas_follow_demand_out_of_the_dead_band() -> None:
    planner, workers = Planner(PlanRules(), KV), list(fleet_of(4, 4).workers.values())
    best = max(planner.plan(mix(1.0), workers, 0.0).rates.values())
    assert planner.plan(mix(best * 1.6), workers, 1.0).num_workers >= 14
    assert planner.plan(mix(best * 0.2), workers, 2.0).num_workers <= 3


def test_a_fleet_too_small_for_specialists_grows_all_the_same() -> None:
    planner, workers = Planner(PlanRules(), KV), list(fleet_of(1, 1).workers.values())
    calm = planner.plan(mix(0.1), workers, 0.0)
    assert (calm.cause, set(calm.rates), calm.num_workers) == ("small", {0}, 2)
    assert planner.plan(mix(1.5 * calm.rates[0]), workers, 1.0).num_workers == 4


def test_a_promise_that_cannot_be_kept_does_not_ask_for_the_moon() -> None:
    hopeless = Mix(10.0, 1000, 1000, 200, Cadence(0.001))
    plan = Planner(PlanRules(), KV).plan(hopeless, list(fleet_of(4, 4).workers.values()), 0.0)
    assert max(plan.rates.values()) == pytest.approx(0.0, abs=1e-6)
    assert plan.num_workers == 16


def test_who_gets_no_requests_needs_two_workers() -> None:
    planner = Planner(PlanRules(), KV)
    plan = planner.plan(None, list(fleet_of(4, 4).workers.values()), 0.0)
    assert (plan.cause, plan.num_workers, plan.flips) == ("no_demand", 2, ())


def test_more_workers_carry_more() -> None:
    model, rules = make_model(), PlanRules()
    rates = [sustainable_rate(model, mix(), n, n, KV, rules) for n in (1, 2, 4)]
    assert rates[1] == pytest.approx(2 * rates[0], rel=0.02)
    assert rates[2] == pytest.approx(4 * rates[0], rel=0.02)
    assert sustainable_rate(model, mix(), 4, 0, KV, rules) == 0.0


def test_a_learnt_model_without_a_fixed_cost_has_a_rate_all_the_same() -> None:
    """A fit of few steps may put everything on the streams."""
    steep = StepModel(Coefficients(0.0, decode_s=0.010), Coefficients(0.0, 100e-6, decode_s=0.010))
    rate = sustainable_rate(steep, mix(1.0, 100, 50), 0, 2, KV, PlanRules())
    assert 1.0 < rate < 4.0  # 3.8 streams in a gap of 38 ms on each, less what reading takes


def test_demand_measures_rate_and_lengths() -> None:
    demand = Demand(Cadence(0.040), window_s=10.0)
    assert demand.mix(0.0) is None
    for number in range(2000):
        now_s = number * 0.05
        demand.arrived(1000, 400, now_s)
        demand.wrote(150, now_s)
        demand.finished(150 if number % 5 else 30, now_s)
    found = demand.mix(100.0)
    assert found is not None
    assert found.requests_per_s == pytest.approx(20.0, rel=0.05)
    assert (found.prompt_tokens, found.new_tokens) == (pytest.approx(1000), pytest.approx(400))
    assert found.output_tokens == pytest.approx(150, rel=0.05)
    assert 20 < demand.short_output < 40  # a fifth of the answers has 30


def asked_of(num_long: int, num_refused: int) -> Mix:
    """One prompt of 100 tokens each 50 ms, beside it `num_long` of 10,000, of which so many are refused 2 s later."""
    demand = Demand(Cadence(0.040), window_s=10.0)
    for tick in range(2000):
        now_s = tick * 0.05
        demand.arrived(100, 100, now_s)
        for _ in range(num_long):
            demand.arrived(10_000, 5_000, now_s)
        if tick >= 40:
            for _ in range(num_refused):
                demand.refused(10_000, 5_000, now_s - 2.0, now_s)
    found = demand.mix(100.0)
    assert found is not None
    return found


def test_nobody_plans_for_what_is_refused_but_replicas_are_wanted_for_it() -> None:
    """What arrived in the last 2 s is not refused yet: with a memory of 10 s, 18% of it all."""
    refused, served = asked_of(1, 1), asked_of(1, 0)
    assert served.asked is None
    assert (served.prompt_tokens, served.new_tokens) == (pytest.approx(5050), pytest.approx(2550))
    assert refused.asked == pytest.approx((5050, 2550))
    assert refused.of_all() == replace(served, requests_per_s=refused.requests_per_s)
    assert refused.requests_per_s == pytest.approx(40.0, rel=0.05)
    assert refused.prompt_tokens < 0.5 * served.prompt_tokens
    plans = [
        Planner(PlanRules(), KV).plan(demand, list(fleet_of(4, 4).workers.values()), 0.0)
        for demand in (refused, served)
    ]
    assert plans[0].wanted_prefill < plans[1].wanted_prefill
    assert plans[0].num_workers == plans[1].num_workers


def test_where_all_are_refused_they_are_what_could_be_served() -> None:
    demand = Demand(Cadence(0.040), window_s=10.0)
    for tick in range(100):
        demand.arrived(1000, 1000, tick * 0.1)
        demand.refused(1000, 1000, tick * 0.1, tick * 0.1)
    found = demand.mix(10.0)
    assert found is not None
    assert (found.prompt_tokens, found.new_tokens) == (pytest.approx(1000), pytest.approx(1000))


@settings(max_examples=50)
@given(
    st.lists(st.tuples(st.integers(1, 20_000), st.floats(0.0, 5.0), st.booleans()), min_size=1, max_size=60)
)
def test_what_is_served_lies_within_what_was_asked(requests: list[tuple[int, float, bool]]) -> None:
    """Whatever is refused, and however late: no mean leaves the range of the prompts that came."""
    demand = Demand(Cadence(0.040), window_s=10.0)
    events = [(0.1 * n, size, 0.1 * n, False) for n, (size, _, _) in enumerate(requests)]
    events += [
        (0.1 * n + wait, size, 0.1 * n, True) for n, (size, wait, is_lost) in enumerate(requests) if is_lost
    ]
    for now_s, size, arrived_s, is_refusal in sorted(events):
        if is_refusal:
            demand.refused(size, size, arrived_s, now_s)
        else:
            demand.arrived(size, size, now_s)
    found = demand.mix(max(event[0] for event in events))
    assert found is not None
    sizes = [size for size, _, _ in requests]
    for tokens in (found.prompt_tokens, found.new_tokens, found.of_all().prompt_tokens):
        assert min(sizes) * (1 - 1e-6) <= tokens <= max(sizes) * (1 + 1e-6)


def test_longer_answers_are_noticed_before_the_first_has_ended() -> None:
    demand = Demand(Cadence(0.040), window_s=10.0)
    for number in range(200):
        demand.wrote(10, number * 0.1)
        demand.finished(10, number * 0.1)
    assert demand.expected_output < 20
    for number in range(100):
        demand.wrote(100, 20 + number * 0.1)
    assert demand.expected_output > 20
