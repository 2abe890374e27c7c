"""The last word on each of the last requests: where it went, or why it waits or got nothing, with all the numbers.

For `/debug/decisions`. Of options that the policy never made, because it looks for a way and not for reasons, the
reasons are told here (`against`, `without_room`), by the same numbers; nothing is decided by them, and nothing is
computed for them before somebody asks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from contracts.service import ServiceClass
from coordinator.ask import Ask
from coordinator.placement import Demand, Placement, WorkerView
from policy.fleet import WorkerState
from policy.place import Job, Option, PlaceRules

NUM_RECORDS = 256
_MAX_TOLD = 16  # workers

Reasons = Callable[[], tuple[Option, ...]]
"""What speaks against the workers that were not weighed."""


def no_reasons() -> tuple[Option, ...]:
    return ()


@dataclass(frozen=True, slots=True)
class Record:
    """What was last said about one request. `rule`: "predicted"; "load", "wait", "refused" or "left" with the reason
    in `verdict`. `left_s`: to the promised first token, `slack_s`: less what reading takes; None without a promise, as
    are `ttft_s` and `itl_s`, the promises. `weighed`: all options that the policy made.
    """

    request_id: str
    at_s: float
    prompt_tokens: int
    left_s: float | None
    rule: str
    verdict: str
    placement: Placement | None
    weighed: tuple[Option, ...] = ()
    reasons: Reasons = no_reasons
    service_class: ServiceClass = "interactive"
    slack_s: float | None = None
    ttft_s: float | None = None
    itl_s: float | None = None

    @property
    def options(self) -> tuple[Option, ...]:
        """All that were weighed, and what speaks against what was left out: of the fleet as it was, by what its steps
        are known to take now."""
        return (*self.weighed, *self.reasons())


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
        weighed: tuple[Option, ...] = (),
        reasons: Reasons = no_reasons,
    ) -> None:
        """A request that waits is asked about at every change of the fleet: its last answer counts. `said`: the rule
        and the verdict.
        """
        left_s = ask.left_s if math.isfinite(ask.left_s) else None
        request_id = ask.request.request_id
        self._records.pop(request_id, None)
        self._records[request_id] = Record(
            request_id,
            at_s,
            ask.request.num_known_tokens,
            left_s,
            *said,
            placement,
            weighed,
            reasons,
            ask.service.service_class,
            None if left_s is None else left_s - ask.service_s,
            ask.service.ttft_s,
            ask.service.itl_s,
        )
        if len(self._records) > NUM_RECORDS:
            del self._records[next(iter(self._records))]

    def add_unseen(self, ask: Ask, at_s: float, said: tuple[str, str]) -> None:
        """As `add`, where nobody looked anew: the options of the last look stand."""
        before = self._records.get(ask.request.request_id)
        weighed, reasons = ((), no_reasons) if before is None else (before.weighed, before.reasons)
        self.add(ask, at_s, said, None, weighed, reasons)


def against(
    rules: PlaceRules, job: Job, workers: Iterable[WorkerState], weighed: Sequence[Option], now_s: float
) -> Reasons:
    """Of workers of which `weighed` has no option: the gap with this stream added, and what speaks against them.
    `workers` stay as they are."""
    known = {worker_id for option in weighed for worker_id in (option.prefill_id, option.decode_id)}
    left_out = list(islice((worker for worker in workers if worker.worker_id not in known), _MAX_TOLD))
    return lambda: tuple(_against(rules, job, worker, now_s) for worker in left_out)


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


def without_room(demand: Demand, decodes: Sequence[WorkerView], avoid: frozenset[str]) -> Reasons:
    """What each worker lacks that a request could be written on."""
    views = decodes[:_MAX_TOLD]
    return lambda: tuple(
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
        for view in views
    )


def _lack(view: WorkerView, demand: Demand, avoid: frozenset[str]) -> str:
    if view.worker_id in avoid:
        return "it failed this request"
    if view.num_requests >= view.max_num_seqs:
        return f"all {view.max_num_seqs} sequences are taken"
    if view.num_blocks < demand.max_blocks:
        return f"it has {view.num_blocks} blocks, {demand.max_blocks} may be needed"
    return f"{view.num_available_blocks} blocks are free, {demand.num_blocks} needed"
