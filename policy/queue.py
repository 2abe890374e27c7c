"""Requests that wait for a worker, and who of them is served next.

    add -> ready --take--> dispatched            ready: can be in time; least slack first
             ↕ triage                            late:  crowded out for now, served when nobody ready can be
           late ---triage--> refused             refused: its latest start has passed (429/503 with retry_after_s)

Binding is late: a request chooses its worker when one is about to be free, so wrong predictions cost little. When not
everybody can be in time, triage keeps the largest number that can (Moore and Hodgson, 1968, for one machine; servers
are counted as one that is so many times faster), and puts aside whoever costs most, tenants beyond their share first.

Classes: interactive has deadlines; batch has none but rises to the front at `age_cap_s`; best_effort takes what is
left, for ever.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice
from typing import ClassVar, Literal

ServiceClass = Literal["interactive", "batch", "best_effort"]


@dataclass(frozen=True, slots=True)
class Waiting:
    """`deadline_s`: when the first token is due, on the caller's clock; infinite without a promise. `service_s`:
    predicted device time from start to first token. `is_kept`: stays, though late, instead of being refused.
    """

    request_id: str
    arrived_s: float
    deadline_s: float
    service_s: float
    num_blocks: int = 0
    tenant: str = ""
    service_class: ServiceClass = "interactive"
    is_kept: bool = False

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

    def note(self, tenant: str, service_s: float, now_s: float) -> None:
        self._decay(now_s)
        self._used[tenant] = self._used.get(tenant, 0.0) + service_s

    def excess(self, tenant: str) -> float:
        """How many times its equal share a tenant had; at least 1, and 1 for a lone tenant."""
        total = sum(self._used.values())
        if len(self._used) < 2 or not total:
            return 1.0
        return max(1.0, self._used.get(tenant, 0.0) * len(self._used) / total)

    def _decay(self, now_s: float) -> None:
        passed_s = now_s - self._updated_s
        if passed_s < 1.0:
            return
        keep = 0.5 ** (passed_s / self.HALF_LIFE_S)
        self._used = {t: used * keep for t, used in self._used.items() if used * keep > self.FORGET_S}
        self._updated_s = now_s


_Item = tuple[float, int, Waiting]  # (rank, arrival number, entry): ordered without comparing entries


class WaitingQueue:
    """Central, bounded by its owner through `len`. No clock: `now_s` is passed in."""

    MAX_RETRY_S: ClassVar[int] = 120  # clients do not obey longer ones

    def __init__(self, age_cap_s: float = 30.0) -> None:
        self._age_cap_s = age_cap_s
        self._numbers = count()
        self._ready: list[_Item] = []  # by latest start
        self._late: list[_Item] = []  # by latest start
        self._patient: list[_Item] = []  # without deadline: batch, then best_effort, by arrival
        self._items: dict[str, tuple[list[_Item], _Item]] = {}
        self._backlog_s = 0.0
        self.shares = TenantShares()

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._items

    @property
    def backlog_s(self) -> float:
        """Device time that the waiting requests need up to their first tokens."""
        return self._backlog_s

    def add(self, entry: Waiting) -> None:
        """Raises ValueError for an id that already waits."""
        if entry.request_id in self._items:
            raise ValueError(f"request_id: expected a new one but got {entry.request_id!r} again")
        if entry.service_class == "interactive" and math.isfinite(entry.deadline_s):
            self._insert(self._ready, entry.latest_start_s, entry)
        else:
            offset_s = 0.0 if entry.service_class != "best_effort" else 1e12
            self._insert(self._patient, entry.arrived_s + offset_s, entry)
        self._backlog_s += entry.service_s

    def remove(self, request_id: str) -> Waiting | None:
        """Leaves without being served (cancelled); None if it does not wait."""
        found = self._items.pop(request_id, None)
        if found is None:
            return None
        held_in, item = found
        del held_in[bisect.bisect_left(held_in, item[:2])]
        self._backlog_s = self._backlog_s - item[2].service_s if self._items else 0.0
        return item[2]

    def take(self, request_id: str, now_s: float) -> Waiting:
        """Leaves for a worker, and counts for its tenant. Raises KeyError if it does not wait."""
        entry = self.remove(request_id)
        if entry is None:
            raise KeyError(request_id)
        self.shares.note(entry.tenant, entry.service_s, now_s)
        return entry

    def candidates(self, now_s: float, limit: int) -> list[Waiting]:
        """The next `limit` in order: aged ones, ready, late, then those without a promise."""
        return list(islice(self._in_order(now_s), limit))

    def _in_order(self, now_s: float) -> Iterator[Waiting]:
        aged: set[str] = set()
        for _, _, entry in islice(self._patient, 4):  # a few: ages must not starve promises in turn
            if entry.service_class == "batch" and now_s - entry.arrived_s >= self._age_cap_s:
                aged.add(entry.request_id)
                yield entry
        for _, _, entry in self._ready:
            yield entry
        for _, _, entry in self._late:
            yield entry
        for _, _, entry in self._patient:
            if entry.request_id not in aged:
                yield entry

    def triage(self, now_s: float, num_servers: float) -> list[Waiting]:
        """Sort those with a deadline into ready and late by what `num_servers` full-time prefill workers can do.

        Returns, removed, the ones no worker could serve in time any more.
        """
        hopeless = []
        promised = sorted(self._ready + self._late, key=_by_deadline)
        kept: list[tuple[float, int, _Item]] = []
        late: list[_Item] = []
        queued_s = 0.0
        for item in promised:
            entry = item[2]
            if entry.latest_start_s < now_s:
                if not entry.is_kept:
                    hopeless.append(entry)
                    continue
                if now_s - entry.arrived_s < self._age_cap_s:
                    late.append(item)
                    continue
            start_s = now_s + queued_s / max(num_servers, 1e-9)
            weight = entry.service_s * self.shares.excess(entry.tenant)
            heapq.heappush(kept, (-weight, item[1], item))
            queued_s += entry.service_s
            if start_s + entry.service_s > entry.deadline_s:
                victim = heapq.heappop(kept)[2]
                queued_s -= victim[2].service_s
                late.append(victim)
        for entry in hopeless:
            self.remove(entry.request_id)
        self._ready = sorted(item for _, _, item in kept)
        self._late = sorted(late)
        for held_in in (self._ready, self._late):
            for item in held_in:
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


def _by_deadline(item: _Item) -> tuple[float, int]:
    return item[2].deadline_s, item[1]
