"""One simulated worker: accepts prompts and streams, and turns them into steps.

A step that reads prompts is one event. Steps of decodes alone are one event up to the next stream's end: with B streams
step i lasts t0 + i·context_s·B, so the run's length is closed form; whoever comes in between cuts it at a step's end.
That is what makes an hour of a large cluster cheap.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from typing import Protocol

from benchmarks.sim.devices import Device
from benchmarks.sim.memory import Memory
from benchmarks.sim.requests import SimRequest
from policy.chunks import StepPlan
from policy.step_model import Work


class Reading:
    """A prompt being read. `deadline_s` orders prompts where the chunker wants it. `blocks`: held here meanwhile."""

    __slots__ = ("blocks", "deadline_s", "is_local", "past", "request")

    def __init__(self, request: SimRequest, is_local: bool, deadline_s: float = math.inf) -> None:
        self.request = request
        self.is_local = is_local
        self.deadline_s = deadline_s
        self.past = 0
        self.blocks = 0

    @property
    def left(self) -> int:
        return self.request.prompt_tokens - self.past


class Chunker(Protocol):
    """How a worker sizes a step that may read prompts, and whether it learns from steps. `gap_s`: planned time
    between two tokens of a stream, 0 where nobody plans.
    """

    gap_s: float

    def plan(self, worker: SimWorker, decodes: Work, now_s: float) -> StepPlan: ...

    def observe(self, worker: SimWorker, work: Work, step_s: float) -> None: ...


class Owner(Protocol):
    """Who is told what happened on a worker, and puts its step ends on the clock. `stream_ended`: or was given up."""

    def at(self, time_s: float, worker: SimWorker, version: int) -> None: ...

    def prompt_read(self, worker: SimWorker, reading: Reading, now_s: float) -> None: ...

    def stream_ended(self, worker: SimWorker, request: SimRequest, now_s: float) -> None: ...

    def step_ended(self, worker: SimWorker, now_s: float) -> None: ...


class SimWorker:
    """`prompts` are read in order; `waiting` have no KV yet. `num_steps` counts steps in which all streams took part:
    a stream's tokens are the steps since it joined. `pending_tokens`: of prompts, still to be read; `num_held`:
    requests that read, write or wait here.
    """

    def __init__(
        self, worker_id: str, device: Device, owner: Owner, chunker: Chunker, memory: Memory
    ) -> None:
        self.worker_id = worker_id
        self.device = device
        self.memory = memory
        self.chunker = chunker
        self.prompts: list[Reading] = []
        self.waiting: deque[Reading | tuple[SimRequest, int]] = deque()
        self.pending_tokens = self.num_held = 0
        self.num_streams = 0
        self.context = 0
        self.num_steps = 0
        self.num_written = 0
        self.busy_s = 0.0
        self.slowness = 1.0  # of this run's or step's noise
        self.gap_tokens: dict[int, int] = {}  # log-spaced gap -> tokens that waited so long
        self.noise: tuple[float, ...] = (1.0,)
        self.noise_at = 0
        self.pace: Callable[[float], float] | None = None
        self._owner = owner
        self._joining: list[tuple[SimRequest, int]] = []
        self._ends: list[tuple[int, int, SimRequest, int]] = []  # (last step, tie, request, blocks)
        self._keys: list[tuple[float, int]] = []  # (deadline key, last step); see due_s
        self._version = 0
        self._started_s: float | None = None
        self._run_steps = 0
        self._step_s = 0.0
        self._plan: StepPlan | None = None

    # --- what comes in ---

    def read(self, reading: Reading, now_s: float) -> None:
        """A prompt to read; with `is_local` its answer is written here too."""
        self.pending_tokens += reading.left
        self.num_held += 1
        self.waiting.append(reading)
        self._admit(now_s)
        self._kick(now_s)

    def reserve(self, num_tokens: int) -> int | None:
        """Blocks for a stream that will come, or None."""
        return self.memory.reserve(num_tokens)

    def join(self, request: SimRequest, blocks: int, now_s: float) -> None:
        """A stream whose KV is here, in `blocks` reserved before; it takes part from the next step on."""
        self.memory.run(blocks)
        self.num_held += 1
        self._joining.append((request, blocks))
        self._kick(now_s)

    def queue_stream(self, request: SimRequest, now_s: float) -> None:
        """A stream whose KV waits elsewhere until it fits here."""
        self.num_held += 1
        self.waiting.append((request, 0))
        self._admit(now_s)
        self._kick(now_s)

    def free(self, reading: Reading, now_s: float) -> None:
        """What was read here is elsewhere now; whoever waits for KV may come in. Not for within a step's end."""
        self.memory.release(reading.blocks, reading.request.keys, reading.request.key_tokens)
        self._admit(now_s)
        self._kick(now_s)

    def give_up(self, reading: Reading, now_s: float) -> None:
        """A prompt that nobody has begun to read is refused."""
        self.prompts.remove(reading)
        self.pending_tokens -= reading.left
        self.num_held -= 1
        self.memory.run(reading.blocks)
        self.memory.release(reading.blocks)
        reading.request.refuse()
        self._owner.stream_ended(self, reading.request, now_s)
        self._admit(now_s)

    # --- what it looks like from outside ---

    @property
    def is_idle(self) -> bool:
        return self._started_s is None

    def slack_s(self, gap_s: float, longest_s: float, now_s: float) -> float:
        """Time to the tightest next-token deadline; infinite without streams."""
        if not self.num_streams:
            return math.inf
        while self._keys and self._keys[0][1] <= self.num_steps:
            heapq.heappop(self._keys)
        # A stream that joined at t with s0 steps done has its next token due at t + (s0' - s0 + 1)·gap: of all
        # streams the one with the least t - s0·gap is due first, whatever step it is.
        due_s = self._keys[0][0] + (self.num_steps + 1) * gap_s
        return min(due_s - now_s, longest_s)

    # --- steps ---

    def step_end(self, version: int, now_s: float) -> None:
        """The clock reached an end put on it; an older version was cut short since."""
        if version != self._version or self._started_s is None:
            return
        started_s, self._started_s = self._started_s, None
        self.busy_s += now_s - started_s
        plan, self._plan = self._plan, None
        if self.num_streams:
            self.num_steps += self._run_steps
            num_tokens = self.num_streams * self._run_steps
            self.context += num_tokens
            self.num_written += num_tokens
            self._note_gap((now_s - started_s) / self._run_steps, num_tokens)
        if plan is not None:
            self.chunker.observe(self, plan.work, now_s - started_s)
            self._read_chunks(plan, now_s)
        self._end_streams(now_s)
        self._take_joining(now_s)
        self._admit(now_s)
        self._owner.step_ended(self, now_s)
        self._kick(now_s)

    def _kick(self, now_s: float) -> None:
        if self._started_s is not None:
            if self._plan is None and (self.prompts or self._joining):
                self._cut(now_s)
            return
        self._take_joining(now_s)
        if self.prompts:
            plan = self.chunker.plan(self, Work(0, 0, self.num_streams, self.context), now_s)
            if plan.chunks:
                self._start_fused(plan, now_s)
                return
        if self.num_streams:
            self._start_run(now_s, 1 if self.prompts else self._ends[0][0] - self.num_steps)

    def _start_fused(self, plan: StepPlan, now_s: float) -> None:
        work = plan.work
        step_s = self.device.step_s(work.new_tokens, work.attended, work.num_decodes, work.decode_context)
        self._plan, self._run_steps = plan, 1
        self._begin(now_s, step_s * self._draw(now_s))

    def _start_run(self, now_s: float, num_steps: int) -> None:
        self.slowness = self._draw(now_s)
        self._step_s = self.device.decode_step_s(self.num_streams, self.context) * self.slowness
        self._run_steps = num_steps
        self._begin(now_s, self._length_s(num_steps))

    def _length_s(self, num_steps: int) -> float:
        growth_s = self.device.context_s * self.num_streams * self.slowness
        return num_steps * self._step_s + growth_s * num_steps * (num_steps - 1) / 2

    def _cut(self, now_s: float) -> None:
        """End the run with the step that is being computed now."""
        assert self._started_s is not None, "only a running worker is cut"
        passed_s = now_s - self._started_s
        growth_s = self.device.context_s * self.num_streams * self.slowness
        linear = self._step_s - growth_s / 2
        guess = 2 * passed_s / (linear + math.sqrt(linear * linear + 2 * growth_s * passed_s))
        num_steps = max(1, math.ceil(guess - 1e-9))
        if num_steps < self._run_steps:
            self._run_steps = num_steps
            self._begin(self._started_s, self._length_s(num_steps))

    def _begin(self, started_s: float, length_s: float) -> None:
        self._started_s = started_s
        self._version += 1
        self._owner.at(started_s + length_s, self, self._version)

    def _draw(self, now_s: float) -> float:
        self.noise_at = (self.noise_at + 1) % len(self.noise)
        noise = self.noise[self.noise_at]
        return noise if self.pace is None else noise * self.pace(now_s)

    # --- what a step's end means ---

    def _read_chunks(self, plan: StepPlan, now_s: float) -> None:
        finished = []
        for reading, num_tokens in zip(self.prompts, plan.chunks, strict=False):
            reading.past += num_tokens
            self.pending_tokens -= num_tokens
            if not reading.left:
                finished.append(reading)
        if not finished:
            return
        self.prompts = [reading for reading in self.prompts if reading.left]
        for reading in finished:
            self.memory.run(reading.blocks)
            self._owner.prompt_read(self, reading, now_s)
            if reading.is_local:
                if reading.request.output_tokens < 2:
                    self._end(reading.request, reading.blocks, now_s)
                else:
                    self._joining.append((reading.request, reading.blocks))
            else:
                self.num_held -= 1

    def _end_streams(self, now_s: float) -> None:
        while self._ends and self._ends[0][0] <= self.num_steps:
            _, _, request, blocks = heapq.heappop(self._ends)
            self.num_streams -= 1
            self.context -= request.prompt_tokens + request.output_tokens
            self._end(request, blocks, now_s)

    def _end(self, request: SimRequest, blocks: int, now_s: float) -> None:
        self.memory.release(blocks, request.keys, request.key_tokens)
        self.num_held -= 1
        request.end(now_s)
        self._owner.stream_ended(self, request, now_s)

    def _take_joining(self, now_s: float) -> None:
        gap_s = self.chunker.gap_s
        for request, blocks in self._joining:
            last_step = self.num_steps + request.output_tokens - 1
            heapq.heappush(self._ends, (last_step, request.number, request, blocks))
            heapq.heappush(self._keys, (now_s - self.num_steps * gap_s, last_step))
            self.num_streams += 1
            self.context += request.prompt_tokens + 1
        self._joining.clear()

    def _admit(self, now_s: float) -> None:
        """First come, first served, as far as KV and the number of streams allow."""
        while (
            self.waiting
            and self.num_streams + len(self.prompts) + len(self._joining) < self.device.max_streams
        ):
            head = self.waiting[0]
            request = head.request if isinstance(head, Reading) else head[0]
            hit = self.memory.hit_tokens(request.keys, request.key_tokens, request.prompt_tokens)
            answer = request.output_tokens if not isinstance(head, Reading) or head.is_local else 1
            blocks = self.memory.reserve(request.prompt_tokens - hit + answer)
            if blocks is None:
                return
            self.waiting.popleft()
            if isinstance(head, Reading):
                head.blocks, head.past = blocks, hit
                self.pending_tokens -= hit
                request.hit_tokens = hit
                self.prompts.append(head)
            else:
                self.memory.run(blocks)
                self._joining.append((request, blocks))

    def _note_gap(self, gap_s: float, num_tokens: int) -> None:
        bucket = int(math.log(max(gap_s, 1e-6)) * 20)
        self.gap_tokens[bucket] = self.gap_tokens.get(bucket, 0) + num_tokens
