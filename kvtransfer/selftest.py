"""The transfer self-test after connecting: real bytes through real slots, checked, with their GB/s.

    rounds:  small sizes, there and back ──► bulk, to touch every page ──► bulk again, with the clock running ─┐
                                                                            └── too slow: again, for a while ◄┘
    a round: Want("") ──► Grant("", slots) ──► Probe per slot, its bytes ──► ProbeDone each; small ones come back

Small probes are echoed by the receiver over the link before ProbeDone: both directions work, or the path is not used.

The speed is the best round's. One is no judgement: slots go to whoever asks, so that beside another newcomer's test the
timed round may be in a slot that nobody has touched yet, which takes eight times as long over shared memory.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from contracts.channel import Channel
from contracts.errors import HandoffError
from contracts.messages import Probe, Want
from kvtransfer.pages import checksum
from kvtransfer.route import Route
from kvtransfer.transport import Op

ECHO_BYTES = 256 << 10  # probes up to this size come back
PIECE_BYTES = (
    1 << 20
)  # of what is sent: made and freed as large as a slot, a pattern leaves holes in the heap
LONGEST_DOUBT_S = 0.5  # from the first timed round to the last one that is begun
SMALL_SIZES = (1, 4 << 10, 64 << 10, ECHO_BYTES)


def make_rounds(num_bytes: int, slot_bytes: int) -> list[list[int]]:
    """Sizes of the probes, round by round; the last round is the timed one. Empty for 0 bytes."""
    if num_bytes == 0:
        return []
    bulk = [min(slot_bytes, num_bytes - low) for low in range(0, num_bytes, slot_bytes)]
    return [sorted({min(size, slot_bytes) for size in SMALL_SIZES}), bulk, bulk]


def make_pattern(num_bytes: int) -> Tensor:
    """[bytes] uint8: what `fill` needs for contents of up to `num_bytes`; hardly more than a piece."""
    return torch.arange(PIECE_BYTES // 8 + num_bytes // PIECE_BYTES, dtype=torch.int64).view(torch.uint8)


def fill(content: Tensor, pattern: Tensor) -> None:
    """`content` [bytes] uint8. No two pieces of it become equal, so that none can stand for another."""
    for number, low in enumerate(range(0, len(content), PIECE_BYTES)):
        piece = content[low : low + PIECE_BYTES]
        piece.copy_(pattern[8 * number :][: len(piece)])


class SelfTest:
    """Of one connection. 0 bytes: passed at once, unmeasured. `least` GB/s: less is doubted, and measured again."""

    def __init__(
        self,
        num_bytes: int,
        channel: Channel,
        route: Route,
        least: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rounds = deque(make_rounds(num_bytes, route.slot_bytes))
        self._sizes: list[int] = []  # of the round that runs
        self._unsent: deque[int] = deque()
        self._num_unanswered = self._num_wanted = self._num_bytes = 0
        self._channel = channel
        self._link = route.link
        self._slots = route.slots
        self._staging = route.staging
        self._credits: deque[int] = deque()
        self._echoes: dict[
            int, tuple[Op, memoryview, int]
        ] = {}  # slot -> receive, its buffer, checksum of what went
        largest = max((size for sizes in self._rounds for size in sizes), default=0)
        self._pattern = make_pattern(largest)
        self._least = least
        self._clock = clock
        self._begun_s = 0.0
        self._timed_since_s: float | None = None
        self._is_stopped = False
        self.gigabytes_per_s = 0.0

    @property
    def is_passed(self) -> bool:
        return self._num_unanswered == 0 and not self._rounds

    def start(self) -> None:
        if self._rounds:
            self._begin_round()

    def stop(self) -> None:
        self._is_stopped = True
        self._slots.forget(self._pump_soon)

    def granted(self, credits: Sequence[int]) -> None:
        self._credits.extend(credits)
        self._pump()

    async def probe_done(self, slot: int, is_ok: bool) -> None:
        """Raises HandoffError if the bytes did not arrive as sent, or did not come back so."""
        if not is_ok:
            raise HandoffError("the transfer self-test failed: bytes arrived damaged")
        if slot in self._echoes:
            op, buffer, wanted = self._echoes.pop(slot)
            num_bytes = await op.wait()
            if checksum(torch.frombuffer(buffer, dtype=torch.uint8)[:num_bytes]) != wanted:
                raise HandoffError("the transfer self-test failed: bytes came back damaged")
        self._num_unanswered = max(self._num_unanswered - 1, 0)
        if self._num_unanswered == 0:
            if not self._rounds:
                self._timed()
            if self._rounds:
                self._begin_round()

    def _timed(self) -> None:
        now_s = self._clock()
        self.gigabytes_per_s = max(
            self.gigabytes_per_s, self._num_bytes / max(now_s - self._begun_s, 1e-9) / 1e9
        )
        self._timed_since_s = self._timed_since_s or self._begun_s
        if self.gigabytes_per_s < self._least and now_s - self._timed_since_s < LONGEST_DOUBT_S:
            self._rounds.append(self._sizes)

    def _begin_round(self) -> None:
        sizes = self._sizes = self._rounds.popleft()
        self._unsent.extend(sizes)
        self._num_unanswered = len(sizes)
        self._num_wanted += len(sizes)
        self._num_bytes = sum(sizes)
        self._begun_s = self._clock()
        self._channel.send(Want("", self._num_wanted))

    def _pump_soon(self) -> None:
        asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        while self._credits and self._unsent and not self._is_stopped and not self._channel.is_closed:
            slot: int | None = None
            buffer = self._staging.tensor(self._credits[0])
            if buffer is None:
                slot = self._slots.try_take(self._pump_soon)
                if slot is None:
                    return
                buffer = self._slots.arena.tensors[slot]
            self._send(buffer, slot, self._credits.popleft(), self._unsent.popleft())
        self._slots.pass_on()

    def _send(self, buffer: Tensor, slot: int | None, credit: int, num_bytes: int) -> None:
        """Through `buffer`: the staging slot of this credit, or our `slot`, which the link then sends."""
        try:
            content = buffer[:num_bytes]
            fill(content, self._pattern)
            wanted = checksum(content)
            if num_bytes <= ECHO_BYTES:
                echo = memoryview(bytearray(num_bytes))
                self._echoes[credit] = (self._link.post_recv(credit, echo), echo, wanted)
            self._channel.send(Probe(credit, num_bytes, wanted))
            if slot is None:
                return
            op = self._link.send(credit, self._slots.arena.views[slot][:num_bytes])
        except BaseException:
            if slot is not None:
                self._slots.give_back(slot)
            raise
        op.final.add_done_callback(partial(self._sent, slot))

    def _sent(self, slot: int, final: asyncio.Future[int]) -> None:
        self._slots.give_back(slot)
        if final.exception() is not None:
            self._channel.abort()
