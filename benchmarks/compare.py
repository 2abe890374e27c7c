"""Servers side by side: `python -m benchmarks.compare --baton disaggregated --server vllm=URL --out DIR`

    round of seed 0: A, B, C   round of seed 1: A, B, C   …       the same prompts and arrivals for all in a round
                     └ ours: started for its turn, stopped after it; --together: all stay up, one at a time is measured

The first server is the baseline. A ratio is of one round, server over baseline, so what changes slowly on the machine
cancels; median and range are over rounds, and a range that holds 1 is a tie.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import aiohttp

from benchmarks import interference, report
from benchmarks.client import Target
from benchmarks.interference import Probe
from benchmarks.load import run_async
from benchmarks.options import add_load_options, spec_from
from benchmarks.progress import Board
from benchmarks.records import Record, write_jsonl
from benchmarks.report_verdict import METRICS, Metric, shown, value_of
from benchmarks.result import Check, Result, Row, conclude, text_table
from benchmarks.servers import Arm, GivenHost, Host, Launch, OurHost, ServerError
from benchmarks.spec import LoadSpec
from benchmarks.sweep_plan import MIN_SEEDS

PROBE_METRICS = (
    Metric("itl_p50_ms", "steady ITL p50, ms"),
    Metric("itl_p99_ms", "steady ITL p99, ms"),
    Metric("itl_max_ms", "steady ITL max, ms"),
    Metric("tokens_per_s", "steady tokens/s", is_lower_better=False),
    Metric("long_ttft_p50_ms", "long prompt's TTFT p50, ms"),
)

_RUN_ERRORS = (ValueError, ServerError, aiohttp.ClientError, OSError, TimeoutError)


@dataclass(frozen=True, slots=True)
class Contender:
    """`arm` None: a server at `url` that runs already."""

    name: str
    arm: Arm | None = None
    url: str = ""

    @classmethod
    def given(cls, text: str) -> Contender:
        """`NAME=URL`. Raises ValueError."""
        name, _, url = text.partition("=")
        if not name or not url.startswith(("http://", "https://")):
            raise ValueError(f"--server: expected NAME=URL but got {text!r}")
        return cls(name, None, url)

    @classmethod
    def ours(cls, text: str) -> Contender:
        """`MODE` or `MODE:P:D`. Raises ValueError."""
        arm = Arm.parse(text)
        return cls(arm.name, arm)

    def host(self, launch: Launch, board: Board) -> Host:
        return OurHost(launch, board.quote) if self.arm else GivenHost(self.url)


@dataclass(frozen=True, slots=True)
class Ratio:
    """Of one metric, a contender over the baseline, over rounds that measured both."""

    name: str
    baseline: str
    metric: Metric
    values: tuple[float, ...]

    @property
    def verdict(self) -> str:
        if len(self.values) < 2 or min(self.values) <= 1.0 <= max(self.values):
            return "tie"
        return "better" if (self.values[0] < 1.0) == self.metric.is_lower_better else "worse"

    def row(self) -> Row:
        return {
            "kind": "ratio",
            "arm": self.name,
            "baseline": self.baseline,
            "metric": self.metric.key,
            "metric_title": self.metric.title,
            "ratio_median": statistics.median(self.values),
            "ratio_min": min(self.values),
            "ratio_max": max(self.values),
            "num_rounds": len(self.values),
            "verdict": self.verdict,
        }


def ratios(rows: Sequence[Row], names: Sequence[str], metrics: Sequence[Metric]) -> list[Ratio]:
    """Pure: rows with `arm`, `seed` and values. Void rounds, and values of zero or none, have no ratio."""
    by_turn = {(row["arm"], row["seed"]): row for row in rows if not row.get("is_void")}
    seeds = dict.fromkeys(row["seed"] for row in rows)
    baseline = names[0]
    found = []
    for metric in metrics:
        for name in names[1:]:
            values = []
            for seed in seeds:
                over, under = by_turn.get((name, seed)), by_turn.get((baseline, seed))
                top, bottom = (value_of(row, metric.key) if row else None for row in (over, under))
                if top is not None and bottom:
                    values.append(top / bottom)
            if values:
                found.append(Ratio(name, baseline, metric, tuple(values)))
    return found


@dataclass(slots=True)
class Comparison:
    """The rounds and what they left. `probe` None: load runs of `spec`."""

    contenders: Sequence[Contender]
    seeds: Sequence[int]
    spec: LoadSpec
    probe: Probe | None
    folder: Path
    rows: list[Row]

    @property
    def metrics(self) -> Sequence[Metric]:
        return METRICS if self.probe is None else PROBE_METRICS

    def run(self, launch: Launch, board: Board, is_together: bool) -> bool:
        """False if Ctrl-C ended it. Raises ServerError, aiohttp.ClientError, OSError, TimeoutError, ValueError."""
        try:
            with contextlib.ExitStack() as stack:
                urls = {}
                if is_together:
                    for one in self.contenders:
                        urls[one.name] = stack.enter_context(one.host(launch, board).open(one.arm))
                for seed in self.seeds:
                    for one in self.contenders:
                        with _opened(one, urls, launch, board) as url:
                            if not self._turn(one, url, seed, board):
                                return False
                        board.advance()
        except KeyboardInterrupt:
            return False
        return True

    def _turn(self, one: Contender, url: str, seed: int, board: Board) -> bool:
        title = f"{one.name}, seed {seed}"
        board.say(f"{title}: measuring")
        if self.probe is None:
            # A name to ask for is a given server's own; ours says itself what it serves.
            spec = replace(self.spec, url=url, seed=seed, model="" if one.arm else self.spec.model)
            run = board.measure(spec, title)
            row, records, is_whole = run.row, run.records, run.is_whole
        else:
            target = replace(self.spec.target, url=url, model="" if one.arm else self.spec.model)
            row, records = self._probe(target, replace(self.probe, seed=seed))
            is_whole = True
        if not is_whole:
            return False
        file = self.folder / "turns" / f"{seed}-{self.contenders.index(one)}.jsonl"
        write_jsonl(file, records)
        self.rows.append(
            {"arm": one.name, **row, "seed": seed, "records": str(file.relative_to(self.folder))}
        )
        numbers = [(metric.title, value_of(row, metric.key)) for metric in self.metrics]
        board.say(f"{title}: " + ", ".join(f"{name} {shown(v)}" for name, v in numbers if v is not None))
        return True

    def _probe(self, target: Target, probe: Probe) -> tuple[Row, list[Record]]:
        outcome = run_async(interference.measure(target, probe, tokenizer=self.spec.tokenizer))
        return outcome.row, outcome.records

    def result(self) -> Result:
        names = [one.name for one in self.contenders]
        missing = len(names) * len(self.seeds) - len(self.rows)
        checks = [
            Check("missing_runs", missing, "==", 0),
            Check("void_runs", sum(bool(row["is_void"]) for row in self.rows), "==", 0),
        ]
        found = ratios(self.rows, names, self.metrics)
        return Result("compare", list(self.seeds), [*self.rows, *(ratio.row() for ratio in found)], checks)


@contextlib.contextmanager
def _opened(one: Contender, urls: dict[str, str], launch: Launch, board: Board) -> Iterator[str]:
    if one.name in urls:
        yield urls[one.name]
        return
    with one.host(launch, board).open(one.arm) as url:
        yield url


def text_report(result: Result) -> str:
    """The table of ratios."""
    lines = [
        (
            row["metric_title"],
            row["arm"],
            shown(row["ratio_median"]),
            f"{shown(row['ratio_min'])}–{shown(row['ratio_max'])}",
            row["verdict"],
        )
        for row in result.rows
        if row.get("kind") == "ratio"
    ]
    if not lines:
        return "No round in which two servers were measured: no ratios."
    baseline = next(row["baseline"] for row in result.rows if row.get("kind") == "ratio")
    table = text_table(lines, ("", "server", "ratio", "min–max", "verdict"))
    return f"{table}\nratios of the same round, server over {baseline}; a tie where 1 lies within the range"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compare",
        description=(__doc__ or "").split("\n\n")[0],
        epilog="Every option of `python -m benchmarks.load` is taken too, for all servers alike.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for records, result.json, report.html"
    )
    parser.add_argument("--json", type=Path, help="file for the result, besides the folder's")
    who = parser.add_argument_group("servers; the first one is the baseline, two at least")
    who.add_argument("--baton", dest="contenders", action="append", type=_argument(Contender.ours),
                     metavar="MODE[:P:D]", help="start Baton: disaggregated or colocated")  # fmt: skip
    who.add_argument("--server", dest="contenders", action="append", type=_argument(Contender.given),
                     metavar="NAME=URL", help="any OpenAI endpoint that runs already")  # fmt: skip
    who.add_argument(
        "--together", action="store_true", help="keep ours up all the time, not for its turn only"
    )
    who.add_argument("--baton-config", type=Path, help="configuration file for ours")
    who.add_argument("--baton-model", default="", help="what ours serves; default: the embedded model")
    what = parser.add_argument_group("what is run")
    what.add_argument(
        "--rounds", type=int, default=MIN_SEEDS, help="seeds --seed, --seed + 1, …; at least three"
    )
    what.add_argument("--interference", action="store_true", help="the interference probe instead of a load")
    return parser


def _argument(parse: Callable[[str], Contender]) -> Callable[[str], Contender]:
    """With the reason in argparse's own message."""

    def parsed(text: str) -> Contender:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parsed


def _plan(argv: Sequence[str] | None) -> tuple[argparse.Namespace, Comparison]:
    """Raises ValueError for parts that contradict each other."""
    args, rest = _parser().parse_known_args(argv)
    load = argparse.ArgumentParser(prog="python -m benchmarks.compare", add_help=False, allow_abbrev=False)
    add_load_options(load)
    spec = spec_from(load.parse_args(["http://each", *rest]))
    names = [one.name for one in args.contenders or ()]
    if len(names) < 2 or len(set(names)) < len(names):
        raise ValueError(f"expected two servers or more of different names but got {names}")
    if args.rounds < MIN_SEEDS:
        raise ValueError(f"--rounds: expected at least {MIN_SEEDS} but got {args.rounds}")
    seeds = range(spec.seed, spec.seed + args.rounds)
    probe = Probe() if args.interference else None
    return args, Comparison(args.contenders, seeds, spec, probe, args.out, [])


def main(argv: Sequence[str] | None = None) -> int:
    """0: all rounds are there and valid; 1: a check failed; 2: could not run; 130: stopped."""
    try:
        args, comparison = _plan(argv)
        launch = Launch(args.baton_model, args.baton_config)
        with Board("turns", len(comparison.contenders) * len(comparison.seeds)) as board:
            is_whole = comparison.run(launch, board, args.together)
        result = comparison.result()
        result.write(args.out / "result.json")
        report.write(args.out / "report.html", report.read_sources([args.out]), "Side by side")
    except _RUN_ERRORS as error:
        print(f"error: {error or type(error).__name__}", file=sys.stderr)
        return 2
    print(text_report(result))
    print("\n" + "\n".join(map(str, result.checks)))
    print(f"\n{args.out / 'result.json'}\nreport: {args.out / 'report.html'}")
    note = "Stopped before the end: these are the rounds until then."
    return conclude(result, args.json, is_whole, note)


if __name__ == "__main__":
    sys.exit(main())
