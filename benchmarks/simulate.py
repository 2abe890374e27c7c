"""Goodput of Baton against colocated and statically split systems, simulated: `python -m benchmarks.simulate`.

    --quick        four traces and the shifting mix, 8 workers, one promise each; at most 5 minutes on two cores
    --table DIR    four traces and the shifting mix × three promises × --sizes × --seeds, every static split; hours, but
                   it goes on where it was stopped (DIR/cells.jsonl)
    --ablations    Baton without one idea at a time, at the quick points
    --speed        only how much faster than real time 1,000 workers run

--page FILE redraws the tables of --table or --ablations in docs/goodput.md. Exit code 0: all checks hold; 1: one fails;
2: it could not run; 130: stopped by Ctrl-C.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from benchmarks.metrics import Slo
from benchmarks.result import Check, Result, Row, conclude, text_table
from benchmarks.sim.baton import Features
from benchmarks.sim.cases import Case, quick_cases, table_cases
from benchmarks.sim.cluster import Setup
from benchmarks.sim.devices import DEVICES
from benchmarks.sim.experiments import baton, simulate
from benchmarks.sim.table import checks_of, compare, fill, page_tables, read_cells, redraw, rows_of
from benchmarks.sim.workloads import trace_workload

MIN_SPEED = 20.0
SPEED_RATE = 50.0

ABLATIONS = {
    "all of it": Features(),
    "fixed chunks of 512": Features(has_deadline_chunks=False),
    "no deflection": Features(can_deflect=False),
    "early binding": Features(is_late_binding=False),
    "models 30% wrong, not learning": Features(is_learning=False, model_error=-0.3),
    "no flips": Features(has_flips=False),
    "no affinity": Features(has_affinity=False),
    "affinity that never fades": Features(has_fading=False),
    "no admission": Features(has_admission=False),
}


def ablate(case: Case) -> Row:
    """Goodput without one idea at a time, as a share of that with all."""
    point = case.point()
    whole = point.goodput(baton(), case.start)
    row = case.head() | {"goodput": whole}
    for name, features in list(ABLATIONS.items())[1:]:
        row[name] = point.goodput(baton(features, name), whole) / whole if whole else None
    return row


def measure_speed(num_workers: int = 1000, num_requests: int = 4000) -> Row:
    """`num_workers` under the Azure conversation excerpt at SPEED_RATE, nine times the recorded one."""
    setup = Setup(DEVICES["h200-70b-tp4"], num_workers, Slo(1.0, 0.04))
    run = simulate(baton(), trace_workload("azure-conv", num_requests), SPEED_RATE, setup)
    return {
        "workload": "speed: azure-conv",
        "device": setup.device.name,
        "workers": num_workers,
        "requests_per_s": SPEED_RATE,
        "simulated_s": run.span_s,
        "events_per_s": run.num_events / run.cpu_s,
        "attainment": run.attainment,
        "speed_vs_real_time": run.speed,
    }


def _speed_check(row: Row) -> Check:
    return Check("speed_vs_real_time", row["speed_vs_real_time"], ">=", MIN_SPEED)


def _in_parallel(task: Callable[[Case], Row], cases: Sequence[Case], num_processes: int) -> list[Row]:
    """Rows in the order of the cases; each case computes alone, so the number of processes changes nothing."""
    if num_processes < 2:
        return [task(case) for case in cases]
    with ProcessPoolExecutor(num_processes, mp_context=get_context("spawn")) as pool:
        return list(pool.map(task, cases))


def _print(rows: Sequence[Row], columns: Sequence[str]) -> None:
    print(text_table([[row.get(column) for column in columns] for row in rows], columns))


_COLUMNS = (
    "workload", "device", "workers", "slo_ttft_ms", "slo_tpot_ms", "goodput", "best_goodput", "ratio", "best_rival",
    "attainment", "refused", "local_share",
)  # fmt: skip
_TABLE_COLUMNS = (
    "workload", "device", "workers", "slo_ttft_ms", "slo_tpot_ms", "seeds", "goodput", "best_rival", "ratio_min",
    "ratio", "ratio_max", "giving_up_ratio",
)  # fmt: skip


def _table(args: argparse.Namespace) -> Result:
    file = args.table / "cells.jsonl"
    cases = list(table_cases([_size(text) for text in args.sizes], args.seeds, args.traces))

    def draw(text: str) -> None:
        print(text, flush=True)
        if args.page is not None:
            tables = page_tables(read_cells(file), len(cases))
            redraw(args.page, "goodput", "python -m benchmarks.simulate --table", tables)

    rivals = read_cells(args.rivals / "cells.jsonl") if args.rivals is not None else []
    cells = fill(file, cases, draw, args.limit, rivals)
    draw(f"{len(cells)} cells in {file}")
    rows = rows_of(cells)
    _print(rows, _TABLE_COLUMNS)
    return Result("simulate-table", sorted({cell["seed"] for cell in cells}), rows, checks_of(cells))


def _size(text: str) -> tuple[str, int]:
    """ "h200-8b:16". Raises ValueError."""
    device, _, number = text.partition(":")
    if device not in DEVICES or not number.isdigit() or int(number) < 2:
        raise ValueError(
            f"--sizes: expected DEVICE:WORKERS with one of {', '.join(DEVICES)} and 2 or more but got {text!r}"
        )
    return device, int(number)


def _ablations(args: argparse.Namespace) -> Result:
    rows = _in_parallel(ablate, quick_cases(), args.processes)
    columns = ("workload", "goodput", *list(ABLATIONS)[1:])
    _print(rows, columns)
    if args.page is not None:
        text = _markdown([[_shown(row[column]) for column in columns] for row in rows], columns)
        redraw(args.page, "ablations", "python -m benchmarks.simulate --ablations", text)
    return Result("simulate-ablations", 0, rows)


def _quick(args: argparse.Namespace) -> Result:
    rows = _in_parallel(compare, quick_cases(), args.processes)
    _print(rows, _COLUMNS)
    checks = checks_of(rows)
    rows.append(measure_speed())
    return Result("simulate", 0, rows, [*checks, _speed_check(rows[-1])])


def _speed(args: argparse.Namespace) -> Result:
    rows = [measure_speed()]
    _print(rows, list(rows[0]))
    return Result("simulate", 0, rows, [_speed_check(rows[0])])


def _shown(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _markdown(rows: Sequence[Sequence[str]], columns: Sequence[str]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.simulate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    kind = parser.add_mutually_exclusive_group(required=True)
    kind.add_argument("--quick", action="store_true")
    kind.add_argument("--table", type=Path, metavar="DIR")
    kind.add_argument("--ablations", action="store_true")
    kind.add_argument("--speed", action="store_true")
    parser.add_argument(
        "--sizes",
        nargs="+",
        default=["h200-70b-tp4:16", "h200-70b-tp4:64", "h100-8b:16"],
        metavar="DEVICE:WORKERS",
        help=f"of the table; devices: {', '.join(DEVICES)}",
    )
    parser.add_argument("--traces", type=Path, help="folder with the whole traces; default: excerpts")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of the table")
    parser.add_argument(
        "--rivals",
        type=Path,
        metavar="DIR",
        help="a table of before Baton changed: its rivals are taken from there",
    )
    parser.add_argument("--limit", type=int, help="new cells of the table in this call (default: all)")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="of --quick, --ablations")
    parser.add_argument("--page", type=Path, help="redraw its tables")
    parser.add_argument("--json", type=Path)
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    args = _parse(argv)
    if args.table is not None:
        work = _table
    elif args.ablations:
        work = _ablations
    else:
        work = _speed if args.speed else _quick
    try:
        result = work(args)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    for check in result.checks:
        print(check)
    return conclude(result, args.json)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
