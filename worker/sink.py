"""The engine thread's end of one outgoing handoff: hops to the event loop and opens the handoff at the first chunk.

created -> opened (first `ready`) -> done           `on_done` fires exactly once: the blocks are no longer read
        \\-> done (aborted before anything was sent)
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence

from contracts.errors import BatonError
from contracts.messages import HandoffState
from contracts.ticket import Ticket
from kvtransfer.endpoint import KvEndpoint
from kvtransfer.outgoing import Outgoing, OutgoingResult


class HandoffSink:
    """A `KvSink`. `block_ids` is asked once, when the first chunk is computed: only then do the blocks exist."""

    def __init__(
        self,
        endpoint: KvEndpoint,
        ticket: Ticket,
        start: int,
        block_ids: Callable[[], Sequence[int]],
        on_done: Callable[[OutgoingResult], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._endpoint = endpoint
        self._ticket = ticket
        self._start = start
        self._block_ids = block_ids
        self._on_done = on_done
        self._outgoing: Outgoing | None = None
        self._is_done = False

    def ready(self, num_tokens: int) -> None:
        block_ids = tuple(self._block_ids())
        self._hop(self._ready, num_tokens, block_ids)

    def finish(self, state: HandoffState) -> None:
        self._hop(self._finish, state)

    def abort(self, error: BatonError | None) -> None:
        self._hop(self._abort, error)

    def _hop(self, method: Callable[..., None], *args: object) -> None:
        with contextlib.suppress(
            RuntimeError
        ):  # the loop is closed: the process ends, and nobody reads any more
            self._loop.call_soon_threadsafe(method, *args)

    def _ready(self, num_tokens: int, block_ids: Sequence[int]) -> None:
        if self._is_done:
            return
        if self._outgoing is None:
            self._outgoing = self._endpoint.open(self._ticket, block_ids, self._start, self._done)
        self._outgoing.ready(num_tokens)

    def _finish(self, state: HandoffState) -> None:
        if self._outgoing is not None and not self._is_done:
            self._outgoing.finish(state)

    def _abort(self, error: BatonError | None) -> None:
        if self._is_done:
            return
        if self._outgoing is None:
            self._done(OutgoingResult(num_bytes=0, exposed_s=0.0, error=error))
        else:
            self._outgoing.abort(error)

    def _done(self, result: OutgoingResult) -> None:
        if not self._is_done:
            self._is_done = True
            self._on_done(result)
