"""Requests that wait for a worker, and who of them is served next.

    add -> ready --take--> dispatched            ready: can be in time; least slack first
             ↕ triage                            late:  crowded out for now, served when nobody ready can be
           late ---triage--> refused             refused: its latest start has passed (429/503 with retry_after_s)

    order: resumed │ ready │ late │ without a promise │ batch │ best_effort
           │         └─ in each of these, tenants that had more than their share come behind the others
           └─ but every second place is for whoever is older than the age cap: no order starves anybody, nor do the old
    Where more wait than can be tried, half of the tries are for those that were not tried in vain just now.

Binding is late: a request chooses its worker when one is about to be free, so wrong predictions cost little. When not
everybody can be in time, triage keeps the largest number that can (Moore and Hodgson, 1968, for one machine; servers
are counted as one that is so many times faster), and puts aside whoever costs most, tenants beyond their share first.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, count, islice
from typing import ClassVar

from contracts.service import ServiceClass


@dataclass(frozen=True, slots=True)
class Waiting:
    """`deadline_s`: when the first token is due, on the caller's clock; infinite without a promise. `service_s`:
    predicted device time from start to first token. `is_kept`: stays, though late, instead of being refused.
    `is_resumed`: was accepted before and lost its worker; goes before all others and is never refused.
    """

    request_id: str
    arrived_s: float
    deadline_s: float
    service_s: float
    num_blocks: int = 0
    tenant: str = ""
    service_class: ServiceClass = "interactive"
    is_kept: bool = False
    is_resumed: bool = False

    @property
    def latest_start_s(self) -> float:
        return self.deadline_s - self.service_s


class TenantShares:
    """Device time each tenant had lately, halved every HALF_LIFE_S."""

    HALF_LIFE_S: ClassVar[float] = 30.0
    FORGET_S: ClassVar[float] = 1e-3

    def __init__(self) -> None:
        self._used: dict[str, float] = {}
        self._updated_s = 0.0

    @property
    def tenants(self) -> frozenset[str]:
        return frozenset(self._used)

    def note(self, tenant: str, service_s: float, now_s: float) -> None:
        self._decay(now_s)
        self._used[tenant] = max(self._used.get(tenant, 0.0) + service_s, 0.0)

    def excess(self, tenant: str, num_tenants: int = 0) -> float:
        """How many times its equal share a tenant had; at least 1, and 1 for a lone tenant. `num_tenants`: all that
        the time is to be shared by, if these are more than had any.
        """
        total, num_tenants = sum(self._used.values()), max(num_tenants, len(self._used))
        if num_tenants < 2 or not total:
            return 1.0
        return max(1.0, self._used.get(tenant, 0.0) * num_tenants / total)

    def _decay(self, now_s: float) -> None:
        passed_s = now_s - self._updated_s
        if passed_s < 1.0:
            return
        keep = 0.5 ** (passed_s / self.HALF_LIFE_S)
        self._used = {t: used * keep for t, used in self._used.items() if used * keep > self.FORGET_S}
        self._updated_s = now_s


_Item = tuple[float, int, Waiting]  # (rank, arrival number, entry): ordered without comparing entries


class WaitingQueue:
    """Central, bounded by its owner through `surplus`. No clock: `now_s` is passed in."""

    MAX_RETRY_S: ClassVar[int] = 120  # clients do not obey longer ones
    AGED_LOOK: ClassVar[int] = 16  # at the head of each line: the old are there
    OVER_SHARE: ClassVar[float] = 1.25  # times its equal share: less is no excess but chance
    REST_S: ClassVar[float] = 0.05  # after a try in vain

    def __init__(self, age_cap_s: float = 30.0) -> None:
        self._age_cap_s = age_cap_s
        self._numbers = count()
        self._resumed: list[_Item] = []  # by arrival
        self._ready: list[_Item] = []  # by latest start
        self._late: list[_Item] = []  # by latest start
        self._patient: list[_Item] = []  # interactive without a promise: by arrival
        self._batch: list[_Item] = []  # by arrival
        self._best_effort: list[_Item] = []  # by arrival
        self._items: dict[str, tuple[list[_Item], _Item]] = {}
        self._rests: dict[str, float] = {}  # until when, of those that were tried in vain
        self._by_tenant: Counter[str] = Counter()
        self._backlog_s = 0.0
        self._was_aged = False  # who was served last
        self.shares = TenantShares()

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._items

    @property
    def backlog_s(self) -> float:
        """Device time that the waiting requests need up to their first tokens."""
        return self._backlog_s

    @property
    def num_newcomers(self) -> int:
        return len(self) - len(self._resumed)

    def add(self, entry: Waiting) -> None:
        """Raises ValueError for an id that already waits."""
        if entry.request_id in self._items:
            raise ValueError(f"request_id: expected a new one but got {entry.request_id!r} again")
        if entry.is_resumed:
            self._insert(self._resumed, entry.arrived_s, entry)
        elif entry.service_class == "batch":
            self._insert(self._batch, entry.arrived_s, entry)
        elif entry.service_class == "best_effort":
            self._insert(self._best_effort, entry.arrived_s, entry)
        elif math.isfinite(entry.deadline_s):
            self._insert(self._ready, entry.latest_start_s, entry)
        else:
            self._insert(self._patient, entry.arrived_s, entry)
        self._by_tenant[entry.tenant] += 1
        self._backlog_s += entry.service_s

    def remove(self, request_id: str) -> Waiting | None:
        """Leaves without being served (cancelled); None if it does not wait. Found by halving."""
        found = self._items.pop(request_id, None)
        if found is None:
            return None
        self._rests.pop(request_id, None)
        held_in, item = found
        entry = item[2]
        del held_in[bisect.bisect_left(held_in, item[:2])]
        self._by_tenant[entry.tenant] -= 1
        if not self._by_tenant[entry.tenant]:
            del self._by_tenant[entry.tenant]
        self._backlog_s = self._backlog_s - entry.service_s if self._items else 0.0
        return entry

    def take(self, request_id: str, now_s: float) -> Waiting:
        """Leaves for a worker, and counts for its tenant. Raises KeyError if it does not wait."""
        entry = self.remove(request_id)
        if entry is None:
            raise KeyError(request_id)
        self.shares.note(entry.tenant, entry.service_s, now_s)
        self._was_aged = self._is_aged(entry, now_s)
        return entry

    def give_back(self, entry: Waiting, now_s: float) -> None:
        """It was taken, and its worker had no room after all: it waits where it had waited."""
        self.shares.note(entry.tenant, -entry.service_s, now_s)
        self.add(entry)

    def surplus(self) -> Waiting | None:
        """Who leaves when one waits too many: of the last class that waits, the youngest of the tenant with most
        waiting requests. None: only such wait as are never refused.
        """
        order = (self._best_effort, self._batch, (*self._ready, *self._late, *self._patient))
        waiting = next((items for items in order if items), ())
        numbers = Counter(entry.tenant for _, _, entry in waiting)
        item = max(
            waiting, key=lambda item: (numbers[item[2].tenant], item[2].arrived_s, item[1]), default=None
        )
        return None if item is None else item[2]

    def tried(self, request_id: str, now_s: float) -> None:
        """In vain: it rests for REST_S."""
        self._rests[request_id] = now_s + self.REST_S

    def may_try(self, request_id: str, num_tries: int, limit: int, now_s: float) -> bool:
        """After `num_tries` of `limit`. Where more wait, the second half is for those that do not rest: else a few that
        fit nowhere were tried again and again, and never anybody behind them.
        """
        is_for_all = num_tries < limit // 2 or len(self) <= limit
        return num_tries < limit and (is_for_all or now_s >= self._rests.get(request_id, now_s))

    def candidates(self, now_s: float, limit: int) -> list[Waiting]:
        """Up to `limit` in order, as `may_try` has it."""
        found: list[Waiting] = []
        for entry in self._in_order(now_s):
            if len(found) == limit:
                break
            if self.may_try(entry.request_id, len(found), limit, now_s):
                found.append(entry)
        return found

    def next_due_s(self, now_s: float) -> float:
        """When the next request becomes late that is not yet; infinite if none does."""
        found = math.inf
        for items in (self._ready, self._late):
            position = bisect.bisect_right(items, (now_s, math.inf))
            if position < len(items):
                found = min(found, items[position][0])
        return found

    def _in_order(self, now_s: float) -> Iterator[Waiting]:
        for _, _, entry in self._resumed:
            yield entry
        over = self._over_share()
        order = (self._ready, self._late, self._patient, self._batch, self._best_effort)
        aged = self._aged(now_s)
        old = {entry.request_id for entry in aged}
        others = (entry for items in order for entry in _fairly(items, over) if entry.request_id not in old)
        is_due = not self._was_aged
        for entry in aged:
            if not is_due:
                yield from islice(others, 1)
            yield entry
            is_due = False
        yield from others

    def _aged(self, now_s: float) -> list[Waiting]:
        """Some of the oldest, the oldest first. Whoever is ready is in time, however old."""
        heads = chain.from_iterable(
            islice(items, self.AGED_LOOK) for items in (self._late, self._patient, self._batch)
        )
        aged = [entry for _, _, entry in heads if self._is_aged(entry, now_s)]
        aged.sort(key=_arrival)
        return aged

    def _is_aged(self, entry: Waiting, now_s: float) -> bool:
        return entry.service_class != "best_effort" and now_s - entry.arrived_s >= self._age_cap_s

    def _over_share(self) -> set[str]:
        """Tenants that had more than their share, where somebody else waits."""
        if len(self._by_tenant) < 2:
            return set()
        num_tenants = self._num_tenants()
        return {t for t in self._by_tenant if self.shares.excess(t, num_tenants) > self.OVER_SHARE}

    def _num_tenants(self) -> int:
        return len({*self.shares.tenants, *self._by_tenant})

    def triage(self, now_s: float, num_servers: float) -> list[Waiting]:
        """Sort those with a deadline into ready and late by what `num_servers` full-time prefill workers can do.

        Returns, removed, the ones no worker could serve in time any more.
        """
        hopeless = []
        was_ready = {item[1] for item in self._ready}
        promised = sorted(self._ready + self._late, key=_by_deadline)
        kept: list[tuple[float, int, _Item]] = []
        late: list[_Item] = []
        queued_s, num_tenants, num_servers = 0.0, self._num_tenants(), max(num_servers, 1e-9)
        excess = {tenant: self.shares.excess(tenant, num_tenants) for tenant in self._by_tenant}
        for item in promised:
            latest_start_s, number, entry = item
            if latest_start_s < now_s:
                if not entry.is_kept:
                    hopeless.append(entry)
                else:
                    late.append(item)
                continue
            service_s = entry.service_s
            start_s = now_s + queued_s / num_servers
            heapq.heappush(kept, (-service_s * excess[entry.tenant], number, item))
            queued_s += service_s
            if start_s + service_s > entry.deadline_s:
                victim = heapq.heappop(kept)[2]
                queued_s -= victim[2].service_s
                late.append(victim)
        for entry in hopeless:
            self.remove(entry.request_id)
        ready = [item for _, _, item in kept]
        ready.sort()
        late.sort()
        self._ready[:], self._late[:] = ready, late
        for held_in, is_ready in ((self._ready, True), (self._late, False)):
            for item in held_in:
                if (item[1] in was_ready) is not is_ready:
                    self._items[item[2].request_id] = (held_in, item)
        return hopeless

    def retry_after_s(self, num_servers: float, service_s: float, ttft_s: float) -> int:
        """Whole seconds after which a request of `service_s` with the promise `ttft_s` should be served in time, if
        what waits now is served first and no more comes than is served.
        """
        drained_s = self._backlog_s / max(num_servers, 1e-9)
        return max(1, min(self.MAX_RETRY_S, math.ceil(drained_s + service_s - ttft_s)))

    def _insert(self, held_in: list[_Item], rank: float, entry: Waiting) -> None:
        item = (rank, next(self._numbers), entry)
        bisect.insort(held_in, item)
        self._items[entry.request_id] = (held_in, item)


def _fairly(items: list[_Item], over: set[str]) -> Iterable[Waiting]:
    """In order, but tenants in `over` behind the others."""
    if not over:
        return (entry for _, _, entry in items)
    return (entry for is_over in (False, True) for _, _, entry in items if (entry.tenant in over) == is_over)


def _arrival(entry: Waiting) -> float:
    return entry.arrived_s


def _by_deadline(item: _Item) -> tuple[float, int]:
    return item[2].deadline_s, item[1]
