"""Results to one self-contained HTML file: `python -m benchmarks.report DIR_OR_JSON… --out report.html`.

A folder of a sweep, a comparison or a load run brings its records and so all figures; a single result of any benchmark
(`--json` of the one format) brings its rows and checks. Results of several commands make one report.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from benchmarks import report_page as html
from benchmarks import report_plots as plots
from benchmarks.records import Record, read_jsonl
from benchmarks.report_verdict import Grid, grid_of
from benchmarks.result import Result, Row, read_result

_NO_RECORDS = "No requests beside these results: give the folder of a run instead of its JSON."


@dataclass(frozen=True, slots=True)
class Source:
    """A result and where it lies. `records_in`: the file of a run's requests, where the rows do not name theirs."""

    name: str
    result: Result
    folder: Path
    records_in: Path | None = None


def read_sources(paths: Sequence[Path]) -> list[Source]:
    """Raises ValueError for a folder without results or a file that is none, OSError for what cannot be read."""
    found = []
    for path in paths:
        found += _read_folder(path) if path.is_dir() else [Source(path.name, read_result(path), path.parent)]
    return found


def _read_folder(folder: Path) -> list[Source]:
    whole = folder / "result.json"
    if whole.exists():
        requests = folder / "requests.jsonl"
        return [Source(folder.name, read_result(whole), folder, requests if requests.exists() else None)]
    # Results side by side, or the cells of a sweep that was killed before it could sum up.
    cells = sorted((folder / "cells").glob("*.json"))
    files = cells or sorted(folder.glob("*.json"))
    if not files:
        raise ValueError(f"{folder}: expected result.json or other results but found none")
    return [Source(file.name, read_result(file), folder) for file in files]


def _reader(sources: Sequence[Source]) -> Callable[[Row], Sequence[Record]]:
    """Requests of a row, read once; none where the file is not there."""
    files: dict[int, Path] = {}
    for source in sources:
        for row in source.result.rows:
            if "records" in row:
                files[id(row)] = source.folder / row["records"]
            elif source.records_in is not None:
                files[id(row)] = source.records_in

    @cache
    def read(file: Path) -> tuple[Record, ...]:
        return tuple(read_jsonl(file)) if file.exists() else ()

    return lambda row: read(files[id(row)]) if id(row) in files else ()


def write(out: Path, sources: Sequence[Source], title: str = "Baton benchmarks") -> None:
    """The file appears whole or not at all. Raises ValueError for records that are none, OSError."""
    rows = [row for source in sources for row in source.result.rows]
    grid = grid_of(rows)
    figures = _figures(grid, _reader(sources))
    results = [(source.name, source.result) for source in sources]
    parts = [
        html.heading(title),
        html.verdict(grid),
        html.ratios([row for row in rows if row.get("kind") == "ratio"]),
        *(html.figure_part(*text, figures[text[0]], missing) for text, missing in _FIGURES),
        html.checks(results),
        html.origin(results),
        html.definitions(),
        html.rows_of(results),
    ]
    drawn = {name: figure for name, figure in figures.items() if figure is not None}
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(out.name + ".partial")
    partial.write_text(html.page(title, parts, drawn), encoding="utf-8")
    os.replace(partial, out)


_FIGURES = (
    (("frontier-ttft", "Throughput and time to first token",
      "A point a load, named by it; bars: range over the seeds."), "No load runs."),
    (("frontier-itl", "Throughput and gaps between tokens",
      "A point a load, named by it; bars: range over the seeds."), "No load runs."),
    (("attainment", "Kept promises and goodput",
      "Of all offered requests; stars: the highest measured rate up to which the median stays at the target."),
     "No promise was measured: a run with --slo-ttft-ms or --slo-tpot-ms and open arrivals has one."),
    (("cdf-ttft", "Time to first token, all values", "Of complete requests; seeds pooled."), _NO_RECORDS),
    (("cdf-itl", "Gaps between tokens, all values", "Of complete requests; seeds pooled."), _NO_RECORDS),
    (("timeline", "Where requests spend their time",
      "One seed. Bars named (server) are the server's own account of the request, set around the first token that the "
      "client saw. Where it gave none, the client's view: queue and prefill are one bar, and a handoff lies in the bar "
      "to the second token."),
     _NO_RECORDS),
)  # fmt: skip


def _figures(grid: Grid, read: Callable[[Row], Sequence[Record]]) -> dict[str, plots.Figure | None]:
    return {
        "frontier-ttft": plots.frontier(grid, "p90_ttft_ms", "TTFT p90, ms"),
        "frontier-itl": plots.frontier(grid, "p99_itl_ms", "ITL p99, ms"),
        "attainment": plots.attainment(grid),
        "cdf-ttft": plots.distribution(grid, read, "ttft", "TTFT"),
        "cdf-itl": plots.distribution(grid, read, "itl", "ITL"),
        "timeline": plots.timeline(grid, read),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """0: written; 2: a source is no result."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.report", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("sources", type=Path, nargs="+", metavar="DIR_OR_JSON")
    parser.add_argument("--out", type=Path, default=Path("report.html"))
    parser.add_argument("--title", default="Baton benchmarks")
    args = parser.parse_args(argv)
    try:
        write(args.out, read_sources(args.sources), args.title)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
