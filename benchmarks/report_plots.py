"""The report's figures, as the plain data that Plotly draws: {"data": [...], "layout": {...}}. Pure.

A figure with several groups (loads, workloads) has a menu that shows one of them at a time. A figure for which nothing
was measured is None.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.metrics import latency_values_s, ttft_s
from benchmarks.records import Record
from benchmarks.report_verdict import TARGETS, Grid, Place, arms_of, goodput_of, spreads_of
from benchmarks.result import Row

Figure = dict[str, Any]
Trace = dict[str, Any]
ReadRecords = Callable[[Row], Sequence[Record]]

COLOURS = ("#3366cc", "#dc6f1b", "#109618", "#990099", "#c4a000", "#0099a8", "#b82e2e", "#66748a")
PHASES = {
    "sending late": "#b8c0cc",
    "to first token: queue and prefill": "#dc6f1b",
    "to second token: handoff and first decode step": "#990099",
    "all other tokens: decode": "#3366cc",
    "failed": "#b82e2e",
}
"""What a client sees."""
STAGE_PHASES = {
    "on the way and read (client)": "#d8dde4",
    "queue (server)": "#c4a000",
    "prefill (server)": "#dc6f1b",
    "transfer (server)": "#990099",
    "decode (server)": "#3366cc",
}
"""What a client sees of a request that the server told the stages of."""
_COLOURS_OF_PHASES = {**PHASES, **STAGE_PHASES}
_NUM_QUANTILES = 200
_NUM_TIMELINE = 40
_HEIGHT = 430


def colours_of(arms: Sequence[str]) -> dict[str, str]:
    return {arm: COLOURS[index % len(COLOURS)] for index, arm in enumerate(arms)}


def frontier(grid: Grid, key: str, title: str) -> Figure | None:
    """Latency against output throughput, a line per arm through its loads; bars are the seeds' ranges."""
    colours = colours_of(arms_of(grid))
    groups = {}
    for workload in dict.fromkeys(place.workload for place in grid):
        places = [place for place in grid if place.workload == workload]
        traces = [_frontier_line(grid, places, arm, key, colours[arm]) for arm in colours]
        groups[workload] = [trace for trace in traces if trace["x"]]
    return _figure(groups, "output tokens/s (to the right: more)", f"{title} (down: better)")


def _frontier_line(grid: Grid, places: Sequence[Place], arm: str, key: str, colour: str) -> Trace:
    points = []
    for place in places:
        x = spreads_of(grid[place], "output_throughput").get(arm)
        y = spreads_of(grid[place], key).get(arm)
        if x is not None and y is not None:
            points.append((x, y, f"{place.load:g} {place.unit}"))
    return {
        "type": "scatter",
        "mode": "lines+markers+text",
        "name": arm,
        "x": [x.median for x, _, _ in points],
        "y": [y.median for _, y, _ in points],
        "error_x": _bars([x for x, _, _ in points]),
        "error_y": _bars([y for _, y, _ in points]),
        "text": [label.split()[0] for _, _, label in points],
        "hovertext": [f"{arm}, {label}: {x} tokens/s, {y}" for x, y, label in points],
        "hoverinfo": "text",
        "textposition": "top center",
        "marker": {"color": colour, "size": 8},
        "line": {"color": colour},
    }


def _bars(spreads: Sequence[Any]) -> dict[str, Any]:
    return {
        "type": "data",
        "symmetric": False,
        "array": [spread.high - spread.median for spread in spreads],
        "arrayminus": [spread.median - spread.low for spread in spreads],
        "thickness": 1,
        "width": 3,
    }


def distribution(grid: Grid, read: ReadRecords, key: str, title: str) -> Figure | None:
    """Cumulative distribution of one latency, seeds pooled: what share of values is at most x."""
    colours = colours_of(arms_of(grid))
    groups = {}
    for place, arms in grid.items():
        lines = []
        for arm, rows in arms.items():
            values = [v for row in rows for v in latency_values_s(read(row))[key]]
            if values:
                lines.append(_distribution_line(arm, values, colours[arm]))
        groups[str(place)] = lines
    figure = _figure(groups, f"{title}, ms", "share of values at most this")
    if figure is not None:
        figure["layout"]["yaxis"]["range"] = [0, 1.02]
        figure["layout"]["xaxis"]["rangemode"] = "tozero"
    return figure


def _distribution_line(arm: str, values_s: Sequence[float], colour: str) -> Trace:
    shares = np.linspace(0.0, 1.0, min(_NUM_QUANTILES, max(2, len(values_s))))
    return {
        "type": "scatter",
        "mode": "lines",
        "name": f"{arm} ({len(values_s):,} values)",
        "x": [round(1000.0 * float(value), 3) for value in np.quantile(values_s, shares)],
        "y": [round(float(share), 4) for share in shares],
        "line": {"color": colour},
    }


def timeline(grid: Grid, read: ReadRecords) -> Figure | None:
    """Where each request's time went, as its server told it or else as the client saw it: the first seed of each arm
    and load.
    """
    groups = {}
    for place, arms in grid.items():
        for arm, rows in arms.items():
            records = sorted(read(rows[0]), key=lambda record: record.scheduled_s)[:_NUM_TIMELINE]
            groups[f"{arm}: {place}"] = _timeline_bars(records)
    figure = _figure(groups, "seconds since the run's start", "request, in order of arrival")
    if figure is not None:
        figure["layout"] |= {"barmode": "overlay", "height": 640}
        figure["layout"]["yaxis"] |= {"autorange": "reversed", "tickformat": "d"}
    return figure


def _timeline_bars(records: Sequence[Record]) -> list[Trace]:
    found: dict[str, list[tuple[int, float, float]]] = {phase: [] for phase in _COLOURS_OF_PHASES}
    for number, record in enumerate(records):
        for phase, begin_s, end_s in phases_of(record):
            if end_s > begin_s:
                found[phase].append((number, begin_s, end_s))
    return [
        {
            "type": "bar",
            "orientation": "h",
            "name": phase,
            "y": [number for number, _, _ in bars],
            "base": [round(begin_s, 4) for _, begin_s, _ in bars],
            "x": [round(end_s - begin_s, 4) for _, begin_s, end_s in bars],
            "hovertext": [f"{phase}: {1000 * (end_s - begin_s):.1f} ms" for _, begin_s, end_s in bars],
            "hoverinfo": "text",
            "marker": {"color": _COLOURS_OF_PHASES[phase]},
        }
        for phase, bars in found.items()
        if bars
    ]


def phases_of(record: Record) -> list[tuple[str, float, float]]:
    """(phase, begin, end) in seconds of the run's clock, without gaps from the scheduled arrival to the end.

    The client sees three borders: first token, second token, end. Queue and prefill lie before the first; a handoff is
    hidden between the first and the second, since prefill sends the first token itself. Where the server told its
    stages, these stand instead, around the first token.
    """
    late, first, second, others, failed = PHASES
    end_s = record.end_s if record.end_s is not None else record.scheduled_s
    if record.sent_s is None:
        return [(failed, record.scheduled_s, end_s)]
    found = [(late, record.scheduled_s, record.sent_s)]
    if ttft_s(record) is None:
        return [*found, (failed if record.outcome != "ok" else first, record.sent_s, end_s)]
    first_s = record.chunk_times_s[0]
    if record.outcome == "ok" and record.stages is not None and record.stages.keys() >= {"queue", "prefill"}:
        return [*found, *_stages_of(record.stages, record.sent_s, first_s, end_s)]
    # A chunk may bring the second token together with the first; then there is no border between them.
    second_s = next((time_s for time_s in record.chunk_times_s[1:] if time_s > first_s), end_s)
    second_s = first_s if record.chunk_tokens[0] > 1 else second_s
    last = failed if record.outcome != "ok" else others
    return [*found, (first, record.sent_s, first_s), (second, first_s, second_s), (last, second_s, end_s)]


def _stages_of(
    stages: Mapping[str, float], sent_s: float, first_s: float, end_s: float
) -> list[tuple[str, float, float]]:
    """A server's durations on the client's clock: backwards and forwards from the first token, which both know.

    What is left after sending is the network, and reading the request. Clocks may disagree a little: a border never
    leaves its neighbours.
    """
    way, queue, prefill, transfer, decode = STAGE_PHASES
    placed_s = max(sent_s, first_s - stages["prefill"])
    arrived_s = max(sent_s, placed_s - stages["queue"])
    moved_s = min(end_s, first_s + stages.get("handoff", 0.0))
    return [
        (way, sent_s, arrived_s),
        (queue, arrived_s, placed_s),
        (prefill, placed_s, first_s),
        (transfer, first_s, moved_s),
        (decode, moved_s, end_s),
    ]


def attainment(grid: Grid) -> Figure | None:
    """Share of offered requests within the promise against the offered rate, with goodput marks."""
    colours = colours_of(arms_of(grid))
    groups: dict[str, list[Trace]] = {}
    for workload in dict.fromkeys(place.workload for place in grid):
        places = [p for p in grid if p.workload == workload and p.unit == "requests/s"]
        traces: list[Trace] = []
        for arm, colour in colours.items():
            for key, dash, note in (("attainment", "solid", ""), ("attainment_ttft", "dot", ", TTFT only"),
                                    ("attainment_tpot", "dash", ", TPOT only")):  # fmt: skip
                traces += _attainment_line(grid, places, arm, key, (colour, dash, note))
            traces += _goodput_marks(grid, workload, arm, colour)
        groups[workload] = traces
    figure = _figure(groups, "offered requests/s", "share of offered requests within the promise")
    if figure is not None:
        figure["layout"]["yaxis"]["range"] = [-0.02, 1.05]
        figure["layout"]["xaxis"]["rangemode"] = "tozero"
        figure["layout"]["shapes"] = [
            {
                "type": "line",
                "xref": "paper",
                "x0": 0,
                "x1": 1,
                "y0": target,
                "y1": target,
                "line": {"color": "#888", "width": 1, "dash": "dot"},
            }
            for target in TARGETS
        ]
    return figure


def _attainment_line(
    grid: Grid, places: Sequence[Place], arm: str, key: str, style: tuple[str, str, str]
) -> list[Trace]:
    colour, dash, note = style
    points = [
        (place.load, spread)
        for place in places
        if (spread := spreads_of(grid[place], key).get(arm)) is not None
    ]
    if not points:
        return []
    return [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": arm + note,
            "legendgroup": arm,
            "x": [load for load, _ in points],
            "y": [spread.median for _, spread in points],
            "error_y": _bars([spread for _, spread in points]),
            "line": {"color": colour, "dash": dash, "width": 1 if note else 2.5},
            "marker": {"size": 4 if note else 8},
        }
    ]


def _goodput_marks(grid: Grid, workload: str, arm: str, colour: str) -> list[Trace]:
    marks = [(target, goodput_of(grid, workload, arm, target)) for target in TARGETS]
    known = [(target, rate) for target, rate in marks if rate]
    if not known:
        return []
    return [
        {
            "type": "scatter",
            "mode": "markers+text",
            "name": f"{arm}, goodput",
            "legendgroup": arm,
            "x": [rate for _, rate in known],
            "y": [target for target, _ in known],
            "text": [f"goodput@{target * 100:g} = {rate:g}/s" for target, rate in known],
            "textposition": "bottom left",
            "marker": {"symbol": "star", "size": 14, "color": colour, "line": {"color": "#000", "width": 1}},
        }
    ]


def _figure(groups: Mapping[str, Sequence[Trace]], x_title: str, y_title: str) -> Figure | None:
    """One group at a time; the last one, the highest load, first."""
    named = [(name, traces) for name, traces in groups.items() if traces]
    if not named:
        return None
    shown = len(named) - 1
    data = [
        {**trace, "visible": index == shown} for index, (_, traces) in enumerate(named) for trace in traces
    ]
    layout: dict[str, Any] = {
        "height": _HEIGHT,
        "margin": {"l": 70, "r": 20, "t": 50, "b": 55},
        "xaxis": {"title": {"text": x_title}},
        "yaxis": {"title": {"text": y_title}},
        "legend": {"orientation": "h", "y": -0.22},
        "hovermode": "closest",
        "showlegend": True,
    }
    if len(named) > 1:
        owners = [index for index, (_, traces) in enumerate(named) for _ in traces]
        buttons = [
            {"label": name, "method": "update", "args": [{"visible": [owner == index for owner in owners]}]}
            for index, (name, _) in enumerate(named)
        ]
        layout["updatemenus"] = [
            {"buttons": buttons, "active": shown, "x": 0, "xanchor": "left", "y": 1.02, "yanchor": "bottom"}
        ]
    return {"data": data, "layout": layout}
