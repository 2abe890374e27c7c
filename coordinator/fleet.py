"""All workers of both pools: their links, labels and peers, and one event for "something changed".

A worker's label (contracts/roles.py) says what it is used for; its pool says only where it came from. Serve says who
exists (handles.py), links say who lives. A worker that Serve no longer lists gets nothing new and keeps its link while
requests run on it:

    listed ──► leaving ──MOVE_SHARE of drain_timeout_s──► overdue ──► dropped, when no request of ours is there
                  │                                          └ requests go on elsewhere, where they are read again;
                  └ requests end, or move with their KV        or stay, as long as no other decode worker is ready

Leaving is also who says that it ends (SIGTERM): Serve lists it until it is gone.
"""

from __future__ import annotations

import asyncio
import secrets
from bisect import bisect_right
from collections.abc import Callable, Iterable
from contextlib import suppress

from contracts.cached import Cached
from contracts.config import BatonConfig
from contracts.errors import DrainingError, OverloadedError, WorkerLostError
from contracts.messages import Hello, Peers, Role, WorkerInfo
from contracts.roles import Duty, Orders
from coordinator.drain import shutting_down
from coordinator.links import WorkerLink
from coordinator.placement import WorkerView
from coordinator.views import Views

MOVE_SHARE = 0.5
"""Part of its grace in which a leaving worker keeps its requests. Most end or move in it; the others have as long again
to be placed and read elsewhere before Serve ends the process."""

ASK_PERIOD_S = 0.25
"""How often the requests of a leaving worker are asked to move: one may have nowhere to go, or not be decoded yet."""

SHORT_SHARE = 0.05
ROOMY_SHARE = 0.3
"""A decode worker with a smaller share of its blocks left lets a stream go, to one that has at least this share: far
enough apart that no stream goes to and fro.
"""

MAX_DECODE_PEERS = 8
"""Connections of one decode worker to others, for requests that move: enough to find room, few in a large fleet."""


class Fleet:
    """Owns every `WorkerLink` and its task. `on_cached`: of each link, see there."""

    def __init__(self, config: BatonConfig, secret: bytes) -> None:
        self._config = config
        self._secret = secret
        self._hello = Hello(f"coordinator-{secrets.token_hex(4)}", 1, "commands", b"")
        self._links: dict[str, WorkerLink] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._listed: dict[Role, frozenset[str]] = {"prefill": frozenset(), "decode": frozenset()}
        self._waiters: set[asyncio.Future[None]] = set()
        # Whoever may write, a new object when membership changes; what each worker was told of it, and whether all; who
        # reads or has read, and is told all.
        self._peers = Peers(())
        self._told: dict[str, tuple[Peers, bool]] = {}
        self._readers: set[str] = set()
        self._max_total_tokens: int | None = None
        self._leaving: dict[str, asyncio.TimerHandle] = {}
        self._asking: dict[str, asyncio.TimerHandle] = {}
        self._overdue: set[str] = set()  # leaving workers whose requests have to move
        self._is_closed = False
        self.on_cached: Callable[[str, Cached], None] = lambda _worker_id, _news: None
        self._views = Views(lambda worker_id: self._links.get(worker_id), self._is_usable)

    def sync(self, role: Role, workers: Iterable[WorkerInfo]) -> None:
        """The pool's workers, as Serve lists them now."""
        listed = {info.worker_id: info for info in workers}
        if role == "decode" and listed:
            self._max_total_tokens = max(map(_max_total_tokens, listed.values()))
        self._listed[role] = frozenset(listed)
        for worker_id, info in listed.items():
            if worker_id not in self._links:
                link = WorkerLink(
                    info,
                    self._hello,
                    self._secret,
                    self._config.coordinator.worker_timeout_s,
                    self._link_changed,
                    self._views.changed,
                )
                link.on_cached = self._cached
                self._links[worker_id] = link
                self._tasks[worker_id] = asyncio.create_task(link.run(), name=f"link-{worker_id}")
        for link in list(self._links.values()):
            self._views.changed(link.info.worker_id)
            if not self._drop_if_departed(link):
                self._note_leaving(link)
        self._renew_peers()
        self._wake()

    def link(self, worker_id: str) -> WorkerLink:
        """Raises WorkerLostError if there is no such worker."""
        link = self._links.get(worker_id)
        if link is None:
            raise WorkerLostError(f"{worker_id} left the fleet")
        return link

    def links(self) -> tuple[WorkerLink, ...]:
        return tuple(self._links.values())

    def views(self, role: Role) -> list[WorkerView]:
        """What placement sees: listed, live, ready workers that may take new work of this role."""
        return self._views.of(role)

    def all_views(self) -> list[WorkerView]:
        """Listed, live, ready workers, whatever their label."""
        return self._views.all()

    def num_open(self, role: Role) -> int:
        """How many `views` would tell of."""
        return len(self._views.of(role))

    def num_ready(self, pool: Role) -> int:
        return sum(view.home == pool for view in self._views.all())

    @property
    def num_coordinators(self) -> int:
        """Ingress replicas that are connected to the workers, this one included."""
        return max((len(link.status.coordinators) for link in self._links.values() if link.status), default=1)

    @property
    def is_leader(self) -> bool:
        """Whether this replica plans: its id is the lowest of those that any worker knows. While workers disagree,
        because one replica has just come or gone, nobody does.
        """
        known = [link.status.coordinators for link in self._links.values() if link.status]
        return all(not ids or ids[0] == self._hello.sender_id for ids in known)

    def order(self, worker_id: str, duty: Duty) -> None:
        """Raises WorkerLostError if it is not connected; then it keeps its label."""
        self.link(worker_id).send(Orders(duty))

    def order_size(self, pool: Role, num_replicas: int) -> None:
        """Tell all workers of a pool how many they should be. Who is not connected hears it next time."""
        for link in self._links.values():
            if link.info.role == pool and link.is_alive:
                with suppress(WorkerLostError):
                    link.send(Orders(pool_size=num_replicas))

    def max_total_tokens(self) -> int:
        """Prompt + output that the roomiest decode worker holds. While none is listed, what the last ones held: a
        request waits for the replacement of a lost worker, and is not refused for it.

        Raises OverloadedError before any decode worker was seen.
        """
        if self._max_total_tokens is None:
            raise OverloadedError("no decode worker is ready yet", retry_after_s=5.0)
        return self._max_total_tokens

    async def changed(self, timeout_s: float) -> None:
        """Returns at the next change of any worker's state or load, at the latest after `timeout_s`."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.add(future)
        try:
            await asyncio.wait([future], timeout=timeout_s)
        finally:
            self._waiters.discard(future)

    def check_open(self) -> None:
        """Raises OverloadedError once the fleet is closed: no worker will ever have room again."""
        if self._is_closed:
            raise shutting_down()

    async def close(self) -> None:
        """Leave all workers, which forget what they do for us. Requests still open here end with an error."""
        self._is_closed = True
        for timer in (*self._leaving.values(), *self._asking.values()):
            timer.cancel()
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        self._links.clear()
        self._views.clear()
        self._tasks.clear()
        self._wake()

    def _is_usable(self, link: WorkerLink) -> bool:
        return self._is_staying(link) and link.is_ready

    def _is_short(self, link: WorkerLink) -> bool:
        """It writes, and so few blocks are left that it will soon preempt somebody."""
        if link.label == "prefill" or link.status is None:
            return False
        return link.status.audit.num_available < SHORT_SHARE * link.info.num_blocks

    def _is_staying(self, link: WorkerLink) -> bool:
        """Serve lists it, and it has not told that it ends."""
        is_draining = link.status is not None and link.status.is_draining
        return link.info.worker_id in self._listed[link.info.role] and not is_draining

    def _link_changed(self, link: WorkerLink) -> None:
        """Called for every beat and every ended request, so the work here does not grow with the fleet."""
        if self._drop_if_departed(link):
            self._renew_peers()
        else:
            self._tell_peers(link)
            self._note_leaving(link)
            if self._is_short(link):
                link.ask_one_to_move(ROOMY_SHARE)
        if self._overdue:
            self._move_requests()
        self._wake()

    def _cached(self, worker_id: str, news: Cached) -> None:
        self.on_cached(worker_id, news)

    def _note_leaving(self, link: WorkerLink) -> None:
        worker_id, role = link.info.worker_id, link.info.role
        if self._is_staying(link) or worker_id not in self._links:
            self._stays(worker_id)
        elif worker_id not in self._leaving:
            loop = asyncio.get_running_loop()
            grace_s = MOVE_SHARE * self._config.pool(role).drain_timeout_s
            self._leaving[worker_id] = loop.call_later(grace_s, self._end_grace, worker_id)
            self._ask_to_move(worker_id)

    def _ask_to_move(self, worker_id: str) -> None:
        loop = asyncio.get_running_loop()
        self._asking[worker_id] = loop.call_later(ASK_PERIOD_S, self._ask_to_move, worker_id)
        self._links[worker_id].ask_to_move()

    def _stays(self, worker_id: str) -> None:
        """Listed again, or gone."""
        self._overdue.discard(worker_id)
        for timers in (self._leaving, self._asking):
            timer = timers.pop(worker_id, None)
            if timer is not None:
                timer.cancel()

    def _end_grace(self, worker_id: str) -> None:
        self._overdue.add(worker_id)
        self._move_requests()

    def _move_requests(self) -> None:
        """Off all workers whose time is over, once there is another one to write their answers."""
        if self._views.of("decode"):
            for worker_id in self._overdue:
                self._links[worker_id].give_up(DrainingError(f"{worker_id} leaves"))

    def _wake(self) -> None:
        for future in self._waiters:
            if not future.done():
                future.set_result(None)

    def _drop_if_departed(self, link: WorkerLink) -> bool:
        worker_id = link.info.worker_id
        is_listed = worker_id in self._listed[link.info.role]
        if is_listed or worker_id not in self._links or (link.num_requests and link.is_alive):
            return False
        del self._links[worker_id]
        self._views.changed(worker_id)
        self._stays(worker_id)
        self._told.pop(worker_id, None)
        self._tasks.pop(worker_id).cancel()
        return True

    def _renew_peers(self) -> None:
        """Connections exist before a request needs them: every worker that reads knows all that may write, which is
        everybody where labels move; and one that only writes knows some others, for streams that move.
        """
        infos = (link.info for link in self._links.values())
        writers = sorted(
            (info for info in infos if info.role == "decode" or self._config.is_planned),
            key=lambda info: info.worker_id,
        )
        if tuple(writers) != self._peers.workers:
            self._peers = Peers(tuple(writers))
        self._readers &= self._links.keys()
        for link in self._links.values():
            self._tell_peers(link)

    def _tell_peers(self, link: WorkerLink) -> None:
        worker_id = link.info.worker_id
        if not link.is_alive:
            self._told.pop(worker_id, None)
            return
        if link.label != "decode":
            # For good: its last handoffs need the connections, and a later order finds them ready.
            self._readers.add(worker_id)
        told, is_reader = self._told.get(worker_id), worker_id in self._readers
        if told is None or told[0] is not self._peers or told[1] != is_reader:
            with suppress(WorkerLostError):  # just lost: it is told when it is back
                link.send(self._peers if is_reader else self._neighbours(worker_id))
                self._told[worker_id] = self._peers, is_reader

    def _neighbours(self, worker_id: str) -> Peers:
        """The decode workers that follow `worker_id` in the circle of all; none where KV cannot leave a process."""
        if self._config.transfer.transport == "memory":
            return Peers(())
        workers = self._peers.workers
        behind = bisect_right(workers, worker_id, key=lambda info: info.worker_id)
        count = min(MAX_DECODE_PEERS, len(workers) - 1)
        return Peers(tuple(workers[(behind + step) % len(workers)] for step in range(count)))


def _max_total_tokens(info: WorkerInfo) -> int:
    return min(info.max_model_len, info.num_blocks * info.layout.block_size)
