"""Receiver and block pool together, under any order of messages, bytes, delays, cancels, deaths and deadlines.

After every step: no block is lost (invariant 3) and none is written on behalf of a request that does not hold it, no
slot is lost, and no reservation has ended twice (invariant 2). At the end, whatever happened, all of it is free.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from contracts.blocks import KvLayout, prompt_hash
from contracts.errors import EngineError, LeaseExpiredError, WorkerLostError, to_wire
from contracts.messages import Abort, AbortOk, Commit, Data, Fin, Grant, Hello, Keep, Message, Open, Want
from contracts.ticket import Ticket, sign
from engine.blocks import BlockPool, Hold, HoldState
from kvtransfer.incoming import Incoming, Outcome
from kvtransfer.pages import Pages, checksum
from kvtransfer.receiver import Receiver, Reservation
from kvtransfer.slots import KEPT
from kvtransfer.transport import Link, LinkClosed, OnBytes, Op
from tests.kvtransfer.tools import SECRET, STATE, make_config

LAYOUT = KvLayout(num_layers=1, num_kv_heads=1, head_dim=2, block_size=4, dtype="float32")
NUM_BLOCKS = 10
NUM_SLOTS = 5  # one of them may be kept
PROGRESS_S = 10.0
PROMPTS = (tuple(range(1, 7)), tuple(range(1, 18)), tuple(range(100, 113)))


class FakeLink:
    """Bytes come when the test says so; a closed link touches no buffer any more."""

    def __init__(self) -> None:
        self.posted: dict[int, tuple[memoryview, Op, OnBytes | None]] = {}
        self.parts: dict[
            int, tuple[int, int]
        ] = {}  # of these, bytes that came and how many of them are in the buffer
        self.is_closed = False

    def post_recv(self, tag: int, buffer: memoryview, on_bytes: OnBytes | None = None) -> Op:
        op = Op()
        if self.is_closed:
            op.fail(LinkClosed("closed"))
        else:
            assert tag not in self.posted
            self.posted[tag] = (buffer, op, on_bytes)
        return op

    def send(self, tag: int, buffer: memoryview) -> Op:
        raise NotImplementedError

    def staging(self, tag: int) -> memoryview | None:
        return None

    def arrive(self, tag: int, content: bytes) -> None:
        """The rest of it, or all."""
        _buffer, op, _on_bytes = self.posted[tag]
        self._come(tag, content, len(content))
        del self.posted[tag]
        self.parts.pop(tag, None)
        op.finish(len(content))

    def arrive_partly(self, tag: int, content: bytes) -> None:
        """Half of what has not come yet."""
        num_here, _ = self.parts.get(tag, (0, 0))
        half = (num_here + len(content)) // 2
        if half > num_here:
            self._come(tag, content, half)

    def _come(self, tag: int, content: bytes, end: int) -> None:
        buffer, _op, on_bytes = self.posted[tag]
        num_here, num_kept = self.parts.get(tag, (0, 0))
        num_kept_then = num_kept + end - num_here
        buffer[num_kept:num_kept_then] = content[num_here:end]
        assert on_bytes is not None
        is_taken = on_bytes(buffer[:num_kept_then], end == len(content))
        assert is_taken or num_kept == num_here or end == len(content), "once taken, always taken"
        self.parts[tag] = (end, 0 if is_taken else num_kept_then)

    async def close(self) -> None:
        self.is_closed = True
        for _buffer, op, _on_bytes in self.posted.values():
            op.fail(LinkClosed("closed"))
        self.posted.clear()


class FakeChannel:
    """What the receiver sends is kept; what it shall hear is put in."""

    def __init__(self, name: str) -> None:
        self.peer = Hello(name, 1, "kv", b"")
        self.sent: list[Message] = []
        self.is_closed = False
        self._inbox: asyncio.Queue[Message | None] = asyncio.Queue()

    def send(self, message: Message) -> None:
        if self.is_closed:
            raise WorkerLostError("closed")
        self.sent.append(message)

    def say(self, message: Message) -> None:
        self._inbox.put_nowait(message)

    async def receive(self) -> Message:
        message = await self._inbox.get()
        if message is None or self.is_closed:
            raise WorkerLostError("closed")
        return message

    def abort(self) -> None:
        self.is_closed = True
        self._inbox.put_nowait(None)


@dataclass(eq=False)
class Peer:
    """A prefill worker's connection."""

    channel: FakeChannel
    link: FakeLink
    task: asyncio.Task[None]
    said: list[Message] = field(default_factory=list)
    announced: dict[int, tuple[Data, int]] = field(
        default_factory=dict
    )  # slot -> what is to come, of which mark


@dataclass(eq=False)
class Held:
    """One request of decode: its blocks, and how its handoff ended."""

    mark: int  # what its KV looks like: every element
    hold: Hold
    incoming: Incoming
    ticket: Ticket
    prompt: tuple[int, ...]
    ends: list[Outcome] = field(default_factory=list)
    is_cancelled: bool = False
    num_chunks: int = 0

    @property
    def targets(self) -> list[int]:
        """Blocks that its peer may write: not the shared prefix."""
        return self.hold.block_ids[self.hold.num_cached_tokens // LAYOUT.block_size :]


indexes = st.integers(0, 5)


class Handoffs(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.now_s = 0.0
        self.pool = BlockPool(NUM_BLOCKS, LAYOUT.block_size, clock=lambda: self.now_s)
        self.slab = torch.zeros(NUM_BLOCKS, 1, 2, 1, LAYOUT.block_size, 2)
        self.before = self.slab.clone()
        self.pages = Pages(self.slab, LAYOUT)
        config = make_config(
            num_slots=NUM_SLOTS, slot_bytes=4096, progress_timeout_s=PROGRESS_S, peer_timeout_s=3600.0
        )
        self.receiver = Receiver(("d", 1), SECRET, self.pages, config, clock=lambda: self.now_s)
        self.peers: list[Peer] = []
        self.held: list[Held] = []
        self.count = 0
        self.connect()
        self.reserve(1)

    # --- decode's side ------------------------------------------------------------------------------------------------

    @rule(which=indexes)
    def reserve(self, which: int) -> None:
        self.count += 1
        mark, prompt = self.count, PROMPTS[which % len(PROMPTS)]
        name = f"h{mark}"
        hold = self.pool.acquire(name, prompt, len(prompt) + 1, HoldState.RESERVED)
        if hold is None:
            return
        digest = prompt_hash(prompt)
        reservation = Reservation(
            name, name, digest, len(prompt), hold.num_cached_tokens, tuple(hold.block_ids), len(prompt)
        )
        ticket = sign(Ticket(name, name, "p", 1, "d", 1, len(prompt), digest), SECRET)
        incoming = self.in_loop(
            lambda: self.receiver.expect(reservation, lambda: started(), lambda end: ended(end))
        )
        held = Held(mark, hold, incoming, ticket, prompt)
        self.held.append(held)
        self.before[held.targets] = self.slab[held.targets]

        def started() -> None:
            self.pool.move(hold, HoldState.IN_HANDOFF)

        def ended(end: Outcome) -> None:
            held.ends.append(end)
            self.before[held.targets] = self.slab[held.targets]
            if end == STATE:
                self.pool.move(hold, HoldState.RUNNING)
            else:
                self.free(held)

    @rule(which=indexes, is_lease=st.booleans())
    def cancel(self, which: int, is_lease: bool) -> None:
        """The client leaves, or the lease is over: the blocks are somebody else's at once."""
        held = self.pick(self.held, which)
        if held is not None and not held.ends:
            held.is_cancelled = True
            error = LeaseExpiredError("nobody came") if is_lease else None
            self.in_loop(lambda: held.incoming.cancel(error))
            self.free(held)

    @rule(which=indexes)
    def finish_running(self, which: int) -> None:
        """An answer is complete: its prompt stays as cache."""
        running = [held for held in self.held if held.ends == [STATE] and not held.hold.is_released]
        held = self.pick(running, which)
        if held is not None:
            self.pool.publish(held.hold, held.prompt, len(held.prompt))
            self.free(held)

    def free(self, held: Held) -> None:
        self.before[held.targets] = self.slab[held.targets]
        self.pool.release(held.hold)

    # --- prefill's side -----------------------------------------------------------------------------------------------

    @rule()
    def connect(self) -> None:
        if len(self.peers) == 2:
            return
        channel, link = FakeChannel("p"), FakeLink()

        async def serve() -> None:
            await self.receiver.serve(channel, as_link(link))  # type: ignore[arg-type]

        self.peers.append(Peer(channel, link, self.loop.create_task(serve())))
        self.run()

    @rule(which=indexes, peer=indexes, is_genuine=st.integers(0, 5))
    def open(self, which: int, peer: int, is_genuine: int) -> None:
        held = self.pick(self.held, which)
        if held is not None:
            ticket = held.ticket if is_genuine else Ticket(**{**as_dict(held.ticket), "mac": b"forged"})
            self.say(peer, Open(ticket, held.incoming.reservation.start))

    @rule(which=indexes, peer=indexes, count=st.integers(-1, 5))
    def want(self, which: int, peer: int, count: int) -> None:
        held = self.pick(self.held, which)
        if held is not None:
            self.say(peer, Want(held.ticket.handoff_id, count))

    @rule(
        which=indexes,
        peer=indexes,
        slot=st.integers(-1, NUM_SLOTS),
        cut=st.integers(0, 9),
        flaw=st.integers(0, 12),
    )
    def data(self, which: int, peer: int, slot: int, cut: int, flaw: int) -> None:
        """All missing tokens or a part of them, sometimes out of range, or announced with a wrong size or sum."""
        held, sender = self.pick(self.held, which), self.pick(self.peers, peer)
        if held is None or sender is None or slot in sender.announced:
            return
        start, end = held.incoming.reservation.start, len(held.prompt)
        low, high = (start, end) if cut == 0 else (start + cut - 1, min(start + cut + 3, end + (flaw == 1)))
        size = max(high - low, 0) * LAYOUT.bytes_per_token - (flaw == 2)
        content = self.content_of(held.mark, max(size, 0))
        head = Data(
            held.ticket.handoff_id,
            held.num_chunks,
            slot,
            low,
            high,
            size,
            checksum(content) ^ (2 * (flaw == 3)),
        )
        held.num_chunks += flaw != 4
        is_granted = any(slot in grant.slots for grant in sender.channel.sent if isinstance(grant, Grant))
        self.say(peer, head)
        if is_granted and slot in sender.link.posted:
            sender.announced[slot] = (head, held.mark)

    @rule(which=indexes, peer=indexes)
    def whole(self, which: int, peer: int) -> None:
        """A sender that does everything right, as far as it gets at once."""
        held, sender = self.pick(self.held, which), self.pick(self.peers, peer)
        if held is None or sender is None:
            return
        handoff_id, start = held.ticket.handoff_id, held.incoming.reservation.start
        self.say(peer, Open(held.ticket, start))
        num_sent = len(sender.channel.sent)
        self.say(peer, Want(handoff_id, 100))
        grants = [grant for grant in sender.channel.sent[num_sent:] if isinstance(grant, Grant)]
        if not grants or held.num_chunks:
            return
        slot, content = (
            grants[0].slots[0],
            self.content_of(held.mark, (len(held.prompt) - start) * LAYOUT.bytes_per_token),
        )
        self.say(peer, Data(handoff_id, 0, slot, start, len(held.prompt), content.numel(), checksum(content)))
        held.num_chunks = 1
        if slot in sender.link.posted:
            self.in_loop(lambda: sender.link.arrive(slot, content.numpy().tobytes()))
        self.say(peer, Fin(handoff_id, 1, STATE))

    @rule(peer=indexes, count=st.integers(-1, 3))
    def keep(self, peer: int, count: int) -> None:
        self.say(peer, Keep(count))

    @rule(which=indexes, peer=indexes, order=st.sampled_from(["bytes", "data", "bytes, data", "data, bytes"]))
    def at_once(self, which: int, peer: int, order: str) -> None:
        """All missing tokens in a slot that the connection keeps, right behind Open; or nothing, or one part of it."""
        held, sender = self.pick(self.held, which), self.pick(self.peers, peer)
        if held is None or sender is None:
            return
        self.say(peer, Open(held.ticket, held.incoming.reservation.start))
        slots = [
            slot for slot in range(NUM_SLOTS) if slot in sender.link.posted and slot not in sender.announced
        ]
        start, end = held.incoming.reservation.start, len(held.prompt)
        if not slots or start == end:
            return
        content = self.content_of(held.mark, (end - start) * LAYOUT.bytes_per_token)
        head = Data(
            held.ticket.handoff_id, held.num_chunks, slots[0], start, end, content.numel(), checksum(content)
        )
        for step in order.split(", "):
            if step == "bytes" and slots[0] in sender.link.posted:
                self.in_loop(lambda: sender.link.arrive(slots[0], content.numpy().tobytes()))
            elif step == "data":
                held.num_chunks += 1
                self.say(peer, head)
        if order == "data" and slots[0] in sender.link.posted:
            sender.announced[slots[0]] = (head, held.mark)

    @rule(which=indexes, peer=indexes)
    def stop_keeping(self, which: int, peer: int) -> None:
        """As if what is kept were a handoff's."""
        self.say(peer, (Abort(KEPT, None), AbortOk(KEPT), Want(KEPT, 9), Abort("", None))[which % 4])

    @rule(peer=indexes, which=indexes)
    def some_bytes_come(self, peer: int, which: int) -> None:
        sender = self.pick(self.peers, peer)
        if sender is None:
            return
        slot = self.pick(sorted(slot for slot in sender.announced if slot in sender.link.posted), which)
        if slot is not None:
            head, mark = sender.announced[slot]
            content = self.content_of(mark, head.num_bytes).numpy().tobytes()
            self.in_loop(lambda: sender.link.arrive_partly(slot, content))

    @rule(peer=indexes, which=indexes, is_short=st.integers(0, 5))
    def bytes_come(self, peer: int, which: int, is_short: int) -> None:
        sender = self.pick(self.peers, peer)
        slot = self.pick(sorted(sender.announced), which) if sender is not None else None
        if sender is None or slot is None:
            return
        head, mark = sender.announced.pop(slot)
        if slot in sender.link.posted:
            content = self.content_of(mark, max(head.num_bytes - (is_short == 0), 0)).numpy().tobytes()
            self.in_loop(lambda: sender.link.arrive(slot, content))

    @rule(which=indexes, peer=indexes, count=st.integers(0, 4))
    def fin(self, which: int, peer: int, count: int) -> None:
        held = self.pick(self.held, which)
        if held is not None:
            self.say(peer, Fin(held.ticket.handoff_id, count or held.num_chunks, STATE))

    @rule(which=indexes, peer=indexes, kind=st.integers(0, 2))
    def stop(self, which: int, peer: int, kind: int) -> None:
        held = self.pick(self.held, which)
        if held is not None:
            handoff_id = held.ticket.handoff_id
            error = to_wire(EngineError("a step failed"))
            self.say(peer, (Abort(handoff_id, error), Abort(handoff_id, None), AbortOk(handoff_id))[kind])

    @rule(peer=indexes, which=indexes)
    def repeat(self, peer: int, which: int) -> None:
        """Something that was said before, bytes never."""
        sender = self.pick(self.peers, peer)
        message = self.pick(sender.said, which) if sender is not None else None
        if message is not None and not isinstance(message, Data):
            self.say(peer, message)

    @rule(peer=indexes, how=st.integers(0, 2))
    def lose(self, peer: int, how: int) -> None:
        """Killed: its control connection ends, its data link ends, or it talks nonsense."""
        sender = self.pick(self.peers, peer)
        if sender is None:
            return
        if how == 0:
            self.in_loop(sender.channel.abort)
        elif how == 1:
            self.loop.run_until_complete(sender.link.close())
        else:
            sender.channel.say(Commit("nonsense"))
        self.run()

    @rule(seconds=st.sampled_from([0.1, PROGRESS_S / 2, PROGRESS_S + 1]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        for connection in list(self.receiver._connections.values()):
            self.in_loop(lambda connection=connection: self.receiver._look(connection))

    # --- what is true after every step --------------------------------------------------------------------------------

    @invariant()
    def no_block_is_lost(self) -> None:
        self.pool.check()

    @invariant()
    def nothing_is_written_into_blocks_of_others(self) -> None:
        writers = torch.full((NUM_BLOCKS, 1, 1, 1, 1, 1), -1.0)
        for held in self.held:
            if not held.incoming.is_over:
                writers[held.targets] = held.mark
        assert bool(((self.slab == self.before) | (self.slab == writers)).all())

    @invariant()
    def what_is_taken_over_is_all_there(self) -> None:
        for held in self.held:
            if held.ends == [STATE] and not held.hold.is_released:
                tokens = self.slab[held.targets].permute(0, 4, 1, 2, 3, 5).flatten(0, 1)
                num_tokens = len(held.prompt) - held.incoming.reservation.start
                assert bool((tokens[:num_tokens] == held.mark).all()), held

    @invariant()
    def no_slot_is_lost(self) -> None:
        counts = self.receiver.slot_counts
        assert counts.free + counts.granted + counts.receiving + counts.quarantined + counts.kept == NUM_SLOTS
        assert min(counts.free, counts.granted, counts.receiving, counts.quarantined, counts.kept) >= 0
        assert counts.kept <= 1

    @invariant()
    def a_link_fills_only_slots_of_its_own(self) -> None:
        """What is posted is held by that connection until its bytes are here, whatever its peer says."""
        used = self.receiver._slots._used
        for number, connection in self.receiver._connections.items():
            for slot in connection.landings:
                assert used[slot].owner[0] == number
                assert used[slot].is_receiving or used[slot].owner[1] == KEPT

    @invariant()
    def one_end_each(self) -> None:
        for held in self.held:
            assert len(held.ends) + held.is_cancelled <= 1, held.ends
            assert held.incoming.is_over == bool(held.ends or held.is_cancelled)
            assert held.hold.is_released or held.ends in ([], [STATE])
        reasons = Counter(held.incoming.reason for held in self.held if held.incoming.is_over)
        assert reasons == +self.receiver.num_ended

    def teardown(self) -> None:
        """Everybody dies; then nothing is held any more."""
        if not hasattr(self, "loop"):
            return
        for peer in list(self.peers):
            self.in_loop(peer.channel.abort)
        self.in_loop(self.receiver.close)
        self.one_end_each()
        for held in self.held:
            if not held.hold.is_released:
                self.free(held)
        counts = self.receiver.slot_counts
        audit = self.pool.audit()
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()
        assert counts.free == NUM_SLOTS, counts
        assert self.receiver.num_expected == 0
        assert audit.free + audit.cached == NUM_BLOCKS, audit

    # --- helpers ------------------------------------------------------------------------------------------------------

    def say(self, peer: int, message: Message) -> None:
        sender = self.pick(self.peers, peer)
        if sender is not None:
            sender.said.append(message)
            sender.channel.say(message)
            self.run()

    def pick(self, things: Any, which: int) -> Any:
        return things[-1 - which % len(things)] if things else None

    def content_of(self, mark: int, num_bytes: int) -> torch.Tensor:
        return torch.full((num_bytes // 4 + 1,), float(mark)).view(torch.uint8)[:num_bytes].clone()

    def in_loop(self, call: Any) -> Any:
        async def run() -> Any:
            return call()

        result = self.loop.run_until_complete(run())
        self.run()
        return result

    def run(self) -> None:
        """Until nothing is left to do."""

        async def settle() -> None:
            for _ in range(8):
                await asyncio.sleep(0)

        self.loop.run_until_complete(settle())
        for peer in [peer for peer in self.peers if peer.task.done()]:
            assert peer.channel.is_closed
            assert peer.link.is_closed
            peer.task.exception()
            self.peers.remove(peer)


def as_link(link: FakeLink) -> Link:
    return link


def as_dict(ticket: Ticket) -> dict[str, Any]:
    return {name: getattr(ticket, name) for name in Ticket.__dataclass_fields__}


Handoffs.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestHandoffs = Handoffs.TestCase
