"""The clock, the workers and the requests; a Controller decides who works on what.

Everything that happens is an entry on one heap, in order of time and then of being put there; random numbers come from
one seeded generator per purpose. So a run is a function of its inputs and its seed.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from benchmarks.metrics import Slo
from benchmarks.sim.devices import Device
from benchmarks.sim.memory import Memory
from benchmarks.sim.requests import SimRequest
from benchmarks.sim.worker import Chunker, Reading, SimWorker
from policy.prefix import PrefixIndex

OVERHEAD_S = 0.002


@dataclass(frozen=True, slots=True)
class Setup:
    """`noise`: standard deviation of the logarithm of a step's time around the device's formula. `overhead_s`: HTTP,
    tokens and the way of a command, on every first token of every system. `pace(time_s)`: how much longer all
    steps take that begin then, where devices are not as fast at one time as at another.
    """

    device: Device
    num_workers: int
    slo: Slo
    seed: int = 0
    noise: float = 0.03
    overhead_s: float = OVERHEAD_S
    pace: Callable[[float], float] | None = None


class Controller(Protocol):
    """A serving system. Each call happens at its time on the clock."""

    def start(self, cluster: Cluster) -> None: ...

    def arrive(self, request: SimRequest, now_s: float) -> None: ...

    def prompt_read(self, worker: SimWorker, reading: Reading, now_s: float) -> None: ...

    def worker_changed(self, worker: SimWorker, ended: SimRequest | None, now_s: float) -> None:
        """A step ended, or (`ended`) a stream on it."""


class Cluster:
    """One run. `index` lists every cached block, as block events would. `misses_left`: counted requests that may still
    miss a promise before `run` stops early, because the verdict is known.
    """

    def __init__(self, setup: Setup, controller: Controller, chunker: Callable[[int], Chunker]) -> None:
        self.setup = setup
        self.index = PrefixIndex()
        self.now_s = 0.0
        self.num_events = 0
        self.misses_left = math.inf
        self._requests: Sequence[SimRequest] = ()
        self._counted_from = self._num_due = 0
        self._due_s = -math.inf  # of the first request that was not looked at for its first token
        self._heap: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._order = 0
        self._controller = controller
        rng = random.Random(setup.seed)
        # One table for all, entered at different places: a prime length, so that no two workers march in step.
        noise = tuple(math.exp(rng.gauss(0.0, setup.noise)) for _ in range(4099))
        self.workers = []
        for number in range(setup.num_workers):
            memory = Memory(f"w{number}", setup.device.kv_tokens, self.index)
            worker = SimWorker(f"w{number}", setup.device, self, chunker(number), memory)
            worker.noise, worker.noise_at = noise, rng.randrange(len(noise))
            worker.pace = setup.pace
            self.workers.append(worker)
        self._link_free_s = dict.fromkeys((worker.worker_id for worker in self.workers), 0.0)
        controller.start(self)

    def run(self, requests: Sequence[SimRequest], counted_from: int = 0) -> None:
        """Until every request has ended, or more of those from number `counted_from` on missed than `misses_left`.
        `requests`: by arrival.
        """
        self._requests, self._counted_from = requests, counted_from
        for request in requests:
            self.call(request.arrived_s, self._controller.arrive, request)
        heap = self._heap
        while heap and self.misses_left >= 0:
            self.now_s, _, action, arguments = heapq.heappop(heap)
            if self.now_s > self._due_s:
                self._count_due(self.now_s)
            self.num_events += 1
            action(*arguments, self.now_s)
        self._count_due(math.inf)

    def refuse(self, request: SimRequest) -> None:
        request.refuse()
        self._refused(request)

    def call(self, time_s: float, action: Callable[..., None], *arguments: object) -> None:
        """`action(*arguments, now_s)` at `time_s`."""
        self._order += 1
        heapq.heappush(self._heap, (time_s, self._order, action, arguments))

    def transfer_s(self, source: SimWorker, num_tokens: int, last_chunk: int, read_s: float) -> float:
        """Moment at which KV read by `source` until `read_s` is elsewhere: chunks left while later ones were read,
        and all leave through one link, one after the other.
        """
        device = self.setup.device
        total_s = num_tokens * device.kv_bytes_per_token / device.link_bytes_per_s
        last_s = min(num_tokens, last_chunk) * device.kv_bytes_per_token / device.link_bytes_per_s
        free_s = self._link_free_s[source.worker_id]
        end_s = max(free_s + total_s, read_s + last_s)
        self._link_free_s[source.worker_id] = end_s
        return end_s + 0.001

    # --- Owner of the workers ---

    def at(self, time_s: float, worker: SimWorker, version: int) -> None:
        self._order += 1
        heapq.heappush(self._heap, (time_s, self._order, worker.step_end, (version,)))

    def prompt_read(self, worker: SimWorker, reading: Reading, now_s: float) -> None:
        reading.request.first_token_s = now_s + self.setup.overhead_s
        self._controller.prompt_read(worker, reading, now_s)

    def stream_ended(self, worker: SimWorker, request: SimRequest, now_s: float) -> None:
        if request.is_refused:
            self._refused(request)
            return
        request.end_s = now_s + self.setup.overhead_s  # the last token travels like the first
        if request.is_prompt(self.setup.slo) and not request.is_good(self.setup.slo):
            self._missed(request)
        self._controller.worker_changed(worker, request, now_s)

    def step_ended(self, worker: SimWorker, now_s: float) -> None:
        self._controller.worker_changed(worker, None, now_s)

    # --- misses: of the first token when it is due, of the gaps when a stream ends, by refusal before that ---

    def _count_due(self, now_s: float) -> None:
        patience_s, size = self.setup.slo.ttft_s, len(self._requests)
        while self._num_due < size and patience_s is not None:
            request = self._requests[self._num_due]
            self._due_s = request.arrived_s + patience_s
            if self._due_s >= now_s:
                return
            self._num_due += 1
            if not request.is_refused and not request.is_prompt(self.setup.slo):
                self._missed(request)
        self._due_s = math.inf

    def _refused(self, request: SimRequest) -> None:
        if request.number >= self._num_due:
            self._missed(request)

    def _missed(self, request: SimRequest) -> None:
        if request.number >= self._counted_from:
            self.misses_left -= 1
