"""The step loop: one thread that owns the device, and the phases that tell it what to compute.

    step   commands ──► each phase proposes (decode first) ──► ONE execute ──► ONE sample ──► phases take ──► emit

    idle      no phase proposed anything: wait for a command, with a sign of life every HEARTBEAT_S
    failed    execute or sample raised: the requests of this step end with EngineError, or OutOfMemory if that was all
              that was wrong; the loop goes on
    broken    a phase or a command raised: the books can no longer be trusted. The thread ends, `failure` says why,
              `step_age_s` grows without bound, and whoever watches it replaces the worker

Other threads talk to the phases only through `submit`; events leave through `emit`, on the engine thread, all events
of a step in one call. Without `start`, `step` drives the same code from a test.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Protocol

import torch

from contracts.errors import BatonError, DeadlineError, EngineError, OutOfMemory
from contracts.request import Finished, Token
from engine.runner import StepItem
from engine.sampler import SamplingRow
from engine.sequence import Sequence

logger = logging.getLogger(__name__)

HEARTBEAT_S = 0.5


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """A token was drawn for a request."""

    request_id: str
    token: Token


@dataclass(frozen=True, slots=True)
class EndEvent:
    """The terminal event of a request: `finished` or `error`, never both, never neither."""

    request_id: str
    finished: Finished | None = None
    error: BatonError | None = None

    @classmethod
    def of(cls, request_id: str, end: Finished | BatonError) -> EndEvent:
        return cls(request_id, end) if isinstance(end, Finished) else cls(request_id, error=end)


Event = TokenEvent | EndEvent
Emit = Callable[[list[Event]], None]


@dataclass(slots=True)
class Budget:
    """What is left of a step, as the phases share it out in their order. `decodes`: what decode took of it.
    `chunk_limit`: how much prompt fits beside them, where somebody knows.
    """

    num_tokens: int
    decodes: list[Work] = field(default_factory=list)
    chunk_limit: ChunkLimit | None = None

    @property
    def num_decodes(self) -> int:
        return len(self.decodes)


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """Compute the next `num_tokens` tokens of `seq`; its hold has room for them. `wants_token`: draw after the last."""

    seq: Sequence
    num_tokens: int
    wants_token: bool


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    """Work done: KV is written and `seq.num_computed` moved on. `token` is there if it was wanted."""

    work: Work
    token: Token | None


Watch = Callable[[list[Work], float], None]
"""(what a step computed, its seconds), after the phases took it. On the engine thread."""

ChunkLimit = Callable[[list[Work], int, int], int | None]
"""(decodes of the step, tokens before the chunk, cap) -> prompt tokens that fit beside them; None: nobody knows."""


class Phase(Protocol):
    """Prefill or decode. All methods are called on the engine thread. `name` labels the counters."""

    name: str

    def propose(self, budget: Budget) -> list[Work]:
        """What to compute in this step; takes its share off `budget`. Each sequence at most once."""

    def take(self, results: list[Result]) -> list[Event]:
        """The results of what was proposed, in the same order."""

    def fail(self, works: list[Work], error: BatonError) -> list[Event]:
        """The step failed: end the requests of `works`. What it wrote into their blocks is void."""

    def has_work(self) -> bool:
        """Whether any request is here, even one that cannot go on just now."""


class Executor(Protocol):
    """The model; engine.runner.Runner."""

    def execute(self, items: list[StepItem]) -> torch.Tensor:
        """Write KV of all items; logits [sum of the items' num_logits, V] float32, in item order."""


class Drawer(Protocol):
    """engine.sampler.Sampler."""

    def sample(self, logits: torch.Tensor, rows: SequenceOf[SamplingRow]) -> list[Token]:
        """One token per row."""


@dataclass(frozen=True, slots=True)
class LoopCounters:
    """Monotonic totals. `num_tokens` computed by phase name; `step_s` is time spent in steps that computed."""

    num_steps: int
    num_failed_steps: int
    step_s: float
    num_tokens: dict[str, int]
    num_drawn: int


class StepLoop:
    """Runs the phases on one device. `phases` in order of precedence: decode first."""

    def __init__(
        self,
        runner: Executor,
        sampler: Drawer,
        phases: SequenceOf[Phase],
        emit: Emit,
        max_step_tokens: int = 1 << 16,
        clock: Callable[[], float] = time.monotonic,
        watch: Watch | None = None,
        chunk_limit: ChunkLimit | None = None,
    ) -> None:
        self._watch = watch
        self._chunk_limit = chunk_limit
        self._runner = runner
        self._sampler = sampler
        self._phases = tuple(phases)
        self._emit = emit
        self._max_step_tokens = max_step_tokens
        self._clock = clock
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_stopping = False
        self._last_beat_s = clock()
        self._num_steps = 0
        self._num_failed_steps = 0
        self._step_s = 0.0
        self._num_drawn = 0
        self._num_tokens: Counter[str] = Counter({phase.name: 0 for phase in self._phases})
        self.failure: BaseException | None = None

    # --- any thread -------------------------------------------------------------------------------------------------

    def submit(self, command: Callable[[], None]) -> bool:
        """Run `command` on the engine thread before the next step; commands keep their order.

        False if the loop has stopped or is stopping: the command may never run.
        """
        if self._is_stopping or self.failure is not None:
            return False
        self._commands.put(command)
        return True

    @property
    def step_age_s(self) -> float:
        """Seconds since the engine thread last proved to be alive; at rest at most about HEARTBEAT_S."""
        return self._clock() - self._last_beat_s

    @property
    def has_work(self) -> bool:
        return any(phase.has_work() for phase in self._phases)

    def counters(self) -> LoopCounters:
        return LoopCounters(
            self._num_steps, self._num_failed_steps, self._step_s, dict(self._num_tokens), self._num_drawn
        )

    def start(self) -> None:
        """Start the engine thread. Once in a loop's life."""
        assert self._thread is None
        self._last_beat_s = self._clock()
        # A daemon, so that a device call that never returns cannot keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """End the thread after the step it is in; requests still here get no event from it.

        Raises DeadlineError if the step does not end within `timeout_s`.
        """
        self._is_stopping = True
        self._commands.put(None)
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                raise DeadlineError(
                    f"expected the engine thread to end within {timeout_s} s but it is in a step"
                )

    # --- engine thread ----------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Run the commands that wait, then one step. False if there was nothing to compute."""
        self._last_beat_s = self._clock()
        self._run_commands()
        budget = Budget(self._max_step_tokens, chunk_limit=self._chunk_limit)
        proposals = [(phase, phase.propose(budget)) for phase in self._phases]
        works = [work for _, proposed in proposals for work in proposed]
        if not works:
            return False
        events: list[Event] = []
        has_failed = False
        try:
            tokens = iter(self._compute(works))
        except Exception as exc:  # the edge of a step: whatever the device did wrong ends the step's requests
            logger.exception("step of %d sequences failed", len(works))
            self._num_failed_steps += 1
            has_failed = True
            error = _as_error(exc)
            for phase, proposed in proposals:
                events += phase.fail(proposed, error) if proposed else []
        else:
            for phase, proposed in proposals:
                if proposed:
                    results = [Result(work, next(tokens) if work.wants_token else None) for work in proposed]
                    self._num_tokens[phase.name] += sum(work.num_tokens for work in proposed)
                    events += phase.take(results)
        now_s = self._clock()
        self._num_steps += 1
        step_s, self._last_beat_s = now_s - self._last_beat_s, now_s
        self._step_s += step_s
        if self._watch is not None and not has_failed:
            self._watch(works, step_s)
        if events:
            self._emit(events)
        return True

    def _compute(self, works: list[Work]) -> list[Token]:
        """Execute and sample all of `works`; the drawn tokens, in order. Only then is any sequence moved on."""
        items = [
            StepItem(
                work.seq.token_ids[work.seq.num_computed : work.seq.num_computed + work.num_tokens],
                work.seq.num_computed,
                work.seq.block_ids,
                work.wants_token,
                work.seq.wants_prompt_logprobs,
            )
            for work in works
        ]
        logits = self._runner.execute(items)
        if any(item.want_all_logits for item in items):
            logits = self._read_prompts(works, items, logits)
        tokens = self._sampler.sample(logits, [work.seq.sampling_row() for work in works if work.wants_token])
        for work in works:
            work.seq.num_computed += work.num_tokens
        self._num_drawn += len(tokens)
        return tokens

    @staticmethod
    def _read_prompts(works: list[Work], items: list[StepItem], logits: torch.Tensor) -> torch.Tensor:
        """Note what the model thought of prompt tokens; the logits that are left are those to draw from."""
        drawn: list[int] = []
        row = 0
        for work, item in zip(works, items, strict=True):
            if item.want_all_logits:
                work.seq.read_prompt(logits[row : row + item.num_logits])
            row += item.num_logits
            if work.wants_token:
                drawn.append(row - 1)
        return logits[drawn]

    def _run_commands(self) -> None:
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return
            if command is not None:
                command()

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                if not self.step():
                    self._wait()
        except Exception as exc:
            self.failure = exc
            logger.critical("the engine thread is broken and ends", exc_info=True)

    def _wait(self) -> None:
        """Sleep until a command comes. The timeout is the heartbeat; it does not look for work."""
        try:
            command = self._commands.get(timeout=HEARTBEAT_S)
        except queue.Empty:
            return
        if command is not None:
            command()


def _as_error(exc: Exception) -> BatonError:
    """What the requests of a failed step are told."""
    if isinstance(exc, BatonError):
        return exc
    reason = f"{type(exc).__name__}: {exc}"
    # torch has no type of its own for the host's memory.
    if isinstance(exc, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in reason:
        return OutOfMemory(f"no memory for a step: {reason}")
    return EngineError(f"step failed: {reason}")
