"""From records to numbers, by the field's definitions. Pure; nothing here reads a clock.

With t_0 the scheduled arrival, t_i the client's receive time of output token i, n the token count of the usage:

    TTFT   t_1 − t_0                           first token with text, reasoning included
    TTST   t_2 − t_1                           a KV transfer behind the first token hides here
    TPOT   (t_n − t_1) / (n − 1)               none for n < 2
    ITL    t_(i+1) − t_i, pooled over tokens   tokens of one chunk arrive together: one gap, then zeros
    ICL    the same over chunks                what `vllm bench serve` calls itl
    TBT    mean of a request's worst 10% ITLs  Mooncake
    E2E    end − t_0
    attainment   good requests within TTFT and TPOT / requests OFFERED, be they refused, broken, cancelled or late.
                 A request with fewer than two tokens passes TPOT and is left out of TPOT's percentiles.

Sources: vLLM's `bench serve` (names of keys, conditions), AIPerf (TTST, inter-chunk latency), DistServe (attainment),
Mooncake (TBT).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from benchmarks.records import Record

Number = float | int | None
PERCENTILES = (50.0, 90.0, 95.0, 99.0)


def ttft_s(record: Record) -> float | None:
    return record.chunk_times_s[0] - record.scheduled_s if record.chunk_times_s else None


def token_times_s(record: Record) -> list[float]:
    """Receive time of each token that came with a chunk."""
    return [
        time_s
        for time_s, count in zip(record.chunk_times_s, record.chunk_tokens, strict=True)
        for _ in range(count)
    ]


def ttst_s(record: Record) -> float | None:
    """Gap between the first and the second token; 0 if one chunk brought both."""
    times_s = token_times_s(record)
    return times_s[1] - times_s[0] if len(times_s) >= 2 else None


def tpot_s(record: Record) -> float | None:
    num_tokens = record.num_output_tokens
    if num_tokens < 2 or not record.chunk_times_s:
        return None
    return (record.chunk_times_s[-1] - record.chunk_times_s[0]) / (num_tokens - 1)


def itls_s(record: Record, start_s: float = -math.inf, end_s: float = math.inf) -> list[float]:
    """Gaps between successive tokens; with bounds, those that end in [start_s, end_s)."""
    return [after - before for before, after in pairwise(token_times_s(record)) if start_s <= after < end_s]


def chunk_gaps_s(record: Record) -> list[float]:
    return [after - before for before, after in pairwise(record.chunk_times_s)]


def worst_gap_s(record: Record, share: float = 0.1) -> float | None:
    """Mean of the longest `share` of a request's ITLs, at least one."""
    gaps = sorted(itls_s(record), reverse=True)
    if not gaps:
        return None
    worst = gaps[: max(1, math.ceil(len(gaps) * share - 1e-9))]
    return sum(worst) / len(worst)


def e2e_s(record: Record) -> float | None:
    return None if record.end_s is None else record.end_s - record.scheduled_s


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Linear between the two nearest ranks; None of nothing."""
    return float(np.percentile(values, percent)) if len(values) else None


@dataclass(frozen=True, slots=True)
class Slo:
    """What is promised to a user; None: no promise."""

    ttft_s: float | None = None
    tpot_s: float | None = None

    def meets_ttft(self, record: Record) -> bool:
        value = ttft_s(record)
        return value is not None and (self.ttft_s is None or value <= self.ttft_s)

    def meets_tpot(self, record: Record) -> bool:
        value = tpot_s(record)
        return value is None or self.tpot_s is None or value <= self.tpot_s


@dataclass(frozen=True, slots=True)
class Attainment:
    """Counts of offered requests; shares are None if none was offered."""

    num_offered: int
    num_both: int
    num_ttft: int
    num_tpot: int

    @property
    def both(self) -> float | None:
        return self._share(self.num_both)

    @property
    def ttft(self) -> float | None:
        return self._share(self.num_ttft)

    @property
    def tpot(self) -> float | None:
        return self._share(self.num_tpot)

    def _share(self, count: int) -> float | None:
        return count / self.num_offered if self.num_offered else None


def attainment(records: Iterable[Record], slo: Slo) -> Attainment:
    records = list(records)
    good = [record for record in records if record.is_good and record.num_output_tokens]
    return Attainment(
        len(records),
        sum(slo.meets_ttft(record) and slo.meets_tpot(record) for record in good),
        sum(slo.meets_ttft(record) for record in good),
        sum(slo.meets_tpot(record) for record in good),
    )


@dataclass(frozen=True, slots=True)
class Window:
    """Which arrivals count. Ramp and drain are cut by arrival, never by finish: that would keep the fast ones only."""

    start_s: float = 0.0
    end_s: float = math.inf

    def holds(self, record: Record) -> bool:
        return self.start_s <= record.scheduled_s < self.end_s

    @classmethod
    def trimmed(cls, records: Iterable[Record], ramp_s: float, drain_s: float) -> Window:
        """Without the first `ramp_s` and the last `drain_s` of arrivals."""
        last_s = max((record.scheduled_s for record in records), default=0.0)
        return cls(ramp_s, last_s - drain_s if drain_s > 0 else math.inf)


def tokens_between(records: Iterable[Record], start_s: float, end_s: float) -> int:
    """Output tokens that reached the client in [start_s, end_s), whichever request they belong to."""
    return sum(
        count
        for record in records
        for time_s, count in zip(record.chunk_times_s, record.chunk_tokens, strict=True)
        if start_s <= time_s < end_s
    )


def peak_tokens_per_s(records: Iterable[Record]) -> int:
    """Most tokens received in one whole second of the run's clock."""
    per_second: Counter[int] = Counter()
    for record in records:
        for time_s, count in zip(record.chunk_times_s, record.chunk_tokens, strict=True):
            per_second[math.floor(time_s)] += count
    return max(per_second.values(), default=0)


def peak_concurrency(records: Iterable[Record]) -> int:
    """Most requests between their sending and their end at once."""
    events = []
    for record in records:
        if record.sent_s is not None and record.end_s is not None:
            events += [(record.sent_s, 1), (record.end_s, -1)]
    peak = current = 0
    for _, step in sorted(events):  # at one moment an end (−1) comes before a start
        current += step
        peak = max(peak, current)
    return peak


_PER_REQUEST: dict[str, Callable[[Record], float | None]] = {
    "ttft": ttft_s,
    "ttst": ttst_s,
    "tpot": tpot_s,
    "tbt": worst_gap_s,
    "e2el": e2e_s,
}


def latency_values_s(records: Iterable[Record]) -> dict[str, list[float]]:
    """Metric -> values of complete requests: one per request, and pooled gaps for `itl` and `icl`."""
    done = [record for record in records if record.outcome == "ok"]
    values = {
        name: [value for record in done if (value := measure(record)) is not None]
        for name, measure in _PER_REQUEST.items()
    }
    values["itl"] = [gap for record in done for gap in itls_s(record)]
    values["icl"] = [gap for record in done for gap in chunk_gaps_s(record)]
    return values


def spread_ms(name: str, values_s: Sequence[float], percentiles: Sequence[float]) -> dict[str, Number]:
    """`mean_ttft_ms`, `median_…`, `std_…`, `max_…`, `p99_…`; all None of nothing."""
    ms = np.asarray(values_s, dtype=np.float64) * 1000.0
    some = len(ms) > 0
    spread: dict[str, Number] = {
        f"mean_{name}_ms": float(ms.mean()) if some else None,
        f"median_{name}_ms": float(np.median(ms)) if some else None,
        f"std_{name}_ms": float(ms.std()) if some else None,
        f"max_{name}_ms": float(ms.max()) if some else None,
    }
    for percent in percentiles:
        spread[f"p{percent:g}_{name}_ms"] = float(np.percentile(ms, percent)) if some else None
    return spread


def summarize(
    records: Iterable[Record],
    slo: Slo | None = None,
    window: Window | None = None,
    num_workers: int | None = None,
    percentiles: Sequence[float] = PERCENTILES,
) -> dict[str, Number]:
    """One flat row of a run: vLLM's keys, and ours. Latencies are those of complete requests in the window.

    `duration` runs from the first counted arrival to the last counted end, as vLLM's does; `steady_output_throughput`
    counts what reached the client between the window's bounds from any request, which no drain dilutes.
    """
    records = list(records)
    counted = [record for record in records if (window or Window()).holds(record)]
    row = {**_counts(counted), **_throughputs(records, counted, num_workers)}
    for name, values_s in latency_values_s(counted).items():
        row.update(spread_ms(name, values_s, percentiles))
    lags_s = [lag for record in counted if (lag := record.send_lag_s) is not None]
    row["p99_send_lag_ms"] = _ms(percentile(lags_s, 99))
    row["max_send_lag_ms"] = _ms(max(lags_s, default=None))
    if slo is not None:
        shares = attainment(counted, slo)
        duration = row["duration"] or 0.0
        row |= {
            "slo_ttft_ms": _ms(slo.ttft_s),
            "slo_tpot_ms": _ms(slo.tpot_s),
            "attainment": shares.both,
            "attainment_ttft": shares.ttft,
            "attainment_tpot": shares.tpot,
            "request_goodput": shares.num_both / duration if duration else None,
        }
    return row


def _counts(counted: Sequence[Record]) -> dict[str, Number]:
    outcomes = Counter(record.outcome for record in counted)
    done = [record for record in counted if record.outcome == "ok"]
    known = [record for record in done if record.cached_tokens is not None]
    hits = sum(record.cached_tokens or 0 for record in known)
    known_input = sum(record.num_input_tokens for record in known)
    return {
        "offered": len(counted),
        "completed": outcomes["ok"],
        "failed": len(counted) - outcomes["ok"],
        "cancelled": outcomes["cancelled"],
        "timed_out": outcomes["timeout"],
        "rejected": sum(record.is_rejected for record in counted),
        "wrong_length": sum(not record.has_right_length for record in done),
        "wrong_input_length": sum(
            record.prompt_tokens is not None
            and record.asked_input_tokens is not None
            and record.prompt_tokens != record.asked_input_tokens
            for record in done
        ),
        "total_input_tokens": sum(record.num_input_tokens for record in done),
        "total_output_tokens": sum(record.num_output_tokens for record in done),
        "prefix_hit_tokens": hits if known else None,
        "prefix_hit_ratio": hits / known_input if known_input else None,
    }


def _throughputs(
    records: Sequence[Record], counted: Sequence[Record], num_workers: int | None
) -> dict[str, Number]:
    begin_s = min((record.scheduled_s for record in counted), default=0.0)
    end_s = max((record.end_s for record in counted if record.end_s is not None), default=begin_s)
    arrivals_end_s = max((record.scheduled_s for record in counted), default=begin_s)
    duration = end_s - begin_s
    done = [record for record in counted if record.outcome == "ok"]
    num_output = sum(record.num_output_tokens for record in done)
    num_input = sum(record.num_input_tokens for record in done)

    def per_s(count: float, seconds: float = duration) -> float | None:
        return count / seconds if seconds > 0 else None

    output = per_s(num_output)
    steady_s = arrivals_end_s - begin_s
    return {
        "duration": duration,
        "request_throughput": per_s(len(done)),
        "output_throughput": output,
        "total_token_throughput": per_s(num_input + num_output),
        "steady_output_throughput": per_s(tokens_between(records, begin_s, arrivals_end_s), steady_s),
        "max_output_tokens_per_s": peak_tokens_per_s(counted),
        "max_concurrent_requests": peak_concurrency(counted),
        "num_workers": num_workers,
        "output_throughput_per_worker": output / num_workers if output and num_workers else None,
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1000.0
