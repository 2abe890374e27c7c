"""What this coordinator has on each decode worker, and what the worker's last report does not tell yet. Pure.

    took ──► granted │ refused ──► left        a new report replaces all that was noted since the one before

A report is a second old in the middle, a burst comes within milliseconds: whoever believed the report would send
everybody to the same worker, which refuses most of them, and then ask it again and again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Self

from coordinator.ask import Ask
from coordinator.placement import WorkerView


@dataclass(frozen=True, slots=True)
class Held:
    """One request on a decode worker. `num_blocks` now, `max_blocks` as far as can be foreseen."""

    num_blocks: int
    max_blocks: int
    itl_s: float = math.inf
    is_leftover: bool = False

    @classmethod
    def of(cls, ask: Ask, block_size: int) -> Self:
        """What a request holds once it is sent to a worker."""
        itl_s = math.inf if ask.service.itl_s is None else ask.service.itl_s
        now, grown = ask.num_blocks(block_size), ask.grown_blocks(block_size)
        return cls(now, grown, itl_s, ask.service.is_leftover)


@dataclass(slots=True)
class _Since:
    """Since one report: blocks of the requests sent after it, and the smallest demand that was refused."""

    report: object
    taken: dict[str, int] = field(default_factory=dict)
    refused: float = math.inf


class Room:
    """`report` is whatever is another object when the worker has told anew."""

    def __init__(self) -> None:
        self._held: dict[str, dict[str, Held]] = {}
        self._since: dict[str, _Since] = {}

    def took(self, worker_id: str, report: object, request_id: str, held: Held) -> None:
        """The request was sent there."""
        self._held.setdefault(worker_id, {})[request_id] = held
        self._of(worker_id, report).taken[request_id] = held.num_blocks

    def granted(self, worker_id: str, request_id: str, num_cached_blocks: int) -> None:
        """It found so many of its blocks in the worker's cache."""
        since = self._since.get(worker_id)
        if since is not None and request_id in since.taken:
            since.taken[request_id] = max(since.taken[request_id] - num_cached_blocks, 0)

    def refused(self, worker_id: str, report: object, request_id: str) -> None:
        """No room for it: until the worker tells anew, nobody who needs as much asks it. What it has told since the
        request was sent is newer than the refusal.
        """
        since = self._since.get(worker_id)
        if since is not None and since.report is report and request_id in since.taken:
            since.refused = min(since.refused, since.taken.pop(request_id))
            self._drop(worker_id, request_id)

    def left(self, worker_id: str, request_id: str) -> None:
        """It is over there. Who was refused before may ask again."""
        if self._drop(worker_id, request_id) and (since := self._since.get(worker_id)) is not None:
            since.taken.pop(request_id, None)
            since.refused = math.inf

    def moved(self, request_id: str, source_id: str, target_id: str) -> None:
        """It goes on over there, which tells of its blocks itself."""
        held = self._held.get(source_id, {}).get(request_id)
        if held is not None:
            self.left(source_id, request_id)
            self._held.setdefault(target_id, {})[request_id] = held

    def all_seen(self, views: list[WorkerView], report_of: Callable[[str], object]) -> list[WorkerView]:
        """The views with all that is known here; `report_of` a worker, by its id."""
        if len(self._since) > len(views):  # workers that are gone will not report again
            live = {view.worker_id for view in views}
            self._since = {worker_id: since for worker_id, since in self._since.items() if worker_id in live}
        held, since = self._held, self._since
        return [
            self.seen(view, report_of(view.worker_id))
            if view.worker_id in since or view.worker_id in held
            else view
            for view in views
        ]

    def seen(self, view: WorkerView, report: object) -> WorkerView:
        """The view with all that is known here."""
        requests, since = self._held.get(view.worker_id), self._since.get(view.worker_id)
        available = view.num_available_blocks
        if since is not None:
            if since.report is not report:
                del self._since[view.worker_id]
            else:
                available -= sum(since.taken.values())
                available = int(min(available, since.refused - 1))
        if not requests:
            return (
                view
                if available == view.num_available_blocks
                else replace(view, num_available_blocks=available)
            )
        leftover = [held for held in requests.values() if held.is_leftover]
        return replace(
            view,
            num_available_blocks=available,
            num_leftover=len(leftover),
            leftover_blocks=sum(held.max_blocks for held in leftover),
            gap_s=min(held.itl_s for held in requests.values()),
        )

    def _drop(self, worker_id: str, request_id: str) -> bool:
        requests = self._held.get(worker_id, {})
        was_there = requests.pop(request_id, None) is not None
        if not requests:
            self._held.pop(worker_id, None)
        return was_there

    def _of(self, worker_id: str, report: object) -> _Since:
        since = self._since.get(worker_id)
        if since is None or since.report is not report:
            since = self._since[worker_id] = _Since(report)
        return since
