"""A backend that answers from a script: exact, instant, and every wait in it is an event that the test
holds.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Sequence

from contracts.blocks import BlockAudit, BlockOwner
from contracts.errors import ContextLengthError, DeadlineError
from contracts.messages import PeerEvent, PeerStatus, Status
from contracts.request import Finished, GenerateRequest, Token, TokenSink
from contracts.service import Service
from contracts.steps import LinkReport
from coordinator.backend import Capacity, PoolReadiness, Readiness, WorkerAudit, WorkerStatus
from coordinator.placement import Placement
from coordinator.planning import PlanRecord
from coordinator.records import Record
from policy.chunks import Cadence
from policy.place import Option
from policy.planner import Flip, Mix, Plan, Prompts

Step = int | Token | Finished | BaseException | asyncio.Event
Script = Callable[[GenerateRequest], Sequence[Step]]

EOS = 257  # of tests.engine.text.builders.make_text


def reply(text: str | bytes, *more: Step) -> Script:
    """The bytes of `text`, one token each, then EOS."""
    data = text.encode() if isinstance(text, str) else text
    return lambda request: [*data, *more, EOS]


class FakeBackend:
    """Draws a script's tokens within the request's limits.

    `ended` has each request that was started, once it is over.
    """

    def __init__(
        self, script: Script | None = None, max_total_tokens: int = 4096, num_cached: int = 0
    ) -> None:
        self.script = script or reply("Hello!")
        self.limit = max_total_tokens
        self.num_cached = num_cached
        self.requests: list[GenerateRequest] = []
        self.services: list[Service | None] = []
        self.running: set[str] = set()
        self.ended: list[str] = []
        self.started = asyncio.Event()
        self.idle = asyncio.Event()
        self.is_ready = True

    async def generate(
        self,
        request: GenerateRequest,
        sink: TokenSink,
        deadline_s: float | None,
        service: Service | None = None,
    ) -> Finished | None:
        assert request.request_id not in self.running, "ids must be unique"
        self.requests.append(request)
        self.services.append(service)
        self.running.add(request.request_id)
        self.idle.clear()
        self.started.set()
        try:
            if request.max_total_tokens > self.limit:
                raise ContextLengthError(f"expected {self.limit} tokens but got {request.max_total_tokens}")
            async for item in self._play(request, deadline_s):
                if isinstance(item, Finished):
                    return item
                if not sink(item):
                    break
            return None
        finally:
            self.running.remove(request.request_id)
            self.ended.append(request.request_id)
            if not self.running:
                self.idle.set()

    async def _play(
        self, request: GenerateRequest, deadline_s: float | None
    ) -> AsyncGenerator[Token | Finished, None]:
        sampling, index = request.sampling, len(request.output_ids)
        if deadline_s is not None and deadline_s <= 0:
            raise DeadlineError("no time")
        for step in self.script(request):
            if isinstance(step, asyncio.Event):
                try:
                    async with asyncio.timeout(deadline_s):
                        await step.wait()
                except TimeoutError as error:
                    raise DeadlineError("late") from error
                continue
            if isinstance(step, BaseException):
                raise step
            if isinstance(step, Finished):
                yield step
                return
            token = step if isinstance(step, Token) else self._token(index, step, request)
            index += 1
            yield token
            is_eos = token.token_id == EOS and not sampling.ignore_eos
            if (is_eos or token.token_id in sampling.stop_token_ids) and index > sampling.min_tokens:
                yield Finished("stop", self.num_cached, token.token_id)
                return
            if index == sampling.max_tokens:
                yield Finished("length", self.num_cached)
                return
        yield Finished("length", self.num_cached)

    @staticmethod
    def _token(index: int, token_id: int, request: GenerateRequest) -> Token:
        count = request.sampling.num_logprobs
        if count is None:
            return Token(index, token_id)
        top = [(token_id, -0.5), (65, -1.0), (66, float("-inf"))][:count]
        return Token(index, token_id, -0.5, tuple(top))

    def readiness(self) -> Readiness:
        audit = BlockAudit(total=8, free=6, cached=1, running=1, reserved=0, in_handoff=0, quarantined=0)
        events = (PeerEvent(2.0, "ready over tcp, 1.5 GB/s"),)
        peers = (
            PeerStatus("decode-0", True, "tcp", 1.5, events=events, link=LinkReport(0.002, 1.2e9, 0.1, 7)),
        )
        labelled = {
            "baton_worker_kv_slots": {"free": 3.0, "quarantined": 1.0},
            "baton_worker_handoffs_ended_total": {"out,ok": 4.0, "malformed": 1.0},
            "unknown_of_a_newer_worker": {"x": 1.0},
        }
        counters = {"baton_worker_steps_total": 7.0, "unknown_of_a_newer_worker": 1.0}
        status = Status("prefill-0", 1, True, 0.1, 1, 2, audit, peers, counters, labelled=labelled)
        pools = (PoolReadiness("prefill", 1, 1), PoolReadiness("decode", 1, int(self.is_ready)))
        reason = "" if self.is_ready else "no decode worker"
        return Readiness(self.is_ready, reason, pools, (WorkerStatus("prefill", status, "mixed"),))

    def capacity(self) -> Capacity:
        return Capacity(self.limit)

    async def audit(self) -> list[WorkerAudit]:
        audit = BlockAudit(total=8, free=6, cached=1, running=1, reserved=0, in_handoff=0, quarantined=0)
        owners = (BlockOwner("r", "running", 1, 0.5),)
        return [WorkerAudit("prefill-0", "prefill", 42, 3, audit, owners)]

    def decisions(self) -> list[Record]:
        option = Option("remote", "prefill-0", "decode-0", 0.25, 0.02, math.inf)
        placement = Placement("decode-0", "prefill-0")
        return [Record("r.1", 0.0, 7, 0.5, "predicted", "placed", placement, (option,), ttft_s=0.6)]

    def plans(self) -> list[PlanRecord]:
        mix = Mix(2.0, 100.0, 80.0, 30.0, Cadence(0.05), Prompts(250.0, 220.0))
        plan = Plan(
            (Flip("decode-0", "prefill", 7),), 1, 2, 5, {1: 1.5, 2: 3.0}, "gain", "2 readers carry +100.0%"
        )
        return [PlanRecord(0.0, "gain", plan, mix), PlanRecord(0.0, "no worker is ready", num_times=3)]
