"""Placement by predicted times: live views of the fleet turned into what `policy.place` decides on. No I/O.

    promises set, every worker's steps known ──► policy.place: remote | local, by predicted first token and gap
    no promise, a worker that is still learning, or no option in time ──► the rule of load (placement.py)

So a promise guides and refuses nobody, and a fleet that has just started is placed by load. Whichever way, the answer
is the same. What each worker holds of a prompt is known from the requests sent there; what it has evicted since then
shows when it grants a reservation, and is forgotten here.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from contracts.blocks import block_hashes
from contracts.config import BatonConfig
from contracts.request import GenerateRequest
from contracts.roles import RoleLabel
from contracts.steps import StepReport
from coordinator.learned import step_model, whole_reports
from coordinator.placement import Demand, Placement, WorkerView, has_room, place
from policy.chunks import Cadence
from policy.fleet import FleetView, WorkerState
from policy.link_model import LinkModel
from policy.place import Decision, Job, Option, Placer, PlaceRules
from policy.prefix import Key, PrefixIndex, keys_of
from policy.step_model import StepModel

NUM_RECORDS = 256
MAX_EXPECTED_TOKENS = 256  # of an answer, when only its limit is known
_PROBE_BYTES = 64 << 20  # a self-test's speed is believed as one transfer of this size
_MAX_INDEXED_BLOCKS = 1 << 20
_MAX_HASHED = 64  # requests between their placement and their first token whose keys are kept


@dataclass(frozen=True, slots=True)
class Record:
    """One placement. `rule`: "predicted", or "load" with the reason in `verdict`. `options`: all that were weighed."""

    request_id: str
    at_s: float
    prompt_tokens: int
    left_s: float | None
    rule: str
    verdict: str
    placement: Placement | None
    options: tuple[Option, ...] = ()


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
        self._timed: set[tuple[str, str]] = set()
        self._models: dict[str, tuple[StepReport, StepModel]] = {}
        self._index = PrefixIndex(_MAX_INDEXED_BLOCKS)
        self._indexed: set[str] = set()
        self._hashed: dict[str, tuple[GenerateRequest, list[Key]]] = {}
        self.records: deque[Record] = deque(maxlen=NUM_RECORDS)
        """Newest last."""

    def place(
        self,
        request: GenerateRequest,
        waited_s: float,
        prefills: Sequence[WorkerView],
        decodes: Sequence[WorkerView],
        avoid: frozenset[str] = frozenset(),
    ) -> Placement | None:
        """The workers for a request that arrived `waited_s` ago, or None: no decode worker has room now."""
        demand = Demand.of(request.num_known_tokens, request.max_total_tokens, self._engine.block_size)
        decision, left_s, verdict = self._predicted(request, demand, waited_s, prefills, decodes, avoid)
        placement = self._checked(decision, demand, prefills, decodes)
        rule = "load" if placement is None else "predicted"
        if placement is None:
            placement = place(demand, prefills, decodes, avoid, self._rng)
        self._remember(
            Record(
                request.request_id,
                self._clock(),
                request.num_known_tokens,
                left_s,
                rule,
                verdict,
                placement,
                decision.options if decision else (),
            )
        )
        return placement

    def granted(self, request: GenerateRequest, decode_id: str, num_cached: int) -> None:
        """What the decode worker really holds: forget the rest."""
        if self._slo.is_set:
            keys = self._keys(request)
            self._index.remove(decode_id, keys[num_cached // self._engine.block_size :])

    def answered(self, request: GenerateRequest, worker_ids: Sequence[str]) -> None:
        """The prompt was read on these workers, which hold it from now on."""
        if self._slo.is_set:
            keys = self._keys(request)
            self._hashed.pop(request.request_id, None)
            for worker_id in worker_ids:
                self._indexed.add(worker_id)
                self._index.add(worker_id, keys)

    def _remember(self, record: Record) -> None:
        """A request that waits is asked about at every change of the fleet: its last answer counts."""
        if self.records and self.records[-1].request_id == record.request_id:
            self.records.pop()
        self.records.append(record)

    # --- helpers ----------------------------------------------------------------------------------------------------

    def _predicted(
        self,
        request: GenerateRequest,
        demand: Demand,
        waited_s: float,
        prefills: Sequence[WorkerView],
        decodes: Sequence[WorkerView],
        avoid: frozenset[str],
    ) -> tuple[Decision | None, float | None, str]:
        """(decision, time left to the first token, why there is none or what it says)."""
        if self._slo.ttft_ms is None or self._slo.itl_ms is None:
            return None, None, "no promise"
        self._forget_gone({view.worker_id for view in (*prefills, *decodes)})
        readers = [p for p in prefills if p.worker_id not in avoid and p.num_blocks >= demand.num_blocks]
        writers = [d for d in decodes if d.worker_id not in avoid and has_room(d, demand)]
        if not writers:
            return None, None, "no room"
        itl_s = self._slo.itl_ms / 1000.0
        states = self._states(readers, writers, itl_s)
        if states is None:
            return None, None, "a worker is still learning"
        rules = self._rules(writers[0])
        left_s = self._slo.ttft_ms / 1000.0 * rules.ttft_share - waited_s
        now_s = self._clock()
        keys = self._keys(request)
        job = Job(
            request.request_id,
            request.num_known_tokens,
            min(request.max_total_tokens - request.num_known_tokens, MAX_EXPECTED_TOKENS),
            now_s + left_s,
            Cadence(itl_s),
            {
                worker_id: count * self._engine.block_size
                for worker_id, count in self._index.longest(keys).items()
            },
            may_be_late=True,
        )
        decision = Placer(rules, self._links, self._rng).place(job, FleetView(states), now_s)
        return decision, left_s, decision.verdict

    def _rules(self, writer: WorkerView) -> PlaceRules:
        return PlaceRules(
            prefill_chunk=self._engine.max_chunk_tokens,
            local_chunk=self._engine.max_chunk_tokens,
            least_chunk=1,  # whatever fits is what the decode worker will really do
            bytes_per_token=writer.bytes_per_token,
        )

    def _states(
        self, readers: Sequence[WorkerView], writers: Sequence[WorkerView], itl_s: float
    ) -> list[WorkerState] | None:
        """One for each worker; None while a kind of step is known to nobody. One that may do both does the work of its
        pool, so that prompts and answers meet no more than they must: placement has a writer read, and a reader write,
        where that is sooner or there is no other.
        """
        views = {view.worker_id: view for view in (*readers, *writers)}
        reports = whole_reports(views.values())
        if reports is None:
            return None
        reading, writing = ({view.worker_id for view in group} for group in (readers, writers))
        states = []
        for worker_id, view in views.items():
            role: RoleLabel = view.home or "mixed"
            if worker_id not in reading or worker_id not in writing:
                role = "prefill" if worker_id in reading else "decode"
            states.append(self._state(view, role, reports[worker_id], itl_s))
        for view in readers:
            for peer_id, bytes_per_s in view.speeds:
                pair = (view.worker_id, peer_id)
                if bytes_per_s > 0 and pair not in self._timed:
                    self._timed.add(pair)
                    self._links.observe(*pair, _PROBE_BYTES, _PROBE_BYTES / bytes_per_s)
        return states

    def _state(self, view: WorkerView, role: RoleLabel, steps: StepReport, itl_s: float) -> WorkerState:
        block_size = self._engine.block_size
        used_tokens = (view.num_blocks - view.num_available_blocks) * block_size
        model = self._model(view.worker_id, steps)
        num_streams = view.num_streams
        backlog_s = 0.0
        if view.num_tokens:
            backlog_s = model.prefill_s(view.num_tokens, 0, self._engine.max_chunk_tokens)
        state = WorkerState(view.worker_id, model, role, view.num_blocks * block_size, view.max_num_seqs)
        state.running_streams = num_streams
        state.running_context = used_tokens if num_streams else 0
        state.used_tokens = used_tokens
        state.prefill_free_s = self._clock() + backlog_s
        if num_streams:
            state.gap_s = itl_s
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
        demand: Demand,
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
        for worker_id in self._indexed - live:
            self._index.drop_worker(worker_id)
            self._links.forget(worker_id)
            self._timed = {pair for pair in self._timed if worker_id not in pair}
            self._models.pop(worker_id, None)
        self._indexed &= live
