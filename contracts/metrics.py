"""Every metric of Baton, in one table: name, kind, labels, buckets, and the one process kind that writes it.

Names are `baton_<what>_<unit>`, counters end in `_total`. Label values come from closed sets: `outcome`,
`code`, `endpoint`, `role`, `state`, `route`, `class`, `met`, `reason` (an error's code, or why a request was refused);
worker ids are bounded by the pools. Workers have no HTTP port of their own: they send their counters in
`Status.counters` (by the name in this table), and the coordinator shows them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]
Writer = Literal["coordinator", "worker"]

SECONDS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    120.0,
    600.0,
)
TOKENS = (1.0, 4.0, 16.0, 64.0, 256.0, 1024.0, 4096.0, 16384.0, 65536.0, 131072.0)

ENDPOINTS = (
    "chat", "completions", "responses", "models", "files", "batches", "health", "ready", "metrics", "debug", "other",
)  # fmt: skip
KV_SLOT_STATES = ("free", "granted", "receiving", "quarantined", "kept")
HANDOFF_DIRECTIONS = ("in", "out")
BLOCK_STATES = ("free", "cached", "running", "reserved", "in_handoff", "quarantined")


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One row. `buckets` only for histograms."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    writer: Writer = "coordinator"


_WORKER = ("worker_id", "role")

METRICS: tuple[MetricSpec, ...] = (
    MetricSpec(
        "baton_coordinator_cpu_seconds_total", "counter", "Processor time of the ingress replica's process."
    ),
    MetricSpec("baton_requests_total", "counter", "Choices ended, by how.", ("endpoint", "outcome")),
    MetricSpec("baton_errors_total", "counter", "Errors shown to clients, by code.", ("endpoint", "code")),
    MetricSpec("baton_http_responses_total", "counter", "HTTP responses.", ("endpoint", "status")),
    MetricSpec("baton_requests_running", "gauge", "HTTP generation requests at work.", ("endpoint",)),
    MetricSpec("baton_prompt_tokens_total", "counter", "Prompt tokens of accepted requests."),
    MetricSpec("baton_cached_prompt_tokens_total", "counter", "Prompt tokens that a prefix cache supplied."),
    MetricSpec("baton_output_tokens_total", "counter", "Tokens drawn."),
    MetricSpec("baton_ttft_seconds", "histogram", "Request to first token.", ("endpoint",), SECONDS),
    MetricSpec("baton_itl_seconds", "histogram", "Between two tokens of one output.", ("endpoint",), SECONDS),
    MetricSpec("baton_e2e_seconds", "histogram", "Request to the end of an output.", ("endpoint",), SECONDS),
    MetricSpec("baton_queue_seconds", "histogram", "Wait for a place, by class.", ("class",), SECONDS),
    MetricSpec("baton_queue_requests", "gauge", "Requests waiting for a place, by class.", ("class",)),
    MetricSpec(
        "baton_refusals_total",
        "counter",
        "Requests that left the line without a place, by class and reason.",
        ("class", "reason"),
    ),
    MetricSpec(
        "baton_promises_total",
        "counter",
        "Outputs that were promised something, by class and by which of both promises were kept.",
        ("class", "met"),
    ),
    MetricSpec("baton_prompt_length_tokens", "histogram", "Prompt length.", (), TOKENS),
    MetricSpec("baton_output_length_tokens", "histogram", "Output length.", (), TOKENS),
    MetricSpec("baton_placements_total", "counter", "Requests placed, by route.", ("route",)),
    MetricSpec(
        "baton_handoff_bytes_total", "counter", "KV bytes of the handoffs of this coordinator's requests."
    ),
    MetricSpec(
        "baton_handoff_exposed_seconds", "histogram", "Transfer not hidden behind compute.", (), SECONDS
    ),
    MetricSpec(
        "baton_continuations_total",
        "counter",
        "Requests that went on elsewhere, by the code of the error that ended their attempt.",
        ("reason",),
    ),
    MetricSpec(
        "baton_migrations_total",
        "counter",
        "Running requests whose KV was to move to another decode worker, by outcome: moved, or stayed, or ended.",
        ("outcome",),
    ),
    MetricSpec(
        "baton_migration_pause_seconds",
        "histogram",
        "Between the last token from the old worker and the first one from the new, of requests that moved.",
        (),
        SECONDS,
    ),
    MetricSpec(
        "baton_guard_refusals_total", "counter", "Answers that an output guard ended, by code.", ("code",)
    ),
    MetricSpec(
        "baton_usage_write_failures_total", "counter", "Writes of the usage ledger to be tried again."
    ),
    MetricSpec("baton_batch_lines_total", "counter", "Batch lines ended, by how.", ("outcome",)),
    MetricSpec("baton_role", "gauge", "1 for the label of the worker.", ("worker_id", "role")),
    MetricSpec(
        "baton_flips_total",
        "counter",
        "Labels that this coordinator, as the one that plans, has changed, by the plan's cause.",
        ("from", "to", "reason"),
    ),
    MetricSpec("baton_worker_ready", "gauge", "1 if the worker is ready.", _WORKER),
    MetricSpec(
        "baton_worker_step_age_seconds", "gauge", "Since the last sign of life of the engine.", _WORKER
    ),
    MetricSpec(
        "baton_worker_step_error_ratio",
        "gauge",
        "Mean relative error of the worker's predictions of its last steps.",
        _WORKER,
    ),
    MetricSpec("baton_worker_requests", "gauge", "Requests on the worker.", (*_WORKER, "state")),
    MetricSpec("baton_worker_blocks", "gauge", "KV blocks by state.", (*_WORKER, "state")),
    MetricSpec(
        "baton_link_bytes_per_second",
        "gauge",
        "Speed of the transfer self-test.",
        ("worker_id", "peer_id", "transport"),
    ),
    MetricSpec(
        "baton_kv_path",
        "gauge",
        "1 for the transport that KV takes between two workers.",
        ("worker_id", "peer_id", "transport"),
    ),
    MetricSpec(
        "baton_kv_path_slow",
        "gauge",
        "1 if the path is far below what such a path promises.",
        ("worker_id", "peer_id", "transport"),
    ),
    MetricSpec(
        "baton_link_error_ratio",
        "gauge",
        "Mean relative error of the predictions of the link's last transfers.",
        ("worker_id", "peer_id"),
    ),
    MetricSpec("baton_link_ready", "gauge", "1 if the link can carry KV.", ("worker_id", "peer_id")),
    MetricSpec("baton_worker_steps_total", "counter", "Engine steps.", _WORKER, writer="worker"),
    MetricSpec("baton_worker_busy_seconds_total", "counter", "Time inside steps.", _WORKER, writer="worker"),
    MetricSpec("baton_worker_prefill_tokens_total", "counter", "Tokens computed.", _WORKER, writer="worker"),
    MetricSpec("baton_worker_decode_tokens_total", "counter", "Tokens decoded.", _WORKER, writer="worker"),
    MetricSpec("baton_worker_lease_expiries_total", "counter", "Leases expired.", _WORKER, writer="worker"),
    MetricSpec("baton_worker_preemptions_total", "counter", "Sequences preempted.", _WORKER, writer="worker"),
    MetricSpec(
        "baton_worker_handoffs_total", "counter", "KV handoffs that ended well.", _WORKER, writer="worker"
    ),
    MetricSpec(
        "baton_worker_handoff_failures_total", "counter", "KV handoffs lost.", _WORKER, writer="worker"
    ),
    MetricSpec(
        "baton_worker_damaged_chunks_total",
        "counter",
        "Pieces of KV that came damaged and were asked for again.",
        _WORKER,
        writer="worker",
    ),
    MetricSpec("baton_worker_handoff_bytes_total", "counter", "KV bytes moved.", _WORKER, writer="worker"),
    MetricSpec(
        "baton_worker_reservations_total",
        "counter",
        "Requests that blocks were granted to.",
        _WORKER,
        writer="worker",
    ),
    MetricSpec(
        "baton_worker_handoff_exposed_seconds_total",
        "counter",
        "Transfer after the end of the prompt's compute.",
        _WORKER,
        writer="worker",
    ),
    MetricSpec(
        "baton_worker_handoff_hidden_seconds_total",
        "counter",
        "Transfer while the prompt was still computed.",
        _WORKER,
        writer="worker",
    ),
    MetricSpec(
        "baton_worker_handoffs_ended_total",
        "counter",
        "Handoffs over, by direction and reason: ok, unneeded, cancelled, or the error's code.",
        (*_WORKER, "direction", "reason"),
        writer="worker",
    ),
    MetricSpec(
        "baton_worker_handoffs_open",
        "gauge",
        "Handoffs under way, by direction and state.",
        (*_WORKER, "direction", "state"),
        writer="worker",
    ),
    MetricSpec(
        "baton_worker_kv_slots",
        "gauge",
        "Receiving staging slots by state; quarantined ones wait for the last bytes of a handoff that is over, kept "
        "ones are granted to a connection for the next handoff's first bytes.",
        (*_WORKER, "state"),
        writer="worker",
    ),
)

BY_NAME: dict[str, MetricSpec] = {spec.name: spec for spec in METRICS}
