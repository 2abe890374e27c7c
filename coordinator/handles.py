"""Workers as Ray Serve sees them: who exists, and the one call that keeps a request in Serve's books.

Ray is the control plane here and nothing more. Two things live in this file:

    PinnedRouter   runs in every process that holds a handle of a pool. Sends a pinned call to its replica or
                   fails it at once, and publishes the set of replica ids whenever it changes.
    ServePool      lives in the coordinator's event loop. Describes the workers behind the ids; holds calls.

    a worker   published by the router -> describing (retried) -> described -> not published any more: removed
    a hold     hold() -> routed -> running on the worker -> the worker returns | the replica died | close()

Threads: Serve runs routers on an event loop thread of its own, or on the caller's loop if
RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP=0; `Membership` is the only thing that both sides touch.

A replica leaves the set as soon as Serve stops routing to it: when it died, but also while it drains.
Requests on a draining worker go on over the data plane; only new ones must go elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import dataclasses
import logging
import random
import threading
from collections.abc import Callable
from typing import Any

from ray.serve.handle import DeploymentHandle, DeploymentResponse
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from contracts.config_planner import PlannerConfig
from contracts.config_pools import PoolConfig
from contracts.errors import ProtocolError, WorkerLostError
from contracts.messages import Role, WorkerInfo

logger = logging.getLogger(__name__)

ReplicaIds = frozenset[str]
PoolKey = tuple[str, str]  # (application name, deployment name)

_PIN = "pin:"

MISSED_CHECKS = 3
"""Serve replaces a replica after so many failed checks in a row; a constant of Serve, compared with ours in a test."""


class Membership:
    """The replica ids of each pool, as this process's routers last heard. Safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ids: dict[PoolKey, ReplicaIds] = {}
        self._listeners: dict[PoolKey, list[Callable[[ReplicaIds], None]]] = {}

    def publish(self, key: PoolKey, replica_ids: ReplicaIds) -> None:
        """Called by a router, on its thread. Listeners hear of changes only, in order, and must not block."""
        with self._lock:
            if self._ids.get(key) == replica_ids:
                return
            self._ids[key] = replica_ids
            for listener in self._listeners.get(key, ()):
                listener(replica_ids)

    def subscribe(self, key: PoolKey, listener: Callable[[ReplicaIds], None]) -> None:
        """Calls `listener` with the current set, if one is known, and then with every later one."""
        with self._lock:
            self._listeners.setdefault(key, []).append(listener)
            if key in self._ids:
                listener(self._ids[key])

    def unsubscribe(self, key: PoolKey, listener: Callable[[ReplicaIds], None]) -> None:
        with self._lock:
            self._listeners[key].remove(listener)


MEMBERSHIP = Membership()


class PinnedRouter(RequestRouter):  # type: ignore[misc]  # ray's types are not followed
    """A call with session id `pin:<replica id>` goes to exactly that replica, any other to the shorter queue.

    NOTE: Serve ships this class by value with the module globals it uses, so `MEMBERSHIP` used directly would
    be a private copy that nobody listens to. `_publish` imports its own module by name instead.
    """

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Two candidates at random; Serve takes the one with the shorter queue. Pins never come here."""
        if pending_request is not None:
            # Without this, an empty answer makes Serve ask again without ever yielding to the event loop.
            pending_request.routing_context.should_backoff = True
        return [random.sample(candidate_replicas, min(2, len(candidate_replicas)))]

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        """A pin is decided here, before Serve's queue: there, a call to a full or vanished replica occupies
        one of the 2 * replicas routing tasks while it waits, and soon all of them: all other calls stop.

        Raises WorkerLostError if the pinned replica is gone, or refused the call (then `is_retry` is set).
        """
        session_id: str = pending_request.metadata.session_id
        if not session_id.startswith(_PIN):
            return await super()._choose_replica_for_request(pending_request, is_retry=is_retry)
        replica_id = session_id[len(_PIN) :]
        if not is_retry:
            for known_id, replica in self.curr_replicas.items():
                if known_id.unique_id == replica_id:
                    return replica
        raise WorkerLostError(f"expected a running replica {replica_id} but it is gone or refused the call")

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._publish()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """A call just failed because the replica is dead: known here before Serve's controller knows it."""
        super().on_replica_actor_died(replica_id)
        self._publish()

    def _publish(self) -> None:
        from coordinator import handles  # see the class docstring

        key = (self._deployment_id.app_name, self._deployment_id.name)
        handles.MEMBERSHIP.publish(key, frozenset(known_id.unique_id for known_id in self.curr_replicas))


class HoldCall:
    """One request's presence on its worker in Serve's books. Ends when the worker returns from `hold`."""

    __slots__ = ("_task", "replica_id", "request_id")

    def __init__(self, replica_id: str, request_id: str, task: asyncio.Task[None]) -> None:
        self.replica_id = replica_id
        self.request_id = request_id
        self._task = task

    @property
    def is_open(self) -> bool:
        return not self._task.done()

    async def ended(self) -> None:
        """Wait for the end of the call, whatever it is. Cancelling the wait leaves the call alone."""
        await asyncio.wait([self._task])

    def release(self) -> None:
        """Cancel the call on the worker: for a worker that would not end it. The normal end needs no call."""
        self._task.cancel()


class ServePool:
    """The workers of one role, as a list that follows Serve within milliseconds, and the calls held on them.

    `on_workers` is called in the event loop of `start()` with all described workers, once for each change.
    All methods belong to that loop.
    """

    def __init__(
        self,
        role: Role,
        handle: DeploymentHandle[Any],
        on_workers: Callable[[tuple[WorkerInfo, ...]], None],
        *,
        describe_timeout_s: float = 5.0,
        hold_timeout_s: float = 3600.0,
    ) -> None:
        self.role = role
        self._handle = handle
        self._on_workers = on_workers
        self._describe_timeout_s = describe_timeout_s
        self._hold_timeout_s = hold_timeout_s
        self._key: PoolKey = (handle.app_name, handle.deployment_name)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._workers: dict[str, WorkerInfo] = {}
        self._describing: dict[str, asyncio.Task[None]] = {}
        self._hold_handles: dict[str, DeploymentHandle[Any]] = {}
        self._holds: set[asyncio.Task[None]] = set()

    @property
    def workers(self) -> tuple[WorkerInfo, ...]:
        return tuple(self._workers.values())

    @property
    def num_holds(self) -> int:
        return len(self._holds)

    async def start(self) -> None:
        """Start to follow the pool. Returns at once: workers arrive through `on_workers`."""
        assert self._loop is None, "started twice"
        self._loop = asyncio.get_running_loop()
        MEMBERSHIP.subscribe(self._key, self._hear)
        self._handle.options(method_name="describe")  # creates the router, which then listens to Serve

    async def close(self) -> None:
        """End all calls and forget all workers. `on_workers` is not called any more. Safe to call twice."""
        if self._loop is None:
            return
        MEMBERSHIP.unsubscribe(self._key, self._hear)
        self._loop = None
        tasks = (*self._describing.values(), *self._holds)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._describing.clear()
        self._workers.clear()
        self._hold_handles.clear()

    def hold(self, replica_id: str, request_id: str) -> HoldCall:
        """Start the call that keeps `request_id` in Serve's books on its worker. Neither waits nor raises.

        What becomes of it is logged at debug level only: the data plane tells the truth about the request.
        """
        task = asyncio.create_task(self._run_hold(replica_id, request_id), name=f"hold-{request_id}")
        self._holds.add(task)
        task.add_done_callback(self._holds.discard)
        return HoldCall(replica_id, request_id, task)

    async def _run_hold(self, replica_id: str, request_id: str) -> None:
        try:
            handle = self._hold_handles.get(replica_id) or self._pinned("hold", replica_id)
            if replica_id in self._workers:  # else nobody would tell that it is gone
                self._hold_handles[replica_id] = handle
            await _finish(_call(handle, request_id), self._hold_timeout_s)
        except Exception as exc:  # the task's outer edge; the request itself ends by the data plane
            logger.debug("hold of %s on %s ended: %s", request_id, replica_id, exc)

    def _pinned(self, method_name: str, replica_id: str) -> DeploymentHandle[Any]:
        return self._handle.options(method_name=method_name, session_id=_PIN + replica_id)

    def _hear(self, replica_ids: ReplicaIds) -> None:
        """On a router's thread, under the lock of `Membership`."""
        loop = self._loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop was closed without close()
                loop.call_soon_threadsafe(self._follow, replica_ids)

    def _follow(self, replica_ids: ReplicaIds) -> None:
        if self._loop is None:  # closed while the call was on its way
            return
        for replica_id in self._describing.keys() - replica_ids:
            self._describing.pop(replica_id).cancel()
        for replica_id in self._hold_handles.keys() - replica_ids:
            del self._hold_handles[replica_id]
        gone = self._workers.keys() - replica_ids
        for replica_id in gone:
            del self._workers[replica_id]
        for replica_id in replica_ids - self._workers.keys() - self._describing.keys():
            self._describing[replica_id] = asyncio.create_task(
                self._describe(replica_id), name=f"describe-{replica_id}"
            )
        if gone:
            self._on_workers(self.workers)

    async def _describe(self, replica_id: str) -> None:
        """Ask until the replica answers; cancelled when it vanishes."""
        handle = self._pinned("describe", replica_id)
        backoff_s = 0.05
        while True:
            try:
                info = await _finish(_call(handle), self._describe_timeout_s)
                if not isinstance(info, WorkerInfo) or info.role != self.role:
                    raise ProtocolError(f"expected the WorkerInfo of a {self.role} worker but got {info!r}")
                break
            except Exception as exc:  # whatever went wrong, the replica is asked again
                logger.warning("%s replica %s cannot be described yet: %r", self.role, replica_id, exc)
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, 2.0)
        del self._describing[replica_id]
        self._workers[replica_id] = dataclasses.replace(info, replica_id=replica_id)
        self._on_workers(self.workers)


def _call(handle: DeploymentHandle[Any], *args: object) -> DeploymentResponse[Any]:
    """The call, outside the context of the HTTP request at hand.

    In that context Serve would give all calls one internal id, and cancel them when the client leaves, behind
    the back of the flow, which has its own order for that.
    """
    response = contextvars.Context().run(handle.remote, *args)
    assert isinstance(response, DeploymentResponse), "not a streaming handle"
    return response


async def _finish(response: DeploymentResponse[Any], timeout_s: float) -> Any:
    """The call's result. A call that nobody waits for any more is cancelled, so that its slot is freed."""
    try:
        async with asyncio.timeout(timeout_s):
            return await response
    except (asyncio.CancelledError, TimeoutError):
        response.cancel()
        raise


def worker_options(pool: PoolConfig, planner: PlannerConfig | None = None) -> dict[str, Any]:
    """What a pool asks of Serve, for `deployment.options(**worker_options(pool))`.

    A replica that is scaled down or redeployed finishes the calls held on it, for `drain_timeout_s` at most.
    `planner`: whose wishes Serve follows where the number of replicas moves.
    """
    return {
        **_replicas(pool, planner or PlannerConfig()),
        "ray_actor_options": {
            "num_cpus": pool.num_cpus,
            "num_gpus": pool.num_gpus,
            "resources": dict(pool.resources),
        },
        **_placement(pool),
        # Admission is the coordinator's; a refused hold would only hide a request from Serve's books.
        "max_ongoing_requests": 100_000,
        "graceful_shutdown_timeout_s": pool.drain_timeout_s,
        "graceful_shutdown_wait_loop_s": 0.1,
        "health_check_period_s": pool.health_check_period_s,
        "health_check_timeout_s": pool.health_check_timeout_s / MISSED_CHECKS,
        "request_router_config": {"request_router_class": "coordinator.handles:PinnedRouter"},
        # One line per held call says nothing that the request's own log does not.
        "logging_config": {"enable_access_log": False},
    }


def _replicas(pool: PoolConfig, planner: PlannerConfig) -> dict[str, Any]:
    if pool.max_replicas is None:
        return {"num_replicas": pool.num_replicas}
    return {
        "autoscaling_config": {
            "min_replicas": pool.min_replicas,
            "initial_replicas": pool.num_replicas,
            "max_replicas": pool.max_replicas,
            "upscale_delay_s": planner.upscale_delay_s,
            "downscale_delay_s": planner.downscale_delay_s,
            "policy": {"policy_function": "coordinator.replicas:wanted_replicas"},
        }
    }


def _placement(pool: PoolConfig) -> dict[str, Any]:
    """Room on one node for all ranks of a worker, or for none. The replica takes the first bundle, the ranks that it
    starts take the others."""
    if pool.tensor_parallel_size == 1:
        return {}
    each = {name: amount for name, amount in (("CPU", pool.num_cpus), ("GPU", pool.num_gpus)) if amount}
    bundles = [{**each, **pool.resources}, *[each] * (pool.tensor_parallel_size - 1)]
    return {"placement_group_bundles": bundles, "placement_group_strategy": "STRICT_PACK"}
