"""What the server says of itself: its Prometheus counters before and after a run, where it has `/metrics`.

A server without them, or with other names, costs only the keys that they would have given.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from dataclasses import dataclass, field

import aiohttp

from benchmarks.client import Client

_SAMPLE = re.compile(r"^(\w+)(?:\{(.*)\})?\s+(\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

_EXPOSED = "baton_handoff_exposed_seconds"


@dataclass(slots=True)
class Snapshot:
    """Sums over labels by name; `buckets[name][upper bound]` of histograms; number of workers that are ready."""

    sums: dict[str, float] = field(default_factory=dict)
    buckets: dict[str, dict[float, float]] = field(default_factory=dict)
    num_ready: int = 0


def parse(text: str) -> Snapshot:
    """Prometheus' text format; lines that are none are skipped."""
    sums: defaultdict[str, float] = defaultdict(float)
    buckets: defaultdict[str, defaultdict[float, float]] = defaultdict(lambda: defaultdict(float))
    num_ready = 0
    for line in text.splitlines():
        match = _SAMPLE.match(line)
        if match is None:
            continue
        name, labels, shown = match.groups()
        try:
            value = float(shown)
        except ValueError:
            continue
        sums[name] += value
        if name.endswith("_bucket"):
            bound = dict(_LABEL.findall(labels or "")).get("le", "+Inf")
            buckets[name.removesuffix("_bucket")][float(bound)] += value
        elif name == "baton_worker_ready":
            num_ready += value == 1
    return Snapshot(dict(sums), {name: dict(values) for name, values in buckets.items()}, num_ready)


async def scrape(client: Client) -> Snapshot | None:
    """None if the server has no metrics."""
    try:
        status, body = await client.get("/metrics")
    except (aiohttp.ClientError, TimeoutError):
        return None
    return parse(body.decode("utf-8", "replace")) if status == 200 else None


def changes(before: Snapshot | None, after: Snapshot | None) -> dict[str, float | int | None]:
    """Keys of a run's row: workers, KV moved and the time it took beyond compute, as far as the server reports it."""
    if before is None or after is None or not after.num_ready:
        return {}

    def grown(name: str) -> float:
        return after.sums.get(name, 0.0) - before.sums.get(name, 0.0)

    count = grown(f"{_EXPOSED}_count")
    bounds = {
        bound: value - before.buckets.get(_EXPOSED, {}).get(bound, 0.0)
        for bound, value in after.buckets.get(_EXPOSED, {}).items()
    }
    return {
        "num_workers": after.num_ready,
        "kv_handoffs": int(count),
        "kv_bytes": int(grown("baton_handoff_bytes_total")),
        "kv_transfer_ms_mean": 1000.0 * grown(f"{_EXPOSED}_sum") / count if count else None,
        "kv_transfer_ms_p50": _quantile_ms(bounds, 0.5),
        "kv_transfer_ms_p99": _quantile_ms(bounds, 0.99),
        "retries": int(grown("baton_continuations_total")),
        "preemptions": int(grown("baton_worker_preemptions_total")),
    }


def _quantile_ms(bounds: dict[float, float], quantile: float) -> float | None:
    """Prometheus' estimate: linear within the bucket; its lower bound in the last, which has no end."""
    total = bounds.get(math.inf, 0.0)
    if not total:
        return None
    rank, lower_s, lower_count = quantile * total, 0.0, 0.0
    for upper_s, count in sorted(bounds.items()):
        if count >= rank:
            if math.isinf(upper_s):
                break
            return 1000.0 * (lower_s + (upper_s - lower_s) * (rank - lower_count) / (count - lower_count))
        lower_s, lower_count = upper_s, count
    return 1000.0 * lower_s
