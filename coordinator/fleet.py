"""All workers of both pools: their links, their peers' list, and one event for "something changed".

Serve says who exists (handles.py), links say who lives. A worker that Serve no longer lists keeps its link while
requests run on it (it drains), and gets nothing new.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterable

from contracts.config import BatonConfig
from contracts.errors import OverloadedError, WorkerLostError
from contracts.messages import Hello, Peers, Role, WorkerInfo
from coordinator.links import WorkerLink
from coordinator.placement import WorkerView


class Fleet:
    """Owns every `WorkerLink` and its task."""

    def __init__(self, config: BatonConfig, secret: bytes) -> None:
        self._config = config
        self._secret = secret
        self._hello = Hello(f"coordinator-{secrets.token_hex(4)}", 1, "commands", b"")
        self._links: dict[str, WorkerLink] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._listed: dict[Role, frozenset[str]] = {"prefill": frozenset(), "decode": frozenset()}
        self._waiters: set[asyncio.Future[None]] = set()
        self._told: dict[str, Peers] = {}
        self._max_total_tokens: int | None = None

    def sync(self, role: Role, workers: Iterable[WorkerInfo]) -> None:
        """The pool's workers, as Serve lists them now."""
        listed = {info.worker_id: info for info in workers}
        if role == "decode" and listed:
            self._max_total_tokens = max(map(_max_total_tokens, listed.values()))
        self._listed[role] = frozenset(listed)
        for worker_id, info in listed.items():
            if worker_id not in self._links:
                link = WorkerLink(
                    info, self._hello, self._secret, self._config.coordinator.worker_timeout_s, self._changed
                )
                self._links[worker_id] = link
                self._tasks[worker_id] = asyncio.create_task(link.run(), name=f"link-{worker_id}")
        self._changed()

    def link(self, worker_id: str) -> WorkerLink:
        """Raises WorkerLostError if there is no such worker."""
        link = self._links.get(worker_id)
        if link is None:
            raise WorkerLostError(f"{worker_id} left the fleet")
        return link

    def links(self) -> tuple[WorkerLink, ...]:
        return tuple(self._links.values())

    def views(self, role: Role) -> list[WorkerView]:
        """What placement sees: listed, live, ready workers of one pool."""
        return [self._view(link) for link in self._links.values() if self._is_open(link, role)]

    def max_total_tokens(self) -> int:
        """Prompt + output that the roomiest decode worker holds. While none is listed, what the last ones held: a
        request waits for the replacement of a lost worker, and is not refused for it.

        Raises OverloadedError before any decode worker was seen.
        """
        if self._max_total_tokens is None:
            raise OverloadedError("no decode worker is ready yet", retry_after_s=5.0)
        return self._max_total_tokens

    async def changed(self, timeout_s: float) -> None:
        """Returns at the next change of any worker's state or load, at the latest after `timeout_s`."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.add(future)
        try:
            await asyncio.wait([future], timeout=timeout_s)
        finally:
            self._waiters.discard(future)

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        self._links.clear()
        self._tasks.clear()

    def _is_open(self, link: WorkerLink, role: Role) -> bool:
        return link.info.role == role and link.info.worker_id in self._listed[role] and link.is_ready

    def _view(self, link: WorkerLink) -> WorkerView:
        status = link.status
        assert status is not None, "only live links are viewed"
        return WorkerView(
            worker_id=link.info.worker_id,
            num_requests=link.num_requests,
            num_tokens=link.num_tokens,
            num_available_blocks=status.audit.num_available,
            num_blocks=link.info.num_blocks,
            max_num_seqs=link.info.max_num_seqs,
            peers=frozenset(peer.worker_id for peer in status.peers if peer.is_ready),
        )

    def _changed(self) -> None:
        self._drop_departed()
        self._tell_peers()
        for future in self._waiters:
            if not future.done():
                future.set_result(None)

    def _drop_departed(self) -> None:
        for worker_id, link in list(self._links.items()):
            is_listed = worker_id in self._listed[link.info.role]
            if not is_listed and (link.num_requests == 0 or not link.is_alive):
                del self._links[worker_id]
                self._told.pop(worker_id, None)
                self._tasks.pop(worker_id).cancel()

    def _tell_peers(self) -> None:
        """Every prefill worker knows all decode workers, so that connections exist before a request needs them."""
        decodes = [link.info for link in self._links.values() if link.info.role == "decode"]
        peers = Peers(tuple(sorted(decodes, key=lambda info: info.worker_id)))
        for worker_id, link in self._links.items():
            if link.info.role != "prefill" or not link.is_alive:
                self._told.pop(worker_id, None)
            elif self._told.get(worker_id) != peers:
                link.send(peers)
                self._told[worker_id] = peers


def _max_total_tokens(info: WorkerInfo) -> int:
    return min(info.max_model_len, info.num_blocks * info.layout.block_size)
