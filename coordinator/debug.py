"""For operators: `/debug/kv`, the block audit of every worker; `/debug/peers`, the KV paths between them;
`/debug/decisions`, the last placements and plans.

Answers on loopback, or to the admin key. Behind a proxy on the same host (Serve's own, for one) the TCP peer
is always loopback, whoever asked; there the LAST address of X-Forwarded-For counts, because that one was
written by the proxy that speaks to us, while the ones before it are whatever the client sent.
"""

from __future__ import annotations

import hmac
import math
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from starlette.requests import Request

from contracts.errors import AuthenticationError, PermissionDenied
from coordinator.addresses import is_loopback
from coordinator.backend import WorkerAudit, WorkerStatus
from coordinator.planning import PlanRecord
from coordinator.records import Record


def check_debug_access(request: Request, admin_key: str | None, sees_clients: bool = True) -> None:
    """Raises AuthenticationError for a wrong key, PermissionDenied for a caller not known to be local.

    `sees_clients` False: a proxy hides who asks, and may pass on an X-Forwarded-For that the client wrote, so
    neither address nor header is believed.
    """
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    if admin_key is not None and scheme.lower() == "bearer" and key:
        if hmac.compare_digest(key.strip().encode(), admin_key.encode()):
            return
        raise AuthenticationError("expected the admin key but got another one")
    if not (sees_clients and _is_local(request)):
        raise PermissionDenied("expected a caller on this machine, or the admin key (server.admin_key)")


def audit_json(workers: list[WorkerAudit]) -> dict[str, Any]:
    """The documented form: one flat object per worker, then who owns the blocks."""
    return {"workers": [_worker(worker) for worker in workers]}


def decisions_json(records: list[Record], plans: list[PlanRecord], now_s: float) -> dict[str, Any]:
    """One object per request, newest first: its placement, or why it waits or was refused, with the predicted numbers
    of every option in ms, null for what never ends. One per plan: the requests per second that every number of
    readers would carry.
    """
    return {
        "decisions": [_decision(record, now_s) for record in records],
        "plans": [_plan(record, now_s) for record in plans],
    }


def _plan(record: PlanRecord, now_s: float) -> dict[str, Any]:
    plan, mix = record.plan, record.mix
    told: dict[str, Any] = {
        "age_s": round(now_s - record.at_s, 3),
        "verdict": record.verdict,
        "num_times": record.num_times,
        "demand": mix
        and {
            "requests_per_s": round(mix.requests_per_s, 3),
            "prompt_tokens": round(mix.prompt_tokens, 1),
            "new_tokens": round(mix.new_tokens, 1),
            "output_tokens": round(mix.output_tokens, 1),
            "new_tokens_with_refused": round(mix.of_all().new_tokens, 1),
        },
    }
    if plan is None:
        return told
    return told | {
        "reason": plan.reason,
        "num_prefill": plan.num_prefill,
        "wanted_prefill": plan.wanted_prefill,
        "wanted_workers": plan.num_workers,
        "requests_per_s_by_num_prefill": {str(n): round(rate, 3) for n, rate in plan.rates.items()},
        "flips": [
            {"worker_id": flip.worker_id, "role": flip.role, "epoch": flip.epoch} for flip in plan.flips
        ],
    }


def _decision(record: Record, now_s: float) -> dict[str, Any]:
    placement = record.placement
    return {
        "request_id": record.request_id,
        "age_s": round(now_s - record.at_s, 3),
        "class": record.service_class,
        "prompt_tokens": record.prompt_tokens,
        "ttft_ms": None if record.ttft_s is None else _ms(record.ttft_s),
        "itl_ms": None if record.itl_s is None else _ms(record.itl_s),
        "left_ms": None if record.left_s is None else _ms(record.left_s),
        "slack_ms": None if record.slack_s is None else _ms(record.slack_s),
        "rule": record.rule,
        "verdict": record.verdict,
        "route": None if placement is None else ("remote" if placement.prefill_id else "local"),
        "prefill_id": placement.prefill_id if placement else None,
        "decode_id": placement.decode_id if placement else None,
        "options": [
            {
                "kind": option.kind,
                "prefill_id": option.prefill_id,
                "decode_id": option.decode_id,
                "ttft_ms": _ms(option.ttft_s),
                "gap_ms": _ms(option.gap_s),
                "price_ms": _ms(option.price_s),
                "drawback": option.drawback,
            }
            for option in record.options
        ],
    }


def _ms(seconds: float) -> float | None:
    return round(1000.0 * seconds, 3) if math.isfinite(seconds) else None


def peers_json(workers: Iterable[WorkerStatus]) -> dict[str, Any]:
    """Every KV connection as its sending side sees it: path, speed, warnings, and what happened lately; and what each
    worker has learnt about its steps.
    """
    return {"workers": [_peers(worker) for worker in workers]}


def _peers(worker: WorkerStatus) -> dict[str, Any]:
    status = worker.status
    return {
        "worker_id": status.worker_id,
        "role": worker.role,
        "label": worker.label,
        "incarnation": status.incarnation,
        "is_ready": status.is_ready,
        "reason": status.reason,
        "steps": None if status.steps is None else asdict(status.steps),
        "slots": status.labelled.get("baton_worker_kv_slots", {}),
        "peers": [asdict(peer) for peer in status.peers],
    }


def _worker(worker: WorkerAudit) -> dict[str, Any]:
    return {
        "worker_id": worker.worker_id,
        "role": worker.role,
        "pid": worker.pid,
        "incarnation": worker.incarnation,
        **asdict(worker.audit),
        "owners": [asdict(owner) for owner in worker.owners],
    }


def _is_local(request: Request) -> bool:
    if request.client is None or not is_loopback(request.client.host):
        return False
    forwarded = request.headers.getlist("x-forwarded-for")
    return not forwarded or is_loopback(forwarded[-1].rpartition(",")[2].strip())
