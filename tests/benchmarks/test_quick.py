"""The five-minute tour in some seconds: the same steps, against launchers that cost nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import quick
from benchmarks.interference import Probe
from benchmarks.progress import Board
from benchmarks.quick import PROBE, SHARES, SWEEP, Tour, fitted
from benchmarks.result import read_result
from benchmarks.servers import Launch, OurHost
from benchmarks.sweep_plan import MIN_SEEDS, cells
from tests.benchmarks.test_servers import LAUNCHER
from tests.benchmarks.test_sweep import make_sweep

SHORT = Probe(duration_s=1.0, warmup_s=0.2, period_s=0.4, long_input_tokens=60, steady_output_tokens=20)


def test_the_tour_measures_each_mode_and_tells_the_verdict(tmp_path: Path) -> None:
    lines: list[str] = []
    with Board("runs") as board:
        host = OurHost(Launch(command=LAUNCHER), lines.append)
        tour = Tour(tmp_path, host, board, make_sweep(interleave=False, num_requests=2), SHORT)
        tour.run()
    text = tour.story()
    assert tour.is_whole
    starts = [line.split(" on ")[0] for line in lines if line.startswith("starting")]
    assert starts == ["starting disaggregated 1:1", "starting colocated 0:2"]
    kinds = [read_result(file).benchmark for file in sorted(tmp_path.glob("*.json"))]
    assert kinds == ["interference", "interference", "load"]
    rows = read_result(tmp_path / "sweep" / "result.json").rows
    assert [row["arm"] for row in rows] == ["disaggregated 1:1"] * 6 + ["colocated 0:2"] * 6
    rate = read_result(tmp_path / "load-disaggregated.json").rows[0]["request_throughput"]
    assert [row["rate"] for row in rows] == [float(f"{share * rate:.2g}") for share in SHARES] * 6
    assert text.index("INTERFERENCE") < text.index("VERDICT") < text.index("CHECKS")
    assert text.endswith(f"report: {tmp_path / 'report.html'}")
    html = (tmp_path / "report.html").read_text()
    assert "itl_max_ms" in html
    assert html.count("20/4 tokens, constant (requests/s): ") == 1


def test_rates_are_shares_of_what_the_machine_can_do() -> None:
    assert fitted(SWEEP, 12.34).loads == (4.9, 9.9)
    assert fitted(SWEEP, 0.6).loads == (0.4, 0.48)  # four requests in ten seconds at least
    assert fitted(SWEEP, 0.1).loads == (0.4,)
    with pytest.raises(ValueError, match="within 15 s but this machine gave none"):
        fitted(SWEEP, 0.0)


def test_what_is_offered_fits_into_five_minutes() -> None:
    """Offered time only; starts and answers come on top."""
    grid = cells(fitted(SWEEP, 10.0))
    assert len(SWEEP.seeds) >= MIN_SEEDS
    assert len(grid) * SWEEP.duration_s + len(SWEEP.modes) * PROBE.end_s <= 160


def test_a_start_that_fails_is_told_with_the_launchers_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "b.yaml"
    config.write_text("engine: {block_size: 0}\n")
    assert quick.main(["--out", str(tmp_path / "out"), "--config", str(config)]) == 2
    assert "engine.block_size: expected ≥ 1 but got 0" in capsys.readouterr().err
    monkeypatch.setattr(
        quick, "OurHost", lambda launch, say: OurHost(Launch(command=(*LAUNCHER, "--fail")), say)
    )
    assert quick.main(["--out", str(tmp_path / "out")]) == 2
    assert "start failed: as asked" in capsys.readouterr().err
