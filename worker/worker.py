"""One life of a worker: load, warm up, listen, serve, stop.

    load ──► warm-up step ──► kv endpoint + command port ──► ready (Status every second) ──► close
             (each stage is logged with its seconds)

The engine thread steps; the event loop does everything else and never waits for a step. Readiness is judged from what
was proved: a step ran at warm-up, the engine thread gave a sign of life lately, and (on a prefill worker that has
peers) the transfer self-test passed with at least one of them. A watchdog tells when the engine thread or the event
loop is stuck.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path

from contracts.channel import Channel, ChannelServer
from contracts.config import BatonConfig
from contracts.errors import ConfigError, DrainingError, EngineError, ProtocolError, WorkerLostError
from contracts.messages import (
    AskAudit,
    AuditReply,
    Cancel,
    Hello,
    Message,
    Migrate,
    Peers,
    Prefill,
    Reserve,
    Role,
    Status,
    WorkerInfo,
)
from contracts.roles import Duty, Orders
from engine.blocks import BlockPool
from engine.loop import Event, StepLoop
from engine.model import select_draw
from engine.runner import GPU_CHUNKS
from engine.sampler import Sampler
from engine.sequence import EndRules
from engine.text.grammar import LazyGrammars
from engine.text.tokenizer import load_text
from engine.weights import LoadedModel
from kvtransfer.endpoint import KvEndpoint
from worker.cache_news import CacheNews
from worker.chunks import ChunkSizer
from worker.desk import Desk
from worker.foreign import told_to
from worker.links import LinkMeters
from worker.loading import Solo, load_engine, max_model_len
from worker.phases import PhaseFactory, Phases
from worker.progress import shown_graphs, shown_weights
from worker.ranks import RankZero, StartRank, gather_ranks, layout_of
from worker.steps import StepMeter
from worker.sweep import Limits, seed
from worker.watchdog import AwakeClock, Watchdog

logger = logging.getLogger("baton.worker")

STATUS_PERIOD_S = 1.0
STATUS_DELAY_S = 0.02


class Worker:
    """A worker process's one object. `start` before anything else, `close` last."""

    def __init__(
        self,
        role: Role,
        worker_id: str,
        config: BatonConfig,
        secret: bytes,
        phases: PhaseFactory,
        on_stuck: Callable[[str], None] = lambda _reason: None,
        start_rank: StartRank | None = None,
    ) -> None:
        """`on_stuck(reason)` is called once, on a thread of its own, when this worker cannot go on: end the process.
        `start_rank` starts the further ranks of a worker that has any.
        """
        self._role = role
        self._worker_id = worker_id
        self._config = config
        self._secret = secret
        self._make_phases = phases
        self._incarnation = time.time_ns()
        self._channels: dict[Channel, str] = {}  # -> whose
        self._duty = Duty(role, 0)
        self.pool_size = 0
        """Replicas that the planner wants in this pool; 0: it never said."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._info: WorkerInfo | None = None
        self._is_draining = False
        self._soon: asyncio.TimerHandle | None = None
        pool = config.pool(role)
        self._start_rank = start_rank
        self._ranks: Solo | RankZero = Solo()
        self._freed = asyncio.Event()  # since it was last cleared
        self._clock = AwakeClock()
        self._steps = StepMeter()
        self._links = LinkMeters()
        itl_s = config.slo.tightest_itl_s
        self._sizer = None if itl_s is None else ChunkSizer(self._steps, itl_s, self._clock)
        self._watchdog = Watchdog(self._clock, self._trouble, pool.health_check_timeout_s, on_stuck)

    @property
    def info(self) -> WorkerInfo:
        """Who this worker is. Raises ConfigError before `start` is through."""
        if self._info is None:
            raise ConfigError(f"worker {self._worker_id} has not started")
        return self._info

    async def start(self, model_path: Path, host: str = "") -> WorkerInfo:
        """Load and listen. `host` is the address that peers and coordinators can reach; empty: found out.

        Raises ConfigError if the model or the configuration does not fit.
        """
        try:
            return await self._start(model_path, host)
        except BaseException:
            self._ranks.close()
            raise

    async def _start(self, model_path: Path, host: str) -> WorkerInfo:
        begun_s = time.monotonic()
        self._event_loop = asyncio.get_running_loop()
        model = await asyncio.to_thread(self._load, model_path)
        loaded_s = time.monotonic()
        chunks = GPU_CHUNKS if self._slab.device.type == "cuda" else ()
        await asyncio.to_thread(self._runner.warm_up, shown_graphs(self._worker_id), chunks)
        await asyncio.to_thread(self._sampler.warm_up, model.spec.vocab_size, self._slab.device)
        warm_s = time.monotonic()
        logger.info(
            "%s: %s loaded in %.1f s, warm in %.1f s, %d KV blocks",
            self._worker_id, model_path.name, loaded_s - begun_s, warm_s - loaded_s, self._pool.num_blocks,
        )  # fmt: skip
        host = host or _own_address()
        layout = layout_of(self._slab, self._slabs, model.whole.num_kv_heads)
        self._kv = KvEndpoint(
            (self._worker_id, self._incarnation),
            model.fingerprint,
            layout,
            self._slabs,
            self._config.transfer,
            self._secret,
        )
        kv_port = await self._kv.start(host)
        grammars = LazyGrammars(lambda: load_text(model_path))
        self._desk = Desk(self._engine, self._phases, self._pool, self._kv, grammars, self._publish_soon)
        self._kv.on_peers_changed = self._publish_status
        self._kv.on_moved = self._links.moved
        self._server = ChannelServer(self._hello, self._secret, self._serve)
        port = await self._server.start(host)
        self._engine.start()
        if self._config.slo.is_set:
            limits = Limits.of(self._config.engine, self._pool, max_model_len(self._config, model.spec))
            await seed(self._steps, self._engine, self._runner, limits)
        self._watchdog.start()
        self._spawn(self._beat())
        # While this worker is found and its paths are tested: nobody streams from it yet.
        self._spawn(asyncio.to_thread(grammars.warm))
        self._info = WorkerInfo(
            self._worker_id,
            self._role,
            os.getpid(),
            self._incarnation,
            host,
            port,
            kv_port,
            model.fingerprint,
            layout,
            self._pool.num_blocks,
            self._config.engine.max_num_seqs,
            max_model_len(self._config, model.spec),
        )
        return self._info

    def check_health(self) -> None:
        """Raises EngineError if the engine thread is dead or stuck in a step."""
        trouble = self._trouble()
        if trouble is not None:
            raise EngineError(f"{self._worker_id}: {trouble}")

    async def hold(self, request_id: str) -> None:
        """Returns when the request has ended here; Serve counts the call and drains by it."""
        await self._desk.holds.hold(request_id, self._config.coordinator.request_timeout_s)

    async def drain(self, grace_s: float) -> None:
        """Returns when no request is here any more, at the latest after `grace_s`: those who have them are told at once
        that this worker ends.
        """
        self._is_draining = True
        self._publish_status()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                while self._desk.requests():
                    self._freed.clear()
                    await self._freed.wait()

    async def close(self) -> None:
        """End every request with a retryable error, then everything else."""
        self._desk.end_all(DrainingError(f"{self._worker_id} is shutting down"))
        await asyncio.sleep(0)  # the terminal events leave before the connections do
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(channel.close() for channel in list(self._channels)))
        await self._server.close()
        await self._kv.close()
        await asyncio.to_thread(self._watchdog.stop)
        try:
            await asyncio.to_thread(self._engine.stop, self._config.engine.stall_timeout_s)
        finally:
            await asyncio.to_thread(self._ranks.close)

    def _trouble(self) -> str | None:
        """Why the engine cannot be trusted to go on, or None. Any thread."""
        if self._ranks.failure is not None:
            return self._ranks.failure
        if self._engine.failure is not None:
            return f"the engine thread ended: {self._engine.failure!r}"
        age_s = self._engine.step_age_s
        if age_s > self._config.engine.stall_timeout_s:
            return f"no sign of life from the engine for {age_s:.1f} s"
        return None

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- set-up -----------------------------------------------------------------------------------------------------

    def _load(self, path: Path) -> LoadedModel:
        engine = self._config.engine
        if self._config.pool(self._role).tensor_parallel_size > 1:
            self._ranks = gather_ranks(self._config, self._role, self._worker_id, path, self._start_rank)
        decodes = self._role == "decode" or self._config.is_planned
        loaded = load_engine(self._config, path, self._ranks, shown_weights(self._worker_id), decodes)
        model, self._slab, self._runner = loaded.model, loaded.slab, loaded.runner
        self._slabs = self._ranks.slabs(self._slab)
        self._pool = BlockPool(self._slab.num_blocks, engine.block_size)
        # Without promises nobody asks where a prefix is.
        self._cache_news = CacheNews(self._pool) if self._config.slo.is_set else None
        ends = EndRules(model.spec.eos_token_ids, max_model_len(self._config, model.spec))
        self._phases: Phases = self._make_phases(self._pool, engine, ends, self._emit)
        self._sampler = Sampler(model.spec.eos_token_ids, select_draw(self._slab.device))
        self._engine = StepLoop(
            self._runner,
            self._sampler,
            (self._phases.decode, self._phases.prefill),
            self._emit,
            clock=self._clock,
            watch=(self._sizer or self._steps).stepped,
            chunk_limit=self._sizer.fitting if self._sizer else None,
        )
        return model

    # --- commands and events ----------------------------------------------------------------------------------------

    def _emit(self, events: Sequence[Event]) -> None:
        """On the engine thread, once per step."""
        with contextlib.suppress(
            RuntimeError
        ):  # the loop is closed: the process ends, and nobody listens any more
            self._event_loop.call_soon_threadsafe(self._desk.deliver, events)

    def _hello(self) -> Hello:
        return Hello(self._worker_id, self._incarnation, "commands", b"")

    async def _serve(self, channel: Channel, _hello: Hello) -> None:
        self._channels[channel] = channel.peer.sender_id
        try:
            if self._cache_news is not None:
                channel.send(self._cache_news.all())
            channel.send(told_to(channel, self._status(), self._desk.requests()))
            while True:
                self._handle(await channel.receive(), channel)
        finally:
            del self._channels[channel]
            self._desk.drop(channel)

    def _handle(self, message: Message, channel: Channel) -> None:
        if isinstance(message, Reserve | Prefill) and len(self._channels) > 1:
            self._publish_soon()  # other coordinators count it from then on
        match message:
            case Reserve():
                self._desk.reserve(message, channel)
            case Prefill():
                self._desk.prefill(message, channel)
            case Migrate():
                self._desk.migrate(message, channel)
            case Cancel(request_id):
                self._desk.cancel(request_id)
            case Peers(workers):
                self._kv.set_peers(workers)
            case Orders():
                self._take(message)
            case AskAudit(call_id):
                channel.send(AuditReply(call_id, self._pool.audit(), self._pool.owners()))
            case _:
                raise ProtocolError(f"expected a coordinator's command but got {type(message).__name__}")

    def _take(self, orders: Orders) -> None:
        """New work of the old role ends when coordinators hear of the new one; what is here is finished."""
        self.pool_size = orders.pool_size or self.pool_size
        duty = orders.duty
        if duty is not None and duty.epoch > self._duty.epoch:
            self._duty = duty
            self._publish_status()

    # --- status -----------------------------------------------------------------------------------------------------

    async def _beat(self) -> None:
        while True:
            self._publish_status()
            await asyncio.sleep(STATUS_PERIOD_S)

    def _publish_soon(self) -> None:
        """Tell coordinators of freed room well before the next beat, once for all that leave together."""
        self._freed.set()
        if self._soon is None:
            self._soon = self._event_loop.call_later(STATUS_DELAY_S, self._publish_status)

    def _publish_status(self) -> None:
        if self._soon is not None:
            self._soon.cancel()
            self._soon = None
        status, requests = self._status(), self._desk.requests()
        news = self._cache_news.latest() if self._cache_news is not None else None
        for channel in list(self._channels):
            with contextlib.suppress(WorkerLostError):
                if news is not None:
                    channel.send(news)
                channel.send(told_to(channel, status, requests))

    def _status(self) -> Status:
        return Status(
            self._worker_id,
            self._incarnation,
            is_ready=not (reason := self._trouble() or self._kv.trouble() or ""),
            step_age_s=self._engine.step_age_s,
            num_running=self._phases.decode.num_running + self._phases.prefill.num_running,
            num_waiting=self._phases.decode.num_waiting + self._phases.prefill.num_waiting,
            audit=self._pool.audit(),
            peers=self._links.told(self._kv.peer_statuses()),
            counters=self._counters(),
            steps=self._steps.report(),
            labelled=self._kv.gauges(),
            reason=reason,
            duty=self._duty,
            coordinators=tuple(sorted(set(self._channels.values()))),
            is_draining=self._is_draining,
        )

    def _counters(self) -> dict[str, float]:
        loop = self._engine.counters()
        return {
            "baton_worker_steps_total": loop.num_steps,
            "baton_worker_busy_seconds_total": loop.step_s,
            "baton_worker_prefill_tokens_total": loop.num_tokens["prefill"],
            "baton_worker_decode_tokens_total": loop.num_tokens["decode"],
            "baton_worker_preemptions_total": self._phases.decode.num_preemptions,
            "baton_worker_handoffs_total": self._desk.num_handoffs,
            "baton_worker_handoff_failures_total": self._desk.num_handoff_failures,
            "baton_worker_handoff_bytes_total": self._desk.num_handoff_bytes,
            "baton_worker_reservations_total": self._desk.num_reservations,
            "baton_worker_handoff_exposed_seconds_total": self._desk.handoff_exposed_s,
            "baton_worker_handoff_hidden_seconds_total": self._desk.handoff_hidden_s,
            "baton_worker_damaged_chunks_total": self._kv.num_damaged_chunks,
            "baton_worker_lease_expiries_total": self._desk.num_lease_expiries,
        }


def _own_address() -> str:
    """The address of the interface that leads out, else loopback. No packet is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("10.255.255.255", 1))
            address: str = probe.getsockname()[0]
        except OSError:
            return "127.0.0.1"
    return address
