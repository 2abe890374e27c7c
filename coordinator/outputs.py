"""Running a job's outputs: tokens from the backend become text, merged until a reader takes it.

    one task per output:  backend ─► Token ─► Detokenizer ─► StopMatcher ─► Piece, appended to what waits
    one reader:           take() ─► everything that waits, by output

A slow reader finds larger pieces, never fewer: what waits for it is one growing Piece per output, bounded by
max_tokens. Leaving the `async with` closes every backend stream, whatever the reason for leaving.

An output ends with a Piece that has an `end`; an error ends the whole job, since half an answer is none.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from contracts.errors import BatonError, DeadlineError, Fault, GrammarError
from contracts.request import Finished, GenerateRequest, PromptLogprob, Timings, Token
from coordinator.alarm import Alarm
from coordinator.backend import Backend
from coordinator.errors_http import as_baton_error
from coordinator.job import Job, OutputPlan
from coordinator.metrics import Metrics
from coordinator.reading import MessageReader, ThoughtCount
from engine.text.detokenizer import Detokenizer
from engine.text.stops import StopMatcher
from engine.text.tokenizer import TextModel

# The backend keeps the deadline; this much later the edge stops believing that it will.
_DEADLINE_GRACE_S = 5.0


@dataclass(frozen=True, slots=True)
class End:
    """How an output ended. `stop_reason`: the stop string or stop token id, None for EOS and length.

    `num_cached_tokens`, `timings` None: unknown, because a stop string ended the output before that was told.
    `num_thought_tokens`: those of the reasoning.
    """

    reason: str
    num_tokens: int
    stop_reason: str | int | None = None
    num_cached_tokens: int | None = 0
    timings: Timings | None = None
    num_thought_tokens: int = 0


@dataclass(slots=True)
class Piece:
    """A stretch of one output: its text, the tokens drawn in it, tokens drawn so far, and maybe the end.

    `prompt`: what the model thought of the prompt, in the first piece, if asked for.

    With stop strings the text may lag behind the tokens; none of either is ever lost.
    """

    texts: list[str] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)
    num_tokens: int = 0
    end: End | None = None
    prompt: tuple[PromptLogprob, ...] = ()

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def append(self, other: Piece) -> None:
        self.texts += other.texts
        self.tokens += other.tokens
        self.num_tokens = other.num_tokens
        self.end = other.end
        self.prompt += other.prompt


class OutputText:
    """Tokens of one output to text; knows when a stop string has ended it. Pure: no I/O, no clock."""

    def __init__(self, plan: OutputPlan, request: GenerateRequest, job: Job, text: TextModel) -> None:
        params, sampling = job.params, request.sampling
        self._stop_ids = frozenset(sampling.stop_token_ids)
        # A token that ends the output is counted and listed but is not text.
        silent_ids = frozenset() if params.include_stop_str_in_output else self._stop_ids
        if sampling.grammar or not sampling.ignore_eos:  # with a grammar EOS always ends
            silent_ids |= text.eos_ids
        self._detokenizer = Detokenizer(
            text, request.prompt_ids, params.skip_special_tokens, job.reading.shown_ids, silent_ids
        )
        self._thoughts = ThoughtCount(job.reading)
        self._is_prompt_only = plan.is_prompt_only
        self._stops = StopMatcher(job.stops, params.include_stop_str_in_output)
        # A second reader of the same text, only to know where a call is.
        self._calls = MessageReader(job.reading) if job.stops and job.reading.make_reader else None
        self._min_tokens = sampling.min_tokens
        self._echo = plan.prompt.echo_text
        self.num_tokens = 0

    def push(self, token: Token) -> Piece:
        """The piece for one token; its `end` is set if a stop string is complete, or nothing was to be generated."""
        if self._is_prompt_only:
            return Piece([self._echoed("")], end=End("length", 0), prompt=token.prompt)
        self.num_tokens += 1
        fresh = self._detokenizer.push(token.token_id)
        self._thoughts.push(fresh)
        shown = self._show(fresh, can_stop=self.num_tokens > self._min_tokens)
        stop = self._stops.matched
        end = None if stop is None else self._end("stop", stop, None)
        return Piece([self._echoed(shown)], [token], self.num_tokens, end, token.prompt)

    def finish(self, finished: Finished) -> Piece:
        """The last piece, when the engine ended the output. What was held back comes out."""
        tail = self._show(self._detokenizer.flush(), can_stop=self.num_tokens >= self._min_tokens)
        stop = self._stops.matched
        if stop is None:
            tail += self._stops.flush()
            stop_id = finished.stop_token_id if finished.stop_token_id in self._stop_ids else None
            end = self._end(finished.reason, stop_id, finished.num_cached_tokens, finished.timings)
        else:  # completed by the replacement of a broken character at the very end
            end = self._end("stop", stop, finished.num_cached_tokens, finished.timings)
        return Piece([self._echoed(tail)], [], self.num_tokens, end)

    def _show(self, fresh: str, can_stop: bool) -> str:
        """What may be shown of the text so far. No stop string is looked for in tokens that belong to a call."""
        if self._calls is not None:
            was_calling = self._calls.is_calling
            self._calls.push(fresh)
            can_stop = can_stop and not (was_calling or self._calls.is_calling)
        return self._stops.push(fresh, can_stop)

    def _end(
        self, reason: str, stop: str | int | None, num_cached: int | None, timings: Timings | None = None
    ) -> End:
        return End(reason, self.num_tokens, stop, num_cached, timings, self._thoughts.num_tokens)

    def _echoed(self, shown: str) -> str:
        echo, self._echo = self._echo, ""
        return echo + shown


class PlainText(OutputText):
    """Of an output whose text alone is wanted, all of it, as it comes: most are."""

    @staticmethod
    def suits(plan: OutputPlan, request: GenerateRequest, job: Job) -> bool:
        """No echo, no stop strings, no reasoning to count, no logprobs."""
        sampling, prompt = request.sampling, plan.prompt
        is_listed = sampling.num_logprobs is not None or sampling.num_prompt_logprobs is not None
        return not (prompt.echo_text or job.stops or job.reading.thinks or is_listed)

    def push(self, token: Token) -> Piece:
        self.num_tokens += 1
        return Piece([self._detokenizer.push(token.token_id)], [], self.num_tokens)


class Outputs:
    """All outputs of one job, as an async context; see the module docstring."""

    def __init__(
        self, job: Job, text: TextModel, backend: Backend, metrics: Metrics, timeout_s: float
    ) -> None:
        self._job = job
        self._text = text
        self._backend = backend
        self._metrics = metrics
        self._timeout_s = timeout_s
        self._tasks: set[asyncio.Task[None]] = set()
        self._waiting: dict[OutputPlan, Piece] = {}
        self._num_open = len(job.plans)
        self._error: BaseException | None = None
        self._reader: asyncio.Future[None] | None = None  # while it waits
        self._alarm = Alarm(self._wake)

    async def __aenter__(self) -> Self:
        for plan in self._job.plans:
            self._tasks.add(asyncio.create_task(self._run(plan), name=f"output-{self._job.completion_id}"))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._alarm.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def take(self, timeout_s: float | None) -> dict[OutputPlan, Piece] | None:
        """What came since the last call; {} if nothing did within `timeout_s`; None when all outputs have
        ended.

        Raises BatonError if the job failed, after the text that came before the failure was taken.
        """
        if not self._waiting and self._error is None and self._num_open:
            if timeout_s is not None:  # and nobody turns it off: without a reader it wakes nobody
                self._alarm.set(time.monotonic() + timeout_s)
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        waiting, self._waiting = self._waiting, {}
        if waiting:
            return waiting
        if self._error is not None:
            raise as_baton_error(self._error)
        return None if not self._num_open else {}

    def raise_if_failed(self) -> None:
        """For a reader that has shown nothing yet, and so prefers the failure to what came before it."""
        if self._error is not None:
            raise as_baton_error(self._error)

    def fail(self, error: BatonError) -> None:
        """End the job with `error`, as if the backend had raised it. Ignored once all outputs have ended."""
        if self._num_open:
            self._fail(error)

    def _put(self, plan: OutputPlan, piece: Piece) -> None:
        waiting = self._waiting.setdefault(plan, piece)
        if waiting is not piece:
            waiting.append(piece)
        if piece.end is not None:
            self._num_open -= 1
        self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def _run(self, plan: OutputPlan) -> None:
        if plan.request is None:
            self._put(plan, Piece([plan.prompt.echo_text], end=End("length", 0)))
            return
        kind = PlainText if PlainText.suits(plan, plan.request, self._job) else OutputText
        outcome, output = "error", kind(plan, plan.request, self._job, self._text)
        try:
            async with asyncio.timeout(self._timeout_s + _DEADLINE_GRACE_S):
                last = await self._generate(plan, plan.request, output)
            assert last.end is not None
            outcome = last.end.reason
            self._put(plan, last)
        except asyncio.CancelledError:
            outcome = "cancelled"
            raise
        except GrammarError as error:  # of a worker, which knows no fields
            error.param = self._job.grammar_param
            self._fail(error)
        except TimeoutError:
            self._fail(DeadlineError(f"the request was not done after {self._timeout_s:g} s"))
        except Exception as error:  # the task's outer edge: the job ends with it
            self._fail(error)
        finally:
            outcome = outcome if outcome in ("stop", "length", "cancelled") else "error"
            e2e_s = time.monotonic() - self._job.started
            self._metrics.ended(self._job.endpoint, outcome, e2e_s, output.num_tokens)

    async def _generate(self, plan: OutputPlan, request: GenerateRequest, output: OutputText) -> Piece:
        """Puts pieces as tokens come, and returns the last one when the backend is done or told to stop.

        Not before: the client must not see the end while the engine still works for this output.
        """
        last: Piece | None = None
        previous_s: float | None = None
        saw_gap = self._metrics.next_tokens(self._job.endpoint)

        def take(token: Token) -> bool:
            nonlocal last, previous_s
            now_s = time.monotonic()
            if previous_s is None:
                self._metrics.first_token(self._job.endpoint, now_s - self._job.started)
            else:
                saw_gap(now_s - previous_s)
            previous_s = now_s
            piece = output.push(token)
            if piece.end is not None:
                last = piece
                return False
            self._put(plan, piece)
            return True

        finished = await self._backend.generate(request, take, self._timeout_s)
        if last is not None:
            return last
        if finished is None:
            raise Fault(f"expected an end of {request.request_id} but there was none")
        self._metrics.cached(finished.num_cached_tokens)
        return output.finish(finished)

    def _fail(self, error: BaseException) -> None:
        if self._error is None:
            self._error = error
        current = asyncio.current_task()
        for task in self._tasks:
            if task is not current:
                task.cancel()
        self._wake()
