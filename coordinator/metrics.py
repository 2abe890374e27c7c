"""The coordinator's metrics: one registry per application, built from the table in contracts/metrics.py.

What the coordinator sees itself is counted as it happens; what workers report is read from their last
heartbeat when somebody asks (`/metrics`), so each series has one writer and a worker that is gone leaves no
stale gauge.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from contracts.metrics import BLOCK_STATES, BY_NAME, METRICS, MetricSpec
from contracts.roles import RoleLabel
from contracts.service import ServiceClass
from coordinator.backend import WorkerStatus
from coordinator.promises import Met

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_CPU = "baton_coordinator_cpu_seconds_total"
_TOKENS, _GAPS = "baton_output_tokens_total", "baton_itl_seconds"
_OF_WORKERS = ("baton_worker_", "baton_link_", "baton_kv_", "baton_role")
_AT_SCRAPE = (_CPU, _TOKENS, _GAPS, *_OF_WORKERS)


class Metrics:
    """Writers by purpose; nobody outside touches a series by name."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}
        self._histograms: dict[str, Histogram] = {}
        self._tokens = _TokenCollector()
        for spec in METRICS:
            if not spec.name.startswith(_AT_SCRAPE):
                self._add(spec)
        self._registry.register(_CpuCollector())
        self._registry.register(self._tokens)

    def _add(self, spec: MetricSpec) -> None:
        if spec.kind == "counter":
            self._counters[spec.name] = Counter(spec.name, spec.help, spec.labels, registry=self._registry)
        elif spec.kind == "gauge":
            self._gauges[spec.name] = Gauge(spec.name, spec.help, spec.labels, registry=self._registry)
        else:
            self._histograms[spec.name] = Histogram(
                spec.name, spec.help, spec.labels, registry=self._registry, buckets=spec.buckets
            )

    def watch_workers(self, workers: Callable[[], Iterable[WorkerStatus]]) -> None:
        """Show these workers at every scrape."""
        self._registry.register(_WorkerCollector(workers))

    def render(self) -> bytes:
        return generate_latest(self._registry)

    def response(self, endpoint: str, status: int) -> None:
        self._counters["baton_http_responses_total"].labels(endpoint, str(status)).inc()

    def error(self, endpoint: str, code: str) -> None:
        self._counters["baton_errors_total"].labels(endpoint, code).inc()

    def running(self, endpoint: str, change: int) -> None:
        self._gauges["baton_requests_running"].labels(endpoint).inc(change)

    def prompt(self, num_tokens: int) -> None:
        self._counters["baton_prompt_tokens_total"].inc(num_tokens)
        self._histograms["baton_prompt_length_tokens"].observe(num_tokens)

    def first_token(self, endpoint: str, ttft_s: float) -> None:
        self._histograms["baton_ttft_seconds"].labels(endpoint).observe(ttft_s)
        self._tokens.first()

    def next_tokens(self, endpoint: str) -> Callable[[float], None]:
        """To be called with the gap before each token that is not the first, in seconds."""
        return self._tokens.gaps(endpoint).add

    def ended(self, endpoint: str, outcome: str, e2e_s: float, num_tokens: int) -> None:
        self._counters["baton_requests_total"].labels(endpoint, outcome).inc()
        self._histograms["baton_e2e_seconds"].labels(endpoint).observe(e2e_s)
        self._histograms["baton_output_length_tokens"].observe(num_tokens)

    def cached(self, num_tokens: int) -> None:
        self._counters["baton_cached_prompt_tokens_total"].inc(num_tokens)

    def waiting(self, service_class: ServiceClass, change: int) -> None:
        self._gauges["baton_queue_requests"].labels(service_class).inc(change)

    def queued(self, service_class: ServiceClass, seconds: float) -> None:
        self._histograms["baton_queue_seconds"].labels(service_class).observe(seconds)

    def refused(self, service_class: ServiceClass, reason: str) -> None:
        self._counters["baton_refusals_total"].labels(service_class, reason).inc()

    def promised(self, service_class: ServiceClass, met: Met) -> None:
        self._counters["baton_promises_total"].labels(service_class, met).inc()

    def placed(self, route: str) -> None:
        self._counters["baton_placements_total"].labels(route).inc()

    def handed_off(self, num_bytes: int, exposed_s: float) -> None:
        self._counters["baton_handoff_bytes_total"].inc(num_bytes)
        self._histograms["baton_handoff_exposed_seconds"].observe(exposed_s)

    def continued(self, reason: str) -> None:
        self._counters["baton_continuations_total"].labels(reason).inc()

    def flipped(self, from_role: RoleLabel, to_role: RoleLabel, reason: str) -> None:
        self._counters["baton_flips_total"].labels(from_role, to_role, reason).inc()

    def migrated(self, outcome: str, pause_s: float | None = None) -> None:
        self._counters["baton_migrations_total"].labels(outcome).inc()
        if pause_s is not None:
            self._histograms["baton_migration_pause_seconds"].observe(pause_s)

    def guarded(self, code: str) -> None:
        self._counters["baton_guard_refusals_total"].labels(code).inc()

    def usage_unwritten(self) -> None:
        self._counters["baton_usage_write_failures_total"].inc()

    def batch_line(self, outcome: str) -> None:
        self._counters["baton_batch_lines_total"].labels(outcome).inc()


class _CpuCollector(Collector):
    def collect(self) -> Iterator[Metric]:
        family = _family(BY_NAME[_CPU])
        family.add_metric((), time.process_time())
        yield family


class _Gaps:
    """Of one endpoint's tokens; written with every token, and so must cost nearly nothing: plain numbers, no locks."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)  # in each bucket, the last one is without a bound
        self.sum_s = 0.0

    def add(self, gap_s: float) -> None:
        self.counts[bisect_left(self._bounds, gap_s)] += 1
        self.sum_s += gap_s


class _TokenCollector(Collector):
    def __init__(self) -> None:
        self._bounds = BY_NAME[_GAPS].buckets
        self._num_first = 0
        self._gaps: dict[str, _Gaps] = {}

    def first(self) -> None:
        self._num_first += 1

    def gaps(self, endpoint: str) -> _Gaps:
        if endpoint not in self._gaps:
            self._gaps[endpoint] = _Gaps(self._bounds)
        return self._gaps[endpoint]

    def collect(self) -> Iterator[Metric]:
        tokens = _family(BY_NAME[_TOKENS])
        tokens.add_metric((), self._num_first + sum(sum(gaps.counts) for gaps in self._gaps.values()))
        yield tokens
        family = HistogramMetricFamily(_GAPS, BY_NAME[_GAPS].help, labels=BY_NAME[_GAPS].labels)
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        for endpoint, gaps in self._gaps.items():
            buckets = list(zip(names, accumulate(gaps.counts), strict=True))
            family.add_metric((endpoint,), buckets, gaps.sum_s)
        yield family


class _WorkerCollector(Collector):
    def __init__(self, workers: Callable[[], Iterable[WorkerStatus]]) -> None:
        self._workers = workers

    def collect(self) -> Iterator[Metric]:
        families = {spec.name: _family(spec) for spec in METRICS if spec.name.startswith(_OF_WORKERS)}
        for worker in self._workers():
            for name, labels, value in _samples(worker):
                families[name].add_metric(labels, value)
        yield from families.values()


def _family(spec: MetricSpec) -> CounterMetricFamily | GaugeMetricFamily:
    kind = CounterMetricFamily if spec.kind == "counter" else GaugeMetricFamily
    return kind(spec.name, spec.help, labels=spec.labels)


def _samples(worker: WorkerStatus) -> Iterator[tuple[str, tuple[str, ...], float]]:
    status = worker.status
    who = (status.worker_id, worker.role)
    yield "baton_role", (status.worker_id, worker.label), 1.0
    yield "baton_worker_ready", who, float(status.is_ready)
    yield "baton_worker_step_age_seconds", who, status.step_age_s
    if status.steps is not None:
        yield "baton_worker_step_error_ratio", who, status.steps.error
    yield "baton_worker_requests", (*who, "running"), status.num_running
    yield "baton_worker_requests", (*who, "waiting"), status.num_waiting
    for state in BLOCK_STATES:
        yield "baton_worker_blocks", (*who, state), getattr(status.audit, state)
    for peer in status.peers:
        link = (status.worker_id, peer.worker_id)
        yield "baton_link_ready", link, float(peer.is_ready)
        if peer.is_ready:
            yield "baton_kv_path", (*link, peer.transport), 1.0
            yield "baton_kv_path_slow", (*link, peer.transport), float(peer.is_slow)
        yield "baton_link_bytes_per_second", (*link, peer.transport), peer.gigabytes_per_s * 1e9
        if peer.link is not None:
            yield "baton_link_error_ratio", link, peer.link.error
    for name, value in status.counters.items():
        # A newer worker may count what this table does not know yet.
        if name in BY_NAME and BY_NAME[name].writer == "worker":
            yield name, who, value
    for name, series in status.labelled.items():
        for key, value in series.items():
            labels = (*who, *key.split(","))
            if name in BY_NAME and len(labels) == len(BY_NAME[name].labels):
                yield name, labels, value
