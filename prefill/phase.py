"""Which prompt tokens run next, and what becomes of a prompt that is through.

    add ──► waiting ──blocks──► running ──last chunk──► in_handoff ──handed_off──► gone          (with a sink)
      └──── hold given ───────────┘  └───────────────► adopted by decode, or ended              (without: local)
    recompute ──► front of waiting (preempted by decode: computes prompt + outputs, draws the NEXT token, re-adopts)

Who releases the blocks, by state and event:

    state        finished at once     step failed          cancel                 handed_off
    waiting      -                    -                    none held              -
    running      -                    local: here          local: here            here
                                      sink: handed_off     sink: handed_off
    in_handoff   handed_off           -                    handed_off             here

With a sink, blocks may be read by the transfer until the worker calls `handed_off`, whatever else happened before;
until then they stay in_handoff. A job tells the outside its events before it tells its sink, so that a transfer that
is over at once cannot overtake the token or the end.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

from contracts.blocks import num_blocks_for
from contracts.config import EngineConfig
from contracts.errors import BatonError, OverloadedError
from contracts.messages import HandoffState
from contracts.request import Token
from engine.blocks import BlockPool, Hold, HoldState
from engine.loop import Budget, Emit, EndEvent, Event, Result, TokenEvent, Work
from engine.sequence import EndRules, Sequence
from prefill.pace import ChunkPace
from worker.phases import KvSink

MAX_PASSED = 64
"""Waiting prompts that are looked at for short ones in each step."""


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    seq: Sequence
    sink: KvSink | None
    is_recompute: bool = False


class PrefillPhase:
    """First come, first served, in chunks; but short prompts that came later may have all of a step, and half of the
    next one, so that they wait one step behind long ones. The long ones take at most four times as long for it.

    A step takes about `max_prefill_step_s` at the speed measured last, and `max_chunk_tokens` at most. All methods on
    the engine thread. `adopt` takes over local sequences with their first token drawn and emitted.
    """

    name = "prefill"

    def __init__(
        self,
        pool: BlockPool,
        config: EngineConfig,
        ends: EndRules,
        emit: Emit,
        adopt: Callable[[Sequence], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool = pool
        self._config = config
        self._ends = ends
        self._emit = emit
        self._adopt = adopt
        self._clock = clock
        self._pace = ChunkPace(config.max_prefill_step_s)
        self._is_owed = False  # to long prompts: half a step at least
        self._pure_since_s: float | None = None  # the running step began then, and nothing else is in it
        self.waiting: OrderedDict[str, _Job] = OrderedDict()
        self.running: dict[str, _Job] = {}
        self.in_handoff: dict[str, _Job] = {}

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    @property
    def num_running(self) -> int:
        return len(self.running)

    # --- commands ---------------------------------------------------------------------------------------------------

    def add(self, seq: Sequence, sink: KvSink | None, hold: Hold | None) -> None:
        """Compute `seq`'s known tokens and draw the next: into `hold` (local), or into blocks of its own for `sink`.

        Too many waiting, or a prompt longer than the whole pool: ended at once with OverloadedError.
        A `hold` that is released already means that the cancellation overtook the command: ignored.
        """
        job = _Job(seq, sink)
        if hold is not None:
            if not hold.is_released:
                self._begin(job, hold)
        elif not self._pool.can_ever_hold(seq.num_tokens):
            self._refuse(job, f"{seq.num_tokens} tokens do not fit {self._pool.num_blocks} blocks")
        elif len(self.waiting) >= self._config.max_waiting:
            self._refuse(job, f"{len(self.waiting)} prompts are waiting already")
        else:
            self.waiting[seq.request_id] = job

    def recompute(self, seq: Sequence) -> None:
        """Compute a preempted sequence again, before all others; it holds no blocks. It is never refused."""
        self.waiting[seq.request_id] = _Job(seq, None, is_recompute=True)
        self.waiting.move_to_end(seq.request_id, last=False)

    def cancel(self, request_id: str) -> Hold | None:
        """Forget the request, in any state; unknown ids are ignored. No event is emitted for it any more.

        With a sink, the caller aborts the transfer next; the returned hold is what the transfer may still read, and
        is released by `handed_off`. Without one, blocks are free on return.
        """
        job = self.waiting.pop(request_id, None) or self.running.pop(request_id, None)
        job = job or self.in_handoff.get(request_id)
        if job is None:
            return None
        job.seq.is_ended = True
        if job.sink is not None and job.seq.hold is not None:
            return self._leave(job)
        self._release(job)
        return None

    def handed_off(self, request_id: str, error: BatonError | None) -> None:
        """The transfer is over and reads no block any more: release them (what is published stays as cache).

        The end of the request is the worker's to tell, except where this phase has told it before. With `error`
        the request may still be computing: that stops here.
        """
        job = self.in_handoff.pop(request_id, None) or self.running.pop(request_id, None)
        job = job or self.waiting.pop(request_id, None)
        if job is not None:
            job.seq.is_ended = True
            self._release(job)

    # --- engine.loop.Phase ------------------------------------------------------------------------------------------

    def has_work(self) -> bool:
        return bool(self.waiting or self.running or self.in_handoff)

    def propose(self, budget: Budget) -> list[Work]:
        """Short prompts, then chunks in order of arrival, until the step's share is used up; fewer beside decodes."""
        left = share = min(self._share(budget), budget.num_tokens)
        works: list[Work] = []
        num_short = self._propose_short(share // 2 if self._is_owed else share, works)
        self._is_owed = num_short > share // 2
        left -= num_short
        taken = {work.seq.request_id for work in works}
        for job in self.running.values():
            if left == 0:
                break
            if job.seq.request_id not in taken:
                left -= self._propose(job, left, works)
        while left > 0 and self.waiting:
            job = next(iter(self.waiting.values()))
            if not self._try_start(job):
                break  # nobody takes the blocks that it waits for: a long prompt would starve behind short ones
            left -= self._propose(job, left, works)
        budget.num_tokens -= share - left
        self._pure_since_s = None if budget.num_decodes else self._clock()
        return works

    def take(self, results: list[Result]) -> list[Event]:
        if self._pure_since_s is not None:
            num_tokens = sum(result.work.num_tokens for result in results)
            self._pace.learn(num_tokens, self._clock() - self._pure_since_s)
        return [event for result in results for event in self._advance(result)]

    def fail(self, works: list[Work], error: BatonError) -> list[Event]:
        events: list[Event] = []
        for work in works:
            job = self.running.pop(work.seq.request_id)
            job.seq.is_ended = True
            end = EndEvent(work.seq.request_id, error=error)
            if job.sink is None:
                self._release(job)
                events.append(end)
            else:
                self._leave(job)
                self._emit([end])
                job.sink.abort()
        return events

    # --- helpers ----------------------------------------------------------------------------------------------------

    def _share(self, budget: Budget) -> int:
        """Prompt tokens of this step. Beside decodes: what fits before their next tokens are due, if that is known."""
        share = min(self._config.max_chunk_tokens, self._pace.num_tokens)
        if not budget.num_decodes or not (self.running or self.waiting):
            return share
        if budget.chunk_limit is not None:
            first = next(iter(self.running.values()), None)
            fits = budget.chunk_limit(budget.decodes, first.seq.num_computed if first else 0, share)
            if fits is not None:
                return fits
        return min(share, self._config.chunk_with_decodes)

    def _propose_short(self, limit: int, works: list[Work]) -> int:
        """Whole prompts of `limit` tokens together, in order of arrival, and those of them alone that take no block
        which a prompt that they pass will need. Returns the tokens proposed."""
        left, num_promised = limit, 0
        for job in self.running.values():
            if job.seq.num_uncomputed <= left:
                left -= self._propose(job, left, works)
        for job in list(islice(self.waiting.values(), MAX_PASSED)):
            if left == 0:
                break
            need = num_blocks_for(job.seq.num_tokens + 1, self._pool.block_size)
            is_short = job.seq.num_tokens <= left
            if is_short and num_promised + need <= self._pool.num_available and self._try_start(job):
                left -= self._propose(job, left, works)
            else:
                num_promised += need
        return limit - left

    def _propose(self, job: _Job, left: int, works: list[Work]) -> int:
        num_tokens = min(job.seq.num_uncomputed, left)
        works.append(Work(job.seq, num_tokens, wants_token=num_tokens == job.seq.num_uncomputed))
        return num_tokens

    def _try_start(self, job: _Job) -> bool:
        seq = job.seq
        num_tokens = seq.num_tokens
        if job.sink is None and self._pool.can_ever_hold(num_tokens + 1):
            num_tokens += 1  # room for the token drawn here, or decode might preempt it again at once
        hold = self._pool.acquire(
            seq.request_id, seq.token_ids, num_tokens, HoldState.RUNNING, seq.request.cache_key
        )
        if hold is None:
            return False
        del self.waiting[seq.request_id]
        self._begin(job, hold)
        return True

    def _begin(self, job: _Job, hold: Hold) -> None:
        seq = job.seq
        seq.hold = hold
        seq.num_computed = hold.num_cached_tokens
        if not job.is_recompute:
            seq.num_cached_tokens = min(hold.num_cached_tokens, seq.num_prompt)
        self._pool.move(hold, HoldState.RUNNING)
        self.running[seq.request_id] = job
        if job.sink is not None:
            job.sink.ready(seq.num_computed, seq.block_ids)

    def _advance(self, result: Result) -> list[Event]:
        seq = result.work.seq
        job = self.running[seq.request_id]
        assert seq.hold is not None
        self._pool.publish(seq.hold, seq.token_ids, seq.num_computed)
        if job.sink is not None:
            job.sink.ready(seq.num_computed, seq.block_ids)
        if result.token is None:
            return []
        del self.running[seq.request_id]
        seq.append(result.token.token_id)
        return self._complete(job, result.token)

    def _complete(self, job: _Job, token: Token) -> list[Event]:
        """All is computed and `token` drawn: the end, the handoff, or on to decode."""
        seq = job.seq
        end = self._ends.end(seq)
        events: list[Event] = [TokenEvent(seq.request_id, seq.told(token))]
        if end is not None:
            seq.is_ended = True
            events.append(EndEvent.of(seq.request_id, end))
        if job.sink is not None:
            self._leave(job)
            self._emit(events)
            if end is None:
                job.sink.finish(HandoffState(token, seq.num_cached_tokens))
            else:
                job.sink.abort()
            return []
        if end is not None:
            self._release(job)
        else:
            self._adopt(seq)
        return events

    def _leave(self, job: _Job) -> Hold:
        """From here on only the transfer needs the blocks."""
        assert job.seq.hold is not None
        self._pool.move(job.seq.hold, HoldState.IN_HANDOFF)
        self.in_handoff[job.seq.request_id] = job
        return job.seq.hold

    def _refuse(self, job: _Job, reason: str) -> None:
        error = OverloadedError(reason, retry_after_s=1.0)
        job.seq.is_ended = True
        self._emit([EndEvent(job.seq.request_id, error=error)])
        if job.sink is not None:
            job.sink.abort()

    def _release(self, job: _Job) -> None:
        if job.seq.hold is not None:
            self._pool.release(job.seq.hold)
