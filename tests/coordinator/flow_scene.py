"""A flow over scripted workers, and what a test says about both."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace

from contracts.channel import Channel
from contracts.config import BatonConfig, load_config
from contracts.messages import Cancel, Message, Prefill
from contracts.request import Finished, GenerateRequest, SamplingParams, Timings, Token
from coordinator.fleet import Fleet
from coordinator.flow import Flow
from tests.coordinator.fake_worker import SECRET, FakeWorker, finish, hand_off, next_token, send_tokens
from tests.coordinator.streams import Stream

EOS = 2


@dataclass
class Recorder:
    """Observer and Serve holds in one."""

    continuations: list[str] = field(default_factory=list)
    routes: list[str] = field(default_factory=list)
    migrations: list[str] = field(default_factory=list)
    held: set[tuple[str, str]] = field(default_factory=set)
    on_handed_off: Callable[[], None] = lambda: None

    waiting_now: Counter[str] = field(default_factory=Counter)
    refusals: list[tuple[str, str]] = field(default_factory=list)
    promises: list[tuple[str, str]] = field(default_factory=list)

    def waiting(self, service_class: str, change: int) -> None:
        self.waiting_now[service_class] += change
        assert self.waiting_now[service_class] >= 0

    def queued(self, service_class: str, seconds: float) -> None:
        assert seconds >= 0

    def refused(self, service_class: str, reason: str) -> None:
        self.refusals.append((service_class, reason))

    def promised(self, service_class: str, met: str) -> None:
        self.promises.append((service_class, met))

    def placed(self, route: str) -> None:
        self.routes.append(route)

    def handed_off(self, num_bytes: int, exposed_s: float) -> None:
        assert num_bytes > 0
        assert exposed_s > 0
        self.on_handed_off()

    def continued(self, reason: str) -> None:
        self.continuations.append(reason)

    def migrated(self, outcome: str, pause_s: float | None = None) -> None:
        assert (pause_s is not None) == (outcome == "moved")
        self.migrations.append(outcome)

    def hold(self, _role: str, replica_id: str, request_id: str) -> None:
        self.held.add((replica_id, request_id))


@dataclass
class Scene:
    flow: Flow
    fleet: Fleet
    recorder: Recorder
    workers: dict[str, FakeWorker]

    def __getitem__(self, worker_id: str) -> FakeWorker:
        return self.workers[worker_id]


@contextlib.asynccontextmanager
async def scene(*workers: FakeWorker, **overrides: object) -> AsyncIterator[Scene]:
    """Keys of `overrides` are the coordinator's, or `section__key`."""
    config: BatonConfig = load_config(
        overrides={
            key.replace("__", ".") if "__" in key else f"coordinator.{key}": value
            for key, value in overrides.items()
        }
    )
    fleet = Fleet(config, SECRET)
    infos = [await worker.start() for worker in workers]
    for role in ("prefill", "decode"):
        fleet.sync(role, [info for info in infos if info.role == role])
    recorder = Recorder()
    flow = Flow(config, fleet, SECRET, recorder.hold, recorder, frozenset({EOS}))
    try:
        async with asyncio.timeout(5):
            while len(fleet.views("prefill")) + len(fleet.views("decode")) < len(workers):
                await fleet.changed(1.0)
        yield Scene(flow, fleet, recorder, {worker.worker_id: worker for worker in workers})
        assert flow.num_running == 0
        assert flow.num_waiting == 0
        assert not recorder.waiting_now.total()
        assert not flow._asked
        assert not flow._room._held
        assert all(link.num_requests == 0 for link in fleet.links())
    finally:
        await fleet.close()
        for worker in workers:
            await worker.kill()


def pair(**kwargs: int) -> tuple[FakeWorker, FakeWorker]:
    return FakeWorker("prefill", "p1", peers=("d1", "d2")), FakeWorker("decode", "d1", **kwargs)


def request(max_tokens: int = 4, prompt_len: int = 20) -> GenerateRequest:
    return GenerateRequest("r", tuple(range(prompt_len)), SamplingParams(max_tokens=max_tokens))


async def collect(
    scene: Scene, req: GenerateRequest, deadline_s: float | None = 5.0
) -> list[Token | Finished]:
    async with contextlib.aclosing(Stream(scene.flow, req, deadline_s)) as events:
        return [event async for event in events]


async def all_heard(scene: Scene, worker: FakeWorker) -> None:
    """What `worker` has said until now has reached the flow: a heartbeat that it sent after that has."""
    link, beat = scene.fleet.link(worker.worker_id), replace(worker.status(), reason=secrets.token_hex(4))
    worker.channels[-1].send(beat)
    await until(lambda: link.status == beat)


async def until(holds: Callable[[], bool]) -> None:
    """As soon as the loop has made it true; fails after 5 s."""
    async with asyncio.timeout(5):
        while not holds():
            await asyncio.sleep(0)


def timings_of(events: list[Token | Finished]) -> Timings:
    """The account of a request that ended well, after checking that no stage is negative."""
    end = events[-1]
    assert isinstance(end, Finished)
    assert end.timings is not None
    assert min(end.timings.queue_s, end.timings.prefill_s, end.timings.decode_s) >= 0
    return end.timings


def expected(count: int) -> list[Token]:
    return [Token(i, next_token(i)) for i in range(count)]


def is_prefill(message: Message) -> bool:
    return isinstance(message, Prefill)


def is_cancel(message: Message) -> bool:
    return isinstance(message, Cancel)


def run_remote(scene: Scene, first: int = 0, count: int = 4, end: bool = True) -> None:
    """Prefill sends token `first` and hands off, decode the rest."""
    prefill, decode = scene["p1"], scene["d1"]

    def script(channel: Channel, command: Prefill) -> None:
        request_id = command.request.request_id
        send_tokens(channel, request_id, first)
        hand_off(channel, request_id)
        send_tokens(decode.channels[-1], request_id, *range(first + 1, count))
        if end:
            finish(decode.channels[-1], request_id)

    prefill.on_prefill = script
