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
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Literal, NamedTuple

from policy.chunks import Cadence
from policy.fleet import FleetView, WorkerState, drawn
from policy.link_model import LinkModel

_NO_TIME = "its streams leave no time"
_gap = itemgetter(0)
_free, _price, _ttft = attrgetter("prefill_free_s"), attrgetter("price_s"), attrgetter("ttft_s")

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
    time that counts as safe. `horizon_s`: reading that a worker may have in hand when it is given more; one with
    streams may have `horizon_gaps` of their token gap, since a step that is not filled costs nearly as much.
    A pool of up to `small_pool` is looked at whole; of a larger one `min_looks`, at random, and more, up to
    `max_looks`, until `shortlist` of them take a prompt. `shortlist`: readers, and writers that read, whose options are
    predicted, besides those that hold a prefix. `least_price`: of an idle reader's second; `wait_price`: of a second of
    waiting for the first token, in device seconds.
    """

    gap_share: float = 0.92
    leftover_share: float = 0.7
    ttft_share: float = 0.94
    margin: float = 0.8
    horizon_s: float = 0.02
    horizon_gaps: float = 0.8
    prefill_chunk: int = 4096
    local_chunk: int = 2048
    least_chunk: int = 32
    least_price: float = 0.2
    wait_price: float = 0.05
    small_pool: int = 16
    min_looks: int = 4
    max_looks: int = 64
    shortlist: int = 2
    kv_share: float = 0.95
    bytes_per_token: int = 131072
    overhead_s: float = 0.002
    can_deflect: bool = True

    def opens_s(self, worker: WorkerState) -> float:
        """When `worker` may be given more to read."""
        in_hand_s = self.horizon_s
        if worker.running_streams or worker.promised_streams:
            step_s = self.horizon_gaps * worker.gap_s
            if in_hand_s < step_s < math.inf:
                in_hand_s = step_s
        return worker.prefill_free_s - in_hand_s


class Placer:
    """The rules and what they need to know; keeps nothing between calls."""

    def __init__(self, rules: PlaceRules, links: LinkModel, rng: random.Random) -> None:
        self.rules = rules
        self._links = links
        self._rng = rng

    def place(self, job: Job, fleet: FleetView, now_s: float) -> Decision:
        """The best option now, with all that were weighed. Counts nothing: see `dispatch`."""
        rules, left_s = self.rules, job.deadline_s - now_s
        readers, idle_share = self._readers(job, fleet, now_s)
        if not readers and all(rules.opens_s(worker) > now_s for worker in fleet.decodes):
            return Decision(None, "workers_busy", ())
        # Prefill workers decode before anybody is refused.
        roomy = self._with_room(job, "decode", fleet, now_s) or self._with_room(job, "prefill", fleet, now_s)
        if not roomy:
            return Decision(None, "no_decode_room", ())
        options = self._weighed(job, readers, idle_share, roomy, now_s)
        usable = [option for option in options if not option.drawback]
        safe_s = rules.margin * left_s
        safe = [option for option in usable if option.ttft_s <= safe_s]
        if safe:
            return Decision(min(safe, key=_price), "placed", tuple(options))
        fastest = min(usable, key=_ttft, default=None)
        if fastest is not None and (fastest.ttft_s <= left_s or (job.may_be_late and left_s <= 0)):
            return Decision(fastest, "placed", tuple(options))
        is_open = options and any(rules.opens_s(worker) <= now_s for worker in chain(readers, fleet.decodes))
        return Decision(None, "too_late" if is_open else "workers_busy", tuple(options))

    def _readers(self, job: Job, fleet: FleetView, now_s: float) -> tuple[list[WorkerState], float | None]:
        """(some readers that take a prompt now, the first to be free first; share of all that are idle, about). Share
        None: the fleet has no readers.

        A worker that has enough to do is none: whoever waits for it may find a better one. It is one for whoever has a
        prefix there, though: reading all of it elsewhere may cost more than waiting.
        """
        rules, workers, held = self.rules, fleet.prefills, job.held
        if not workers:
            return [], None
        shortlist = rules.shortlist
        found = []
        num_seen = num_idle = 0
        least = rules.min_looks if len(workers) > rules.small_pool else rules.small_pool
        for worker in drawn(workers, rules.max_looks, self._rng):
            if rules.opens_s(worker) <= now_s:
                found.append(worker)
                num_idle += worker.prefill_free_s <= now_s
            num_seen += 1
            if num_seen >= least and len(found) >= shortlist:
                break
        if len(found) > 1:
            found.sort(key=_free)
        if held:
            found = [worker for worker in found if worker.worker_id not in held][:shortlist]
            found += _holders(job, fleet, "prefill")
        return found, num_idle / num_seen

    def _with_room(
        self, job: Job, role: Literal["prefill", "decode"], fleet: FleetView, now_s: float
    ) -> list[tuple[float, WorkerState]]:
        """(token gap with this stream added, worker) where KV and every resident's promise allow one more, the
        shortest gap first.
        """
        rules, own_s, longest_s = self.rules, job.cadence.tpot_s, job.cadence.longest_step_s
        share = rules.leftover_share if job.is_leftover else rules.gap_share
        kv_share = rules.kv_share
        context = job.prompt_tokens + job.expected_output // 2
        need = job.prompt_tokens + job.expected_output
        found: list[tuple[float, WorkerState]] = []
        num_seen = num_open = 0
        workers = fleet.decodes if role == "decode" else fleet.prefills
        least = rules.min_looks if len(workers) > rules.small_pool else rules.small_pool
        pool: Iterable[WorkerState] = drawn(workers, rules.max_looks, self._rng)
        if job.held:
            others = (worker for worker in pool if worker.worker_id not in job.held)
            pool = chain(_holders(job, fleet, role), others)
        for worker in pool:
            num_seen += 1
            is_open = rules.opens_s(worker) <= now_s
            if num_seen > least:
                if num_open >= rules.shortlist:
                    break
                if not is_open and found:  # it could write, but what lacks is one that reads
                    continue
            num_streams = worker.running_streams + worker.promised_streams
            if num_streams >= worker.max_streams or worker.used_tokens + need > worker.kv_tokens * kv_share:
                continue
            model, limit_s = worker.model, worker.gap_s
            fit = model.decode
            gap_s = (
                fit.base_s
                + fit.decode_s * (num_streams + 1)
                + fit.context_s * (worker.running_context + worker.promised_tokens + context)
            )
            limit_s = share * (limit_s if limit_s < own_s else own_s)
            if gap_s * model.margin <= (limit_s if limit_s < longest_s else longest_s):
                found.append((gap_s, worker))
                num_open += is_open
        found.sort(key=_gap)
        return found

    def _weighed(
        self,
        job: Job,
        readers: list[WorkerState],
        idle_share: float | None,
        roomy: list[tuple[float, WorkerState]],
        now_s: float,
    ) -> list[Option]:
        """First the workers that hold a prefix, all of them, then the first of the others. Of these only such as may be
        cheaper than the best that is in time: reading so many tokens costs something, whatever else is predicted.
        """
        rules, held = self.rules, job.held
        options: list[Option] = []
        price = 1.0 if idle_share is None else max(1.0 - idle_share, rules.least_price)
        at, best = roomy[0], roomy[0][1]
        if not rules.can_deflect and idle_share is not None:
            roomy = []
        limit_s = math.inf
        if held:
            for reader in readers:
                if reader.worker_id in held and reader is not best:
                    options.append(self._remote(job, reader, at, now_s, price))
            for pair in roomy:
                if pair[1].worker_id in held:
                    options.append(self._local(job, pair, now_s))
            safe_s = rules.margin * (job.deadline_s - now_s)
            for option in options:
                if option.price_s < limit_s and option.ttft_s <= safe_s:
                    limit_s = option.price_s
        number, wait_price, size = 0, rules.wait_price, job.prompt_tokens
        for reader in readers:
            if number == rules.shortlist:
                break
            if held and reader.worker_id in held:
                continue
            number += 1
            if reader is not best and size * reader.model.mixed.token_s * (price + wait_price) < limit_s:
                options.append(self._remote(job, reader, at, now_s, price))
        number = 0
        for pair in roomy:
            worker = pair[1]
            if number == rules.shortlist:
                break
            if rules.opens_s(worker) > now_s or (held and worker.worker_id in held):
                continue
            number += 1
            # The streams' steps may hide the device time of all chunks, but not the wait for them.
            if (size * worker.model.mixed.token_s + rules.overhead_s) * wait_price < limit_s:
                options.append(self._local(job, pair, now_s))
        return options

    def _remote(
        self, job: Job, reader: WorkerState, place: tuple[float, WorkerState], now_s: float, price: float
    ) -> Option:
        rules, held, size = self.rules, job.held, job.prompt_tokens
        gap_s, writer = place
        reader_id, writer_id, backlog_s = reader.worker_id, writer.worker_id, reader.prefill_free_s - now_s
        past = num_there = 0
        if held:
            past, num_there = held.get(reader_id, 0), held.get(writer_id, 0)
            past, num_there = min(past, size - 1), min(num_there, size)
        service_s, _ = self._reading(reader, job.cadence, size - past, past, rules.prefill_chunk)
        transfer_s = self._links.predict_s(reader_id, writer_id, (size - num_there) * rules.bytes_per_token)
        ttft_s = (backlog_s if backlog_s > 0.0 else 0.0) + service_s + rules.overhead_s
        price_s = service_s * price + rules.wait_price * (ttft_s + transfer_s)
        drawback = _NO_TIME if service_s == math.inf else ""
        return Option("remote", reader_id, writer_id, ttft_s, gap_s, price_s, service_s, drawback)

    def _local(self, job: Job, place: tuple[float, WorkerState], now_s: float) -> Option:
        rules, size = self.rules, job.prompt_tokens
        gap_s, worker = place
        worker_id, backlog_s = worker.worker_id, worker.prefill_free_s - now_s
        past = min(job.held.get(worker_id, 0), size - 1) if job.held else 0
        service_s, price_s = self._reading(worker, job.cadence, size - past, past, rules.local_chunk)
        ttft_s = (backlog_s if backlog_s > 0.0 else 0.0) + service_s + rules.overhead_s
        price_s += rules.wait_price * ttft_s
        drawback = _NO_TIME if service_s == math.inf else ""
        return Option("local", worker_id, worker_id, ttft_s, gap_s, price_s, service_s, drawback)

    def unread_s(self, worker: WorkerState, cadence: Cadence, num_tokens: int) -> float:
        """How long a worker will read what it has in hand, beside the streams that it has now; infinite where they
        leave no time. `cadence`: of its streams.
        """
        if not num_tokens:
            return 0.0
        rules = self.rules
        if not worker.running_streams:
            return worker.model.prefill_s(num_tokens, 0, rules.prefill_chunk)
        return self._reading(worker, cadence, num_tokens, 0, rules.local_chunk)[0]

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


def _holders(job: Job, fleet: FleetView, role: Literal["prefill", "decode"]) -> list[WorkerState]:
    """Workers of a role, or mixed ones, with a prefix of the prompt."""
    found = (fleet.workers.get(worker_id) for worker_id in job.held)
    return [w for w in found if w is not None and w.is_open and w.role in (role, "mixed")]


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
