"""One worker of `benchmarks/soak.py` in a process of its own: a block pool and a KV endpoint, without a model.

    told: peers, expect, open, cancel, audit, end          tells: granted (None: full), arrived, sent, audit

What a model would compute is written by hand: the KV of a token is the token, in every element. So decode can see
whether what arrived is what was asked for, to the last token.
"""

from __future__ import annotations

import asyncio
import signal
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from contracts.blocks import KvLayout, prompt_hash
from contracts.config import TransferConfig
from contracts.errors import BatonError, LeaseExpiredError
from contracts.messages import HandoffState, WorkerInfo
from contracts.request import Token
from contracts.ticket import Ticket
from engine.blocks import BlockPool, Hold, HoldState
from kvtransfer.endpoint import KvEndpoint
from kvtransfer.incoming import Incoming, Outcome
from kvtransfer.outgoing import Outgoing, OutgoingResult

HOST = "127.0.0.1"
SECRET = b"soak" * 8
LAYOUT = KvLayout(num_layers=2, num_kv_heads=2, head_dim=16, block_size=16, dtype="float32")
NUM_BLOCKS = 160
CHUNK_TOKENS = 64
LEASE_S = 2.0
STATE = HandoffState(Token(0, 0))
CONFIG = TransferConfig(
    slot_bytes=16 * LAYOUT.bytes_per_block, num_slots=4, probe_bytes=0, peer_timeout_s=3.0, checksum="always"
)


@dataclass(eq=False, slots=True)
class _Request:
    hold: Hold
    token_ids: list[int]
    incoming: Incoming | None = None
    outgoing: Outgoing | None = None
    lease: asyncio.TimerHandle | None = None


class SoakWorker:
    """Both sides; which one it plays, a request decides."""

    def __init__(self, conn: Connection, name: str, incarnation: int) -> None:
        self._conn = conn
        self._pool = BlockPool(NUM_BLOCKS, LAYOUT.block_size)
        shape = (NUM_BLOCKS, LAYOUT.num_layers, 2, LAYOUT.num_kv_heads, LAYOUT.block_size, LAYOUT.head_dim)
        self._slab = torch.zeros(shape)
        self._endpoint = KvEndpoint((name, incarnation), "soak", LAYOUT, self._slab, CONFIG, SECRET)
        self._endpoint.on_peers_changed = self._tell_peers
        self._requests: dict[str, _Request] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Until it is told to end, or nobody is there any more to tell."""
        loop = asyncio.get_running_loop()
        commands: asyncio.Queue[tuple[Any, ...]] = asyncio.Queue()

        def read() -> None:
            try:
                commands.put_nowait(self._conn.recv())
            except (EOFError, OSError):
                loop.remove_reader(self._conn.fileno())
                commands.put_nowait(("end",))

        self._tell("started", await self._endpoint.start(HOST))
        loop.add_reader(self._conn.fileno(), read)
        while (command := await commands.get())[0] != "end":
            getattr(self, f"_{command[0]}")(*command[1:])
        await self._endpoint.close()

    # --- commands -----------------------------------------------------------------------------------------------------

    def _peers(self, workers: list[WorkerInfo]) -> None:
        self._endpoint.set_peers(workers)

    def _expect(self, handoff_id: str, token_ids: list[int]) -> None:
        num_tokens = len(token_ids)
        hold = self._pool.acquire(handoff_id, token_ids, num_tokens + 1, HoldState.RESERVED)
        if hold is None:
            self._tell("granted", handoff_id, None)
            return
        request = self._requests[handoff_id] = _Request(hold, token_ids)
        request.lease = asyncio.get_running_loop().call_later(LEASE_S, self._expire, handoff_id)
        request.incoming = self._endpoint.expect(
            handoff_id, handoff_id, prompt_hash(token_ids), num_tokens, hold.num_cached_tokens, hold.block_ids,
            on_start=lambda: self._started(request),
            on_done=lambda outcome: self._arrived(handoff_id, outcome),
        )  # fmt: skip
        self._tell("granted", handoff_id, hold.num_cached_tokens)

    def _open(self, ticket: Ticket, start: int, token_ids: list[int]) -> None:
        handoff_id = ticket.handoff_id
        hold = self._pool.acquire(handoff_id, token_ids, len(token_ids), HoldState.RUNNING)
        if hold is None:
            self._tell("sent", handoff_id, "overloaded")
            return
        request = self._requests[handoff_id] = _Request(hold, token_ids)
        request.outgoing = self._endpoint.open(ticket, start, lambda result: self._sent(handoff_id, result))
        task = asyncio.create_task(self._compute(request, request.outgoing))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _cancel(self, handoff_id: str) -> None:
        request = self._requests.get(handoff_id)
        if request is None:
            return
        if request.outgoing is not None:
            request.outgoing.abort()  # its blocks may be read until it has told that it is over
        elif request.incoming is not None:
            request.incoming.cancel(None)
            self._free(handoff_id)
            self._tell("arrived", handoff_id, "cancelled")

    def _audit(self) -> None:
        """What is not back: blocks, receiving slots, sending slots, requests."""
        audit = self._pool.audit()
        self._pool.check()
        num_slots, counts = CONFIG.num_slots, self._endpoint.slot_counts
        self._tell(
            "audit",
            {
                "blocks": audit.total - audit.free - audit.cached,
                "slots": num_slots - counts.free - counts.kept,
                "send_slots": num_slots - self._endpoint.num_free_send_slots,
                "requests": len(self._requests),
            },
        )

    # --- what becomes of them -----------------------------------------------------------------------------------------

    async def _compute(self, request: _Request, outgoing: Outgoing) -> None:
        """Chunk by chunk, with a breath between, as a step would take."""
        hold, token_ids = request.hold, request.token_ids
        begin = hold.num_cached_tokens
        for low in range(begin, len(token_ids), CHUNK_TOKENS):
            high = min(low + CHUNK_TOKENS, len(token_ids))
            if hold.is_released:
                return
            self._write(hold.block_ids, token_ids, low, high)
            self._pool.publish(hold, token_ids, high)
            outgoing.ready(high, hold.block_ids)
            await asyncio.sleep(0.001)
        outgoing.ready(len(token_ids), hold.block_ids)
        outgoing.finish(STATE)

    def _started(self, request: _Request) -> None:
        if request.lease is not None:
            request.lease.cancel()
        self._pool.move(request.hold, HoldState.IN_HANDOFF)

    def _expire(self, handoff_id: str) -> None:
        request = self._requests.get(handoff_id)
        if request is not None and request.incoming is not None:
            request.incoming.cancel(LeaseExpiredError("nobody came"))
            self._free(handoff_id)
            self._tell("arrived", handoff_id, LeaseExpiredError.code)

    def _arrived(self, handoff_id: str, outcome: Outcome) -> None:
        request = self._requests[handoff_id]
        code = "unneeded" if outcome is None else "ok"
        if isinstance(outcome, BatonError):
            code = outcome.code
        elif outcome is not None:
            if not self._is_right(request):
                code = "wrong"
            self._pool.publish(request.hold, request.token_ids, len(request.token_ids))
        self._free(handoff_id)
        self._tell("arrived", handoff_id, code)

    def _sent(self, handoff_id: str, result: OutgoingResult) -> None:
        self._free(handoff_id)
        self._tell("sent", handoff_id, "ok" if result.error is None else result.error.code)

    def _free(self, handoff_id: str) -> None:
        request = self._requests.pop(handoff_id)
        if request.lease is not None:
            request.lease.cancel()
        self._pool.release(request.hold)

    def _write(self, block_ids: list[int], token_ids: list[int], low: int, high: int) -> None:
        size = LAYOUT.block_size
        for position in range(low, high):
            self._slab[block_ids[position // size], :, :, :, position % size] = token_ids[position]

    def _is_right(self, request: _Request) -> bool:
        tokens = self._slab[request.hold.block_ids].permute(0, 4, 1, 2, 3, 5).flatten(0, 1).flatten(1)
        wanted = torch.tensor(request.token_ids, dtype=torch.float32)
        return bool((tokens[: len(wanted)] == wanted[:, None]).all())

    def _tell_peers(self) -> None:
        self._tell("peers", tuple(peer.worker_id for peer in self._endpoint.peer_statuses() if peer.is_ready))

    def _tell(self, *event: Any) -> None:
        try:
            self._conn.send(event)
        except OSError:
            return  # the other side is at its end; `run` will hear of it


def run_worker(conn: Connection, name: str, incarnation: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    asyncio.run(SoakWorker(conn, name, incarnation).run())
