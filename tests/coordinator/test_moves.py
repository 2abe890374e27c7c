"""A decode worker that leaves: its streams move to another one with their KV, and whatever fails, nobody notices."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from contracts.channel import Channel
from contracts.errors import WireError, WorkerLostError
from contracts.messages import Cancel, Ended, Message, Migrate, Peers, Prefill, Reserve, Stayed
from contracts.request import Finished
from contracts.roles import Duty
from contracts.ticket import is_genuine
from tests.coordinator.fake_worker import (
    SECRET,
    FakeWorker,
    finish,
    hand_off,
    next_token,
    send_tokens,
)
from tests.coordinator.flow_scene import Scene, all_heard, collect, expected, request, scene, until
from tests.coordinator.streams import Stream

NUM_TOKENS = 8
LOST = WireError("worker_lost", "gone")


def workers(num_decodes: int = 2) -> list[FakeWorker]:
    names = [f"d{number}" for number in range(1, num_decodes + 1)]
    decodes = [
        FakeWorker("decode", name, peers=tuple(other for other in names if other != name)) for name in names
    ]
    return [FakeWorker("prefill", "p1", peers=tuple(names)), *decodes]


class Story:
    """A stream of which `source` has written three tokens when Serve takes it away; `target` is the other one."""

    def __init__(self, s: Scene) -> None:
        self.scene = s
        self.name = ""
        self.is_told_to_end = False
        s["p1"].on_prefill = self._begin
        self.on_migrate: Callable[[Migrate], None] = lambda _command: None
        self.prefills: list[Prefill] = []

    def _begin(self, channel: Channel, command: Prefill) -> None:
        assert command.ticket is not None
        self.prefills.append(command)
        name = command.request.request_id
        known = len(command.request.output_ids)
        if known:  # a continuation: serve it to its end
            target = self.scene[command.ticket.target_id].channels[-1]
            send_tokens(channel, name, known)
            hand_off(channel, name)
            send_tokens(target, name, *range(known + 1, NUM_TOKENS))
            finish(target, name)
            return
        self.name = name
        self.source = self.scene[command.ticket.target_id]
        self.target = self.target_of(self.source)
        self.source.on_migrate = lambda _channel, message: self.on_migrate(message)
        send_tokens(channel, name, 0)
        hand_off(channel, name)
        send_tokens(self.source.channels[-1], name, 1, 2)
        self.leave()

    def target_of(self, source: FakeWorker) -> FakeWorker:
        return self.scene["d2" if source.worker_id == "d1" else "d1"]

    def leave(self) -> None:
        if self.is_told_to_end:  # SIGTERM: Serve does not know of it
            self.source.is_draining = True
            self.source.channels[-1].send(self.source.status())
            return
        decodes = [link.info for link in self.scene.fleet.links() if link.info.role == "decode"]
        rest = [info for info in decodes if info.worker_id != self.source.worker_id]
        self.scene.fleet.sync("decode", rest)

    def from_source(self, *indexes: int) -> None:
        send_tokens(self.source.channels[-1], self.name, *indexes)

    def from_target(self, command: Migrate, *indexes: int, end: bool = False) -> None:
        send_tokens(self.target.channels[-1], command.ticket.request_id, *indexes)
        if end:
            finish(self.target.channels[-1], command.ticket.request_id)

    def handed_off(self) -> None:
        hand_off(self.source.channels[-1], self.name)


async def assert_whole(s: Scene, migrations: list[str], *continuations: str) -> None:
    got = await collect(s, request(NUM_TOKENS), 15.0)
    assert got == [*expected(NUM_TOKENS), Finished("length")]
    assert s.recorder.migrations == migrations
    assert tuple(s.recorder.continuations) == continuations
    assert not s.flow._room._held  # it is counted nowhere any more


@pytest.mark.parametrize("is_told_to_end", [False, True])
async def test_a_stream_moves_with_its_kv_and_is_not_read_again(is_told_to_end: bool) -> None:
    async with scene(*workers()) as s:
        story = Story(s)
        story.is_told_to_end = is_told_to_end

        def move(command: Migrate) -> None:
            story.from_source(3, 4)
            story.handed_off()
            story.from_target(command, 5, 6, 7, end=True)

        story.on_migrate = move
        await assert_whole(s, ["moved"])
        assert len(story.prefills) == 1
        (reserve,) = [m for m in story.target.heard if isinstance(m, Reserve)]
        (migrate,) = [m for m in story.source.heard if isinstance(m, Migrate)]
        ids = (reserve.request.request_id, reserve.handoff_id)
        assert ids == (migrate.ticket.request_id, migrate.ticket.handoff_id)
        assert ids[0] != story.name
        assert reserve.request.output_ids == (next_token(0), next_token(1))  # the third has no KV yet
        assert is_genuine(migrate.ticket, SECRET)
        assert migrate.ticket.num_tokens == reserve.request.num_known_tokens
        assert migrate.max_tokens == migrate.ticket.num_tokens + reserve.num_more
        assert reserve.num_more == NUM_TOKENS - 2  # the request's own limit is the nearer one
        assert (story.target.worker_id, ids[0]) in s.recorder.held
        listed = {view.worker_id for view in s.fleet.views("decode")}
        assert listed == {story.target.worker_id}  # nobody new goes to the one that leaves


async def test_a_stream_may_move_to_the_worker_that_has_read_it() -> None:
    reader, writer = workers(1)
    reader.duty, writer.peers = Duty("mixed", 1), ("p1",)
    async with scene(reader, writer) as s:
        story = Story(s)
        story.target_of = lambda _source: s["p1"]  # type: ignore[method-assign]

        def move(command: Migrate) -> None:
            story.handed_off()
            story.from_target(command, 3, 4, 5, 6, 7, end=True)

        story.on_migrate = move
        await assert_whole(s, ["moved"])


async def test_who_is_asked_to_let_one_go_lets_one_go_that_it_answers() -> None:
    async with scene(*workers()) as s:
        link, heard = s.fleet.link("d1"), list[str]()
        link.open("answered", lambda _event: heard.append("answered"), 0)
        link.open("read", lambda _event: heard.append("read"), 9, is_answered_here=False)
        link.ask_one_to_move(0.3)
        assert heard == ["answered"]
        for name in ("answered", "read"):
            link.close(name, cancel=False)


@pytest.mark.parametrize("order", ["target first", "end first"])
async def test_the_words_of_two_workers_may_come_in_any_order(order: str) -> None:
    async with scene(*workers()) as s:
        story = Story(s)

        def move(command: Migrate) -> None:
            story.from_target(command, 5, 6, 7, end=order == "end first")
            loop = asyncio.get_running_loop()
            loop.call_later(0.05, story.from_source, 3, 4)
            loop.call_later(0.1, story.handed_off)
            if order != "end first":
                loop.call_later(0.15, finish, story.target.channels[-1], command.ticket.request_id)

        story.on_migrate = move
        await assert_whole(s, ["moved"])


@pytest.mark.parametrize("how", ["refused", "stayed", "target ends it"])
async def test_a_move_that_comes_to_nothing_is_tried_again_and_the_stream_goes_on(how: str) -> None:
    async with scene(*workers()) as s:
        story = Story(s)
        tried: list[Message] = []

        def move(command: Migrate) -> None:
            tried.append(command)
            if len(tried) == 1:
                story.from_source(3)
                source, target = story.source.channels[-1], story.target.channels[-1]
                if how == "stayed":
                    source.send(Stayed(story.name, LOST))
                else:
                    target.send(Ended(command.ticket.request_id, error=LOST))
                return
            story.from_source(4)
            story.handed_off()
            story.from_target(command, 5, 6, 7, end=True)

        def refuse_once(channel: Channel, command: Reserve) -> None:
            if how == "refused" and not tried and command.request.output_ids:
                tried.append(command)
                story.from_source(3)
                channel.send(Ended(command.request.request_id, error=WireError("overloaded", "no room")))
                return
            s["d1"].grant(channel, command)

        s["d1"].on_reserve = s["d2"].on_reserve = refuse_once
        story.on_migrate = move
        await assert_whole(s, ["stayed", "moved"])
        if how == "stayed":
            first = tried[0]
            assert isinstance(first, Migrate)
            await story.target.wait_for(lambda m: m == Cancel(first.ticket.request_id))


async def test_a_request_that_ends_before_it_has_moved_just_ends() -> None:
    async with scene(*workers()) as s:
        story = Story(s)

        def move(_command: Migrate) -> None:
            story.from_source(3, 4, 5, 6, 7)
            finish(story.source.channels[-1], story.name)

        story.on_migrate = move
        await assert_whole(s, ["ended"])
        await story.target.wait_for(lambda m: isinstance(m, Cancel))


async def test_a_source_that_fails_in_its_pause_costs_a_reading() -> None:
    async with scene(*workers()) as s:
        story = Story(s)

        def move(_command: Migrate) -> None:
            story.from_source(3)
            story.source.channels[-1].send(Ended(story.name, error=LOST))

        story.on_migrate = move
        await assert_whole(s, ["ended"], "worker_lost")
        await story.target.wait_for(lambda m: isinstance(m, Cancel))


@pytest.mark.parametrize("has_all", [True, False])
async def test_a_source_that_dies_when_the_target_streams_is_not_missed_unless_tokens_died_with_it(
    has_all: bool,
) -> None:
    async with scene(*workers()) as s, asyncio.TaskGroup() as tasks:
        story = Story(s)

        def move(command: Migrate) -> None:
            if has_all:
                story.from_source(3, 4)
            story.from_target(command, 5)

            async def die() -> None:
                link = s.fleet.link(story.source.worker_id)
                await all_heard(s, story.source)
                await all_heard(s, story.target)
                await story.source.kill()
                await until(lambda: not link.is_alive)
                if has_all:
                    story.from_target(command, 6, 7, end=True)

            tasks.create_task(die())

        story.on_migrate = move
        await assert_whole(s, ["moved"], *([] if has_all else ["worker_lost"]))


async def test_a_target_that_dies_with_the_stream_costs_a_reading() -> None:
    async with scene(*workers(3)) as s, asyncio.TaskGroup() as tasks:
        story = Story(s)

        def move(command: Migrate) -> None:
            story.target = s[command.ticket.target_id]
            story.from_source(3, 4)
            story.handed_off()
            story.from_target(command, 5)
            tasks.create_task(story.target.kill())

        story.on_migrate = move
        await assert_whole(s, ["moved"], "worker_lost")


async def test_a_lost_first_token_is_not_waited_for() -> None:
    """Prefill dies with the frame that had it, while decode streams already: the gap would never close."""
    async with scene(*workers(), first_token_timeout_s=60.0) as s, asyncio.TaskGroup() as tasks:
        names: list[str] = []

        def begin(channel: Channel, command: Prefill) -> None:
            assert command.ticket is not None
            name = command.request.request_id
            names.append(name)
            target = s[command.ticket.target_id].channels[-1]
            if len(names) > 1:
                raise AssertionError("prefill is gone")
            send_tokens(target, name, 1, 2)
            tasks.create_task(die(s[command.ticket.target_id]))

        async def die(target: FakeWorker) -> None:
            await all_heard(s, target)
            await s["p1"].kill()

        def read_here(channel: Channel, command: Prefill) -> None:
            send_tokens(channel, command.request.request_id, *range(NUM_TOKENS))
            finish(channel, command.request.request_id)

        s["p1"].on_prefill = begin
        s["d1"].on_prefill = s["d2"].on_prefill = read_here
        await assert_whole(s, [], "worker_lost")


@pytest.mark.parametrize("num_free", [29, 30])
async def test_a_decode_worker_short_of_blocks_lets_its_youngest_stream_go_to_one_that_has_many(
    num_free: int,
) -> None:
    decode, roomy = FakeWorker("decode", "d1", peers=("d2",)), FakeWorker("decode", "d2")
    roomy.num_free = num_free
    info = await roomy.start()
    async with scene(decode) as s, asyncio.TaskGroup() as tasks:
        decode.on_prefill = lambda channel, command: send_tokens(channel, command.request.request_id, 0, 1, 2)
        decode.on_migrate = lambda channel, command: hand_off(channel, command.request_id)
        streams = [
            Stream(s.flow, replace(request(NUM_TOKENS), request_id=name), 15.0) for name in ("old", "young")
        ]
        for stream in streams:
            assert [await anext(stream) for _ in range(3)] == expected(3)
        s.fleet.sync("decode", [s.fleet.link("d1").info, info])
        while len(s.fleet.views("decode")) < 2:
            await s.fleet.changed(1.0)
        rest = [tasks.create_task(stream.__anext__()) for stream in streams]  # somebody has to listen
        decode.channels[-1].send(decode.status(num_free=4))
        if num_free == 30:
            migrate = await decode.wait_for(lambda m: isinstance(m, Migrate))
            assert isinstance(migrate, Migrate)
            assert migrate.request_id == "young.1"
            send_tokens(roomy.channels[-1], migrate.ticket.request_id, 3)
        else:
            send_tokens(decode.channels[-1], "young.1", 3)
        send_tokens(decode.channels[-1], "old.1", 3)
        assert [await each for each in rest] == [expected(4)[3]] * 2
        assert sum(isinstance(m, Migrate) for m in decode.heard) == (num_free == 30)
        for stream in streams:
            await stream.aclose()
    await roomy.kill()


async def test_a_worker_that_is_asked_to_let_go_and_is_silent_is_not_waited_for_longer() -> None:
    async with scene(*workers(1), stall_timeout_s=0.4, max_continuations=0) as s:
        story = Story(s)
        story.target_of = lambda _source: s["d1"]  # type: ignore[method-assign]
        with pytest.raises(WorkerLostError, match=r"no token from p1 or d1 for 0\.4 s"):
            await collect(s, request(NUM_TOKENS), 15.0)


async def test_a_request_that_is_only_reserved_does_not_move() -> None:
    async with scene(*workers(1)) as s:

        def grant(channel: Channel, command: Reserve) -> None:
            s.fleet.link("d1").ask_to_move()
            s["d1"].grant(channel, command)

        def answer(channel: Channel, command: Prefill) -> None:
            send_tokens(channel, command.request.request_id, *range(NUM_TOKENS))
            finish(channel, command.request.request_id)

        s["d1"].on_reserve = grant
        s["p1"].on_prefill = answer
        await assert_whole(s, [])


async def test_decode_workers_know_each_other_up_to_a_number() -> None:
    async with scene(*workers(11)) as s:
        for number in range(1, 12):
            worker = s[f"d{number}"]
            message = await worker.wait_for(lambda m: isinstance(m, Peers) and len(m.workers) == 8)
            assert isinstance(message, Peers)
            assert worker.worker_id not in {info.worker_id for info in message.workers}
        everybody = await s["p1"].wait_for(lambda m: isinstance(m, Peers) and len(m.workers) == 11)
        assert isinstance(everybody, Peers)
