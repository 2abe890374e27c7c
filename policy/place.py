"""Where a request goes: which worker reads its prompt and which one writes its answer.

    remote  a prefill worker reads, a decode worker writes; what the decode worker lacks is transferred
    local   the decode worker reads the prompt itself, in the time its streams leave over; also the way to a prefix
            that lives there

Every option gets a predicted time to first token, token gap and price. Options that would break a resident's promise
are dropped. Among those in time with some margin the cheapest in device time wins, else the fastest. Idle prefill
workers are cheap, busy ones dear, so answers are disturbed only when that buys something. Affinity acts only through
the predicted time: a held prefix is prompt that need not be read. None is an answer: wait, a later look may find room.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal, NamedTuple

from policy.chunks import Cadence
from policy.fleet import FleetView, WorkerState, sample
from policy.link_model import LinkModel

_NO_TIME = "its streams leave no time"

Verdict = Literal["placed", "no_decode_room", "too_late", "workers_busy"]


@dataclass(frozen=True, slots=True)
class Job:
    """A request as placement sees it. `held`: leading prompt tokens that each worker has. `deadline_s`: of the first
    token, on the caller's clock. `is_leftover`: batch and best effort, which leave room for others.
    `may_be_late`: served even after its deadline, then by the fastest way.
    """

    request_id: str
    prompt_tokens: int
    expected_output: int
    deadline_s: float
    cadence: Cadence
    held: Mapping[str, int] = field(default_factory=dict)
    is_leftover: bool = False
    may_be_late: bool = False

    def split(self, worker_id: str) -> tuple[int, int]:
        """(prompt tokens that the worker need not read, those that it must: one at least)."""
        held = self.held.get(worker_id, 0)
        past = held if held < self.prompt_tokens else self.prompt_tokens - 1
        return past, self.prompt_tokens - past


class Option(NamedTuple):
    """Predicted numbers of one way to serve a request; `drawback` says why it cannot be taken, "" if it can."""

    kind: Literal["remote", "local"]
    prefill_id: str
    decode_id: str
    ttft_s: float
    gap_s: float
    price_s: float
    service_s: float = 0.0
    drawback: str = ""


class Decision(NamedTuple):
    """`options` holds everything that was weighed, for whoever asks why."""

    chosen: Option | None
    verdict: Verdict
    options: tuple[Option, ...]


@dataclass(frozen=True, slots=True)
class PlaceRules:
    """Shares are of a promise: `gap_share` is what a decode step alone may take of the token gap, `leftover_share` the
    same for batch, `ttft_share` what deadlines are made of, because predictions err. `margin`: part of the remaining
    time that counts as safe. `horizon_s`: reading that a worker may have in hand when it is given more.
    `max_candidates`: workers of a large pool that are looked at; `shortlist`: those fully
    weighed, besides holders of a prefix. `least_price`: of an
    idle reader's second; `wait_price`: of a second of waiting for the first token, in device seconds.
    """

    gap_share: float = 0.92
    leftover_share: float = 0.7
    ttft_share: float = 0.94
    margin: float = 0.8
    horizon_s: float = 0.02
    prefill_chunk: int = 4096
    local_chunk: int = 2048
    least_chunk: int = 32
    least_price: float = 0.2
    wait_price: float = 0.05
    max_candidates: int = 6
    shortlist: int = 3
    kv_share: float = 0.95
    bytes_per_token: int = 131072
    overhead_s: float = 0.002
    can_deflect: bool = True


class Placer:
    """The rules and what they need to know; keeps nothing between calls."""

    def __init__(self, rules: PlaceRules, links: LinkModel, rng: random.Random) -> None:
        self.rules = rules
        self._links = links
        self._rng = rng

    def place(self, job: Job, fleet: FleetView, now_s: float) -> Decision:
        """The best option now, with all that were weighed. Counts nothing: see `dispatch`."""
        rules, left_s = self.rules, job.deadline_s - now_s
        open_s = now_s + rules.horizon_s
        pool = self._pool(fleet.prefills, job, fleet, "decode")
        # A worker that has enough to do is no option: whoever waits for it may find a better one.
        # It is one for whoever has a prefix there, though: reading all of it elsewhere may cost more than waiting.
        held = job.held
        readers = [w for w in pool if w.prefill_free_s <= open_s or (held and w.worker_id in held)]
        if not readers and all(worker.prefill_free_s > open_s for worker in fleet.decodes):
            return Decision(None, "workers_busy", ())
        # Prefill workers decode before anybody is refused.
        roomy = self._with_room(job, fleet.decodes, fleet) or self._with_room(job, fleet.prefills, fleet)
        if not roomy:
            return Decision(None, "no_decode_room", ())
        best_gap_s, best = roomy[0]
        price = 1.0
        if pool:
            num_idle = sum(worker.prefill_free_s <= now_s for worker in readers)
            price = max(1.0 - num_idle / len(pool), rules.least_price)
        readers.sort(key=_free)
        options = [
            self._remote(job, worker, best, best_gap_s, now_s, price)
            for number, worker in enumerate(readers)
            if (number < rules.shortlist or worker.worker_id in job.held) and worker is not best
        ]
        if rules.can_deflect or not pool:
            free = [
                pair
                for pair in roomy
                if pair[1].prefill_free_s <= open_s or (held and pair[1].worker_id in held)
            ]
            options += [
                self._local(job, worker, gap_s, now_s)
                for number, (gap_s, worker) in enumerate(free)
                if number < rules.shortlist or worker.worker_id in job.held
            ]
        usable = [option for option in options if not option.drawback]
        safe = [option for option in usable if option.ttft_s <= rules.margin * left_s]
        if safe:
            return Decision(min(safe, key=_price), "placed", tuple(options))
        fastest = min(usable, key=_ttft, default=None)
        if fastest is not None and (fastest.ttft_s <= left_s or (job.may_be_late and left_s <= 0)):
            return Decision(fastest, "placed", tuple(options))
        is_open = options and any(worker.prefill_free_s <= open_s for worker in chain(readers, fleet.decodes))
        return Decision(None, "too_late" if is_open else "workers_busy", tuple(options))

    def _pool(
        self, workers: list[WorkerState], job: Job, fleet: FleetView, other_role: str
    ) -> list[WorkerState]:
        """Some of a role's workers, and with them those that hold a prefix."""
        found = sample(workers, self.rules.max_candidates, self._rng)
        if len(workers) > self.rules.max_candidates and job.held:
            holders = (fleet.workers.get(worker_id) for worker_id in job.held)
            found = found + [w for w in holders if w is not None and w.is_open and w.role != other_role]
        return found

    def _with_room(
        self, job: Job, workers: list[WorkerState], fleet: FleetView
    ) -> list[tuple[float, WorkerState]]:
        """(token gap with this stream added, worker) where KV and every resident's promise allow one more, the
        shortest gap first.
        """
        rules, cadence = self.rules, job.cadence
        share = rules.leftover_share if job.is_leftover else rules.gap_share
        own_s, longest_s = cadence.tpot_s, cadence.longest_step_s
        context = job.prompt_tokens + job.expected_output // 2
        need = job.prompt_tokens + job.expected_output
        found = []
        for worker in self._pool(workers, job, fleet, "prefill"):
            num_streams = worker.running_streams + worker.promised_streams
            if (
                num_streams >= worker.max_streams
                or worker.used_tokens + need > worker.kv_tokens * rules.kv_share
            ):
                continue
            fit = worker.model.decode
            gap_s = (
                fit.base_s
                + fit.decode_s * (num_streams + 1)
                + fit.context_s * (worker.running_context + worker.promised_tokens + context)
            )
            limit_s = share * (worker.gap_s if worker.gap_s < own_s else own_s)
            if gap_s * worker.model.margin <= (limit_s if limit_s < longest_s else longest_s):
                found.append((gap_s, worker))
        found.sort(key=_gap)
        return found

    def _remote(
        self, job: Job, reader: WorkerState, writer: WorkerState, gap_s: float, now_s: float, price: float
    ) -> Option:
        rules = self.rules
        backlog_s = reader.prefill_free_s - now_s if reader.prefill_free_s > now_s else 0.0
        past, num_new = job.split(reader.worker_id)
        service_s, _ = self._reading(reader, job.cadence, num_new, past, rules.prefill_chunk)
        num_bytes = (job.prompt_tokens - job.held.get(writer.worker_id, 0)) * rules.bytes_per_token
        transfer_s = self._links.predict_s(reader.worker_id, writer.worker_id, max(num_bytes, 0))
        ttft_s = backlog_s + service_s + rules.overhead_s
        return Option(
            "remote",
            reader.worker_id,
            writer.worker_id,
            ttft_s,
            gap_s,
            service_s * price + rules.wait_price * (ttft_s + transfer_s),
            service_s,
            _NO_TIME if service_s == math.inf else "",
        )

    def _local(self, job: Job, worker: WorkerState, gap_s: float, now_s: float) -> Option:
        rules = self.rules
        past, num_new = job.split(worker.worker_id)
        service_s, price_s = self._reading(worker, job.cadence, num_new, past, rules.local_chunk)
        backlog_s = worker.prefill_free_s - now_s if worker.prefill_free_s > now_s else 0.0
        ttft_s = backlog_s + service_s + rules.overhead_s
        drawback = _NO_TIME if service_s == math.inf else ""
        return Option(
            "local",
            worker.worker_id,
            worker.worker_id,
            ttft_s,
            gap_s,
            price_s + rules.wait_price * ttft_s,
            service_s,
            drawback,
        )

    def unread_s(self, worker: WorkerState, cadence: Cadence, num_tokens: int) -> float:
        """How long a worker will read what it has in hand, beside its streams; infinite where they leave no time."""
        return self._reading(worker, cadence, num_tokens, 0, self.rules.local_chunk)[0]

    def _reading(
        self, worker: WorkerState, cadence: Cadence, num_new: int, past: int, cap: int
    ) -> tuple[float, float]:
        """(time, device time beyond what the streams take anyway) of a prompt read in the chunks that fit between the
        tokens of the worker's streams; infinite where none fits.
        """
        model, num_streams = worker.model, worker.running_streams + worker.promised_streams
        if not num_streams:
            service_s = model.prefill_s(num_new, past, cap)
            return service_s, service_s
        step_s, longest_s = worker.gap_s * cadence.share, cadence.longest_step_s
        return model.reading_s(
            num_new,
            past,
            (num_streams, worker.running_context + worker.promised_tokens),
            step_s if step_s < longest_s else longest_s,
            cap,
            self.rules.least_chunk,
        )


def dispatch(option: Option, job: Job, fleet: FleetView, now_s: float) -> None:
    """Count the load at once, before any report can."""
    reader, writer = fleet.workers[option.prefill_id], fleet.workers[option.decode_id]
    reader.prefill_free_s = max(reader.prefill_free_s, now_s) + option.service_s
    reader.num_prompts += 1
    writer.promised_streams += 1
    writer.promised_tokens += job.prompt_tokens
    writer.used_tokens += job.prompt_tokens + job.expected_output
    writer.gap_s = min(writer.gap_s, job.cadence.tpot_s)


def joined(worker: WorkerState, job: Job, running_streams: int, running_context: int) -> None:
    """The stream decodes now; the worker's report, which includes it, comes along."""
    worker.promised_streams -= 1
    worker.promised_tokens -= job.prompt_tokens
    worker.running_streams, worker.running_context = running_streams, running_context


def released(worker: WorkerState, job: Job, gap_s: float, was_promised: bool = False) -> None:
    """The stream ended (or, `was_promised`, never began). `gap_s`: the tightest of those that stay."""
    worker.used_tokens -= job.prompt_tokens + job.expected_output
    worker.gap_s = gap_s
    if was_promised:
        worker.promised_streams -= 1
        worker.promised_tokens -= job.prompt_tokens


def _gap(pair: tuple[float, WorkerState]) -> float:
    return pair[0]


def _free(worker: WorkerState) -> float:
    return worker.prefill_free_s


def _price(option: Option) -> float:
    return option.price_s


def _ttft(option: Option) -> float:
    return option.ttft_s
