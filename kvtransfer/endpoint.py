"""One worker's end of all handoffs: the door through which the worker uses this package.

    start ──► kv_port (control, authenticated) + data address (published in the handshake)
    as sender:    set_peers ──► one Sender per decode worker ──► open ──► Outgoing      a prompt, or a running request
    as receiver:  expect ──► Incoming, filled over a connection that the sender made
    close ──► all connections end; every handoff that is open ends with an error

Everything runs on the event loop that called `start`, except the three methods of Outgoing.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial

from torch import Tensor

from contracts.blocks import KvLayout
from contracts.channel import Channel, ChannelServer
from contracts.config import TransferConfig
from contracts.errors import ConfigError, HandoffError, WorkerLostError
from contracts.messages import Hello, PeerStatus, WorkerInfo
from contracts.ticket import Ticket
from kvtransfer import fp8
from kvtransfer.incoming import Incoming, Outcome, Reservation
from kvtransfer.joined import Holder, pages_of
from kvtransfer.outgoing import Outgoing, OutgoingResult
from kvtransfer.paths import Paths, make_transports
from kvtransfer.receiver import Receiver
from kvtransfer.sender import Sender, check_peer
from kvtransfer.slots import SendSlots, SlotCounts
from kvtransfer.transport import TOKEN_BYTES
from kvtransfer.watch import while_it_lasts


class KvEndpoint:
    """On the event loop, `on_peers_changed` is called when a PeerStatus changes, and `on_moved(peer, bytes, seconds)`
    when bytes that were on their way to that peer are all there (stretch.py).
    """

    def __init__(
        self,
        identity: tuple[str, int],
        fingerprint: str,
        layout: KvLayout,
        slabs: Tensor | Sequence[Tensor | Holder],
        config: TransferConfig,
        secret: bytes,
    ) -> None:
        """`slabs`: [N, L, 2, K, S, D], or of each tensor-parallel rank (see `pages_of`). Raises ConfigError if it is
        not of `layout`, one token does not fit a slot, or the wire's dtype is not for it."""
        if layout.bytes_per_token > config.slot_bytes:
            raise ConfigError(
                f"transfer.slot_bytes: expected at least {layout.bytes_per_token} (one token's KV) "
                f"but got {config.slot_bytes}"
            )
        self._identity = identity
        self._config = config
        self._secret = secret
        if config.wire_dtype == fp8.FP8:
            fp8.check_layout(layout)
        wire_dtype = "" if config.wire_dtype == "auto" else config.wire_dtype
        self._hello = Hello(
            *identity, "kv", b"", fingerprint, layout, slot_bytes=config.slot_bytes, wire_dtype=wire_dtype
        )
        self._pages = pages_of(slabs, layout)
        self._receiver = Receiver(identity, secret, self._pages, config)
        self._send_slots = SendSlots(config.num_slots, config.slot_bytes)
        self._senders: dict[str, Sender] = {}
        self._tasks: dict[asyncio.Task[None], Sender] = {}
        self._address = ""
        self._paths: Paths | None = None
        self._server: ChannelServer | None = None
        self._is_closed = False
        self._num_sent: Counter[str] = Counter()  # by OutgoingResult.reason
        self.on_peers_changed: Callable[[], None] | None = None
        self.on_moved: Callable[[str, int, float], None] | None = None

    async def start(self, host: str) -> int:
        """Listen; returns the kv_port. Raises ConfigError if the configured transport is not available."""
        paths = self._paths = Paths(make_transports(self._config, host), host)
        self._address = await paths.listen()

        async def serve(channel: Channel, hello: Hello) -> None:
            channel.batch()
            accepting = paths.accept(hello.bind_token, self._config.connect_timeout_s)
            link = await while_it_lasts(channel, accepting)
            await self._receiver.serve(channel, link, fp8.is_agreed(hello, channel.peer))

        self._server = ChannelServer(
            self._make_hello, self._secret, serve, lambda peer: check_peer(self._hello, peer)
        )
        return await self._server.start(host)

    async def close(self) -> None:
        """End all connections and all handoffs, opened or only expected. May follow a `start` that failed, or none."""
        self._is_closed = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._senders.clear()
        if self._server is not None:
            await self._server.close()
        if self._paths is not None:
            await self._paths.close()
        self._receiver.close()

    # --- as a sender ------------------------------------------------------------------------------------------------

    def set_peers(self, workers: Sequence[WorkerInfo]) -> None:
        """Keep a connection to each of `workers`, and to nobody else. An older incarnation never replaces a newer."""
        if self._is_closed:
            return
        wanted = {info.worker_id: info for info in workers if info.worker_id != self._identity[0]}
        for worker_id, sender in list(self._senders.items()):
            info = wanted.get(worker_id)
            if info is not None and info.incarnation < sender.info.incarnation:
                wanted[worker_id] = info = sender.info
            if info is None or _life(info) != _life(sender.info):
                del self._senders[worker_id]
                for task in [task for task, owner in self._tasks.items() if owner is sender]:
                    task.cancel()
        for worker_id, info in wanted.items():
            if worker_id not in self._senders:
                self._add(info)
        self._changed()

    def peer_statuses(self) -> tuple[PeerStatus, ...]:
        return tuple(sender.status_now() for _, sender in sorted(self._senders.items()))

    def open(
        self,
        ticket: Ticket,
        start: int,
        on_done: Callable[[OutgoingResult], None],
        on_caught_up: Callable[[], None] | None = None,
    ) -> Outgoing:
        """Hand tokens [start, ticket.num_tokens) of a sequence to the ticket's target, as they become ready.

        With `on_caught_up`, the sequence goes on growing meanwhile: called once, on the event loop, when all full
        blocks so far are at the target. `finish` may follow at any time; its `output_ids` say by how much it grew.

        Open it when the request is here, before there is anything to send: the target then knows that its reservation
        is used. `on_done` is called exactly once, later, on the event loop, whatever happens; until then the blocks
        may be read.
        """

        def done(result: OutgoingResult) -> None:
            self._num_sent[result.reason] += 1
            on_done(result)

        sender = self._senders.get(ticket.target_id)
        if sender is None:
            lost = WorkerLostError(f"{ticket.target_id} is not among the peers")
            return Outgoing(ticket, start, done, lost)
        return sender.open(ticket, start, done, on_caught_up)

    # --- as a receiver ----------------------------------------------------------------------------------------------

    def expect(
        self,
        handoff_id: str,
        request_id: str,
        prompt_hash: bytes,
        num_tokens: int,
        start: int,
        block_ids: Sequence[int],
        *,
        num_more: int = 0,
        on_start: Callable[[], object] | None = None,
        on_done: Callable[[Outcome], object],
    ) -> Incoming:
        """Let the genuine ticket of this handoff fill tokens [start, num_tokens) of `block_ids`, and up to `num_more`
        tokens behind them that the state then names.

        `on_start`: the sender has opened it, and has the request; from then on the end of its connection ends this.
        `on_done`: once, at the end (None: not needed); not after `Incoming.cancel`. How long to wait for `on_start` is
        the caller's decision.
        """
        size = self._pages.layout.block_size
        max_tokens = num_tokens + num_more
        assert 0 <= start <= num_tokens <= max_tokens <= len(block_ids) * size, (
            start,
            max_tokens,
            len(block_ids),
        )
        assert all(0 <= block < self._pages.num_blocks for block in block_ids)
        reservation = Reservation(
            handoff_id, request_id, prompt_hash, num_tokens, start, tuple(block_ids), max_tokens
        )
        try:
            return self._receiver.expect(reservation, on_start, on_done)
        except HandoffError as error:
            refused = Incoming(reservation, self._pages, on_start, on_done, lambda _incoming, _error: None)
            asyncio.get_running_loop().call_soon(refused.fail, error)
            return refused

    @property
    def slot_counts(self) -> SlotCounts:
        """The receiving slots by state, for audits."""
        return self._receiver.slot_counts

    @property
    def num_damaged_chunks(self) -> int:
        """Chunks that came with a wrong checksum or length since the start; each was asked for again."""
        return self._receiver.num_damaged_chunks

    def trouble(self) -> str | None:
        """Why this worker should get no more handoffs, or None. To be asked regularly."""
        return self._receiver.trouble()

    def gauges(self) -> dict[str, dict[str, float]]:
        """Metrics with labels of their own, as in Status.labelled."""
        ended = {f"in,{reason}": float(count) for reason, count in self._receiver.num_ended.items()}
        ended |= {f"out,{reason}": float(count) for reason, count in self._num_sent.items()}
        is_open = {f"in,{state}": float(count) for state, count in self._receiver.num_open().items()}
        is_open["out,sending"] = float(sum(sender.num_open for sender in self._senders.values()))
        slots = {name: float(count) for name, count in asdict(self.slot_counts).items()}
        return {
            "baton_worker_handoffs_ended_total": ended,
            "baton_worker_handoffs_open": is_open,
            "baton_worker_kv_slots": slots,
        }

    @property
    def num_free_send_slots(self) -> int:
        return self._send_slots.num_free

    # --- inside -----------------------------------------------------------------------------------------------------

    def _make_hello(self) -> Hello:
        token = secrets.token_bytes(TOKEN_BYTES)
        return replace(self._hello, data_address=self._address, bind_token=token)

    def _add(self, info: WorkerInfo) -> None:
        assert self._paths is not None, "set_peers comes after start"
        sender = Sender(
            info, self._hello, self._secret, self._paths, self._pages, self._send_slots, self._config, self._changed,
            partial(self._moved, info.worker_id),
        )  # fmt: skip
        self._senders[info.worker_id] = sender
        task = asyncio.create_task(sender.run())
        self._tasks[task] = sender
        task.add_done_callback(lambda done: self._tasks.pop(done, None))

    def _changed(self) -> None:
        if self.on_peers_changed is not None:
            self.on_peers_changed()

    def _moved(self, peer_id: str, num_bytes: int, seconds: float) -> None:
        if self.on_moved is not None:
            self.on_moved(peer_id, num_bytes, seconds)


def _life(info: WorkerInfo) -> tuple[int, str, int]:
    return info.incarnation, info.host, info.kv_port
