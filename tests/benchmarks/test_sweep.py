"""Sweeps: what makes a cell, and that a killed sweep goes on where it was."""

from __future__ import annotations

import csv
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import sweep as sweep_command
from benchmarks.progress import Board
from benchmarks.report_verdict import Place
from benchmarks.result import read_result
from benchmarks.servers import Launch, OurHost
from benchmarks.spec import TraceSpec
from benchmarks.sweep import Folder, run_sweep
from benchmarks.sweep_plan import Sweep, cells, differences, read_sweep
from tests.benchmarks.builders import fake_server, stamps, wait_until
from tests.benchmarks.fake_launcher import TTFT_S
from tests.benchmarks.test_servers import LAUNCHER


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with fake_server(ttft_s=0.01, gap_s=0.002) as found:
        yield found


def make_sweep(**changes: Any) -> Sweep:
    fields: dict[str, Any] = {
        "loads": [100.0],
        "lengths": ["20/4"],
        "arrival": "constant",
        "num_requests": 4,
        "num_warmups": 0,
    }
    return read_sweep(None, {**fields, **changes})


def flags(url: str, out: Path, **changes: str) -> list[str]:
    options = {
        "url": url,
        "name": "fake",
        "out": str(out),
        "loads": "100",
        "lengths": "20/4",
        "arrival": "constant",
        "num-requests": "4",
        "num-warmups": "0",
        **{name.replace("_", "-"): value for name, value in changes.items()},
    }
    return [text for name, value in options.items() for text in (f"--{name}", value)]


def test_cells_have_names_of_their_own_that_are_file_names() -> None:
    sweep = make_sweep(
        splits=["1:1", "1:2", "2:1"],
        lengths=["64/8", "64:128/8", "64/8:16", "128/8"],
        loads=[0.5, 1, 2, 12],
        seeds=[0, 1, 2, 12],
    )
    grid = cells(sweep)
    names = [cell.name for cell in grid]
    # Splits of one total are one colocated arm: 0:2, 0:3.
    assert len(set(names)) == len(names) == (3 + 2) * 4 * 4 * 4
    assert not [name for name in names if set(name) & set("/: ")]
    assert names[0] == "disaggregated-1-1_64-8_constant-0.5_seed0"


def test_servers_get_the_same_prompts_at_a_seed_and_others_at_another_load() -> None:
    grid = cells(make_sweep(loads=[50, 100]))
    by_place: dict[tuple[float, int], set[int]] = {}
    for cell in grid:
        by_place.setdefault((cell.load, cell.seed), set()).add(cell.run_seed)
    assert all(len(seeds) == 1 for seeds in by_place.values())
    assert len(set.union(*by_place.values())) == len(by_place) == 6


def test_servers_take_turns_seed_by_seed_unless_told_otherwise() -> None:
    def order(**changes: Any) -> list[tuple[str, int]]:
        return [
            (cell.series.split()[0][0], cell.seed) for cell in cells(make_sweep(seeds=[0, 1, 2], **changes))
        ]

    assert order() == [("d", 0), ("c", 0), ("d", 1), ("c", 1), ("d", 2), ("c", 2)]
    assert order(interleave=False) == [("d", 0), ("d", 1), ("d", 2), ("c", 0), ("c", 1), ("c", 2)]


def test_a_cell_is_the_load_run_that_the_definition_says() -> None:
    sweep = make_sweep(loads=[100.0], duration_s=0.5, slo_ttft_ms=200, lengths=["20:30/4"])
    spec = cells(sweep)[0].spec(sweep, "http://x")
    assert (spec.rate, spec.num_requests, str(spec.input_tokens)) == (100.0, 50, "20:30")
    assert spec.slo is not None
    assert (spec.slo.ttft_s, spec.slo.tpot_s) == (0.2, None)
    sweep = make_sweep(arrival="closed", loads=[3])
    spec = cells(sweep, "given")[0].spec(sweep, "http://x")
    assert (spec.arrival, spec.concurrency, spec.num_requests) == ("closed", 3, 4)


def test_a_trace_is_work_at_any_arrival_and_at_its_own_times() -> None:
    lengths = ["trace:azure_conv", "20/4"]
    sweep = make_sweep(lengths=lengths, loads=[3], length_scale=0.5, max_tokens=900)
    drawn, plain = (cell.spec(sweep, "http://x") for cell in cells(sweep, "given")[:2])
    assert drawn.trace == TraceSpec("azure_conv", 1.0, 0.5, 900)
    assert (drawn.rate, plain.rate, plain.trace, str(plain.input_tokens)) == (3.0, 3.0, None, "20")
    sweep = make_sweep(lengths=lengths[:1], arrival="trace", loads=[0.5, 2])
    grid = cells(sweep, "given")
    specs = [cell.spec(sweep, "http://x") for cell in grid[:2]]
    assert [spec.trace and spec.trace.time_scale for spec in specs] == [0.5, 2.0]
    assert grid[0].title == "given, azure_conv, 0.5 × the trace's rate, seed 0"
    assert grid[0].name == "given_trace-azure_conv_trace-0.5_seed0"


def test_shared_prefixes_and_conversations_reach_the_server(url: str, tmp_path: Path) -> None:
    arguments = flags(url, tmp_path, prefix_tokens="8", num_prefixes="2", turns="2", name="talk")
    assert sweep_command.main(arguments) == 0
    rows = read_result(tmp_path / "result.json").rows
    assert [(row["prefix_tokens"], row["num_turns"], row["offered"]) for row in rows] == [(8, 2, 8)] * 3
    place = Place.of(rows[0])
    assert str(place) == "20/4 tokens behind 8 shared, 2 turns, constant, 100 requests/s"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seeds": [0, 1]}, "seeds: .*at least 3"),
        ({"seeds": [0, 0, 1]}, "seeds: expected different values"),
        ({"lengths": ["20"]}, "lengths: expected PROMPT/ANSWER"),
        ({"loads": []}, "loads: "),
        ({"loads": [-1]}, "loads.0: "),
        ({"arrival": "closed", "loads": [1.5]}, "expected whole numbers of streams"),
        ({"arrival": "closed", "loads": [5]}, "up to num_requests=4 but got 5"),
        ({"arrival": "closed", "loads": [2], "duration_s": 3}, "duration_s: expected arrivals at a rate"),
        ({"lengths": ["trace:nobody"]}, "lengths: trace: expected a file or one of azure_code"),
        ({"arrival": "trace"}, "lengths: expected trace:NAME beside arrival=trace but got 20/4"),
        ({"lengths": ["trace:azure_code"], "prefix_tokens": 64}, "prefix_tokens: expected no trace"),
        ({"turns": 2, "endpoint": "completions"}, "turns: expected endpoint=chat"),
        ({"colour": "red"}, "colour: unknown key; known: modes"),
    ],
)
def test_a_definition_that_makes_no_sense_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_sweep(**changes)


def test_a_mode_that_cannot_be_served_is_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sweep_command.main(["--modes", "nowhere", "--out", str(tmp_path / "x")]) == 2
    assert "mode: expected one of disaggregated, colocated, local-only" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_the_file_and_the_flags_make_one_definition(tmp_path: Path) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_text("loads: [1, 2]\nlengths: [64/8]\nsettings: {engine.block_size: 32}\n")
    sweep = read_sweep(file, {"loads": (3.0,)})
    assert (sweep.loads, sweep.lengths) == ((3.0,), ("64/8",))
    assert sweep.identity("launcher")["configuration"] == {"engine": {"block_size": 32}}


def test_differences_are_named() -> None:
    assert differences({"a": 1, "b": 2}, {"a": 1, "b": 3, "c": 4}) == (
        "b: 2 before, 3 now; c: None before, 4 now"
    )


def test_a_killed_sweep_goes_on_with_the_runs_that_are_missing(url: str, tmp_path: Path) -> None:
    arguments = flags(url, tmp_path, loads="100,150,200", name="killed")
    with subprocess.Popen([sys.executable, "-m", "benchmarks.sweep", *arguments]) as process:
        wait_until(lambda: len(list((tmp_path / "cells").glob("*.json"))) >= 2)
        process.kill()
    done = {file: file.read_bytes() for file in (tmp_path / "cells").glob("*.json")}
    assert 2 <= len(done) < 9
    before = set(stamps(url))
    assert sweep_command.main(arguments) == 0
    assert {file: file.read_bytes() for file in done} == done
    result = read_result(tmp_path / "result.json")
    assert len(result.rows) == len(list((tmp_path / "cells").glob("*.json"))) == 9
    assert result.is_ok
    finished = {json.loads(content)["rows"][0]["run_seed"] for content in done.values()}
    again = {int(name.rpartition("-")[2]) for name in set(stamps(url)) - before}
    assert not finished & again
    with (tmp_path / "cells.csv").open(newline="") as file:
        assert [row["arm"] for row in csv.DictReader(file)] == ["killed"] * 9


def test_other_settings_are_refused_by_name_and_other_axes_are_not(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sweep_command.main(flags(url, tmp_path)) == 0
    assert sweep_command.main(flags(url, tmp_path, num_requests="5")) == 2
    assert "num_requests: 4 before, 5 now" in capsys.readouterr().err
    assert sweep_command.main(flags(url, tmp_path, name="other")) == 2
    assert "target: 'fake' before, 'other' now" in capsys.readouterr().err
    assert sweep_command.main(flags(url, tmp_path, seeds="0,1,2,3")) == 0
    assert [row["seed"] for row in read_result(tmp_path / "result.json").rows] == [0, 1, 2, 3]


def test_a_void_run_is_run_again(url: str, tmp_path: Path) -> None:
    assert sweep_command.main(flags(url, tmp_path, seeds="7,8,9")) == 0
    file = tmp_path / "cells" / "fake_20-4_constant-100_seed8.json"
    content = json.loads(file.read_text())
    content["rows"][0]["is_void"] = True
    file.write_text(json.dumps(content))
    assert sweep_command.main(flags(url, tmp_path, seeds="7,8,9")) == 0
    assert not read_result(file).rows[0]["is_void"]


def test_ctrl_c_ends_a_sweep_with_what_is_finished(url: str, tmp_path: Path) -> None:
    arguments = flags(url, tmp_path, num_requests="300", loads="10", name="long")
    command = [sys.executable, "-m", "benchmarks.sweep", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        known = len(stamps(url))
        wait_until(lambda: len(stamps(url)) > known)
        process.send_signal(signal.SIGINT)
        printed, _ = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "the same command goes on" in printed
    assert read_result(tmp_path / "result.json").rows == []
    assert (tmp_path / "report.html").exists()


def test_modes_are_started_measured_and_stopped_in_turn(tmp_path: Path) -> None:
    sweep = make_sweep(interleave=False)
    lines: list[str] = []
    grid = cells(sweep)
    folder = Folder(tmp_path)
    with Board("runs") as board:
        host = OurHost(Launch(command=LAUNCHER), lines.append)
        assert run_sweep(sweep, grid, folder, host, board)
    starts = [line.split(" on ")[0] for line in lines if line.startswith("starting")]
    assert starts == ["starting disaggregated 1:1", "starting colocated 0:2"]
    rows = read_result(tmp_path / "result.json").rows
    assert [(row["mode"], row["split"]) for row in rows] == [("disaggregated", "1:1")] * 3 + [
        ("colocated", "0:2")
    ] * 3
    for row in rows:
        assert row["p50_ttft_ms"] >= 1000 * TTFT_S[row["mode"]]


def test_a_server_that_is_not_there_is_said_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sweep_command.main(flags("http://127.0.0.1:9", tmp_path)) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: ")
