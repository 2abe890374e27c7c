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
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace

from contracts.config import BatonConfig
from contracts.errors import (
    BatonError,
    ContextLengthError,
    DeadlineError,
    OverloadedError,
    TryAgain,
    WorkerLostError,
)
from contracts.request import Finished, GenerateRequest, Token
from coordinator.fleet import Fleet
from coordinator.line import Line, Pace
from coordinator.links import WorkerLink
from coordinator.placement import Demand, Placement, new_home
from coordinator.predict import Predictor
from coordinator.run import Hold, Means, Observer, Run
from coordinator.stages import StageClock
from coordinator.story import Story

logger = logging.getLogger("baton.coordinator")


class Flow:
    """Runs requests on a fleet. One per ingress replica."""

    def __init__(
        self,
        config: BatonConfig,
        fleet: Fleet,
        secret: bytes,
        hold: Hold,
        observer: Observer,
        eos_ids: frozenset[int],
    ) -> None:
        self._config = config
        self._fleet = fleet
        self._observer = observer
        self._means = Means(config, secret, hold, observer, self._new_home)
        self._eos_ids = eos_ids
        self.predictor = Predictor(config)
        """Why requests went where they went."""
        self._line = Line(config.coordinator.max_queue)
        self._pace = Pace()
        self._num_running = 0

    @property
    def num_waiting(self) -> int:
        return self._line.num_waiting

    @property
    def num_running(self) -> int:
        return self._num_running

    async def generate(
        self, request: GenerateRequest, deadline_s: float | None
    ) -> AsyncGenerator[Token | Finished, None]:
        """Tokens in order, then exactly one Finished, with timings. Closing the iterator cancels everywhere.

        Raises BatonError, before or after tokens, as the one terminal event instead of Finished.
        """
        limits = self._config.coordinator
        limit_s = limits.request_timeout_s
        arrived_s = time.monotonic()
        deadline = arrived_s + (limit_s if deadline_s is None else min(limit_s, deadline_s))
        self._check_fits(request)
        stages = StageClock()
        story = Story(request, self._eos_ids, limits.max_continuations, arrived_s)
        while (end := story.end()) is None:
            run: Run | None = None
            try:
                async with self._placed(story, deadline, stages) as run:
                    run.start()
                    async with aclosing(run.events(deadline)) as events:
                        async for event in events:
                            if isinstance(event, Token):
                                if event.index == len(run.request.output_ids):
                                    self.predictor.answered(run.request, run.worker_ids)
                                story.sent(event)
                                stages.token()
                                yield event
                            else:
                                yield replace(story.finished(event), timings=stages.timings(run.handoff_s))
                return
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
        yield replace(end, timings=stages.timings())

    def _check_fits(self, request: GenerateRequest) -> None:
        """Raises ContextLengthError for a request that no worker could ever finish."""
        limit = self._fleet.max_total_tokens()
        if request.max_total_tokens > limit:
            raise ContextLengthError(
                f"expected prompt + max_tokens of at most {limit} tokens but got {request.max_total_tokens}"
            )

    @asynccontextmanager
    async def _placed(self, story: Story, deadline: float, stages: StageClock) -> AsyncIterator[Run]:
        """A run whose blocks decode has reserved. Whatever happens after, leaving ends it on both workers."""
        begun_s = time.monotonic()
        request = story.next_attempt()
        run = await self._try_place(request, story, deadline) if self._line.is_empty else None
        if run is None:
            run = await self._wait_for_place(request, story, deadline)
        placed_s = time.monotonic()
        stages.placed(placed_s - begun_s)
        self._observer.queued(placed_s - begun_s)
        self._observer.placed("remote" if run.prefill is not None else "local")
        self._num_running += 1
        try:
            yield run
        finally:
            self._pace.note(time.monotonic() - placed_s, self._num_running)
            self._num_running -= 1
            run.close()

    async def _wait_for_place(self, request: GenerateRequest, story: Story, deadline: float) -> Run:
        """A newcomer waits `queue_timeout_s`, a stream that was accepted before `continue_timeout_s`."""
        limits = self._config.coordinator
        patience_s = limits.continue_timeout_s if story.is_resumed else limits.queue_timeout_s
        line_deadline = min(deadline, time.monotonic() + patience_s)
        try:
            async with (
                asyncio.timeout(line_deadline - time.monotonic()),
                self._line.turn(self._pace.wait_s(self._line.num_waiting), story.is_resumed),
            ):
                while True:
                    run = await self._try_place(request, story, line_deadline)
                    if run is not None:
                        return run
                    await self._fleet.changed(1.0)
        except TimeoutError:
            if time.monotonic() >= deadline:
                raise DeadlineError("the request's deadline passed before a worker had room") from None
            retry_after_s = self._pace.wait_s(self._line.num_waiting)
            if story.last_error is not None:
                raise WorkerLostError(
                    f"{story.last_error.message}; no worker could go on within {patience_s:g} s",
                    retry_after_s=retry_after_s,
                ) from None
            raise OverloadedError(
                f"no worker had room within {patience_s:g} s", retry_after_s=retry_after_s
            ) from None

    async def _try_place(self, request: GenerateRequest, story: Story, deadline: float) -> Run | None:
        """A reserved run, or None: nobody has room now. Raises OverloadedError if nobody ever will have."""
        self._fleet.check_open()
        if self._num_running >= self._config.coordinator.max_running:
            return None
        placement = self.predictor.place(
            request,
            time.monotonic() - story.arrived_s,
            self._fleet.views("prefill"),
            self._fleet.views("decode"),
            story.avoid,
        )
        if placement is None:
            return None
        run = self._make_run(request, placement)
        try:
            await run.reserve(min(deadline, time.monotonic() + self._config.coordinator.reserve_timeout_s))
        except TryAgain as error:
            run.close()
            logger.debug("%s: %s", request.request_id, error.message)
            return None
        except BaseException:
            run.close()
            raise
        self.predictor.granted(request, placement.decode_id, run.num_cached_tokens)
        return run

    def _make_run(self, request: GenerateRequest, placement: Placement) -> Run:
        decode = self._fleet.link(placement.decode_id)
        prefill = self._fleet.link(placement.prefill_id) if placement.prefill_id else None
        return Run(request, prefill, decode, self._means)

    def _new_home(self, request: GenerateRequest, source: WorkerLink, free_share: float) -> WorkerLink | None:
        """Where a request that is decoded at `source` may move: `coordinator.move.Find`."""
        peers = source.status.peers if source.status is not None else ()
        reachable = frozenset(peer.worker_id for peer in peers if peer.is_ready)
        block_size = source.info.layout.block_size
        demand = Demand.of(request.num_known_tokens, request.max_total_tokens, block_size)
        worker_id = new_home(demand, reachable, self._fleet.views("decode"), free_share)
        return None if worker_id is None else self._fleet.link(worker_id)
