"""What placement sees of the fleet, kept: only the view of a worker of which something changed is made again.

    beat │ request opened, read, closed │ link lost │ listed, unlisted ──► changed(worker_id)
                                                     next look: its view is made anew, or it is in no list any more

A burst asks for hundreds of places between two beats of a thousand workers; most of these stay what they were.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from contracts.messages import Role, Status
from coordinator.links import WorkerLink
from coordinator.placement import WorkerView


class Views:
    """`find`: the link of an id, None if it has left. `is_usable`: whether it takes new work of any kind."""

    def __init__(
        self, find: Callable[[str], WorkerLink | None], is_usable: Callable[[WorkerLink], bool]
    ) -> None:
        self._find = find
        self._is_usable = is_usable
        self._changed: set[str] = set()
        self._made: dict[str, tuple[Status, WorkerView]] = {}
        self._open: dict[Role, dict[str, WorkerView]] = {"prefill": {}, "decode": {}}

    def changed(self, worker_id: str) -> None:
        """Something of this worker is another now, or it has come or gone."""
        self._changed.add(worker_id)

    def clear(self) -> None:
        self._changed.clear()
        self._made.clear()
        for group in self._open.values():
            group.clear()

    def all(self) -> list[WorkerView]:
        """All usable workers, whatever their label."""
        self._renew()
        return [view for _, view in self._made.values()]

    def of(self, role: Role) -> list[WorkerView]:
        """Those that take work of this role."""
        self._renew()
        return list(self._open[role].values())

    def _renew(self) -> None:
        while self._changed:
            self._look(self._changed.pop())

    def _look(self, worker_id: str) -> None:
        link = self._find(worker_id)
        if link is None or not self._is_usable(link):
            self._made.pop(worker_id, None)
            for group in self._open.values():
                group.pop(worker_id, None)
            return
        view = self._view(link)
        for role, group in self._open.items():
            if link.label in (role, "mixed"):
                group[worker_id] = view
            else:
                group.pop(worker_id, None)

    def _view(self, link: WorkerLink) -> WorkerView:
        status, worker_id = link.status, link.info.worker_id
        assert status is not None, "only live links are viewed"
        kept = self._made.get(worker_id)
        # What a status tells of hundreds of peers is gone through once.
        view = kept[1] if kept is not None and kept[0] is status else _told(link, status)
        view = replace(
            view,
            num_requests=link.num_requests + status.num_foreign,
            num_tokens=link.num_tokens + status.num_foreign_tokens,
            num_reading=link.num_reading,
        )
        self._made[worker_id] = status, view
        return view


def _told(link: WorkerLink, status: Status) -> WorkerView:
    """Without what this coordinator has there itself."""
    return WorkerView(
        worker_id=link.info.worker_id,
        num_requests=0,
        num_tokens=0,
        num_available_blocks=status.audit.num_available,
        num_blocks=link.info.num_blocks,
        max_num_seqs=link.info.max_num_seqs,
        peers=frozenset(peer.worker_id for peer in status.peers if peer.is_ready),
        links=tuple((peer.worker_id, peer.link) for peer in status.peers if peer.link is not None),
        bytes_per_token=link.info.layout.bytes_per_token,
        steps=status.steps,
        role=link.label,
        epoch=status.duty.epoch if status.duty is not None else 0,
        home=link.info.role,
    )
