"""Staging slots: the only memory that network data lands in, and who gets them next.

Receiver's slot:
    FREE ──grant──► GRANTED ──begin (Data came)──► RECEIVING ──finish (bytes final)──► FREE
     │                 │                              │ ▲
     │                 └──────── quarantine ──────────┘ │ the handoff is over, its bytes may still come:
     │                                                  │ granted:   until the sender says so (release_unused),
     │                                                  │            or begins
     │                                                  │ receiving: until the bytes are final
     └──grant to a connection──► KEPT ──begin───────────┘ of whichever handoff its Data names
    release_peer: the link is closed, nothing can come any more: all its slots are FREE.

A kept slot waits with its receive posted, so that a handoff's first bytes need no Grant. It is free again only by its
bytes or the end of its link, whatever the sender says. A connection has KEPT_SLOTS at most, all of them a quarter.

Free slots are taken last in, first out, so that the one used next is the one most likely still in the CPU's cache.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvtransfer.transport import Link

WINDOW = 2
"""Slots of one flow at a time: what is under way while the word that a slot is free again goes back and forth."""

KEPT_SLOTS = 2
"""Slots that one connection keeps, as far as there are enough: the first pieces of a handoff, or of two."""

KEPT_SHARE = 4  # of all slots, one in so many is kept at most: the rest is for whoever has something to send

QUARANTINE_GRACE_S = 1.0

FlowKey = tuple[
    int, str
]  # connection number, handoff id ("" is the connection's self-test, KEPT what it keeps)
KEPT = "\0kept"


class _Cuts:
    """The first bytes of slots, kept: pieces are mostly of one size, and a cut costs as much as a message."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[int, torch.Tensor]] = {}

    def first(self, num_bytes: int, slot: int, whole: torch.Tensor) -> torch.Tensor:
        """Or all of `whole`, if there are no more."""
        known = self._known.get(slot)
        if known is None or known[0] != num_bytes:
            known = self._known[slot] = (num_bytes, whole[:num_bytes])
        return known[1]

    def clear(self) -> None:
        self._known.clear()


class Arena:
    """Memory of all slots of one direction. `views` are what a transport reads or fills."""

    def __init__(self, num_slots: int, slot_bytes: int) -> None:
        self.tensors = torch.empty(num_slots, slot_bytes, dtype=torch.uint8)
        self.views = [memoryview(row.numpy()) for row in self.tensors]
        self._rows = self.tensors.unbind()
        self._cuts = _Cuts()

    def content(self, slot: int, num_bytes: int) -> torch.Tensor:
        """The first bytes of a slot."""
        return self._cuts.first(num_bytes, slot, self._rows[slot])


@dataclass(frozen=True, slots=True)
class SlotCounts:
    """The receiver's slots by state; they sum to the configured number."""

    free: int
    granted: int
    receiving: int
    quarantined: int
    kept: int = 0


@dataclass(slots=True)
class _Slot:
    owner: FlowKey
    is_receiving: bool = False
    is_quarantined: bool = False


class SlotTable:
    """Which flow holds which slot. No I/O."""

    def __init__(self, num_slots: int) -> None:
        self._free = list(range(num_slots))
        self._used: dict[int, _Slot] = {}
        self._num_held: dict[FlowKey, int] = {}
        self.num_kept = 0
        self.most_kept = num_slots // KEPT_SHARE

    @property
    def num_free(self) -> int:
        return len(self._free)

    def counts(self) -> SlotCounts:
        used = self._used.values()
        quarantined = sum(slot.is_quarantined for slot in used)
        receiving = sum(slot.is_receiving and not slot.is_quarantined for slot in used)
        granted = len(used) - quarantined - receiving - self.num_kept
        return SlotCounts(len(self._free), granted, receiving, quarantined, self.num_kept)

    def num_held(self, owner: FlowKey) -> int:
        return self._num_held.get(owner, 0)

    def num_receiving(self, owner: FlowKey) -> int:
        return sum(slot.owner == owner and slot.is_receiving for slot in self._used.values())

    def grant(self, owner: FlowKey) -> int:
        slot = self._free.pop()
        self._used[slot] = _Slot(owner)
        self._count(owner, 1)
        return slot

    def try_begin(self, slot: int, owner: FlowKey) -> bool:
        """True if `slot` was granted to `owner`, or is kept by its connection, and now receives for `owner`; False for
        anything else (duplicate, not theirs)."""
        held = self._used.get(slot)
        if held is None or held.is_receiving:
            return False
        if held.owner != owner:
            if held.owner != (owner[0], KEPT) or not owner[1]:  # a self-test has slots of its own
                return False
            self._count(held.owner, -1)
            held.owner = owner
            self._count(owner, 1)
        held.is_receiving = True
        return True

    def finish(self, slot: int) -> None:
        """The bytes are final."""
        self._count(self._used.pop(slot).owner, -1)
        self._free.append(slot)

    def quarantine(self, owner: FlowKey) -> bool:
        """The handoff is over on our side; True if any slot is held back."""
        held = [slot for slot in self._used.values() if slot.owner == owner]
        for slot in held:
            slot.is_quarantined = True
        return bool(held)

    def release_unused(self, owner: FlowKey) -> None:
        """The sender will use none of the slots that it has not announced Data for."""
        for number, slot in list(self._used.items()):
            if slot.owner == owner and owner[1] != KEPT and not slot.is_receiving:
                self.finish(number)

    def release_peer(self, connection: int) -> None:
        """The link of `connection` is closed."""
        for number, slot in list(self._used.items()):
            if slot.owner[0] == connection:
                self.finish(number)

    def _count(self, owner: FlowKey, change: int) -> None:
        self.num_kept += change if owner[1] == KEPT else 0
        num_held = self._num_held[owner] = self.num_held(owner) + change
        if not num_held:
            del self._num_held[owner]


class QuarantineBudget:
    """Tells when more slots than `most` are quarantined, and not for a moment only: any abort may do that."""

    def __init__(self, slots: SlotTable, most: float, clock: Callable[[], float]) -> None:
        self._slots = slots
        self._most = most
        self._clock = clock
        self._over_since_s = math.inf

    def trouble(self) -> str | None:
        """To be asked regularly; what is wrong in words, or None."""
        num_quarantined = self._slots.counts().quarantined
        if num_quarantined <= self._most:
            self._over_since_s = math.inf
            return None
        self._over_since_s = min(self._over_since_s, self._clock())
        if self._clock() - self._over_since_s < QUARANTINE_GRACE_S:
            return None
        return f"expected at most {self._most:g} staging slots in quarantine but {num_quarantined} are"


class Credits:
    """Hands out free slots round robin to the flows that asked, one each in turn, WINDOW at most to one flow.

    Slots go only to flows with a chunk ready to send: a flow that still computes holds none. Draining a slot needs
    nothing but the slot and blocks that are reserved already, so flows cannot wait for each other in a circle. What
    connections keep is a flow each as well, which always wants what it lacks.
    """

    def __init__(self, slots: SlotTable) -> None:
        self._slots = slots
        self._wanted: dict[FlowKey, int] = {}
        self._granted: dict[FlowKey, int] = {}
        self._kept: dict[FlowKey, int] = {}
        self._turns: OrderedDict[FlowKey, None] = OrderedDict()

    def want(self, flow: FlowKey, total: int) -> None:
        """`flow` wants `total` slots since it began. A repeated or older total changes nothing."""
        self._wanted[flow] = max(total, self._wanted.get(flow, 0))
        self._granted.setdefault(flow, 0)
        if self._wanted[flow] > self._granted[flow]:
            self._turns.setdefault(flow)

    def keep(self, connection: int, num_slots: int) -> None:
        """Keep up to `num_slots` slots, and no more than KEPT_SLOTS, granted to `connection`."""
        flow = (connection, KEPT)
        self._kept[flow] = min(num_slots, KEPT_SLOTS)
        self._turns.setdefault(flow)

    def drop(self, flow: FlowKey) -> None:
        self._wanted.pop(flow, None)
        self._granted.pop(flow, None)
        self._turns.pop(flow, None)

    def drop_peer(self, connection: int) -> None:
        for flow in [flow for flow in self._wanted if flow[0] == connection]:
            self.drop(flow)
        self._kept.pop((connection, KEPT), None)
        self._turns.pop((connection, KEPT), None)

    def hand_out(self) -> dict[FlowKey, tuple[int, ...]]:
        """All free slots that somebody wants and may have."""
        given: dict[FlowKey, tuple[int, ...]] = {}
        num_passed = 0
        while num_passed < len(self._turns) and self._slots.num_free:
            flow, _ = self._turns.popitem(last=False)
            if not self._may_have(flow):
                self._turns[flow] = None
                num_passed += 1
                continue
            num_passed = 0
            given[flow] = (*given.get(flow, ()), self._slots.grant(flow))
            if flow in self._kept:
                self._turns[flow] = None
                continue
            self._granted[flow] += 1
            if self._wanted[flow] > self._granted[flow]:
                self._turns[flow] = None
        return given

    def _may_have(self, flow: FlowKey) -> bool:
        num_kept = self._kept.get(flow)
        if num_kept is None:
            return self._slots.num_held(flow) < WINDOW
        return self._slots.num_held(flow) < num_kept and self._slots.num_kept < self._slots.most_kept


class SendSlots:
    """The sender's slots: taken to gather into, given back when the transport has sent them.

    Those who find none are called in turn, once per slot that comes back.
    """

    def __init__(self, num_slots: int, slot_bytes: int) -> None:
        self.arena = Arena(num_slots, slot_bytes)
        self._free = list(range(num_slots))
        self._waiting: OrderedDict[Callable[[], None], None] = OrderedDict()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def try_take(self, when_free: Callable[[], None]) -> int | None:
        """A slot, or None: then `when_free` is called once when one may be had."""
        if self._free:
            return self._free.pop()
        self._waiting.setdefault(when_free)
        return None

    def give_back(self, slot: int) -> None:
        self._free.append(slot)
        if self._waiting:
            when_free, _ = self._waiting.popitem(last=False)
            when_free()

    def forget(self, when_free: Callable[[], None]) -> None:
        self._waiting.pop(when_free, None)

    def pass_on(self) -> None:
        """NOTE: to be called by a waiter that was called and wants no slot any more, or the others wait for ever."""
        if self._free and self._waiting:
            when_free, _ = self._waiting.popitem(last=False)
            when_free()


class Staging:
    """A link's staging slots as tensors, or None where the link has none."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._tensors: dict[int, torch.Tensor] = {}
        self._cuts = _Cuts()

    def content(self, slot: int, num_bytes: int) -> torch.Tensor | None:
        """The first bytes of a slot, or all if there are no more. None: as of `tensor`."""
        whole = self.tensor(slot)
        return None if whole is None else self._cuts.first(num_bytes, slot, whole)

    def tensor(self, slot: int) -> torch.Tensor | None:
        known = self._tensors.get(slot)
        if known is None:
            view = self._link.staging(slot)
            if view is not None:
                known = self._tensors[slot] = torch.frombuffer(view, dtype=torch.uint8)
        return known

    def close(self) -> None:
        """Before the link is closed: memory that nobody holds any more is unmapped with it.

        NOTE: not left to the garbage collector, which hardly ever runs in a worker that serves steadily: what ended a
        connection (the traceback of its error) holds all that was part of it, and this may be 128 MiB of each.
        """
        self._tensors.clear()
        self._cuts.clear()
