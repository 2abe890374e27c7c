"""The simulator: everyone ends once, blocks are conserved, runs repeat, and the closed forms equal the long way."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import routing, simulate
from benchmarks.metrics import Slo
from benchmarks.result import Row, read_result
from benchmarks.sim import table
from benchmarks.sim.baselines import BudgetChunker, RoundRobin
from benchmarks.sim.baton import Features
from benchmarks.sim.cases import Case
from benchmarks.sim.cluster import OVERHEAD_S, Cluster, Setup
from benchmarks.sim.devices import DEVICES
from benchmarks.sim.experiments import (
    TARGET,
    Point,
    System,
    baselines,
    baton,
    cache_aware,
    is_attained,
    round_robin,
    static_split,
)
from benchmarks.sim.experiments import simulate as run_once
from benchmarks.sim.memory import Memory
from benchmarks.sim.requests import SimRequest
from benchmarks.sim.workloads import Workload, shifting_workload, trace_workload

DEVICE = DEVICES["h200-8b"]
SLO = Slo(1.0, 0.03)
SYSTEMS = [baton(), round_robin(512), cache_aware(1024), static_split(2), cache_aware(512, gives_up=True)]


def setup(num_workers: int = 4, seed: int = 0, **changes: object) -> Setup:
    return replace(Setup(DEVICE, num_workers, SLO, seed), **changes)  # type: ignore[arg-type]


def fixed(requests: list[SimRequest]) -> Workload:
    return Workload("fixed", lambda rate, seed: requests)


REQUESTS = st.lists(
    st.tuples(st.integers(0, 3000), st.integers(1, 20_000), st.integers(1, 400), st.integers(0, 6)),
    min_size=1,
    max_size=40,
)


def made(rows: list[tuple[int, int, int, int]]) -> list[SimRequest]:
    """Milliseconds of arrival, prompt, output, conversation (0: shares nothing)."""
    requests = []
    for number, (arrived_ms, prompt, output, talk) in enumerate(sorted(rows)):
        keys = tuple(talk * 1000 + n for n in range(prompt // 512)) if talk else ()
        requests.append(SimRequest(number, arrived_ms / 1000, prompt, output, keys))
    return requests


@settings(max_examples=25)
@given(rows=REQUESTS, seed=st.integers(0, 9), number=st.integers(0, len(SYSTEMS) - 1))
def test_everyone_ends_once_and_every_block_comes_back(
    rows: list[tuple[int, int, int, int]], seed: int, number: int
) -> None:
    small = setup(seed=seed, device=replace(DEVICE, kv_tokens=40_000))
    requests = made(rows)
    controller, chunker = SYSTEMS[number].build(small)
    cluster = Cluster(small, controller, chunker)
    cluster.run(requests)
    for request in requests:
        assert request.num_ends == 1
        assert request.is_refused != (request.end_s is not None)
        if request.end_s is not None:
            assert request.first_token_s is not None
            assert request.arrived_s < request.first_token_s <= request.end_s + OVERHEAD_S
    for worker in cluster.workers:
        assert worker.memory.is_balanced
        assert worker.memory.running == worker.memory.reserved == 0
        assert (worker.num_streams, worker.context, worker.prompts) == (0, 0, [])
        assert (worker.pending_tokens, worker.num_held) == (0, 0)


@pytest.mark.parametrize("system", SYSTEMS, ids=lambda system: system.name)
def test_a_run_is_a_function_of_its_seed(system: System) -> None:
    workload = trace_workload("azure-conv", 200)

    def ends(seed: int) -> list[float | None]:
        return [request.end_s for request in run_once(system, workload, 60.0, setup(seed=seed)).requests]

    assert ends(3) == ends(3)
    assert ends(3) != ends(4)


def test_beliefs_and_truth_agree_when_all_is_over() -> None:
    run = run_once(baton(), trace_workload("azure-conv", 300), 80.0, setup())
    for state in run.controller._states.values():  # type: ignore[attr-defined]
        assert state.promised_streams == state.promised_tokens == state.used_tokens == 0
        assert state.num_prompts == state.running_streams == 0


def test_a_run_of_decodes_lasts_as_long_as_its_steps_one_by_one() -> None:
    request = SimRequest(0, 0.0, 1000, 200)
    quiet = setup(1, noise=0.0)
    Cluster(quiet, RoundRobin(), lambda _: BudgetChunker(2048)).run([request])
    first_s = DEVICE.step_s(1000, 1000 * 1000, 0, 0)
    assert request.first_token_s == pytest.approx(first_s + OVERHEAD_S)
    steps_s = sum(DEVICE.decode_step_s(1, 1001 + n) for n in range(199))
    assert request.end_s == pytest.approx(first_s + steps_s + OVERHEAD_S)


def test_who_comes_in_between_waits_for_the_step_under_way_only() -> None:
    early, late = SimRequest(0, 0.0, 1000, 1000), SimRequest(1, 0.5, 100, 2)
    Cluster(setup(1, noise=0.0), RoundRobin(), lambda _: BudgetChunker(2048)).run([early, late])
    assert late.first_token_s is not None
    step_s = DEVICE.decode_step_s(1, 1100)
    chunk_s = DEVICE.step_s(100, 100 * 100, 1, 1100)
    waited_s = late.first_token_s - OVERHEAD_S - 0.5 - chunk_s
    assert 0 <= waited_s <= step_s * 1.01


def test_a_cached_prefix_is_not_read_again() -> None:
    keys = tuple(range(15))
    requests = [SimRequest(0, 0.0, 8000, 2, keys), SimRequest(1, 5.0, 8000, 2, keys)]
    Cluster(setup(1), RoundRobin(), lambda _: BudgetChunker(2048)).run(requests)
    assert [request.hit_tokens for request in requests] == [0, 15 * 512]


@given(
    steps=st.lists(st.tuples(st.integers(1, 9000), st.integers(0, 5), st.booleans()), min_size=1, max_size=40)
)
def test_memory_conserves_blocks(steps: list[tuple[int, int, bool]]) -> None:
    memory = Memory("w", 20_000, None)
    held: list[tuple[int, tuple[int, ...]]] = []
    for num_tokens, talk, is_end in steps:
        if is_end and held:
            blocks, keys = held.pop(0)
            memory.run(blocks)
            assert memory.is_balanced
            memory.release(blocks, keys)
        else:
            keys = tuple(talk * 100 + n for n in range(num_tokens // 512))
            reserved = memory.reserve(num_tokens - memory.hit_tokens(keys, 512, num_tokens))
            if reserved is not None:
                held.append((reserved, keys))
        assert memory.is_balanced
    assert memory.reserved == sum(blocks for blocks, _ in held)


def test_a_trace_keeps_its_shape_at_any_rate() -> None:
    workload = trace_workload("azure-code", 500)
    slow, fast = workload.make(1.0, 0), workload.make(10.0, 0)
    assert fast[-1].arrived_s == pytest.approx(499 / 10.0)
    assert [r.arrived_s for r in slow] == pytest.approx([10 * r.arrived_s for r in fast])
    assert [r.prompt_tokens for r in slow] == [r.prompt_tokens for r in fast]


def test_the_shifting_mix_shifts() -> None:
    requests = shifting_workload(10.0, 4, ratio=4.0).make(20.0, 0)

    def mean_output(start_s: float) -> float:
        found = [r.output_tokens for r in requests if start_s <= r.arrived_s < start_s + 10.0]
        return sum(found) / len(found)

    assert min(mean_output(10.0), mean_output(30.0)) > 5 * max(mean_output(0.0), mean_output(20.0))
    assert len(requests) == pytest.approx(800, rel=0.15)


def test_goodput_finds_the_edge() -> None:
    class Edge(Point):
        def attains(self, system: System, rate: float) -> bool:
            return rate <= float(system.name)

    point = Edge(fixed([]), setup())
    systems = [System(name, SYSTEMS[0].build) for name in ("3.0", "70.0", "10.0", "71.0", "90.0")]
    assert point.goodput(systems[1], 50.0) == pytest.approx(70.0, rel=0.02)
    assert point.goodput(systems[1], 500.0) == pytest.approx(70.0, rel=0.02)
    champion, record = point.best([systems[:2], systems[2:]], 50.0)
    assert champion is systems[-1]
    assert record == pytest.approx(90.0, rel=0.02)
    assert point.goodput(System("0.0", SYSTEMS[0].build), 50.0) == 0.0
    with pytest.raises(ValueError, match="more requests"):
        point.goodput(System("1e9", SYSTEMS[0].build), 50.0)


def test_a_line_is_left_after_its_peak() -> None:
    tried: list[str] = []

    class Edge(Point):
        def attains(self, system: System, rate: float) -> bool:
            tried.append(system.name)
            return rate <= float(system.name)

    line = [
        System(name, SYSTEMS[0].build)
        for name in ("60", "70", "69", "68", "67", "66", "65", "64", "63", "62")
    ]
    champion, record = Edge(fixed([]), setup()).best([line], 50.0)
    assert (champion, record) == (line[1], pytest.approx(70.0, rel=0.02))
    assert set(tried) == {"60", "70", "69", "68", "67", "66", "65", "64"}


@pytest.mark.parametrize("system", SYSTEMS, ids=lambda system: system.name)
@pytest.mark.parametrize("rate", [40.0, 90.0, 140.0, 400.0])
def test_a_verdict_cut_short_is_the_verdict(system: System, rate: float) -> None:
    workload = trace_workload("azure-conv", 300)
    whole = run_once(system, workload, rate, setup())
    assert is_attained(system, workload, rate, setup()) == (whole.attainment >= TARGET)


@pytest.mark.parametrize("system", SYSTEMS, ids=lambda system: system.name)
def test_misses_are_counted_once(system: System) -> None:
    requests = trace_workload("azure-conv", 300).make(200.0, 0)
    controller, chunker = system.build(setup())
    cluster = Cluster(setup(), controller, chunker)
    cluster.misses_left = 300
    cluster.run(requests)
    assert cluster.misses_left == sum(request.is_good(SLO) for request in requests)


def test_every_static_split_is_among_the_baselines() -> None:
    names = {system.name for line in baselines(16, (512, 2048), (2048, 8192)) for system in line}
    assert {static_split(n, budget).name for n in range(1, 16) for budget in (2048, 8192)} <= names
    assert len(names) == 2 * 15 + 4


def test_splits_of_many_workers_are_looked_at_more_closely_around_the_best() -> None:
    class Peak(Point):
        def attains(self, system: System, rate: float) -> bool:
            return rate <= 100.0 - abs(system.num_readers - 41)

    many = replace(setup(), num_workers=64)
    lines = baselines(64, (512,), (2048, 8192), likely_readers=0.5)
    assert {system.num_readers for system in lines[0]} == set(range(32, 64, 4))
    champion, record = Peak(fixed([]), many, tolerance=0.005).best_rival(lines[:2], 70.0)
    assert champion is not None
    assert champion.num_readers == 41
    assert record == pytest.approx(100.0, rel=0.01)


def test_searches_of_a_cell_begin_where_its_neighbour_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Case] = []

    def noted(case: Case, with_giving_up: bool) -> Row:
        seen.append(case)
        found = {"goodput": 10.0, "best_goodput": 8.0, "giving_up_goodput": 9.0, "best_readers": 12}
        rest = {
            "best_rival": "a",
            "giving_up_rival": "b",
            "ratio": 1.25,
            "giving_up_ratio": 1.1,
            "cpu_s": 1.0,
        }
        return case.head() | found | rest

    monkeypatch.setattr(table, "compare", noted)
    cases = [Case("azure-conv", "h200-8b", size, SLO, 3.0) for size in (16, 64)]
    cells = table.fill(tmp_path / "cells.jsonl", cases, print)
    assert table.page_tables(cells, 45).startswith("2 of 45 cells.")
    assert (seen[0].start, seen[0].rival_starts, seen[0].likely_readers) == (3.0, (0.0, 0.0), 0.0)
    assert (seen[1].start, seen[1].rival_starts, seen[1].likely_readers) == (40.0, (32.0, 36.0), 0.75)


def test_rivals_that_were_measured_before_are_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case("azure-conv", "h200-8b", 2, SLO, 60.0, 500, tolerance=0.2)
    before = case.head() | {
        "goodput": 60.0,
        "ratio": 9.0,
        "best_goodput": 50.0,
        "best_rival": "a",
        "giving_up_ratio": 9.0,
        "giving_up_goodput": 0.0,
        "giving_up_rival": "b",
    }
    monkeypatch.setattr(Case, "rivals", lambda *_: 1 / 0)
    (cell,) = table.fill(tmp_path / "cells.jsonl", [case], print, rivals=[before])
    assert (cell["best_rival"], cell["best_goodput"]) == ("a", 50.0)
    assert cell["goodput"] != 60.0
    assert cell["ratio"] == cell["goodput"] / 50.0
    assert cell["giving_up_ratio"] is None
    assert cell["attainment"] >= TARGET


def test_refusing_early_keeps_promises_to_the_others() -> None:
    workload = trace_workload("azure-conv", 400)
    refusing = run_once(baton(), workload, 400.0, setup())
    keeping = run_once(baton(Features(has_admission=False)), workload, 400.0, setup())
    assert refusing.refused_share > 0.1
    assert keeping.refused_share == 0.0
    assert refusing.tpot_share > 0.99


def test_result_and_exit_code_follow_the_checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("azure-conv", "h200-8b", 2, SLO, 60.0, 500, budgets=(1024,), tolerance=0.2)
    monkeypatch.setattr(simulate, "quick_cases", lambda: [case])
    monkeypatch.setattr(simulate, "measure_speed", lambda: {"speed_vs_real_time": 25.0})
    code = simulate.main(["--quick", "--processes", "1", "--json", str(tmp_path / "r.json")])
    result = read_result(tmp_path / "r.json")
    checks = {check.name: check for check in result.checks}
    assert set(checks) == {
        "goodput_min_ratio", "goodput_bursty_ratio", "goodput_shifting_ratio", "speed_vs_real_time",
    }  # fmt: skip
    assert checks["speed_vs_real_time"].is_ok
    assert not checks["goodput_bursty_ratio"].is_ok  # not measured is not met
    assert code == 1
    assert math.isfinite(result.rows[0]["ratio"])


def test_routing_measures_every_placement() -> None:
    result = routing.run(routing.Load(num_workers=50, num_blocks=6400, num_requests=200, rate=1e6))
    assert {check.name for check in result.checks} == {"place_p99_us", "bytes_per_block"}
    assert result.rows[0]["place_p50_us"] > 0
    assert 0 < result.rows[0]["bytes_per_block"] < 1000
