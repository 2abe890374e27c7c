"""The goodput table: cell by cell into a file, then rows over seeds, checks, and the tables of a page.

    cell   one case (workload, device, workers, promise, seed): Baton, the best rival, the best rival that gives up
    row    the same over seeds: median (least to most)

A cell that the file holds is not computed again, so a run may be stopped and gone on with at any time.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from statistics import median

from benchmarks.result import Check, Row
from benchmarks.sim.baton import Baton
from benchmarks.sim.cases import BURSTY, SHIFTING, Case
from benchmarks.sim.experiments import Point, System, baton, simulate

MIN_RATIO, MIN_BURSTY, MIN_SHIFTING = 0.98, 1.10, 1.10
KEY = ("workload", "device", "workers", "slo_ttft_ms", "slo_tpot_ms", "seed")
_RIVALS = (("ratio", "best_rival"), ("giving_up_ratio", "giving_up_rival"))
_BEGIN, _END = "<!-- {}: begin, written by {} -->", "<!-- {}: end -->"


def compare(case: Case, with_giving_up: bool = False) -> Row:
    """Goodput of Baton and of the best rival, and what Baton did at its own. `with_giving_up`: also of the best of the
    rivals that refuse hopeless prompts.
    """
    began_s = time.process_time()
    point = case.point()
    row = case.head() | _ours(point, case.start)
    ours, starts = row["goodput"], case.rival_starts
    champion, best = point.best_rival(case.rivals(), starts[0] or ours or case.start)
    row |= _against("best", champion, best, ours)
    if with_giving_up:
        champion, best = point.best_rival(case.rivals(gives_up=True), starts[1] or best or case.start, True)
        row |= _against("giving_up", champion, best, ours)
    return row | {"cpu_s": round(time.process_time() - began_s, 1)}


def compare_again(case: Case, cell: Row) -> Row:
    """`compare` after Baton has changed: its rivals in `cell` are as they were."""
    began_s = time.process_time()
    row = cell | _ours(case.point(), cell["goodput"] or case.start)
    for group in ("best", "giving_up"):
        row[_ratio_of(group)] = _times(row["goodput"], row[f"{group}_goodput"])
    return row | {"cpu_s": round(time.process_time() - began_s, 1)}


def _ours(point: Point, start: float) -> Row:
    goodput = point.goodput(baton(), start)
    return {"goodput": goodput} | (_shown(point, goodput) if goodput else {})


def _ratio_of(group: str) -> str:
    return "ratio" if group == "best" else f"{group}_ratio"


def _times(ours: float, theirs: float) -> float | None:
    return ours / theirs if theirs else None


def _against(group: str, rival: System | None, goodput: float, ours: float) -> Row:
    return {
        _ratio_of(group): _times(ours, goodput),
        f"{group}_goodput": goodput,
        f"{group}_rival": rival.name if rival else "",
        f"{group}_readers": rival.num_readers if rival else 0,
    }


def _shown(point: Point, rate: float) -> Row:
    run = simulate(baton(), point.workload, rate, replace(point.setup, seed=point.seeds[0]))
    controller = run.controller
    assert isinstance(controller, Baton), "it was built here"
    placed = controller.decisions.get("local", 0) + controller.decisions.get("remote", 0)
    return {
        "attainment": run.attainment,
        "attainment_ttft": run.ttft_share,
        "attainment_tpot": run.tpot_share,
        "refused": run.refused_share,
        "local_share": controller.decisions.get("local", 0) / max(placed, 1),
        "num_flips": len(controller.roles),
        "requests": len(run.requests),
        "simulated_s": run.span_s,
    }


def fill(
    file: Path,
    cases: Iterable[Case],
    tell: Callable[[str], None],
    most: int | None = None,
    rivals: Sequence[Row] = (),
) -> list[Row]:
    """Cells of all cases, in the file's order; each is in the file before the next one begins. `most`: new ones.
    `rivals`: cells whose rivals need not be measured again.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    cells = read_cells(file)
    known, measured = {_key(cell) for cell in cells}, {_key(cell): cell for cell in rivals}
    missing = (case for case in cases if _key(case.head()) not in known)
    for case in islice(missing, most):
        before = measured.get(_key(case.head()))
        cell = compare_again(case, before) if before else compare(_hinted(case, cells), with_giving_up=True)
        with file.open("a", encoding="utf-8") as out:
            out.write(json.dumps({name: _rounded(value) for name, value in cell.items()}) + "\n")
        cells.append(cell)
        tell(_told(cell))
    return cells


def _hinted(case: Case, cells: Sequence[Row]) -> Case:
    """Searches begin where the nearest cell of the same workload, device and promise ended, at so much a worker."""
    head = case.head()
    known = [
        cell
        for cell in cells
        if all(cell[name] == head[name] for name in KEY if name not in ("workers", "seed"))
        and cell["goodput"]
    ]
    if not known:
        return case
    cell = min(known, key=lambda cell: abs(cell["workers"] - case.num_workers))
    scale = case.num_workers / cell["workers"]
    return replace(
        case,
        start=cell["goodput"] * scale,
        rival_starts=(cell["best_goodput"] * scale, cell["giving_up_goodput"] * scale),
        likely_readers=cell.get("best_readers", 0) / cell["workers"],
    )


def read_cells(file: Path) -> list[Row]:
    """Raises ValueError for a line that is no cell."""
    if not file.exists():
        return []
    cells = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            cell = json.loads(line)
            _key(cell)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{file}:{number}: expected a cell of the table but got {line[:80]!r}"
            ) from error
        cells.append(cell)
    return cells


def rows_of(cells: Sequence[Row]) -> list[Row]:
    """One row for all seeds of a point; values are (least, median, most)."""
    points: dict[tuple[object, ...], list[Row]] = {}
    for cell in cells:
        points.setdefault(_key(cell)[:-1], []).append(cell)
    rows = []
    for key, found in points.items():
        row: Row = dict(zip(KEY, key, strict=False))
        row["seeds"] = len(found)
        for name in ("goodput", "ratio", "giving_up_ratio", "best_goodput", "giving_up_goodput"):
            values = [cell[name] for cell in found]
            row[name] = None if None in values else median(values)
            row[f"{name}_min"] = None if None in values else min(values)
            row[f"{name}_max"] = None if None in values else max(values)
        for name in ("best_rival", "giving_up_rival"):
            row[name] = sorted(found, key=_ratio)[len(found) // 2][name]
        for name in ("refused", "local_share", "simulated_s"):
            row[name] = median(cell.get(name, 0.0) for cell in found)
        rows.append(row)
    return rows


def checks_of(cells: Sequence[Row]) -> list[Check]:
    """Of the worst seed: a median would hide one."""

    def least(workload: str | None = None) -> float | None:
        found = [cell["ratio"] for cell in cells if workload in (None, cell["workload"])]
        return min(found) if found and None not in found else None

    return [
        Check("goodput_min_ratio", least(), ">=", MIN_RATIO),
        Check("goodput_bursty_ratio", least(BURSTY), ">", MIN_BURSTY),
        Check("goodput_shifting_ratio", least(SHIFTING), ">", MIN_SHIFTING),
    ]


def page_tables(cells: Sequence[Row], num_wanted: int) -> str:
    """Markdown: how many cells of those wanted there are, and one table for each device and number of workers."""
    rows = rows_of(cells)
    parts = [f"{len(cells)} of {num_wanted} cells. What is missing was not computed yet, and says nothing."]
    for device, num_workers in dict.fromkeys((row["device"], row["workers"]) for row in rows):
        found = [row for row in rows if (row["device"], row["workers"]) == (device, num_workers)]
        lines = [
            f"### {num_workers} × {device}\n",
            "| workload | TTFT/TPOT (ms) | seeds | Baton (requests/s) | best rival | Baton ÷ it "
            "| best that gives up | Baton ÷ it |",
            "|---|---|---|---|---|---|---|---|",
        ]
        order = list(dict.fromkeys(row["workload"] for row in rows))
        found.sort(key=lambda row: (order.index(row["workload"]), row["slo_tpot_ms"]))
        lines += [
            f"| {row['workload']} | {row['slo_ttft_ms']:g}/{row['slo_tpot_ms']:g} | {row['seeds']} "
            f"| {_spread(row, 'goodput')} | {row['best_rival']} | {_verdict(row, 'ratio')} "
            f"| {row['giving_up_rival'].removesuffix(', giving up')} | {_verdict(row, 'giving_up_ratio')} |"
            for row in found
        ]
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def redraw(page: Path, section: str, command: str, text: str) -> None:
    """Replace what stands between the marks of `section`. Raises ValueError where they are missing."""
    old = page.read_text(encoding="utf-8")
    begin, end = _BEGIN.format(section, f"`{command}`"), _END.format(section)
    head, found_begin, rest = old.partition(begin)
    _, found_end, tail = rest.partition(end)
    if not found_begin or not found_end:
        raise ValueError(f"{page}: expected the lines {begin!r} and {end!r}")
    page.write_text(f"{head}{begin}\n\n{text}\n{end}{tail}", encoding="utf-8")


def _told(cell: Row) -> str:
    where = "{workload}, {workers} {device}, {slo_ttft_ms:g}/{slo_tpot_ms:g} ms, seed {seed}".format(**cell)
    rivals = (f"{_factor(cell[name])} {cell[rival]}" for name, rival in _RIVALS)
    return f"{where}: {cell['goodput']:.4g}/s, {', '.join(rivals)} ({cell['cpu_s']:.0f} s)"


def _key(cell: Row) -> tuple[object, ...]:
    return tuple(cell[name] for name in KEY)


def _ratio(cell: Row) -> float:
    return cell["ratio"] or 0.0


def _rounded(value: object) -> object:
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _factor(ratio: float | None) -> str:
    return "–" if ratio is None else f"{ratio:.3f} ×"


def _spread(row: Row, name: str) -> str:
    if row[name] is None:
        return "–"
    middle = f"{row[name]:.4g}"
    return middle if row["seeds"] < 2 else f"{middle} ({row[f'{name}_min']:.4g}–{row[f'{name}_max']:.4g})"


def _verdict(row: Row, name: str) -> str:
    """The ratio, and in words where it is no win: within the search's tolerance of one, or below."""
    if row[name] is None:
        return "– (no rival keeps it at any rate)"
    middle = f"{row[name]:.2f}"
    shown = middle if row["seeds"] < 2 else f"{middle} ({row[f'{name}_min']:.2f}–{row[f'{name}_max']:.2f})"
    if row[f"{name}_min"] < MIN_RATIO:
        return f"{shown} **loses**"
    return f"{shown} ties" if row[f"{name}_min"] < 1.02 else shown
