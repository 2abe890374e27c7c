"""The report: figures that Plotly accepts, phases without gaps, nothing unescaped, results of other benchmarks."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pytest

from benchmarks import report
from benchmarks import report_plots as plots
from benchmarks.records import Record, write_jsonl
from benchmarks.report_page import page
from benchmarks.report_verdict import grid_of
from benchmarks.result import Check, Result
from tests.benchmarks.builders import make_record
from tests.benchmarks.test_report_verdict import make_row

NAMES = ("frontier-ttft", "frontier-itl", "attainment", "cdf-ttft", "cdf-itl", "timeline")


def make_records(seed: int) -> list[Record]:
    records = [
        make_record(at, [at + 0.1 + 0.01 * seed, at + 0.15, at + 0.2], sent_s=at + 0.001)
        for at in (0.0, 0.5, 1.0)
    ]
    failed = make_record(1.5, outcome="error", status=503, end_s=1.6)
    return [*records, failed]


def make_folder(folder: Path, arms: tuple[str, ...] = ("a", "b")) -> Path:
    """A sweep's folder: two loads, three seeds."""
    rows = []
    for number, arm in enumerate(arms):
        for load in (1.0, 2.0):
            for seed in range(3):
                name = f"cells/{number}-{load:g}-{seed}.jsonl"
                write_jsonl(folder / name, make_records(seed + 5 * number))
                latency = 100.0 * load * (number + 1) + seed
                values: dict[str, Any] = {
                    "p50_ttft_ms": latency, "p90_ttft_ms": latency, "p99_itl_ms": latency / 10,
                    "output_throughput": 50 * load + seed, "attainment": 1.0 - 0.2 * number,
                    "attainment_ttft": 1.0, "attainment_tpot": 1.0,
                }  # fmt: skip
                rows.append(make_row(arm, load, seed=seed, records=name, **values))
    Result("sweep", [0, 1, 2], rows, [Check("void_runs", 0, "==", 0)]).write(folder / "result.json")
    return folder


def test_every_figure_is_one_that_plotly_knows(tmp_path: Path) -> None:
    sources = report.read_sources([make_folder(tmp_path)])
    grid = grid_of(sources[0].result.rows)
    figures = report._figures(grid, report._reader(sources))
    assert tuple(figures) == NAMES
    for name, figure in figures.items():
        assert figure is not None, name
        go.Figure(figure)  # validates each property
        shown = [trace for trace in figure["data"] if trace["visible"]]
        assert shown, name
        for menu in figure["layout"].get("updatemenus", ()):
            for button in menu["buttons"]:
                assert len(button["args"][0]["visible"]) == len(figure["data"])


def test_goodput_marks_stand_where_the_promise_still_holds(tmp_path: Path) -> None:
    sources = report.read_sources([make_folder(tmp_path)])
    figure = plots.attainment(grid_of(sources[0].result.rows))
    assert figure is not None
    marks = {
        trace["name"]: (trace["x"], trace["y"]) for trace in figure["data"] if "goodput" in trace["name"]
    }
    assert marks == {"a, goodput": ([2.0, 2.0], [0.9, 0.99])}  # b attains 0.8: no mark


def test_the_distribution_pools_seeds_and_counts_complete_requests() -> None:
    rows = [make_row("a", seed=seed) for seed in range(2)]
    records = {0: make_records(0), 1: make_records(0)}
    figure = plots.distribution(grid_of(rows), lambda row: records[row["seed"]], "ttft", "TTFT")
    assert figure is not None
    [line] = figure["data"]
    assert line["name"] == "a (6 values)"
    assert (line["y"][0], line["y"][-1]) == (0.0, 1.0)
    assert line["x"] == pytest.approx([100.0] * 6)


@pytest.mark.parametrize(
    ("record", "names"),
    [
        (make_record(1.0, [1.2, 1.3, 1.5], sent_s=1.1), ["sending", "to first", "to second", "all other"]),
        (make_record(1.0, [1.2], sent_s=1.1, end_s=1.3), ["sending", "to first", "to second", "all other"]),
        (make_record(1.0, [1.2, 1.4], tokens=[2, 1]), ["sending", "to first", "to second", "all other"]),
        (make_record(1.0, [1.2, 1.3], outcome="error", end_s=1.4), ["sending", "to first", "to second", "failed"]),
        (make_record(1.0, outcome="timeout", end_s=3.0), ["sending", "failed"]),
        (make_record(1.0, outcome="cancelled", sent_s=None, end_s=None), ["failed"]),
    ],
)  # fmt: skip
def test_phases_follow_each_other_without_a_gap(record: Record, names: list[str]) -> None:
    phases = plots.phases_of(record)
    assert [phase[: len(name)] for (phase, _, _), name in zip(phases, names, strict=True)] == names
    assert phases[0][1] == record.scheduled_s
    assert all(before[2] == after[1] for before, after in pairwise(phases))
    assert phases[-1][2] == (record.end_s if record.end_s is not None else record.scheduled_s)


@pytest.mark.parametrize(
    ("stages", "borders"),
    [
        (
            {"queue": 0.25, "prefill": 0.5, "handoff": 0.125, "decode": 1.0},
            [1.0, 1.25, 1.5, 1.75, 2.25, 2.375, 4.0],
        ),
        (
            {"queue": 0.25, "prefill": 0.5, "decode": 1.0},
            [1.0, 1.25, 1.5, 1.75, 2.25, 2.25, 4.0],
        ),  # handoff unknown
        (
            {"queue": 9.0, "prefill": 0.5, "handoff": 9.0},
            [1.0, 1.25, 1.25, 1.75, 2.25, 4.0, 4.0],
        ),  # clocks disagree
        ({"queue": 9.0, "prefill": 9.0}, [1.0, 1.25, 1.25, 1.25, 2.25, 2.25, 4.0]),
    ],
)
def test_a_servers_stages_stand_around_the_first_token(
    stages: dict[str, float], borders: list[float]
) -> None:
    phases = plots.phases_of(make_record(1.0, [2.25, 3.0], sent_s=1.25, end_s=4.0, stages=stages))
    assert [name for name, _, _ in phases] == ["sending late", *plots.STAGE_PHASES]
    assert [begin for _, begin, _ in phases] + [phases[-1][2]] == borders
    assert all(before[2] == after[1] for before, after in pairwise(phases))


@pytest.mark.parametrize(
    "record",
    [
        make_record(1.0, [2.0, 3.0], stages={"decode": 1.0}),
        make_record(1.0, [2.0, 3.0], outcome="error", stages={"queue": 0.1, "prefill": 0.1}),
        make_record(1.0, outcome="ok", end_s=2.0, stages={"queue": 0.1, "prefill": 0.1}),
    ],
)
def test_without_a_servers_whole_account_the_clients_phases_are_drawn(record: Record) -> None:
    assert not {name for name, _, _ in plots.phases_of(record)} & plots.STAGE_PHASES.keys()


def test_the_timeline_says_whose_account_it_draws() -> None:
    told = make_record(
        0.0, [0.5, 1.0], sent_s=0.01, stages={"queue": 0.1, "prefill": 0.3, "handoff": 0.1, "decode": 0.5}
    )
    figure = plots.timeline(grid_of([make_row("a")]), lambda _row: [told, make_record(1.0, [1.5, 2.0, 2.5])])
    assert figure is not None
    go.Figure(figure)
    assert {(trace["name"], tuple(trace["y"])) for trace in figure["data"]} == {
        ("sending late", (0,)), ("on the way and read (client)", (0,)), ("queue (server)", (0,)),
        ("prefill (server)", (0,)), ("transfer (server)", (0,)), ("decode (server)", (0,)),
        ("to first token: queue and prefill", (1,)), ("to second token: handoff and first decode step", (1,)),
        ("all other tokens: decode", (1,)),
    }  # fmt: skip


def test_a_chunk_of_two_tokens_leaves_no_bar_for_the_second() -> None:
    phases = plots.phases_of(make_record(1.0, [1.2, 1.4], tokens=[2, 1]))
    assert phases[2][1] == phases[2][2] == 1.2


def test_results_of_other_benchmarks_are_checks_and_rows(tmp_path: Path) -> None:
    Result("kv", 0, [{"bytes": 1 << 20, "gb_per_s": 2.5}], [Check("kv_gb_per_s", 2.5, ">=", 3.0)]).write(
        tmp_path / "kv.json"
    )
    assert report.main([str(tmp_path / "kv.json"), "--out", str(tmp_path / "r.html")]) == 0
    html = (tmp_path / "r.html").read_text()
    assert "<td>kv_gb_per_s</td><td>2.5</td><td>&gt;= 3</td><td class=fail>FAIL</td>" in html
    assert "No valid load run in these results." in html
    assert "No promise was measured" in html


def test_a_sweep_that_was_killed_is_read_by_its_cells(tmp_path: Path) -> None:
    for seed in range(2):
        Result("sweep", seed, [make_row("a", seed=seed)]).write(tmp_path / "cells" / f"{seed}.json")
    sources = report.read_sources([tmp_path])
    assert [source.result.seed for source in sources] == [0, 1]


def test_the_folder_of_a_load_run_brings_its_requests(tmp_path: Path) -> None:
    Result("load", 0, [make_row("a")]).write(tmp_path / "result.json")
    write_jsonl(tmp_path / "requests.jsonl", make_records(0))
    sources = report.read_sources([tmp_path])
    assert len(report._reader(sources)(sources[0].result.rows[0])) == 4


def test_names_from_results_cannot_become_markup(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script>"
    make_folder(tmp_path, (evil, "b"))
    report.write(tmp_path / "r.html", report.read_sources([tmp_path]), title=evil)
    html = (tmp_path / "r.html").read_text()
    assert "<script>alert" not in html
    assert "{{" not in html.split("<script>")[0]


def test_what_is_filled_in_is_not_filled_in_again() -> None:
    html = page("{{library}}", ["{{figures}}"], {})
    assert "<title>{{library}}</title>" in html


@pytest.mark.parametrize("content", [None, "{}", "no json"])
def test_a_source_that_is_no_result_is_named(
    content: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.json"
    if content is not None:
        path.write_text(content)
    assert report.main([str(path), "--out", str(tmp_path / "r.html")]) == 2
    assert "x.json" in capsys.readouterr().err
    assert report.main([str(tmp_path / "cells"), "--out", str(tmp_path / "r.html")]) == 2


def test_figures_survive_json(tmp_path: Path) -> None:
    sources = report.read_sources([make_folder(tmp_path)])
    figures = report._figures(grid_of(sources[0].result.rows), report._reader(sources))
    assert json.loads(json.dumps(figures, allow_nan=False)) == figures
