"""Baton in the simulator: the code of policy/ on a simulated clock. Nothing is decided here, only carried out.

`Features` switches single ideas off, to see what each is worth.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

from benchmarks.sim.cluster import Cluster
from benchmarks.sim.requests import SimRequest
from benchmarks.sim.worker import Reading, SimWorker
from contracts.roles import RoleLabel
from policy.chunks import Cadence, Prompt, StepPlan, plan_step
from policy.fleet import FleetView, WorkerState
from policy.link_model import LinkModel
from policy.place import Decision, Job, Option, Placer, PlaceRules, Verdict, dispatch, joined, released
from policy.planner import Demand, Planner, PlanRules
from policy.queue import Waiting, WaitingQueue
from policy.step_model import StepModel, Work


@dataclass(frozen=True, slots=True)
class Features:
    """`has_fading` off: whoever holds most of a prompt reads it, whatever waiting costs. `model_error`: how wrong the
    step models are at the start; with `is_learning` off they stay so.
    """

    has_deadline_chunks: bool = True
    can_deflect: bool = True
    is_late_binding: bool = True
    is_learning: bool = True
    has_flips: bool = True
    has_affinity: bool = True
    has_fading: bool = True
    has_admission: bool = True
    model_error: float = 0.1
    bank: float = 0.5
    gap_share: float = 0.95


@dataclass(frozen=True, slots=True)
class Layout:
    """What an operator sets. `homes`: the pool of each worker, all mixed at first where there are none; chunks in
    tokens: `read_chunk` of a step without decodes, `local_chunk` as placement expects of one with, `least_chunk` below
    which it expects none.
    """

    homes: tuple[RoleLabel, ...] = ()
    read_chunk: int = 4096
    local_chunk: int = 2048
    least_chunk: int = 32


class DeadlineChunker:
    """plan_step under the tightest deadline of the worker's streams."""

    FIXED = 512  # tokens, where deadlines are switched off
    LEARN_EVERY = 8

    def __init__(self, model: StepModel, cadence: Cadence, features: Features, cap: int) -> None:
        self.gap_s = cadence.gap_s
        self.cap = cap
        self._model = model
        self.longest_s = cadence.longest_step_s
        self._features = features
        self._since = 0

    def plan(self, worker: SimWorker, decodes: Work, now_s: float) -> StepPlan:
        prompts = worker.prompts
        if len(prompts) > 1:
            prompts.sort(key=_deadline)
        pending = [Prompt(reading.left, reading.past) for reading in prompts[:8]]
        budget_s = worker.slack_s(self.gap_s, self.longest_s, now_s)
        cap = self.cap
        if not self._features.has_deadline_chunks and decodes.num_decodes:
            budget_s, cap = math.inf, self.FIXED
        least = 64 if now_s > prompts[0].deadline_s else 0
        return plan_step(self._model, decodes, pending, budget_s, cap, least)

    def observe(self, worker: SimWorker, work: Work, step_s: float) -> None:
        self._since += 1
        if self._features.is_learning and self._since % self.LEARN_EVERY == 0:
            self._model.observe(work, step_s)


def _deadline(reading: Reading) -> float:
    return reading.deadline_s


class Baton:
    """A Controller. `decisions` counts verdicts and kinds of placement."""

    TRIES = 6  # waiting requests looked at before the pump gives up until something changes
    REPUMP_S = (0.005, 0.02)  # not sooner, not later than
    TRIAGE_S = 0.02
    PLAN_S = 1.0

    def __init__(
        self, features: Features, ttft_s: float, tpot_s: float, seed: int = 0, layout: Layout | None = None
    ) -> None:
        self.features = features
        self.layout = layout or Layout()
        self.cadence = Cadence(tpot_s, features.gap_share, features.bank)
        self.decisions: dict[str, int] = {}
        self.roles: list[tuple[float, int]] = []
        self.chunkers: dict[str, DeadlineChunker] = {}
        self._ttft_s = ttft_s
        self._rng = random.Random(seed + 1)
        self._queue = WaitingQueue()
        self._demand = Demand(self.cadence)
        self._jobs: dict[int, tuple[Job, Option]] = {}
        self._reserved: dict[int, int] = {}  # request -> blocks at its writer
        self._waiting: dict[str, tuple[SimRequest, Job]] = {}
        self._blocked_until_s = -math.inf
        self._is_pump_due = False
        self._triaged_s = -math.inf
        self._servers = 1.0
        self._arrivals_s = 0.0
        self._written = 0
        self._states: dict[str, WorkerState] = {}

    def chunker(self, number: int, model: StepModel) -> DeadlineChunker:
        chunker = DeadlineChunker(model, self.cadence, self.features, self.layout.read_chunk)
        self.chunkers[f"w{number}"] = chunker
        homes = self.layout.homes
        self._states[f"w{number}"] = WorkerState(f"w{number}", model, homes[number] if homes else "mixed")
        return chunker

    def start(self, cluster: Cluster) -> None:
        self._cluster = cluster
        device = cluster.setup.device
        for worker in cluster.workers:
            state = self._states[worker.worker_id]
            state.kv_tokens, state.max_streams = device.kv_tokens, device.max_streams
            state.gap_s = self.cadence.tpot_s
        self._fleet = FleetView(self._states.values())
        links = LinkModel(0.001, device.link_bytes_per_s)
        overhead_s, layout = cluster.setup.overhead_s, self.layout
        rules = PlaceRules(
            prefill_chunk=layout.read_chunk,
            local_chunk=layout.local_chunk,
            least_chunk=layout.least_chunk,
            bytes_per_token=device.kv_bytes_per_token,
            overhead_s=overhead_s,
            can_deflect=self.features.can_deflect,
            horizon_s=PlaceRules().horizon_s if self.features.is_late_binding else 1e9,
        )
        self._placer = Placer(rules, links, self._rng)
        self._planner = Planner(PlanRules(max_streams=device.max_streams), device.kv_tokens)
        self._servers = float(len(self._states))
        cluster.call(self.PLAN_S / 2, self._plan)  # all are mixed until the first demand is known

    # --- Controller ---

    def arrive(self, request: SimRequest, now_s: float) -> None:
        self._arrivals_s = now_s
        held = self._held(request)
        most = max(held.values(), default=0)
        self._demand.arrived(request.prompt_tokens, request.prompt_tokens - most, now_s)
        job = Job(
            str(request.number),
            request.prompt_tokens,
            self._demand.expected_output,
            request.arrived_s + self._ttft_s * self._placer.rules.ttft_share,
            self.cadence,
            held,
            may_be_late=not self.features.has_admission,
        )
        model = self._any_state().model
        service_s = model.prefill_s(request.prompt_tokens - most, most) + self._placer.rules.overhead_s
        entry = Waiting(
            job.request_id, now_s, job.deadline_s, service_s, is_kept=not self.features.has_admission
        )
        self._waiting[job.request_id] = (request, job)
        self._queue.add(entry)
        if now_s >= self._blocked_until_s:
            self._pump(now_s)
        else:
            self._try(entry, now_s)  # the others found nothing just now; a short one may

    def prompt_read(self, worker: SimWorker, reading: Reading, now_s: float) -> None:
        request = reading.request
        job, option = self._jobs[request.number]
        state = self._states[worker.worker_id]
        state.num_prompts -= 1
        if option.kind == "local":
            joined(state, job, state.running_streams + 1, state.running_context + job.prompt_tokens)
            return
        if request.output_tokens < 2:
            worker.memory.release(reading.blocks, request.keys, request.key_tokens)
            writer = self._states[option.decode_id]
            released(writer, job, self.cadence.tpot_s, was_promised=True)
            self._demand.finished(1, now_s)
            memory = self._worker(option.decode_id).memory
            blocks = self._reserved.pop(request.number)
            memory.run(blocks)
            memory.release(blocks)
            del self._jobs[request.number]
            request.end(now_s)
            return
        lacking = job.prompt_tokens - job.held.get(option.decode_id, 0)
        arrives_s = self._cluster.transfer_s(worker, lacking, self.layout.read_chunk, now_s)
        self._cluster.call(arrives_s, self._hand_over, worker, reading)

    def worker_changed(self, worker: SimWorker, ended: SimRequest | None, now_s: float) -> None:
        state = self._states[worker.worker_id]
        if ended is not None:
            job, _ = self._jobs.pop(ended.number)
            released(state, job, self.cadence.tpot_s)
            self._demand.finished(ended.output_tokens, now_s)
        state.running_streams, state.running_context = worker.num_streams, worker.context
        if ended is not None:
            return
        was_busy = state.prefill_free_s > now_s
        state.prefill_free_s = now_s + self._placer.unread_s(state, self.cadence, worker.pending_tokens)
        is_open = self._placer.rules.opens_s(state) <= now_s
        if len(self._queue) and is_open and (was_busy or now_s >= self._blocked_until_s):
            self._pump(now_s)

    # --- carrying out ---

    def _pump(self, now_s: float) -> None:
        """Place whoever can be placed, in the queue's order."""
        while len(self._queue):
            if not self._place_one(now_s):
                self._blocked_until_s = self._next_opening_s(now_s)
                if now_s - self._triaged_s >= self.TRIAGE_S:
                    self._triage(now_s)
                if not self._is_pump_due and len(self._queue):
                    self._is_pump_due = True
                    self._cluster.call(self._blocked_until_s, self._pump_again)
                return

    def _place_one(self, now_s: float) -> bool:
        for entry in self._queue.candidates(now_s, self.TRIES):
            verdict = self._try(entry, now_s)
            if verdict == "placed":
                return True
            if verdict == "workers_busy":
                return False  # for all others, too
            self._queue.tried(entry.request_id, now_s)
        return False

    def _try(self, entry: Waiting, now_s: float) -> Verdict:
        request, job = self._waiting[entry.request_id]
        if request.keys and now_s > entry.arrived_s:
            job = replace(job, held=self._held(request))  # others of its conversation were read meanwhile
        fleet = self._fleet if self.features.has_fading or not job.held else self._holder_only(job)
        decision = self._placer.place(job, fleet, now_s)
        self._count(decision)
        if decision.chosen is not None and not self._carry_out(request, job, decision.chosen, now_s):
            return "no_decode_room"
        return decision.verdict

    def _held(self, request: SimRequest) -> dict[str, int]:
        """Prompt tokens that each worker need not read."""
        if not request.keys or not self.features.has_affinity:
            return {}
        longest, most = self._cluster.index.longest(request.keys), request.prompt_tokens - 1
        return {worker_id: min(depth * request.key_tokens, most) for worker_id, depth in longest.items()}

    def _holder_only(self, job: Job) -> FleetView:
        holder = self._states[max(job.held, key=lambda worker_id: job.held[worker_id])]
        fleet = FleetView()
        fleet.workers, fleet.prefills = self._fleet.workers, [holder]
        fleet.decodes = self._fleet.decodes if holder.role == "prefill" else [holder]
        return fleet

    def _next_opening_s(self, now_s: float) -> float:
        """When a reader will take more, should no step end before."""
        soonest_s = min(map(self._placer.rules.opens_s, self._fleet.prefills), default=math.inf)
        return min(max(soonest_s, now_s + self.REPUMP_S[0]), now_s + self.REPUMP_S[1])

    def _pump_again(self, now_s: float) -> None:
        self._is_pump_due = False
        self._pump(now_s)

    def _triage(self, now_s: float) -> None:
        self._triaged_s = now_s
        for entry in self._queue.triage(now_s, self._servers):
            request, job = self._waiting.pop(entry.request_id)
            self._cluster.refuse(request)
            lacking = request.prompt_tokens - max(job.held.values(), default=0)
            self._demand.refused(request.prompt_tokens, lacking, request.arrived_s, now_s)
            self._count(None)

    def _carry_out(self, request: SimRequest, job: Job, option: Option, now_s: float) -> bool:
        """False: the writer's memory is not what it was believed to be."""
        reader, writer = self._worker(option.prefill_id), self._worker(option.decode_id)
        reading = Reading(request, option.kind == "local", job.deadline_s)
        if option.kind == "remote":
            blocks = writer.reserve(
                job.prompt_tokens - job.held.get(option.decode_id, 0) + request.output_tokens
            )
            if blocks is None:
                return False
            self._reserved[request.number] = blocks
        self._queue.take(job.request_id, now_s)
        del self._waiting[job.request_id]
        self._jobs[request.number] = (job, option)
        dispatch(option, job, self._fleet, now_s)
        reader.read(reading, now_s)
        return True

    def _hand_over(self, reader: SimWorker, reading: Reading, now_s: float) -> None:
        reader.free(reading, now_s)
        request = reading.request
        job, option = self._jobs[request.number]
        state = self._states[option.decode_id]
        joined(state, job, state.running_streams + 1, state.running_context + job.prompt_tokens)
        self._worker(option.decode_id).join(request, self._reserved.pop(request.number), now_s)

    def _plan(self, now_s: float) -> None:
        written = sum(worker.num_written for worker in self._cluster.workers)
        self._demand.wrote(written - self._written, now_s)
        self._written = written
        self.cadence = replace(self.cadence, short_output=self._demand.short_output)
        longest_s = self.cadence.longest_step_s
        for chunker in self.chunkers.values():
            chunker.longest_s = longest_s
        mix = self._demand.mix(now_s)
        states = list(self._states.values())
        if self.features.has_flips:
            plan = self._planner.plan(mix, states, now_s)
            if plan.flips:
                self._fleet.set_roles((flip.worker_id, flip.role, flip.epoch) for flip in plan.flips)
                self.roles.append((now_s, sum(state.role == "prefill" for state in states)))
        self._servers = self._capacity()
        if len(self._queue) or now_s - self._arrivals_s < 30.0:
            self._cluster.call(now_s + self.PLAN_S, self._plan)

    def _capacity(self) -> float:
        """Full-time prefill workers that the pools amount to, with the time that streams leave over."""
        writers = self._fleet.decodes
        looked_at = writers[:: max(1, len(writers) // 32)]
        spare = 0.0
        for state in looked_at:
            decodes = Work(0, 0, state.num_streams, state.context_tokens)
            chunk = state.model.largest_chunk(decodes, 512, self.cadence.gap_s, 2048)
            spare += min(1.0, chunk * state.model.mixed.token_s / self.cadence.gap_s)
        num_readers = len(self._states) - len(writers)
        return num_readers + spare * len(writers) / max(len(looked_at), 1)

    def _worker(self, worker_id: str) -> SimWorker:
        return self._cluster.workers[int(worker_id[1:])]

    def _any_state(self) -> WorkerState:
        return next(iter(self._states.values()))

    def _count(self, decision: Decision | None) -> None:
        if decision is None:
            name = "refused"
        else:
            name = decision.chosen.kind if decision.chosen else decision.verdict
        self.decisions[name] = self.decisions.get(name, 0) + 1
