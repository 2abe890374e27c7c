"""The transfer self-test after connecting: real bytes through real slots, checked, with their GB/s.

start: Want("") ──► Grant("", slots) ──► Probe per slot ──► ProbeDone each ──► passed
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from functools import partial

from contracts.channel import Channel
from contracts.errors import HandoffError
from contracts.messages import Probe, Want
from kvtransfer.pages import checksum
from kvtransfer.slots import SendSlots
from kvtransfer.transport import Link


class SelfTest:
    """Of one connection. 0 bytes: passed at once, unmeasured."""

    def __init__(
        self, num_bytes: int, slot_bytes: int, channel: Channel, link: Link, slots: SendSlots
    ) -> None:
        self._num_bytes = num_bytes
        self._unsent = num_bytes
        self._slot_bytes = slot_bytes
        self._channel = channel
        self._link = link
        self._slots = slots
        self._credits: deque[int] = deque()
        self._num_unanswered = -(-num_bytes // slot_bytes)
        self._begun_s = 0.0
        self._is_stopped = False
        self.gigabytes_per_s = 0.0

    @property
    def is_passed(self) -> bool:
        return self._num_unanswered == 0

    def start(self) -> None:
        if self._num_unanswered:
            self._channel.send(Want("", self._num_unanswered))

    def stop(self) -> None:
        self._is_stopped = True
        self._slots.forget(self._pump_soon)

    def granted(self, credits: Sequence[int]) -> None:
        self._begun_s = self._begun_s or time.monotonic()
        self._credits.extend(credits)
        self._pump()

    def probe_done(self, is_ok: bool) -> None:
        """Raises HandoffError if the bytes did not arrive as sent."""
        if not is_ok:
            raise HandoffError("the transfer self-test failed: bytes arrived damaged")
        self._num_unanswered = max(self._num_unanswered - 1, 0)
        if self.is_passed:
            elapsed_s = max(time.monotonic() - self._begun_s, 1e-9)
            self.gigabytes_per_s = self._num_bytes / elapsed_s / 1e9

    def _pump_soon(self) -> None:
        asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        while self._credits and self._unsent and not self._is_stopped and not self._channel.is_closed:
            slot = self._slots.try_take(self._pump_soon)
            if slot is None:
                return
            credit = self._credits.popleft()
            num_bytes = min(self._unsent, self._slot_bytes)
            self._unsent -= num_bytes
            content = self._slots.arena.tensors[slot][:num_bytes]
            try:
                self._channel.send(Probe(credit, num_bytes, checksum(content)))
                op = self._link.send(credit, self._slots.arena.views[slot][:num_bytes])
            except BaseException:
                self._slots.give_back(slot)
                raise
            op.final.add_done_callback(partial(self._sent, slot))
        self._slots.pass_on()

    def _sent(self, slot: int, final: asyncio.Future[int]) -> None:
        self._slots.give_back(slot)
        if final.exception() is not None:
            self._channel.abort()
