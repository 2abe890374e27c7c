"""The story of one request, and all its continuations.

    generate ─┬─ placed       wait in line, choose workers, have decode reserve every block        (no device time yet)
              ├─ prefill      tell prefill; its first token goes to the client at once
              ├─ decode       the KV arrives at decode, which streams the rest
              └─ one end      finished | error | the caller leaves: both workers are told, leases end, holds are let go

A worker that dies or leaves, a handoff that fails, a step that finds no memory: the attempt (run.py) is over, and the
request is placed again with the tokens the client already has as `output_ids`, and goes on from there (story.py says
how often). Before all newcomers, and for at most `continue_timeout_s`: the client sees a pause.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Protocol

from contracts.config import BatonConfig
from contracts.errors import (
    BatonError,
    ContextLengthError,
    DeadlineError,
    OverloadedError,
    TryAgain,
    WorkerLostError,
)
from contracts.request import Finished, GenerateRequest, TokenSink
from contracts.service import Service, ServiceClass
from coordinator.ask import Ask
from coordinator.fleet import Fleet
from coordinator.line import Line
from coordinator.links import WorkerLink
from coordinator.placement import Demand, NotNow, Placement, WorkerView, new_home
from coordinator.predict import Predictor
from coordinator.promises import Account, Met
from coordinator.room import Held, Room
from coordinator.run import Hold, Means, Observer, Run
from coordinator.stages import StageClock
from coordinator.story import Story
from policy.queue import Waiting

logger = logging.getLogger("baton.coordinator")


class QueueObserver(Protocol):
    """What metrics want to know of the line and of the promises."""

    def waiting(self, service_class: ServiceClass, change: int) -> None: ...

    def queued(self, service_class: ServiceClass, seconds: float) -> None: ...

    def refused(self, service_class: ServiceClass, reason: str) -> None: ...

    def promised(self, service_class: ServiceClass, met: Met) -> None: ...


class FlowObserver(Observer, QueueObserver, Protocol):
    """Both."""


class Flow:
    """Runs requests on a fleet. One per ingress replica."""

    def __init__(
        self,
        config: BatonConfig,
        fleet: Fleet,
        secret: bytes,
        hold: Hold,
        observer: FlowObserver,
        eos_ids: frozenset[int],
    ) -> None:
        self._config = config
        self._fleet = fleet
        self._observer = observer
        self._room = Room()
        self._means = Means(config, secret, hold, observer, self._new_home, self._room.moved, self._was_read)
        self._eos_ids = eos_ids
        self.predictor = Predictor(config)
        """Chooses workers, and remembers why."""
        fleet.on_cached = self.predictor.cached
        self._asked: dict[str, Ask] = {}  # of those in the line, by attempt
        self._line: Line[Run] = Line(
            config.coordinator.max_queue,
            fleet.changed,
            self._num_readers,
            self._release,
            self,
            config.slo.age_cap_s,
        )
        self._num_running = 0
        self._reads_locally = config.coordinator.placement == "local"

    @property
    def num_waiting(self) -> int:
        return self._line.num_waiting

    @property
    def num_running(self) -> int:
        return self._num_running

    async def generate(
        self,
        request: GenerateRequest,
        sink: TokenSink,
        deadline_s: float | None,
        service: Service | None = None,
    ) -> Finished | None:
        """Tokens to the sink in order, then the one end, with timings; None if the sink had enough. Cancelling cancels
        everywhere.

        Without a `service`: what an interactive request is promised by default. Raises BatonError, before or after
        tokens, as the one terminal event instead of Finished.
        """
        limits = self._config.coordinator
        limit_s = limits.request_timeout_s
        service = service or self._config.slo.service()
        arrived_s = time.monotonic()
        deadline = arrived_s + (limit_s if deadline_s is None else min(limit_s, deadline_s))
        self._check_fits(request)
        story = Story(request, self._eos_ids, limits.max_continuations, arrived_s)
        stages = StageClock()
        account, has_failed = Account(service, arrived_s), False
        try:
            return await self._attempts(story, account, deadline, stages, sink)
        except BatonError:
            has_failed = True
            raise
        finally:
            met = account.met(time.monotonic(), has_failed)
            if met is not None:
                self._observer.promised(service.service_class, met)

    async def _attempts(
        self, story: Story, account: Account, deadline: float, stages: StageClock, sink: TokenSink
    ) -> Finished | None:
        """One after the other, until one brings the end."""
        service = account.service
        while (known_end := story.end()) is None:
            run: Run | None = None
            try:
                async with self._placed(story, service, deadline, stages, sink) as run:
                    try:
                        run.start()
                        end = await run.finish(deadline)
                    finally:
                        if (spoken := run.spoken) is not None:
                            story.sent(spoken.token_ids)
                            stages.first_token(spoken.first_s)
                            account.tokens(len(spoken.token_ids), spoken.first_s, spoken.last_s)
                    return end and replace(story.finished(end), timings=stages.timings(run.handoff_s))
            except BatonError as error:
                if run is None:
                    raise
                stages.lost(run.handoff_s)
                may_go_on = story.lost(error, run.worker_ids, run.num_cached_tokens)
                if story.end() is not None:
                    continue  # lost after its last token
                if not may_go_on or time.monotonic() >= deadline:
                    raise
                logger.warning(
                    "%s: %s; goes on from token %d", run.request.request_id, error.message, story.num_known
                )
                self._observer.continued(error.code)
        return replace(known_end, timings=stages.timings())

    # --- the line's watcher ---

    def waits(self, service_class: ServiceClass, change: int) -> None:
        self._observer.waiting(service_class, change)

    def refused(self, entry: Waiting, reason: str) -> None:
        self._observer.refused(entry.service_class, reason)
        self.predictor.refused(self._asked[entry.request_id], reason)

    # --- helpers ---

    def _check_fits(self, request: GenerateRequest) -> None:
        """Raises ContextLengthError for a request that no worker could ever finish."""
        limit = self._fleet.max_total_tokens()
        if request.max_total_tokens > limit:
            raise ContextLengthError(
                f"expected prompt + max_tokens of at most {limit} tokens but got {request.max_total_tokens}"
            )

    @asynccontextmanager
    async def _placed(
        self, story: Story, service: Service, deadline: float, stages: StageClock, sink: TokenSink
    ) -> AsyncIterator[Run]:
        """A run whose blocks decode has reserved. Whatever happens after, leaving ends it on both workers."""
        begun_s = time.monotonic()
        run = await self._reserved(story, service, deadline, sink)
        placed_s = time.monotonic()
        stages.placed(placed_s - begun_s)
        self._observer.queued(service.service_class, placed_s - begun_s)
        self._observer.placed("remote" if run.prefill is not None else "local")
        try:
            yield run
        finally:
            held_s, num_running = time.monotonic() - placed_s, self._num_running
            self._line.pace.note(held_s, num_running)
            self._line.used(service.tenant, held_s / num_running)
            self._release(run)

    async def _reserved(self, story: Story, service: Service, deadline: float, sink: TokenSink) -> Run:
        """A newcomer waits `queue_timeout_s`, a stream that was accepted before `continue_timeout_s`."""
        limits = self._config.coordinator
        patience_s = limits.continue_timeout_s if story.is_resumed else limits.queue_timeout_s
        line_deadline = min(deadline, time.monotonic() + patience_s)
        ask, entry = self._enter(story, service)
        self._asked[entry.request_id] = ask
        # What an entry hears of no room is true for all that ask for the same in the same way.
        kind = (replace(service, tenant=""), ask.avoid)
        run: Run | None = None
        is_back = False
        try:
            async with asyncio.timeout(line_deadline - time.monotonic()):
                while True:
                    grant = partial(self._grant, ask, story.arrived_s, sink)
                    run = await self._line.turn(entry, grant, kind, is_back)
                    if await self._is_granted(run, line_deadline):
                        return run
                    run, is_back = None, True
        except asyncio.CancelledError:  # not at its deadline: then it was not the caller who gave up
            if run is None:
                self.predictor.left(ask)
            raise
        except TimeoutError:
            raise self._timed_out(story, entry, time.monotonic() >= deadline, patience_s) from None
        finally:
            del self._asked[entry.request_id]

    def _enter(self, story: Story, service: Service) -> tuple[Ask, Waiting]:
        """Of the next attempt: what is asked of placement, and the place in the line."""
        request, is_resumed = story.next_attempt(), story.is_resumed
        service_s = self.predictor.service_s(request)
        is_kept = is_resumed or service.is_leftover or not self._config.slo.refuse
        waited_s = time.monotonic() - story.arrived_s
        ask = Ask(request, service, waited_s, service_s, story.avoid, is_kept, is_resumed)
        entry = Waiting(
            request.request_id,
            story.arrived_s,
            math.inf if is_resumed else story.arrived_s + waited_s + ask.left_s,
            service_s,
            ask.num_blocks(self._config.engine.block_size),
            service.tenant,
            service.service_class,
            is_kept,
            is_resumed,
        )
        return ask, entry

    def _grant(self, ask: Ask, arrived_s: float, sink: TokenSink) -> Run | NotNow:
        """A run that its workers have heard of, or why there is none now.

        Raises OverloadedError if there never will be one.
        """
        self._fleet.check_open()
        if self._num_running >= self._config.coordinator.max_running:
            self.predictor.waits(ask, "max_running")
            return NotNow("max_running", 0)
        ask = replace(ask, waited_s=time.monotonic() - arrived_s)
        answer = self.predictor.place(ask, self._readers(), self._writers())
        if isinstance(answer, NotNow):
            return answer
        run = self._make_run(ask.request, answer, sink)
        self._num_running += 1
        try:
            run.dispatch()
        except TryAgain:
            self._release(run)
            return NotNow("a worker was lost")
        except BaseException:
            self._release(run)
            raise
        held = Held.of(ask, self._config.engine.block_size)
        self._room.took(answer.decode_id, run.decode.status, ask.request.request_id, held)
        return run

    async def _is_granted(self, run: Run, deadline: float) -> bool:
        """False: its worker has no room after all."""
        request, decode_id = run.request, run.decode.info.worker_id
        limit_s = self._config.coordinator.reserve_timeout_s
        try:
            await run.reserve(min(deadline, time.monotonic() + limit_s))
        except TryAgain as error:
            logger.debug("%s: %s", request.request_id, error.message)
            if isinstance(
                error, OverloadedError
            ):  # its own word, or its silence; not that the reader was lost
                self._room.refused(decode_id, run.decode.status, request.request_id)
            self._release(run)
            return False
        except BaseException:
            self._release(run)
            raise
        block_size = self._config.engine.block_size
        self._room.granted(decode_id, request.request_id, run.num_cached_tokens // block_size)
        self.predictor.granted(request, decode_id, run.num_cached_tokens)
        return True

    def _was_read(self, run: Run) -> None:
        """The first token is here: its reader is open for the next prompt."""
        self.predictor.answered(run.request, run.worker_ids)
        if self._line.num_waiting:
            self._line.look()

    def _release(self, run: Run) -> None:
        """The run is over, however far it came."""
        self._num_running -= 1
        self._room.left(run.decode.info.worker_id, run.request.request_id)
        run.close()

    def _timed_out(self, story: Story, entry: Waiting, is_over: bool, patience_s: float) -> BatonError:
        """Nobody had room in time."""
        self.predictor.refused(self._asked[entry.request_id], "deadline" if is_over else "no_room")
        if is_over:
            return DeadlineError("the request's deadline passed before a worker had room")
        retry_after_s = self._line.pace.wait_s(self._line.num_waiting)
        if story.last_error is not None:
            return WorkerLostError(
                f"{story.last_error.message}; no worker could go on within {patience_s:g} s",
                retry_after_s=retry_after_s,
            )
        self._observer.refused(entry.service_class, "no_room")
        return OverloadedError(f"no worker had room within {patience_s:g} s", retry_after_s=retry_after_s)

    def _num_readers(self) -> float:
        """Workers that read prompts all the time."""
        num = 0 if self._reads_locally else self._fleet.num_open("prefill")
        return float(num or self._fleet.num_open("decode") or 1)

    def _readers(self) -> list[WorkerView]:
        return [] if self._reads_locally else self._fleet.views("prefill")

    def _writers(self) -> list[WorkerView]:
        return self._room.all_seen(
            self._fleet.views("decode"), lambda worker_id: self._fleet.link(worker_id).status
        )

    def _make_run(self, request: GenerateRequest, placement: Placement, sink: TokenSink) -> Run:
        decode = self._fleet.link(placement.decode_id)
        prefill = self._fleet.link(placement.prefill_id) if placement.prefill_id else None
        return Run(request, prefill, decode, self._means, sink)

    def _new_home(self, request: GenerateRequest, source: WorkerLink, free_share: float) -> WorkerLink | None:
        """Where a request that is decoded at `source` may move: `coordinator.move.Find`."""
        peers = source.status.peers if source.status is not None else ()
        reachable = frozenset(peer.worker_id for peer in peers if peer.is_ready)
        block_size = source.info.layout.block_size
        demand = Demand.of(request.num_known_tokens, request.max_total_tokens, block_size)
        worker_id = new_home(demand, reachable, self._writers(), free_share)
        return None if worker_id is None else self._fleet.link(worker_id)
