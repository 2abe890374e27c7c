"""Builders that several test packages use: requests, a model that cannot be fooled, a worker in one thread.

`FakeRunner` keeps what each KV slot was last given and answers with a function of what it reads back through the
block table. A wrong table, a block in two hands or a lost chunk therefore shows as a wrong token, and `oracle` says
which tokens are right without any paging.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from itertools import count

import torch

from contracts.config import EngineConfig
from contracts.errors import BatonError
from contracts.messages import HandoffState
from contracts.request import Finished, GenerateRequest, SamplingParams, Token
from decode.phase import DecodePhase
from engine.blocks import BlockPool, HoldState
from engine.loop import EndEvent, Event, StepLoop, TokenEvent
from engine.runner import StepItem
from engine.sampler import Sampler, SamplingRow
from engine.sequence import EndRules, Sequence
from prefill.phase import PrefillPhase

NUM_VOCAB = 24
EOS_ID = 0
_MAX_STEPS = 5000

_request_numbers = count()


def make_request(
    num_tokens: int = 10,
    prompt_ids: SequenceOf[int] | None = None,
    request_id: str = "",
    output_ids: tuple[int, ...] = (),
    salt: str = "",
    sampling: SamplingParams | None = None,
) -> GenerateRequest:
    """A request with `num_tokens` prompt tokens (the same ones for the same number) unless `prompt_ids` are given."""
    if prompt_ids is None:
        prompt_ids = [(7 * i + num_tokens) % NUM_VOCAB for i in range(num_tokens)]
    sampling = sampling or SamplingParams(max_tokens=8, temperature=0.0)
    request_id = request_id or f"r{next(_request_numbers)}"
    return GenerateRequest(request_id, tuple(prompt_ids), sampling, output_ids, salt)


def next_logits(token_ids: SequenceOf[int | None]) -> list[float]:
    """The fake model: any function of all tokens, and only of them."""
    rng = random.Random(zlib.crc32(repr(list(token_ids)).encode()))
    return [rng.uniform(-4.0, 4.0) for _ in range(NUM_VOCAB)]


def oracle(request: GenerateRequest, eos_ids: tuple[int, ...] = (EOS_ID,)) -> tuple[list[int], str]:
    """All output tokens of `request` (those it brought included) and the finish reason, from one plain loop."""
    sampler, params, outputs = Sampler(eos_ids), request.sampling, list(request.output_ids)
    while True:
        counts = {token_id: outputs.count(token_id) for token_id in outputs}
        row = SamplingRow(params, len(outputs), counts, frozenset(request.prompt_ids))
        logits = torch.tensor([next_logits([*request.prompt_ids, *outputs])])
        outputs.append(sampler.sample(logits, [row])[0].token_id)
        stops = params.stop_token_ids if params.ignore_eos else (*eos_ids, *params.stop_token_ids)
        if outputs[-1] in stops and len(outputs) > params.min_tokens:
            return outputs, "stop"
        if len(outputs) >= params.max_tokens:
            return outputs, "length"


class FakeRunner:
    """An Executor over a KV store of token ids. `error` is raised by the next step that computes `broken_token`."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._slots: dict[tuple[int, int], tuple[int, int]] = {}  # (block, slot) -> (position, token)
        self.batches: list[list[StepItem]] = []
        self.error: Exception | None = None
        self.broken_token: int | None = None

    def fill(self, block_ids: SequenceOf[int], token_ids: SequenceOf[int], start: int = 0) -> None:
        """Write KV of tokens [start, len(token_ids)): what a step, or a handoff, does."""
        for position in range(start, len(token_ids)):
            place = (block_ids[position // self._block_size], position % self._block_size)
            self._slots[place] = (position, token_ids[position])

    def read(self, block_ids: SequenceOf[int], num_tokens: int) -> list[int | None]:
        """The tokens that attention would see; None where the slot belongs to another position."""
        seen: list[int | None] = []
        for position in range(num_tokens):
            place = (block_ids[position // self._block_size], position % self._block_size)
            written, token_id = self._slots.get(place, (-1, -1))
            seen.append(token_id if written == position else None)
        return seen

    def execute(self, items: list[StepItem]) -> torch.Tensor:
        self.batches.append(list(items))
        for item in items:
            padding = [0] * item.start
            self.fill(item.block_ids, [*padding, *item.token_ids], item.start)
        if self.error is not None and any(self.broken_token in item.token_ids for item in items):
            error, self.error = self.error, None
            raise error
        rows = [
            next_logits(self.read(item.block_ids, item.start + end))
            for item in items
            for end in range(len(item.token_ids) - item.num_logits + 1, len(item.token_ids) + 1)
        ]
        return torch.tensor(rows, dtype=torch.float32).reshape(len(rows), NUM_VOCAB)


class FakeSink:
    """A KvSink that writes down what it is told."""

    def __init__(self) -> None:
        self.readies: list[int] = []
        self.state: HandoffState | None = None
        self.num_aborts = 0

    def ready(self, num_tokens: int, block_ids: SequenceOf[int]) -> None:
        self.readies.append(num_tokens)

    def finish(self, state: HandoffState) -> None:
        assert self.state is None
        self.state = state

    def abort(self) -> None:
        self.num_aborts += 1


class TinyWorker:
    """Pool, both phases and the loop of one worker, driven by `run` in the calling thread."""

    def __init__(
        self,
        num_blocks: int = 32,
        block_size: int = 4,
        config: EngineConfig | None = None,
        max_model_len: int | None = None,
    ) -> None:
        config = config or EngineConfig()
        ends = EndRules((EOS_ID,), max_model_len)
        self.events: list[Event] = []
        self.emits: list[list[Event]] = []
        self.pool = BlockPool(num_blocks, block_size)
        self.runner = FakeRunner(block_size)
        self.decode = DecodePhase(
            self.pool, config, ends, self._emit, recompute=lambda seq: self.prefill.recompute(seq)
        )
        # A clock that stands: chunks must not depend on how fast the machine happens to be.
        self.prefill = PrefillPhase(
            self.pool, config, ends, self._emit, adopt=self.decode.adopt, clock=lambda: 0.0
        )
        self.loop = StepLoop(self.runner, Sampler((EOS_ID,)), (self.decode, self.prefill), self._emit)
        self._arrivals = count()

    def _emit(self, events: list[Event]) -> None:
        self.emits.append(list(events))
        self.events += events

    def sequence(self, request: GenerateRequest) -> Sequence:
        return Sequence(request, arrival_s=float(next(self._arrivals)))

    def start_local(self, request: GenerateRequest) -> Sequence | None:
        """Reserve and prefill on this worker; None if there was no room."""
        hold = self.decode.reserve(request, HoldState.RESERVED)
        if hold is None:
            return None
        seq = self.sequence(request)
        self.loop.submit(lambda: self.prefill.add(seq, None, hold))
        return seq

    def start_remote(self, request: GenerateRequest, sink: FakeSink) -> Sequence:
        """Prefill on this worker for a handoff."""
        seq = self.sequence(request)
        self.loop.submit(lambda: self.prefill.add(seq, sink, None))
        return seq

    def receive(self, request: GenerateRequest, state: Token | HandoffState) -> Sequence | None:
        """What a finished handoff does on the decode side; None if there was no room."""
        if isinstance(state, Token):
            state = HandoffState(state)
        request = replace(request, output_ids=(*request.output_ids, *state.output_ids))
        hold = self.decode.reserve(request, HoldState.RESERVED)
        if hold is None:
            return None
        seq = self.sequence(request)
        seq.hold = hold
        self.runner.fill(hold.block_ids, seq.token_ids, hold.num_cached_tokens)
        seq.take_over(state.first_token, state.num_cached_tokens)
        self.loop.submit(lambda: self.decode.adopt(seq))
        return seq

    def cancel(self, request_id: str) -> None:
        def command() -> None:
            self.prefill.cancel(request_id)
            self.decode.cancel(request_id)

        self.loop.submit(command)

    def step(self) -> bool:
        """One step; the pool is recounted after it (invariant 3)."""
        has_computed = self.loop.step()
        self.pool.check()
        return has_computed

    def run(self) -> None:
        """Step until nothing is left to compute."""
        for _ in range(_MAX_STEPS):
            if not self.step():
                return
        raise AssertionError(f"expected the worker to come to rest within {_MAX_STEPS} steps")

    def outputs(self, request_id: str) -> list[int]:
        """Emitted token ids; their indices must be consecutive."""
        tokens = [e.token for e in self.events if isinstance(e, TokenEvent) and e.request_id == request_id]
        first = tokens[0].index if tokens else 0
        assert [token.index for token in tokens] == list(range(first, first + len(tokens)))
        return [token.token_id for token in tokens]

    def ends(self, request_id: str) -> list[EndEvent]:
        return [e for e in self.events if isinstance(e, EndEvent) and e.request_id == request_id]

    def finished(self, request_id: str) -> Finished:
        """The good end, which must be the only one and the last event."""
        mine = [event for event in self.events if event.request_id == request_id]
        (end,) = self.ends(request_id)
        assert mine[-1] is end
        assert end.error is None
        assert end.finished is not None
        return end.finished

    def error(self, request_id: str) -> BatonError:
        """The bad end, which must be the only one."""
        (end,) = self.ends(request_id)
        assert end.finished is None
        assert end.error is not None
        return end.error

    def assert_at_rest(self) -> None:
        """Nothing is here and every block is free or cached."""
        assert not self.loop.has_work
        audit = self.pool.audit()
        assert audit.num_available == audit.total, audit
