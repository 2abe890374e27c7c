"""The report's HTML: a verdict first, then figures, checks and what was measured. One file, no network.

Everything that comes from a result is escaped; the page itself forbids all loading (Content-Security-Policy).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib import resources
from typing import Any

from plotly.offline import get_plotlyjs

from benchmarks.report_plots import Figure, colours_of
from benchmarks.report_verdict import (
    Grid,
    Judgement,
    Spread,
    arms_of,
    judge,
    metrics_in,
    sentences,
    shown,
    spreads_of,
)
from benchmarks.result import Result, Row

_MAX_ROWS = 8

DEFINITIONS = (
    ("t₀, tᵢ", "the scheduled arrival, so a late client counts against the system; when token i reached the client"),
    ("TTFT", "t₁ − t₀: first token with text"),
    ("TTST", "t₂ − t₁: a KV handoff behind the first token hides here"),
    ("TPOT", "(tₙ − t₁)/(n − 1), n from the usage; none for n < 2"),
    ("ITL", "gaps between tokens, pooled over requests, without TTFT"),
    ("whole request", "end − t₀"),
    ("attainment", "requests complete, of the right length, within TTFT and TPOT, of all that were OFFERED: refused, "
                   "failed and late ones included"),
    ("goodput@q", "highest offered rate at which attainment reaches q; in a sweep, of the rates that were measured"),
    ("stages", "by the server's clock, where it tells them (Baton does): queue until a request has its workers, "
               "prefill until the first token, decode until the end; transfer is the part of decode until KV is there"),
    ("spread", "median (min–max) over the seeds; an arm wins if its worst seed beats every other's best one "
               "and its median is better by 5% or more; otherwise it is a tie"),
    ("void", "a run whose client was late itself (send lag p99 > 500 ms or event loop lag p99 > 100 ms); not counted"),
)  # fmt: skip


def page(title: str, parts: Iterable[str], figures: Mapping[str, Figure]) -> str:
    """The whole file."""
    template = resources.files("benchmarks").joinpath("templates/report.html").read_text(encoding="utf-8")
    fields = {
        "title": escape(title),
        "body": "\n".join(parts),
        "library": get_plotlyjs(),
        # A script element is ended, or turned into something else, by what begins with `<`: none is left.
        "figures": json.dumps(figures, allow_nan=False).replace("<", "\\u003c"),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: fields[match.group(1)], template)


def heading(title: str) -> str:
    return f"<h1>{escape(title)}</h1>"


def verdict(grid: Grid) -> str:
    """Sentences, the matrix of winners, and the numbers behind them."""
    if not grid:
        return "<h2>Verdict</h2><p class=note>No valid load run in these results.</p>"
    colours = colours_of(arms_of(grid))
    items = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences(grid))
    keys = " &nbsp; ".join(
        f'<i class=key style="background:{colour}"></i>{escape(arm)}' for arm, colour in colours.items()
    )
    return (
        f"<h2>Verdict</h2><ul class=verdict>{items}</ul><p>{keys}</p>"
        + _winners(grid, colours)
        + "<p class=note>Colour: the winner. Grey: a tie (see spread, below). Dash: one server, or one seed.</p>"
        + "<details open><summary>The numbers behind it</summary>"
        + _numbers(grid)
        + "</details>"
    )


def _winners(grid: Grid, colours: Mapping[str, str]) -> str:
    grid = {place: arms for place, arms in grid.items() if len(arms) > 1} or grid
    rows = []
    for metric in metrics_in(grid):
        cells = [f"<td>{escape(metric.title)}</td>"]
        for arms in grid.values():
            judgement = judge(spreads_of(arms, metric.key), metric.is_lower_better)
            cells.append(_winner(judgement, colours))
        rows.append(f"<tr>{''.join(cells)}</tr>")
    heads = "".join(
        f"<th>{escape(place.workload)}<br>{place.load:g} {escape(place.unit)}</th>" for place in grid
    )
    return f'<div class=wide><table id="winners"><tr><th></th>{heads}</tr>{"".join(rows)}</table></div>'


def _winner(judgement: Judgement, colours: Mapping[str, str]) -> str:
    if judgement.winner is not None:
        return f'<td class=win style="background:{colours[judgement.winner]}">{escape(judgement.winner)}</td>'
    if judgement.is_tie:
        return "<td class=tie>tie</td>"
    return "<td class=none>–</td>"


def _numbers(grid: Grid) -> str:
    """Arm × load for each metric; the best median bold, unless it is no better than the spread."""
    rows = []
    for metric in metrics_in(grid):
        for arm in arms_of(grid):
            cells = [f"<td>{escape(metric.title)}</td><td>{escape(arm)}</td>"]
            for arms in grid.values():
                spreads = spreads_of(arms, metric.key)
                wins = judge(spreads, metric.is_lower_better).winner == arm
                cells.append(_number(spreads.get(arm), wins))
            rows.append(f"<tr>{''.join(cells)}</tr>")
    heads = "".join(f"<th>{escape(str(place))}</th>" for place in grid)
    return f"<div class=wide><table><tr><th></th><th></th>{heads}</tr>{''.join(rows)}</table></div>"


def _number(spread: Spread | None, is_best: bool) -> str:
    if spread is None:
        return "<td class=none>–</td>"
    return f"<td{' class=best' if is_best else ''}>{escape(str(spread))}</td>"


def figure_part(name: str, title: str, note: str, figure: Figure | None, missing: str) -> str:
    """A heading and the place where the figure will be drawn, or why there is none."""
    if figure is None:
        return f"<h2>{escape(title)}</h2><p class=note>{escape(missing)}</p>"
    return f'<h2>{escape(title)}</h2><p class=note>{escape(note)}</p><div id="{name}" class=plot></div>'


def ratios(rows: Sequence[Row]) -> str:
    """Of side-by-side runs; empty if there are none."""
    if not rows:
        return ""
    heads = ("metric", "server", "baseline", "ratio", "min–max", "verdict")
    lines = [
        (
            row["metric_title"],
            row["arm"],
            row["baseline"],
            shown(row["ratio_median"]),
            f"{shown(row['ratio_min'])}–{shown(row['ratio_max'])}",
            row["verdict"],
        )
        for row in rows
    ]
    note = "Ratios of the same seed, server over baseline. A tie where 1 lies within their range."
    return f"<h2>Side by side</h2><p class=note>{note}</p>{_table(heads, lines)}"


def checks(results: Sequence[tuple[str, Result]]) -> str:
    """Every requirement that some benchmark checked."""
    lines = [
        "<tr>"
        + "".join(f"<td>{escape(text)}</td>" for text in (source, result.benchmark, check.name))
        + f"<td>{'not measured' if check.value is None else escape(shown(check.value))}</td>"
        + f"<td>{escape(check.op)} {check.required:g}</td>"
        + f"<td class={'ok' if check.is_ok else 'fail'}>{'ok' if check.is_ok else 'FAIL'}</td></tr>"
        for source, result in results
        for check in result.checks
    ]
    if not lines:
        return "<h2>Checks</h2><p class=note>None.</p>"
    heads = "".join(f"<th>{head}</th>" for head in ("result", "benchmark", "check", "value", "required", ""))
    return f'<h2>Checks</h2><table id="checks"><tr>{heads}</tr>{"".join(lines)}</table>'


def rows_of(results: Sequence[tuple[str, Result]]) -> str:
    """Rows of each result, turned: a column a row, up to some."""
    parts = []
    for source, result in results:
        shown_rows = result.rows[:_MAX_ROWS]
        names = list(dict.fromkeys(name for row in shown_rows for name in row))
        lines = [(name, *(_cell(row.get(name)) for row in shown_rows)) for name in names]
        rest = len(result.rows) - len(shown_rows)
        note = f"<p class=note>… and {rest} more rows in the file</p>" if rest > 0 else ""
        heads = ("", *(str(number + 1) for number in range(len(shown_rows))))
        parts.append(
            f"<details><summary>{escape(source)}: {escape(result.benchmark)}, {len(result.rows)} rows</summary>"
            f"<div class=wide>{_table(heads, lines)}</div>{note}</details>"
        )
    return "<h2>All rows</h2>" + "".join(parts)


def origin(results: Sequence[tuple[str, Result]]) -> str:
    """Machines, versions, seeds; and a warning where machines differ."""
    lines = [
        (
            source,
            result.benchmark,
            _plain(result.machine),
            _plain(result.versions),
            ", ".join(map(str, result.seed)) if isinstance(result.seed, list) else str(result.seed),
        )
        for source, result in results
    ]
    machines = {json.dumps({**result.machine, "os": ""}, sort_keys=True) for _, result in results}
    warning = "<p><b>These results come from different machines.</b></p>" if len(machines) > 1 else ""
    heads = ("result", "benchmark", "machine", "versions", "seeds")
    return f"<h2>Measured on</h2>{warning}<div class=wide>{_table(heads, lines)}</div>"


def definitions() -> str:
    return f"<h2>Definitions</h2>{_table(('', ''), DEFINITIONS)}"


def _table(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(text)}</th>" for text in heads)
    body = "".join("<tr>" + "".join(f"<td>{escape(text)}</td>" for text in line) + "</tr>" for line in lines)
    return f"<table><tr>{head}</tr>{body}</table>"


def _plain(content: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in content.items() if value not in ("", None, []))


def _cell(value: object) -> str:
    if value is None:
        return "–"
    return shown(value) if isinstance(value, float) else str(value)[:80]
