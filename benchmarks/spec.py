"""What a load run is: one frozen value that a command line, a sweep or a test makes, and its sessions."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, Self

from benchmarks import arrivals
from benchmarks.client import Endpoint, Target
from benchmarks.metrics import Slo
from benchmarks.prompts import PromptBuilder
from benchmarks.runner import Session, Turn
from benchmarks.traces import TraceRequest, find_trace, read_trace, scaled

Arrival = Literal["poisson", "gamma", "constant", "trace", "closed"]

_NUM_PARALLEL_COUNTS = 8


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens: uniform from `low` to `high`, both included."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """`512` or `64:512`. Raises ValueError for anything else."""
        low, _, high = text.partition(":")
        lengths = cls(int(low), int(high or low))
        if not 1 <= lengths.low <= lengths.high:
            raise ValueError(f"expected N or LOW:HIGH with 1 <= LOW <= HIGH but got {text!r}")
        return lengths

    def draw(self, rng: random.Random) -> int:
        return rng.randint(self.low, self.high)

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}:{self.high}"


@dataclass(frozen=True, slots=True)
class TraceSpec:
    """`name`: a file, or an excerpt in benchmarks/data. Rate is scaled by time, lengths by a factor, both stated."""

    name: str
    time_scale: float = 1.0
    length_scale: float = 1.0
    max_tokens: int | None = None
    jitter_s: float = 0.0


@dataclass(frozen=True, slots=True)
class PrefixSpec:
    """Every prompt begins with one of `num_prefixes` texts of `num_tokens` tokens."""

    num_tokens: int
    num_prefixes: int = 1


@dataclass(frozen=True, slots=True)
class TurnSpec:
    """Conversations: each later turn adds new words as many as its prompt has tokens; arrivals are of conversations."""

    num_turns: int = 1
    think_time_s: float = 0.0


@dataclass(frozen=True, slots=True)
class LoadSpec:
    """One run. `rate` in sessions/s for open arrivals, `concurrency` for closed ones; `burstiness` is gamma's shape.

    `ramp_s`, `drain_s`: arrivals at both ends that are sent but not counted. `num_warmups`: requests sent before the
    run's clock starts and not recorded. With a trace, its lengths and prefixes are used whatever the arrival, and
    `num_requests` bounds it.
    """

    url: str
    model: str = ""
    endpoint: Endpoint = "chat"
    api_key: str | None = field(default=None, repr=False)
    is_plain: bool = False
    tokenizer: Path | None = None
    arrival: Arrival = "poisson"
    rate: float = 1.0
    burstiness: float = 1.0
    concurrency: int = 1
    num_requests: int = 100
    input_tokens: Lengths = field(default_factory=lambda: Lengths(256, 256))
    output_tokens: Lengths = field(default_factory=lambda: Lengths(64, 64))
    trace: TraceSpec | None = None
    prefix: PrefixSpec | None = None
    turns: TurnSpec = field(default_factory=TurnSpec)
    seed: int = 0
    slo: Slo | None = None
    num_warmups: int = 0
    ramp_s: float = 0.0
    drain_s: float = 0.0
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        """Raises ValueError for parts that contradict each other."""
        if self.arrival == "trace" and self.trace is None:
            raise ValueError("arrival=trace: expected a trace beside it")
        if self.turns.num_turns > 1 and self.endpoint != "chat":
            raise ValueError("turns: expected endpoint=chat but got completions")
        if self.turns.num_turns < 1 or self.num_requests < 1 or self.concurrency < 1:
            raise ValueError("turns, num_requests, concurrency: expected at least 1")
        if self.trace is not None and self.prefix is not None:
            raise ValueError("prefix: expected no trace beside it, since a trace has its own prefixes")

    @property
    def target(self) -> Target:
        return Target(self.url, self.model, self.endpoint, self.api_key, self.timeout_s, self.is_plain)

    def row(self) -> dict[str, str | int | float | None]:
        """What tells this run's row from others'."""
        is_closed = self.arrival == "closed"
        return {
            "url": self.url,
            "model": self.model,
            "endpoint": self.endpoint,
            "arrival": self.arrival,
            "rate": self.rate if self.arrival in ("poisson", "gamma", "constant") else None,
            "burstiness": self.burstiness if self.arrival == "gamma" else None,
            "concurrency": self.concurrency if is_closed else None,
            "num_requests": self.num_requests,
            "input_tokens": str(self.input_tokens) if self.trace is None else None,
            "output_tokens": str(self.output_tokens) if self.trace is None else None,
            "trace": self.trace.name if self.trace else None,
            "time_scale": self.trace.time_scale if self.trace else None,
            "length_scale": self.trace.length_scale if self.trace else None,
            "prefix_tokens": self.prefix.num_tokens if self.prefix else None,
            "num_turns": self.turns.num_turns,
            "seed": self.seed,
        }


def plan_requests(spec: LoadSpec) -> list[TraceRequest]:
    """Arrivals and lengths of the run's sessions, in order. Pure but for reading the trace.

    Raises ValueError for a trace that has no times, or nothing that fits.
    """
    requests = _of_trace(spec, spec.trace) if spec.trace is not None else _drawn(spec)
    if not requests:
        raise ValueError("trace: expected at least one request that fits max_tokens but got none")
    times_s = _times_s(spec, requests)
    return [replace(request, time_s=time_s) for request, time_s in zip(requests, times_s, strict=True)]


async def build_sessions(
    spec: LoadSpec, builder: PromptBuilder, requests: Sequence[TraceRequest], kind: str = "r"
) -> list[Session]:
    """Prompts for planned requests. The text depends on (seed, kind, position), and on shared blocks, only."""
    parallel = asyncio.Semaphore(_NUM_PARALLEL_COUNTS)

    async def build(index: int, request: TraceRequest) -> Session:
        rng = random.Random(f"{spec.seed}/{kind}/{index}")
        async with parallel:
            prompt = await builder.shared(
                request.input_tokens, request.block_ids, request.block_tokens, rng, spec.seed
            )
        turns = [Turn(prompt.text, request.output_tokens, max(request.input_tokens, prompt.num_tokens))]
        for _ in range(1, spec.turns.num_turns):
            turns.append(Turn(" ".join(builder.draw(rng, request.input_tokens)), request.output_tokens))
        return Session(
            f"{kind}{index}-{spec.seed}", tuple(turns), request.time_s or 0.0, spec.turns.think_time_s
        )

    return list(await asyncio.gather(*(build(index, request) for index, request in enumerate(requests))))


def _of_trace(spec: LoadSpec, trace: TraceSpec) -> list[TraceRequest]:
    requests = read_trace(find_trace(trace.name))
    return scaled(requests, trace.length_scale, trace.max_tokens)[: spec.num_requests]


def _drawn(spec: LoadSpec) -> list[TraceRequest]:
    rng = random.Random(f"{spec.seed}/lengths")
    requests = []
    for _ in range(spec.num_requests):
        request = TraceRequest(None, spec.input_tokens.draw(rng), spec.output_tokens.draw(rng))
        if spec.prefix is not None:
            prefix_id = rng.randrange(spec.prefix.num_prefixes)
            request = replace(request, block_ids=(prefix_id,), block_tokens=spec.prefix.num_tokens)
        requests.append(request)
    return requests


def _times_s(spec: LoadSpec, requests: Sequence[TraceRequest]) -> list[float]:
    count = len(requests)
    if spec.arrival == "closed":
        return [0.0] * count
    if spec.arrival == "constant":
        return arrivals.constant(spec.rate, count)
    if spec.arrival != "trace":
        burstiness = spec.burstiness if spec.arrival == "gamma" else 1.0
        return arrivals.gamma(spec.rate, count, burstiness, spec.seed)
    assert spec.trace is not None
    times_s = [request.time_s for request in requests if request.time_s is not None]
    if len(times_s) != count:
        raise ValueError(f"arrival=trace: expected times but {spec.trace.name} holds lengths only")
    return arrivals.replay(times_s, spec.trace.time_scale, spec.trace.jitter_s, spec.seed)
