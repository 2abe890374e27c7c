"""The last word on each of the last requests: where it went, or why it waits or got nothing, with all the numbers.

For `/debug/decisions`. Of options that the policy never made, because it looks for a way and not for reasons, the
reasons are told here (`against`, `without_room`), by the same numbers; nothing is decided by them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from contracts.service import ServiceClass
from coordinator.ask import Ask
from coordinator.placement import Demand, Placement, WorkerView
from policy.fleet import WorkerState
from policy.place import Job, Option, PlaceRules

NUM_RECORDS = 256
_MAX_TOLD = 16  # workers


@dataclass(frozen=True, slots=True)
class Record:
    """What was last said about one request. `rule`: "predicted"; "load", "wait", "refused" or "left" with the reason
    in `verdict`. `left_s`: to the promised first token, `slack_s`: less what reading takes; None without a promise, as
    are `ttft_s` and `itl_s`, the promises. `options`: all that were weighed, and what was left out.
    """

    request_id: str
    at_s: float
    prompt_tokens: int
    left_s: float | None
    rule: str
    verdict: str
    placement: Placement | None
    options: tuple[Option, ...] = ()
    service_class: ServiceClass = "interactive"
    slack_s: float | None = None
    ttft_s: float | None = None
    itl_s: float | None = None


class Records:
    """NUM_RECORDS of them, the newest last."""

    def __init__(self) -> None:
        self._records: dict[str, Record] = {}

    def all(self) -> list[Record]:
        return list(self._records.values())

    def add(
        self,
        ask: Ask,
        at_s: float,
        said: tuple[str, str],
        placement: Placement | None = None,
        options: tuple[Option, ...] | None = None,
    ) -> None:
        """A request that waits is asked about at every change of the fleet: its last answer counts. `said`: the rule
        and the verdict. `options` None: nobody looked anew, so those of the last look stand.
        """
        left_s = ask.left_s if math.isfinite(ask.left_s) else None
        request_id = ask.request.request_id
        before = self._records.pop(request_id, None)
        if options is None:
            options = () if before is None else before.options
        self._records[request_id] = Record(
            request_id,
            at_s,
            ask.request.num_known_tokens,
            left_s,
            *said,
            placement,
            options,
            ask.service.service_class,
            None if left_s is None else left_s - ask.service_s,
            ask.service.ttft_s,
            ask.service.itl_s,
        )
        if len(self._records) > NUM_RECORDS:
            del self._records[next(iter(self._records))]


def against(
    rules: PlaceRules, job: Job, workers: Iterable[WorkerState], weighed: Sequence[Option], now_s: float
) -> tuple[Option, ...]:
    """Of workers of which `weighed` has no option: the gap with this stream added, and what speaks against them."""
    known = {worker_id for option in weighed for worker_id in (option.prefill_id, option.decode_id)}
    told = [worker for worker in workers if worker.worker_id not in known][:_MAX_TOLD]
    return tuple(_against(rules, job, worker, now_s) for worker in told)


def _against(rules: PlaceRules, job: Job, worker: WorkerState, now_s: float) -> Option:
    num_streams = worker.num_streams
    context = worker.context_tokens + job.prompt_tokens + job.expected_output // 2
    gap_s = worker.model.decode_step_s(num_streams + 1, context)
    share = rules.leftover_share if job.is_leftover else rules.gap_share
    allowed_s = min(share * min(worker.gap_s, job.cadence.tpot_s), job.cadence.longest_step_s)
    need, room = job.prompt_tokens + job.expected_output, int(worker.kv_tokens * rules.kv_share)
    faults = []
    if num_streams >= worker.max_streams:
        faults.append(f"all {worker.max_streams} sequences are taken")
    if worker.used_tokens + need > room:
        faults.append(f"{max(room - worker.used_tokens, 0)} tokens of KV are free, {need} expected")
    if gap_s * worker.model.margin > allowed_s:
        margin = f" with a margin of {worker.model.margin - 1.0:.0%}" if worker.model.margin > 1.0 else ""
        faults.append(f"the gap{margin} is above the {1000 * allowed_s:.1f} ms that are allowed")
    if (wait_s := rules.opens_s(worker) - now_s) > 0:
        faults.append(
            f"open for the next prompt in {1000 * wait_s:.0f} ms" if wait_s < math.inf else "never open"
        )
    return Option(
        "local", worker.worker_id, worker.worker_id, math.inf, gap_s, math.inf, 0.0, "; ".join(faults)
    )


def without_room(demand: Demand, decodes: Sequence[WorkerView], avoid: frozenset[str]) -> tuple[Option, ...]:
    """What each worker lacks that a request could be written on."""
    return tuple(
        Option(
            "local",
            view.worker_id,
            view.worker_id,
            math.inf,
            math.inf,
            math.inf,
            0.0,
            _lack(view, demand, avoid),
        )
        for view in decodes[:_MAX_TOLD]
    )


def _lack(view: WorkerView, demand: Demand, avoid: frozenset[str]) -> str:
    if view.worker_id in avoid:
        return "it failed this request"
    if view.num_requests >= view.max_num_seqs:
        return f"all {view.max_num_seqs} sequences are taken"
    if view.num_blocks < demand.max_blocks:
        return f"it has {view.num_blocks} blocks, {demand.max_blocks} may be needed"
    return f"{view.num_available_blocks} blocks are free, {demand.num_blocks} needed"
