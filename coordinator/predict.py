"""Placement by predicted times: live views of the fleet turned into what `policy.place` decides on. No I/O.

    promises set, every worker's steps known ──► policy.place: remote | local, by predicted first token and gap
                                                  └► or nobody is open yet: wait in the line, a later look finds better
    no promise, a worker that is still learning, or no option whatever comes ──► the rule of load (placement.py)

So a promise guides, and refuses nobody unless `slo.refuse` says so; a fleet that has just started is placed by load.
Whichever way, the answer is the same. What each worker holds of a prompt it tells itself, prompts and answers of all
ingress replicas; before it does, the requests sent there and its grants say it.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

from contracts.blocks import block_hashes
from contracts.cached import Cached, keys_in
from contracts.config import BatonConfig
from contracts.request import GenerateRequest
from contracts.roles import RoleLabel
from contracts.steps import StepReport
from coordinator.ask import RULES, Ask
from coordinator.learned import step_model, whole_reports
from coordinator.placement import Demand, NotNow, Placement, WorkerView, has_room, place, within_leftover
from coordinator.records import Reasons, Record, Records, against, no_reasons, without_room
from policy.chunks import Cadence
from policy.fleet import FleetView, WorkerState
from policy.link_model import LinkModel
from policy.place import Decision, Job, Option, Placer, PlaceRules
from policy.planner import SMALL
from policy.prefix import Key, PrefixIndex, keys_of
from policy.step_model import StepModel

MAX_WEIGHED = 16  # workers of one role that are looked at, beside those that hold a prefix
_MAX_INDEXED_BLOCKS = 1 << 20
_MAX_HASHED = 64  # requests between their placement and their first token whose keys are kept
_NOMINAL_TOKEN_S = 1e-4  # of a prompt, until a worker has told
_DOUBT_S = 30.0


@dataclass(frozen=True, slots=True)
class _Weighed:
    """What predictions say. `opens_in_s`: until a worker that has enough to do is open again. `options`: all that were
    weighed; `reasons`: where there was no way, what speaks against the others.
    """

    verdict: str
    decision: Decision | None = None
    opens_in_s: float = math.inf
    options: tuple[Option, ...] = ()
    reasons: Reasons = no_reasons


class Predictor:
    """Chooses, and remembers why. One per flow."""

    def __init__(
        self,
        config: BatonConfig,
        rng: random.Random | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = config.engine
        self._slo = config.slo
        self._rng = rng or random.Random()
        self._clock = clock
        self._links = LinkModel(1e-3, 1e9)
        self._models: dict[str, tuple[StepReport, StepModel]] = {}
        self._lost_since_s: float | None = None
        self._reading_since: dict[str, float] = {}
        self._index = PrefixIndex(_MAX_INDEXED_BLOCKS)
        self._known: set[str] = set()
        self._hashed: dict[str, tuple[GenerateRequest, list[Key]]] = {}
        self._records = Records()

    @property
    def records(self) -> list[Record]:
        """The last word on each of the last requests, newest last."""
        return self._records.all()

    def place(
        self, ask: Ask, prefills: Sequence[WorkerView], decodes: Sequence[WorkerView]
    ) -> Placement | NotNow:
        """The workers for a request, or why it has to wait."""
        self._forget_gone({view.worker_id for view in (*prefills, *decodes)})
        request = ask.request
        demand = Demand.of(request.num_known_tokens, request.max_total_tokens, self._engine.block_size)
        if ask.is_leftover:
            grown = ask.grown_blocks(self._engine.block_size)
            prefills, decodes = within_leftover(grown, self._slo.leftover_share, prefills, decodes)
        weighed, rule = self._weigh(ask, demand, prefills, decodes), "predicted"
        answer: Placement | NotNow | None = self._checked(weighed.decision, prefills, decodes)
        if answer is None and (answer := self._wait(ask, demand, weighed, decodes)) is None:
            rule = "load"
            answer = place(demand, prefills, decodes, ask.avoid, self._rng) or NotNow(
                "no room", demand.num_blocks
            )
        if isinstance(answer, NotNow):
            self._note(ask, ("wait", answer.verdict), None, weighed)
            return answer
        self._lost_since_s = None
        self._begun(answer.reader_id, prefills, decodes)
        self._note(ask, (rule, weighed.verdict), answer, weighed)
        return answer

    def _note(self, ask: Ask, said: tuple[str, str], placement: Placement | None, weighed: _Weighed) -> None:
        self._records.add(ask, self._clock(), said, placement, weighed.options, weighed.reasons)

    def service_s(self, request: GenerateRequest) -> float:
        """Predicted time from the start of reading to the first token, on the fastest worker, idle and with most of it
        in its cache.
        """
        num_known, chunk = request.num_known_tokens, self._engine.max_chunk_tokens
        held = max(self._held(request).values(), default=0) if self._slo.is_set else 0
        past = min(held, num_known - 1)
        known = (model for report, model in self._models.values() if report.is_mixed_known)
        reading_s = (model.prefill_s(num_known - past, past, chunk) for model in islice(known, MAX_WEIGHED))
        return RULES.overhead_s + min(reading_s, default=num_known * _NOMINAL_TOKEN_S)

    def waits(self, ask: Ask, reason: str) -> None:
        """It is not even looked at."""
        self._records.add_unseen(ask, self._clock(), ("wait", reason))

    def refused(self, ask: Ask, reason: str) -> None:
        """It leaves without a worker."""
        self._records.add_unseen(ask, self._clock(), ("refused", reason))

    def left(self, ask: Ask) -> None:
        """Its client left while it waited."""
        self._records.add_unseen(ask, self._clock(), ("left", "client left"))

    def granted(self, request: GenerateRequest, decode_id: str, num_cached: int) -> None:
        """What the decode worker really holds: forget the rest."""
        if self._slo.is_set:
            keys = self._keys(request)
            self._index.remove(decode_id, keys[num_cached // self._engine.block_size :])

    def answered(self, request: GenerateRequest, worker_ids: Sequence[str]) -> None:
        """The prompt was read on these workers, which hold it from now on."""
        now_s = self._clock()
        for worker_id in worker_ids:
            if worker_id in self._known:
                self._reading_since[worker_id] = now_s
        if self._slo.is_set:
            keys = self._keys(request)
            self._hashed.pop(request.request_id, None)
            for worker_id in worker_ids:
                self._known.add(worker_id)
                self._index.add(worker_id, keys)

    def cached(self, worker_id: str, news: Cached) -> None:
        """Its own word, whoever's requests filled its cache."""
        if self._slo.is_set:
            if news.is_all:
                self._index.drop_worker(worker_id)
            self._index.remove(worker_id, keys_in(news.evicted))
            if news.stored:  # a lost worker gets no place in the index
                self._index.add(worker_id, keys_in(news.stored))

    # --- helpers ----------------------------------------------------------------------------------------------------

    def _weigh(
        self, ask: Ask, demand: Demand, prefills: Sequence[WorkerView], decodes: Sequence[WorkerView]
    ) -> _Weighed:
        own_itl_s = ask.service.itl_s or (self._slo.itl_ms or math.inf) / 1000.0
        for view in (*prefills[:1], *decodes[:1]):
            if view.steps is not None:
                self._model(view.worker_id, view.steps)
        if ask.is_leftover and not decodes:
            return _Weighed("nothing is left over")
        if not self._slo.is_set:
            return _Weighed("no promise")
        readers = [p for p in prefills if p.worker_id not in ask.avoid and p.num_blocks >= demand.num_blocks]
        writers = [d for d in decodes if d.worker_id not in ask.avoid and has_room(d, demand)]
        if not writers:
            return _Weighed("no room", reasons=without_room(demand, decodes, ask.avoid))
        held = self._held(ask.request)
        cadence, rules = Cadence(own_itl_s), self._rules(writers[0])
        placer = Placer(rules, self._links, self._rng)
        states = self._states(self._some(readers, held), self._some(writers, held), placer, cadence)
        if states is None:
            return _Weighed("a worker is still learning")
        now_s = self._clock()
        # Late is late: the fastest way then, not the cheapest.
        left_s = ask.left_s if ask.left_s > ask.service_s else 0.0
        job = Job(
            ask.request.request_id,
            ask.request.num_known_tokens,
            ask.num_expected,
            now_s + left_s,
            cadence,
            held,
            is_leftover=ask.is_leftover,
            may_be_late=ask.is_kept,
        )
        decision = placer.place(job, FleetView(states), now_s)
        busy_s = [rules.opens_s(state) - now_s for state in states]
        opens_in_s = min((wait_s for wait_s in busy_s if wait_s > 0), default=math.inf)
        verdict: str = decision.verdict
        if decision.chosen is not None and decision.chosen.decode_id not in {d.worker_id for d in writers}:
            verdict = "no_decode_room"  # the policy would have a prefill worker write
        options, reasons = decision.options, no_reasons
        if verdict != "placed":
            reasons = against(rules, job, states, options, now_s)
        return _Weighed(verdict, decision, opens_in_s, options, reasons)

    def _wait(
        self, ask: Ask, demand: Demand, weighed: _Weighed, decodes: Sequence[WorkerView]
    ) -> NotNow | None:
        """Why the request waits in the line for now; None: load decides.

        Nobody waits for what no waiting brings: a promise that an idle worker breaks, or one that is broken already.
        """
        verdict, opens_in_s = weighed.verdict, weighed.opens_in_s
        is_late = ask.left_s <= ask.service_s
        if is_late and not ask.is_kept and self._slo.is_set:
            return self._hopeless("too_late", opens_in_s)
        if verdict in ("workers_busy", "nothing is left over"):
            return NotNow(verdict, 0, opens_in_s)
        if verdict not in ("no_decode_room", "too_late"):
            return None
        if verdict == "too_late":
            may_help, from_blocks = math.isfinite(opens_in_s), math.inf
        else:
            may_help, from_blocks = all(view.num_requests for view in decodes), float(demand.num_blocks)
        if may_help and (not is_late or (ask.is_kept and math.isfinite(opens_in_s))):
            return NotNow(verdict, from_blocks, opens_in_s)
        return None if ask.is_kept else self._hopeless(verdict, opens_in_s)

    def _hopeless(self, verdict: str, opens_in_s: float) -> NotNow | None:
        """None: nothing was placed for so long that the predictions must be tried; they cannot mend while all are
        refused by them.
        """
        now_s = self._clock()
        if self._lost_since_s is None:
            self._lost_since_s = now_s
        if now_s - self._lost_since_s >= _DOUBT_S:
            return None
        return NotNow(verdict, opens_in_s=opens_in_s, is_hopeless=True)

    def _held(self, request: GenerateRequest) -> dict[str, int]:
        """Leading tokens that each worker holds."""
        longest = self._index.longest(self._keys(request))
        return {worker_id: count * self._engine.block_size for worker_id, count in longest.items()}

    def _some(self, views: list[WorkerView], held: dict[str, int]) -> list[WorkerView]:
        """Of a large pool, a random part, and who holds a prefix: the best of some is close to the best of all."""
        if len(views) <= MAX_WEIGHED:
            return views
        some = {view.worker_id: view for view in self._rng.sample(views, MAX_WEIGHED)}
        some |= {view.worker_id: view for view in views if view.worker_id in held}
        return list(some.values())

    def _begun(self, reader_id: str, prefills: Sequence[WorkerView], decodes: Sequence[WorkerView]) -> None:
        """The reader gets a prompt; if it has no other, it begins now."""
        for view in (*prefills, *decodes):
            if view.worker_id == reader_id and not view.num_tokens:
                self._reading_since[reader_id] = self._clock()

    def _rules(self, writer: WorkerView) -> PlaceRules:
        return PlaceRules(
            prefill_chunk=self._engine.max_chunk_tokens,
            local_chunk=self._engine.max_chunk_tokens,
            least_chunk=1,  # whatever fits is what the decode worker will really do
            bytes_per_token=writer.bytes_per_token,
        )

    def _states(
        self,
        readers: Sequence[WorkerView],
        writers: Sequence[WorkerView],
        placer: Placer,
        cadence: Cadence,
    ) -> list[WorkerState] | None:
        """One for each worker; None while a kind of step is known to nobody. A mixed worker reads, for others too, and
        writes. Where so few are left that there is no plan, the prefill pool's write only if nobody else has room.
        """
        views = {view.worker_id: view for view in (*readers, *writers)}
        reports = whole_reports(views.values())
        if reports is None:
            return None
        reading, writing = ({view.worker_id for view in group} for group in (readers, writers))
        is_small = len(self._known) <= SMALL
        states = []
        for worker_id, view in views.items():
            role: RoleLabel = "prefill" if is_small and view.home == "prefill" else "mixed"
            if worker_id not in reading or worker_id not in writing:
                role = "prefill" if worker_id in reading else "decode"
            state = self._state(view, role, reports[worker_id])
            unread_s = placer.unread_s(state, cadence, view.num_tokens)
            now_s = self._clock()
            passed_s = now_s - self._reading_since.get(worker_id, now_s)
            state.prefill_free_s = now_s + max(unread_s - passed_s, 0.0)
            states.append(state)
        for view in readers:
            for peer_id, link in view.links:
                if peer_id in writing:
                    self._links.tell(view.worker_id, peer_id, link.latency_s, link.bytes_per_s)
        return states

    def _state(self, view: WorkerView, role: RoleLabel, steps: StepReport) -> WorkerState:
        block_size = self._engine.block_size
        used_tokens = (view.num_blocks - view.num_available_blocks) * block_size
        model = self._model(view.worker_id, steps)
        num_streams = view.num_streams
        state = WorkerState(view.worker_id, model, role, view.num_blocks * block_size, view.max_num_seqs)
        state.running_streams = num_streams
        state.running_context = used_tokens if num_streams else 0
        state.used_tokens = used_tokens
        if num_streams:
            state.gap_s = view.gap_s
        return state

    def _model(self, worker_id: str, steps: StepReport) -> StepModel:
        cached = self._models.get(worker_id)
        if cached is not None and cached[0] == steps:
            return cached[1]
        model = step_model(steps)
        self._models[worker_id] = (steps, model)
        return model

    def _checked(
        self,
        decision: Decision | None,
        prefills: Sequence[WorkerView],
        decodes: Sequence[WorkerView],
    ) -> Placement | None:
        """The choice, unless the fleet cannot do it: who does not write is not asked to, a pair needs a connection."""
        chosen = decision.chosen if decision is not None else None
        if chosen is None or chosen.decode_id not in {view.worker_id for view in decodes}:
            return None
        if chosen.kind == "local":
            return Placement(chosen.decode_id, None)
        reader = next((view for view in prefills if view.worker_id == chosen.prefill_id), None)
        if reader is None or chosen.decode_id not in reader.peers:
            return None
        return Placement(chosen.decode_id, chosen.prefill_id)

    def _keys(self, request: GenerateRequest) -> list[Key]:
        """Hashed once per attempt (a third of a ms per 1,000 tokens), however often it asks for a place."""
        kept = self._hashed.get(request.request_id)
        if kept is not None and kept[0] is request:
            return kept[1]
        known = (*request.prompt_ids, *request.output_ids)
        keys = keys_of(block_hashes(known, self._engine.block_size, request.cache_key))
        self._hashed[request.request_id] = request, keys
        if len(self._hashed) > _MAX_HASHED:
            del self._hashed[next(iter(self._hashed))]
        return keys

    def _forget_gone(self, live: set[str]) -> None:
        """All that is kept by worker, whether or not it ever read a prompt; of the index, a part each time."""
        for worker_id in self._known - live:
            self._index.drop_worker(worker_id)
            self._links.forget(worker_id)
            self._models.pop(worker_id, None)
            self._reading_since.pop(worker_id, None)
        self._known = live
        self._index.tidy()
