"""Goodput: the highest offered rate at which enough of the offered requests meet their promise.

    double (or halve) the rate until the verdict turns ─► bisect to 5% ─► the highest rate that passed

A rate passes if most of its seeds do (2 of 3). `find_goodput` is pure over the callable that measures one point;
`python -m benchmarks.goodput URL --slo-ttft-ms 500 --slo-tpot-ms 50` measures with the load generator.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import aiohttp

from benchmarks.load import measure, run_async
from benchmarks.options import add_load_options, spec_from
from benchmarks.result import Check, Result, Row, conclude, text_table

Measure = Callable[[float, int], float | None]
"""(rate in requests/s, seed) -> attainment, None if nothing was offered (which does not pass)."""


@dataclass(frozen=True, slots=True)
class Search:
    """How the rate is looked for. `tolerance`: failing rate over passing rate at the end, minus 1."""

    start_rate: float = 1.0
    min_rate: float = 0.01
    max_rate: float = 1000.0
    tolerance: float = 0.05
    seeds: tuple[int, ...] = (0, 1, 2)

    def __post_init__(self) -> None:
        """Raises ValueError for bounds that are not in order."""
        if not 0 < self.min_rate <= self.start_rate <= self.max_rate or self.tolerance <= 0 or not self.seeds:
            raise ValueError(f"expected 0 < min <= start <= max rate, a tolerance and seeds but got {self}")


@dataclass(slots=True)
class Goodput:
    """`rates[target]`: requests/s, 0 if not even the lowest rate passed. `curve[rate, seed]`: what was measured."""

    rates: dict[float, float] = field(default_factory=dict)
    curve: dict[tuple[float, int], float | None] = field(default_factory=dict)


def find_goodput(
    measure: Measure, targets: Sequence[float] = (0.9, 0.99), search: Search | None = None
) -> Goodput:
    """One search per target, easiest first; points are measured once and serve all targets.

    Attainment is taken to fall with the rate; where noise bends it, the search still ends, at a rate that passed
    next to one that did not.
    """
    search = search or Search()
    found = Goodput()

    def passes(target: float, rate: float) -> bool:
        needed = len(search.seeds) // 2 + 1
        num_passed = num_failed = 0
        for seed in search.seeds:
            if (rate, seed) not in found.curve:
                found.curve[rate, seed] = measure(rate, seed)
            value = found.curve[rate, seed]
            is_pass = value is not None and value >= target
            num_passed, num_failed = num_passed + is_pass, num_failed + (not is_pass)
            if num_passed >= needed or num_failed > len(search.seeds) - needed:
                break
        return num_passed >= needed

    start = search.start_rate
    for target in sorted(targets):
        rate = _search(partial(passes, target), start, search)
        found.rates[target] = rate
        start = max(rate, search.min_rate)
    return found


def _search(passes: Callable[[float], bool], start: float, search: Search) -> float:
    low, high = 0.0, start
    if passes(start):
        low = start
        while low < search.max_rate:
            high = min(low * 2, search.max_rate)
            if not passes(high):
                break
            low = high
        else:
            return low
    else:
        while high > search.min_rate:
            low = max(high / 2, search.min_rate)
            if passes(low):
                break
            high = low
        else:
            return 0.0
    while high / low > 1 + search.tolerance:
        middle = (low * high) ** 0.5
        if passes(middle):
            low = middle
        else:
            high = middle
    return low


def main(argv: Sequence[str] | None = None) -> int:
    """0: measured; 1: a run was void or no rate passed; 2: could not run; 130: stopped by Ctrl-C."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.goodput", description=(__doc__ or "").split("\n\n")[0]
    )
    add_load_options(parser)
    parser.add_argument("--min-rate", type=float, default=0.05)
    parser.add_argument("--max-rate", type=float, default=64.0)
    parser.add_argument("--seeds", type=int, default=3, help="runs per rate; most of them must pass")
    parser.add_argument("--json", type=Path, help="file for the result")
    args = parser.parse_args(argv)
    rows: list[Row] = []
    num_void = 0

    def measured(rate: float, seed: int) -> float | None:
        nonlocal num_void
        run = run_async(measure(replace(spec, rate=rate, seed=seed)))
        rows.append(run.row)
        num_void += run.lag.is_void
        value = run.row["attainment"]
        print(f"rate {rate:.3g}, seed {seed}: attainment {value:.3f}", flush=True)
        return None if run.lag.is_void else float(value)

    try:
        spec = spec_from(args)
        if spec.slo is None or spec.arrival not in ("poisson", "gamma", "constant"):
            raise ValueError("expected --slo-ttft-ms or --slo-tpot-ms, and an open arrival with a rate")
        seeds = tuple(range(spec.seed, spec.seed + args.seeds))
        search = Search(spec.rate, args.min_rate, args.max_rate, seeds=seeds)
        found = find_goodput(measured, search=search)
    except (ValueError, aiohttp.ClientError, OSError, TimeoutError) as error:
        print(f"error: {error or type(error).__name__}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    rows += [{"target": target, "goodput": rate} for target, rate in found.rates.items()]
    checks = [Check("void_runs", num_void, "==", 0)]
    checks += [Check(f"goodput_at_{target * 100:g}", rate, ">", 0) for target, rate in found.rates.items()]
    result = Result("goodput", list(seeds), rows, checks)
    print(
        "\n" + text_table([(f"goodput@{t * 100:g}", r) for t, r in found.rates.items()], ("", "requests/s"))
    )
    return conclude(result, args.json)


if __name__ == "__main__":
    sys.exit(main())
