"""The Serve adapter against a real local Ray. A dummy worker ends its holds when told so on its port.

As under the launcher (tests/conftest.py sets its environment), routers run on the caller's event loop: on the one where
the first call was made. So all tests here share one loop, as all requests of a coordinator do, and it never stands
still: news from Serve that come while it does switch Serve's client off for good.
"""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import threading
import warnings
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from contracts.blocks import KvLayout
from contracts.config_pools import PoolConfig
from contracts.errors import WorkerLostError
from contracts.messages import Role, WorkerInfo
from coordinator import local_ray

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Serve's own models use what pydantic has deprecated
    import ray
    from ray import serve
    from ray.serve.handle import DeploymentHandle

    from coordinator.handles import HoldCall, Membership, ServePool, worker_options


LAYOUT = KvLayout(num_layers=1, num_kv_heads=1, head_dim=1, block_size=16, dtype="float32")
START_TIMEOUT_S = 180.0  # Serve may start processes first, on a machine that does other things as well


class DummyWorker:
    """Holds calls until told on its own port to end them, as a worker's engine would."""

    def __init__(self, role: Role, num_bad_answers: int = 0) -> None:
        self._role = role
        self._num_bad_answers = num_bad_answers
        self._server: asyncio.Server | None = None
        self._changed = asyncio.Condition()
        self._holding: set[str] = set()
        self._ended: set[str] = set()

    async def describe(self) -> WorkerInfo:
        if self._num_bad_answers:
            self._num_bad_answers -= 1
            raise RuntimeError("not yet")
        if self._server is None:
            self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        worker_id = serve.get_replica_context().replica_id.unique_id
        return WorkerInfo(worker_id, self._role, os.getpid(), 1, "127.0.0.1", port, 0, "f", LAYOUT, 8, 8, 64)

    async def hold(self, request_id: str) -> None:
        async with self._changed:
            self._holding.add(request_id)
            self._changed.notify_all()
        try:
            async with self._changed:
                await self._changed.wait_for(lambda: request_id in self._ended)
        finally:
            async with self._changed:
                self._holding.discard(request_id)
                self._changed.notify_all()

    async def who(self) -> str:
        return str(serve.get_replica_context().replica_id.unique_id)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """`held X`, `free X`: answered once that is so. `end X`: lets the call return."""
        while line := await reader.readline():
            verb, request_id = line.decode().split()
            async with self._changed:
                if verb == "held":
                    await self._changed.wait_for(lambda: request_id in self._holding)  # noqa: B023
                elif verb == "free":
                    await self._changed.wait_for(lambda: request_id not in self._holding)  # noqa: B023
                else:
                    self._ended.add(request_id)
                    self._changed.notify_all()
            writer.write(b"ok\n")
            await writer.drain()
        writer.close()


class Line:
    """The test's end of a dummy worker's port."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def tell(self, verb: str, request_id: str) -> None:
        self._writer.write(f"{verb} {request_id}\n".encode())
        async with asyncio.timeout(10):
            assert await self._reader.readline() == b"ok\n"

    async def closed_by_worker(self) -> None:
        async with asyncio.timeout(30):
            try:
                assert await self._reader.read() == b""
            except ConnectionResetError:
                return


@asynccontextmanager
async def line_to(worker: WorkerInfo) -> AsyncIterator[Line]:
    reader, writer = await asyncio.open_connection(worker.host, worker.port)
    yield Line(reader, writer)
    writer.close()


class Watched:
    """A started pool and the lists it has announced."""

    def __init__(self, handle: DeploymentHandle[Any], role: Role = "decode") -> None:
        self._lists: asyncio.Queue[tuple[WorkerInfo, ...]] = asyncio.Queue()
        self.pool = ServePool(role, handle, self._lists.put_nowait)

    async def until(self, num_workers: int, without: str = "") -> tuple[WorkerInfo, ...]:
        async with asyncio.timeout(START_TIMEOUT_S):
            while True:
                workers = await self._lists.get()
                if len(workers) == num_workers and without not in {w.replica_id for w in workers}:
                    return workers

    async def __aenter__(self) -> Watched:
        await self.pool.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.pool.close()
        assert self.pool.num_holds == 0


def run_app(name: str, *, num_replicas: int, num_bad_answers: int = 0) -> DeploymentHandle[Any]:
    options = worker_options(PoolConfig(num_replicas=num_replicas, num_cpus=0.1, drain_timeout_s=60))
    deployment = serve.deployment(DummyWorker).options(name="Workers", **options)
    return serve.run(deployment.bind("decode", num_bad_answers), name=name, route_prefix=None)


class Loop:
    """The event loop that all tests on a cluster share; runs from the first one's beginning to the last one's end."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="shared-loop", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(3 * START_TIMEOUT_S)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()


def on_a_cluster(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """A test that needs Ray, on the event loop that all of them share. It takes `cluster`, or what is made of it."""

    @pytest.mark.cluster
    @pytest.mark.usefixtures("cluster")
    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        assert LOOPS, "the cluster's fixture begins the loop"
        LOOPS[0].run(test(**fixtures))

    return run


LOOPS: list[Loop] = []  # one, while there is a cluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    LOOPS.append(Loop())
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    serve.start(proxy_location="Disabled")
    yield
    LOOPS[0].run(serve.shutdown_async())
    ray.shutdown()
    LOOPS.pop().close()


@pytest.fixture(scope="module")
def pair(cluster: None) -> DeploymentHandle[Any]:
    return run_app("pair", num_replicas=2)


async def finished(call: HoldCall) -> None:
    async with asyncio.timeout(10):
        await call.ended()


def test_these_tests_run_in_the_launchers_environment() -> None:
    wanted = {
        name: value for name, value in local_ray.RAY_ENVIRONMENT.items() if name.startswith("RAY_SERVE_")
    }
    assert wanted.items() <= dict(os.environ).items()


def test_listeners_hear_the_current_set_and_then_changes_only() -> None:
    membership, heard = Membership(), list[frozenset[str]]()
    key = ("app", "Decode")
    membership.publish(key, frozenset({"a"}))
    membership.subscribe(key, heard.append)
    membership.publish(key, frozenset({"a"}))
    membership.publish(("app", "Prefill"), frozenset({"p"}))
    membership.publish(key, frozenset({"a", "b"}))
    membership.unsubscribe(key, heard.append)
    membership.publish(key, frozenset())
    assert heard == [{"a"}, {"a", "b"}]


class LostHandle:
    """Of a pool whose replicas are gone: every call says so."""

    app_name, deployment_name = "app", "Decode"

    def options(self, **_options: str) -> LostHandle:
        return self

    def remote(self, *_args: object) -> None:
        raise WorkerLostError("gone")


async def test_holds_on_replicas_that_are_gone_leave_nothing() -> None:
    """A request may still move to one, or away from it, when Serve lists it no more."""
    pool = ServePool("decode", cast("DeploymentHandle[Any]", LostHandle()), lambda _workers: None)
    for number in range(5):
        await finished(pool.hold(f"gone-{number}", "r"))
    assert pool._hold_handles == {}


@on_a_cluster
async def test_every_replica_is_described_with_its_own_replica_id(pair: DeploymentHandle[Any]) -> None:
    async with Watched(pair) as watched:
        workers = await watched.until(2)
        assert {w.replica_id for w in workers} == {w.worker_id for w in workers}
        assert len({w.pid for w in workers}) == 2
        assert watched.pool.workers == workers


@on_a_cluster
async def test_a_hold_stays_on_its_worker_until_the_worker_ends_it(pair: DeploymentHandle[Any]) -> None:
    async with Watched(pair) as watched:
        first, second = await watched.until(2)
        calls = [watched.pool.hold(w.replica_id, f"on-{w.worker_id}") for w in (first, second, first)]
        async with line_to(first) as to_first, line_to(second) as to_second:
            await to_first.tell("held", f"on-{first.worker_id}")
            await to_second.tell("held", f"on-{second.worker_id}")
            await to_first.tell("end", f"on-{first.worker_id}")
            await finished(calls[0])
            await finished(calls[2])
            assert calls[1].is_open
            await to_second.tell("end", f"on-{second.worker_id}")
            await finished(calls[1])


@on_a_cluster
async def test_many_pins_to_a_vanished_replica_fail_and_hold_nobody_up(pair: DeploymentHandle[Any]) -> None:
    async with Watched(pair) as watched:
        workers = await watched.until(2)
        lost = [watched.pool.hold("vanished", f"lost-{i}") for i in range(100)]
        async with asyncio.timeout(5):
            assert await pair.who.remote() in {w.replica_id for w in workers}
        for call in lost:
            await finished(call)
        with pytest.raises(WorkerLostError, match="expected a running replica vanished"):
            await pair.options(method_name="who", session_id="pin:vanished").remote()


@on_a_cluster
async def test_a_pinned_call_reaches_its_replica_every_time(pair: DeploymentHandle[Any]) -> None:
    async with Watched(pair) as watched:
        for worker in await watched.until(2):
            pinned = pair.options(method_name="who", session_id="pin:" + worker.replica_id)
            answers = await asyncio.gather(*(pinned.remote() for _ in range(10)))
            assert set(answers) == {worker.replica_id}


@on_a_cluster
async def test_release_and_close_cancel_the_call_on_the_worker(pair: DeploymentHandle[Any]) -> None:
    async with Watched(pair) as watched:
        worker, _ = await watched.until(2)
        async with line_to(worker) as line:
            released = watched.pool.hold(worker.replica_id, "released")
            watched.pool.hold(worker.replica_id, "closed")
            await line.tell("held", "released")
            await line.tell("held", "closed")
            released.release()
            await line.tell("free", "released")
            await watched.pool.close()
            await line.tell("free", "closed")


@on_a_cluster
async def test_a_worker_that_cannot_be_described_is_asked_again(cluster: None) -> None:
    async with Watched(run_app("late", num_replicas=1, num_bad_answers=2)) as watched:
        (worker,) = await watched.until(1)
        assert worker.role == "decode"
    serve.delete("late")


@on_a_cluster
async def test_a_killed_worker_leaves_the_list_its_holds_end_and_another_comes(
    pair: DeploymentHandle[Any],
) -> None:
    async with Watched(pair) as watched:
        killed, other = await watched.until(2)
        call = watched.pool.hold(killed.replica_id, "killed")
        async with line_to(killed) as line:
            await line.tell("held", "killed")
            os.kill(killed.pid, signal.SIGKILL)
            assert await watched.until(1, without=killed.replica_id) == (other,)
            await finished(call)
        assert other in await watched.until(2, without=killed.replica_id)


@on_a_cluster
async def test_a_draining_worker_leaves_the_list_and_finishes_its_holds(cluster: None) -> None:
    async with Watched(run_app("drained", num_replicas=1)) as watched:
        (old,) = await watched.until(1)
        call = watched.pool.hold(old.replica_id, "drained")
        async with line_to(old) as line:
            await line.tell("held", "drained")
            redeploy = asyncio.create_task(asyncio.to_thread(run_app, "drained", num_replicas=1))
            await watched.until(0)
            await line.tell("held", "drained")
            assert call.is_open
            await line.tell("end", "drained")
            await finished(call)
            await line.closed_by_worker()
        await watched.until(1, without=old.replica_id)
        await redeploy
