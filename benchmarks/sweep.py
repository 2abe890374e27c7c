"""Many runs over a grid: `python -m benchmarks.sweep SWEEP.yaml --out DIR`, against Baton in its modes or one `--url`.

    definition ─► cells ─► for each server: start ─► its cells, one after the other ─► stop
                                            DIR/cells/NAME.jsonl, then NAME.json: this cell is finished
    DIR/definition.json  settings of all cells     DIR/result.json, cells.csv, report.html   written at the end

Killed in the middle, the same command goes on with the cells that have no NAME.json, and those that were void. With
other settings it refuses: cells of one folder are comparable.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks import report
from benchmarks.load import LoadRun
from benchmarks.progress import Board
from benchmarks.records import write_jsonl
from benchmarks.report_verdict import text_verdict
from benchmarks.result import Check, Result, Row, conclude, read_result, write_json
from benchmarks.servers import Arm, GivenHost, Host, OurHost, ServerError
from benchmarks.sweep_plan import Cell, Sweep, cells, differences, read_sweep

_LAUNCHER = "launcher"
_RUNS_ERRORS = (ValueError, ServerError, aiohttp.ClientError, OSError, TimeoutError)


@dataclass(frozen=True, slots=True)
class Folder:
    """Where a sweep lives. A cell is finished when its JSON is there, which appears after its records."""

    path: Path

    def adopt(self, identity: dict[str, Any]) -> None:
        """Raises ValueError if cells of other settings are here."""
        file = self.path / "definition.json"
        if file.exists():
            found = differences(json.loads(file.read_text(encoding="utf-8")), identity)
            if found:
                raise ValueError(
                    f"{self.path} holds a sweep of other settings ({found}); choose another --out"
                )
        write_json(file, identity)

    def find(self, cell: Cell) -> Result | None:
        """A finished cell's result; None if it has to run (again)."""
        file = self._file(cell, "json")
        if not file.exists():
            return None
        result = read_result(file)
        return None if result.rows[0]["is_void"] else result

    def keep(self, cell: Cell, run: LoadRun) -> None:
        records = self._file(cell, "jsonl")
        write_jsonl(records, run.records)
        arm = cell.arm
        row: Row = {
            "arm": cell.series,
            "mode": arm.mode if arm else None,
            "split": arm.split if arm else None,
            **run.row,
            "seed": cell.seed,
            "run_seed": cell.run_seed,
            "records": str(records.relative_to(self.path)),
        }
        Result("sweep", cell.seed, [row], run.checks).write(self._file(cell, "json"))

    def summarize(self, grid: Sequence[Cell]) -> Result:
        """What is finished so far, as one result, a table and a report."""
        files = [self._file(cell, "json") for cell in grid]
        found = [read_result(file) for file in files if file.exists()]
        rows = [row for result in found for row in result.rows]
        hardware = {json.dumps({**result.machine, "os": ""}, sort_keys=True) for result in found}
        checks = [
            Check("missing_runs", len(grid) - len(found), "==", 0),
            Check("void_runs", sum(bool(row["is_void"]) for row in rows), "==", 0),
            Check("machines", len(hardware), "<=", 1),
        ]
        result = Result("sweep", sorted({cell.seed for cell in grid}), rows, checks)
        result.write(self.path / "result.json")
        write_csv(self.path / "cells.csv", rows)
        return result

    def report(self) -> Path:
        file = self.path / "report.html"
        report.write(file, report.read_sources([self.path]))
        return file

    def _file(self, cell: Cell, ending: str) -> Path:
        return self.path / "cells" / f"{cell.name}.{ending}"


def run_sweep(sweep: Sweep, grid: Sequence[Cell], folder: Folder, host: Host, board: Board) -> bool:
    """Runs what is not finished. False if Ctrl-C ended it; then the cell that ran is not finished.

    Raises ServerError, aiohttp.ClientError, OSError, TimeoutError, ValueError when a server cannot be measured.
    """
    pending = [cell for cell in grid if folder.find(cell) is None]
    board.advance(len(grid) - len(pending))
    if len(pending) < len(grid):
        board.say(f"{len(grid) - len(pending)} of {len(grid)} runs are finished already")
    try:
        for arm, group in itertools.groupby(pending, key=_arm):
            with host.open(arm) as url:
                for cell in group:
                    run = board.measure(cell.spec(sweep, url), cell.title)
                    if not run.is_whole:
                        return False
                    folder.keep(cell, run)
                    board.say(f"{cell.title}: {_in_short(run.row)}")
                    board.advance()
    except KeyboardInterrupt:
        return False
    finally:
        folder.summarize(grid)
    return True


def _arm(cell: Cell) -> Arm | None:
    return cell.arm


def _in_short(row: Row) -> str:
    def shown(key: str) -> str:
        return "–" if row.get(key) is None else f"{row[key]:.0f}"

    text = f"TTFT p50 {shown('p50_ttft_ms')} ms, ITL p99 {shown('p99_itl_ms')} ms, "
    text += f"{shown('output_throughput')} tokens/s"
    if row.get("failed"):
        text += f", {row['failed']} of {row['offered']} failed"
    return text + (", VOID: the client was late" if row["is_void"] else "")


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """All keys of all rows. The file appears whole or not at all."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)
    os.replace(partial, path)


def _listed(parse: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    def split(text: str) -> tuple[Any, ...]:
        return tuple(parse(part.strip()) for part in text.split(","))

    return split


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sweep", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("definition", type=Path, nargs="?", help="YAML file; flags win over it")
    parser.add_argument("--out", type=Path, required=True, help="folder; an unfinished sweep in it goes on")
    parser.add_argument("--url", help="measure this server instead of starting Baton")
    parser.add_argument("--name", default="server", help="of the server at --url, in the report")
    parser.add_argument("--json", type=Path, help="file for the result, besides the folder's")
    axes = parser.add_argument_group("axes, each a list with commas")
    axes.add_argument("--modes", type=_listed(str), help="disaggregated,colocated")
    axes.add_argument("--splits", type=_listed(str), help="P:D workers, e.g. 1:1,1:2")
    axes.add_argument(
        "--lengths", type=_listed(str), help="prompt/answer tokens, e.g. 256/64,64:1024/32, or trace:NAME"
    )
    axes.add_argument(
        "--loads", type=_listed(float), help="requests/s; streams of closed arrivals; × a trace's rate"
    )
    axes.add_argument("--seeds", type=_listed(int), help="at least three, e.g. 0,1,2")
    axes.add_argument(
        "--interleave", action=argparse.BooleanOptionalAction, help="seed by seed through servers"
    )
    settings = parser.add_argument_group("settings, the same for all runs of a folder")
    settings.add_argument("--arrival", help="poisson, gamma, constant, trace, closed")
    for name, kind in (("burstiness", float), ("length-scale", float), ("max-tokens", int),
                       ("jitter-s", float), ("prefix-tokens", int), ("num-prefixes", int), ("turns", int),
                       ("think-time-s", float), ("num-requests", int), ("duration-s", float), ("num-warmups", int),
                       ("ramp-s", float), ("drain-s", float), ("slo-ttft-ms", float), ("slo-tpot-ms", float),
                       ("timeout-s", float), ("model", str), ("config", str), ("tokenizer", str)):  # fmt: skip
        settings.add_argument(f"--{name}", type=kind)
    return parser


def definition_from(args: argparse.Namespace) -> Sweep:
    """Raises ValueError, OSError."""
    flags = {name: value for name in Sweep.model_fields if (value := getattr(args, name, None)) is not None}
    if args.url is not None and (flags.keys() & {"modes", "splits", "config"}):
        raise ValueError("--url: expected no modes, splits or config beside a server that runs already")
    return read_sweep(args.definition, flags)


def main(argv: Sequence[str] | None = None) -> int:
    """0: all runs are there and valid; 1: a check failed; 2: could not run; 130: stopped."""
    args = _parser().parse_args(argv)
    folder = Folder(args.out)
    try:
        sweep = definition_from(args)
        grid = cells(sweep, args.name if args.url else None)
        folder.adopt(sweep.identity(args.name if args.url else _LAUNCHER))
        with Board("runs", len(grid)) as board:
            host: Host = GivenHost(args.url) if args.url else OurHost(sweep.launch, board.quote)
            is_whole = run_sweep(sweep, grid, folder, host, board)
        result = folder.summarize(grid)
        file = folder.report()
    except _RUNS_ERRORS as error:
        print(f"error: {error or type(error).__name__}", file=sys.stderr)
        return 2
    print(text_verdict(result.rows))
    print("\n" + "\n".join(map(str, result.checks)))
    print(f"\n{folder.path / 'result.json'}, cells.csv\nreport: {file}")
    note = "Stopped before the end: the same command goes on with the runs that are missing."
    return conclude(result, args.json, is_whole, note)


if __name__ == "__main__":
    sys.exit(main())
