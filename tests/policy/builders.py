"""Workers, jobs and models with round numbers."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping

from contracts.roles import RoleLabel
from contracts.service import ServiceClass
from policy.chunks import Cadence
from policy.fleet import WorkerState
from policy.link_model import LinkModel
from policy.place import Job, Placer, PlaceRules
from policy.queue import Waiting
from policy.step_model import Coefficients, StepModel, Work

# 10 ms to read the weights, 100 µs a prompt token, 20 µs a stream, 10 ns a token of context.
DECODE = Coefficients(0.010, decode_s=20e-6, context_s=10e-9)
MIXED = Coefficients(0.005, 100e-6, 1e-9, 100e-6, 10e-9)


def make_model() -> StepModel:
    return StepModel(DECODE, MIXED)


def true_step_s(work: Work) -> float:
    decode_s = DECODE.base_s + DECODE.decode_s * work.num_decodes + DECODE.context_s * work.decode_context
    if not work.new_tokens:
        return decode_s
    fused_s = (
        MIXED.base_s
        + MIXED.token_s * work.new_tokens
        + MIXED.attended_s * work.attended
        + MIXED.decode_s * work.num_decodes
        + MIXED.context_s * work.decode_context
    )
    return max(fused_s, decode_s) if work.num_decodes else fused_s


def make_worker(
    worker_id: str, role: RoleLabel = "mixed", streams: int = 0, context: int = 1000, **changes: float
) -> WorkerState:
    """`context`: tokens of each of its streams, which are promised 40 ms."""
    worker = WorkerState(
        worker_id,
        make_model(),
        role,
        running_streams=streams,
        running_context=streams * context,
        used_tokens=streams * context,
        gap_s=0.040 if streams else math.inf,
    )
    for name, value in changes.items():
        setattr(worker, name, value)
    return worker


def make_job(
    prompt_tokens: int = 1000,
    deadline_s: float = 1.0,
    held: Mapping[str, int] | None = None,
    tpot_s: float = 0.040,
    is_leftover: bool = False,
) -> Job:
    return Job("r", prompt_tokens, 100, deadline_s, Cadence(tpot_s), held or {}, is_leftover)


def make_placer(seed: int = 0, rules: PlaceRules | None = None) -> Placer:
    return Placer(rules or PlaceRules(), LinkModel(0.001, 45e9), random.Random(seed))


def make_waiting(
    request_id: str,
    deadline_s: float = 1.0,
    service_s: float = 0.1,
    arrived_s: float = 0.0,
    tenant: str = "",
    service_class: ServiceClass = "interactive",
    is_kept: bool = False,
    is_resumed: bool = False,
) -> Waiting:
    return Waiting(
        request_id, arrived_s, deadline_s, service_s, 0, tenant, service_class, is_kept, is_resumed
    )
