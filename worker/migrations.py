"""Requests that leave for another decode worker while they are decoded here: between kvtransfer and the decode phase.

    begin ──► KV leaves while it runs ──caught up──► it stops, the rest follows ──► handed over | failed
                 └── does not run (any more), the transfer failed: it stays, or its end is told

The transfer lives on the event loop, the sequence on the engine thread; what one has to say to the other hops.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from contracts.errors import HandoffError
from contracts.messages import Migrate
from engine.loop import StepLoop
from kvtransfer.endpoint import KvEndpoint
from kvtransfer.incoming import OK
from kvtransfer.outgoing import Outgoing, OutgoingResult
from worker.phases import Decoder


class Migrations:
    """On the event loop."""

    def __init__(self, engine: StepLoop, decode: Decoder, kv: KvEndpoint) -> None:
        self._engine = engine
        self._decode = decode
        self._kv = kv

    def begin(
        self,
        command: Migrate,
        on_moved: Callable[[OutgoingResult], None],
        on_stays: Callable[[OutgoingResult], None],
    ) -> Outgoing:
        """`on_moved`: it is the target's. `on_stays`: it goes on here. Neither, if it ends or is cancelled meanwhile.

        A transfer that fails when the request has stopped for it ends the request, with an event of its own.
        """
        request_id, num_known = command.request_id, command.ticket.num_tokens
        loop = asyncio.get_running_loop()

        def caught_up() -> None:
            self._engine.submit(lambda: self._decode.pass_on(request_id))

        def done(result: OutgoingResult) -> None:
            self._engine.submit(lambda: settle(result))
            if result.reason == OK:
                on_moved(result)

        def settle(result: OutgoingResult) -> None:
            if self._decode.handed_off(request_id, result.error):
                loop.call_soon_threadsafe(on_stays, result)

        outgoing = self._kv.open(command.ticket, command.skip_tokens, done, caught_up)

        def start() -> None:
            if not self._decode.migrate(request_id, outgoing, num_known, command.max_tokens):
                outgoing.abort(HandoffError(f"request {request_id} does not run now"))

        self._engine.submit(start)
        return outgoing
