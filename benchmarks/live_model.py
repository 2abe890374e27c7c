"""A running Baton as the simulator sees it: what its workers have learnt of their steps, and what they do not see.

/debug/peers, again and again   step costs and how they change, pools, speed of the KV paths
/debug/kv                       blocks
one request at a time           first token and gap, less what the step costs explain: what lies outside of steps

A worker knows what its last few hundred steps took. A machine that others use as well is faster at one time than at
another, so what it knows when the run has ended is not what its steps took all along.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from bisect import bisect_right
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from benchmarks.client import Client, Target
from benchmarks.metrics import Slo, tpot_s, ttft_s
from benchmarks.records import Record
from benchmarks.result import Row
from benchmarks.server_metrics import scrape
from benchmarks.sim.baton import Layout
from benchmarks.sim.cluster import Setup
from benchmarks.sim.devices import Device
from benchmarks.sim.fit import LEAST_OUTPUT
from benchmarks.sim.requests import BLOCK_TOKENS
from contracts.config import EngineConfig
from contracts.roles import RoleLabel
from policy.step_model import StepModel

MAX_NOISE = 0.3  # what is more is no noise but another machine
GLANCE_PERIOD_S = 2.0
_SENT_BYTES, _PROMPT_TOKENS = "baton_handoff_bytes_total", "baton_prompt_tokens_total"


Workers = Sequence[dict[str, Any]]  # of /debug/peers


@dataclass(frozen=True, slots=True)
class Pace:
    """How long a step takes at a time of the run, over what it takes on average. `times_s`: rising."""

    times_s: tuple[float, ...] = ()
    values: tuple[float, ...] = ()

    def __call__(self, time_s: float) -> float:
        """Of the last glance before; of the first one before that."""
        return self.values[max(bisect_right(self.times_s, time_s) - 1, 0)] if self.values else 1.0


@dataclass(slots=True)
class Glances:
    """What the workers knew of themselves at some times, in seconds since `begin`."""

    seen: list[tuple[float, Workers]] = field(default_factory=list)
    _begun_s: float = 0.0

    def begin(self) -> None:
        """What was seen before is of no account."""
        self._begun_s = asyncio.get_running_loop().time()
        self.seen.clear()

    @contextlib.asynccontextmanager
    async def looking(self, target: Target) -> AsyncIterator[None]:
        """At `target`, every GLANCE_PERIOD_S and at the end. Raises what the last look does."""
        async with Client(target) as client:
            task = asyncio.create_task(self._look_on(client))
            try:
                yield
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            await self._look(client)

    async def _look_on(self, client: Client) -> None:
        while True:
            await asyncio.sleep(GLANCE_PERIOD_S)
            await self._look(client)

    async def _look(self, client: Client) -> None:
        workers = (await _debug(client, "/debug/peers"))["workers"]
        self.seen.append((asyncio.get_running_loop().time() - self._begun_s, workers))

    @property
    def workers(self) -> Workers:
        """As they were seen, one after the other."""
        return [worker for _, workers in self.seen for worker in workers]

    def pace(self) -> Pace:
        """By decode steps of one stream: there are most of them, so that they are known soonest."""
        known = [
            (time_s, workers)
            for time_s, workers in self.seen
            if any(_knows(worker, "decode") for worker in workers)
        ]
        steps_s = [sum(_mean_costs(workers, "decode")[:2]) for _, workers in known]
        mean_s = sum(steps_s) / max(len(steps_s), 1)
        return Pace(tuple(time_s for time_s, _ in known), tuple(step_s / mean_s for step_s in steps_s))


@dataclass(frozen=True, slots=True)
class LiveModel:
    """`overhead_s`: of a first token, `device.host_s`: of every step, both outside of the workers' own clock. `noise`:
    of a step around its cost. `margin`: that the workers themselves put on predictions. `pace`: of the machine.
    """

    device: Device
    layout: Layout
    overhead_s: float
    noise: float
    margin: float
    pace: Pace = Pace()

    def step_model(self) -> StepModel:
        """As the workers believe it."""
        model = self.device.step_model()
        model.margin = self.margin
        return model

    def setup(self, slo: Slo, seed: int) -> Setup:
        return Setup(self.device, len(self.layout.homes), slo, seed, self.noise, self.overhead_s, self.pace)

    def row(self) -> Row:
        device = self.device
        return {
            "run": "model",
            "workers": len(self.layout.homes),
            "overhead_ms": 1000 * self.overhead_s,
            "host_ms": 1000 * device.host_s,
            "noise": self.noise,
            "margin": self.margin,
            "slowest_pace": max(self.pace.values, default=1.0),
            "fastest_pace": min(self.pace.values, default=1.0),
            "prompt_base_ms": 1000 * device.prefill_base_s,
            "prompt_token_us": 1e6 * device.token_s,
            "attended_ns": 1e9 * device.square_s,
            "decode_base_ms": 1000 * device.decode_base_s,
            "stream_us": 1e6 * device.stream_s,
            "context_us": 1e6 * device.context_s,
            "kv_tokens": device.kv_tokens,
        }


async def learn(target: Target, alone: Sequence[Record], before: Glances, during: Glances) -> LiveModel:
    """The cluster at `target`, after a run. `alone`: requests that had it for themselves. `before`, `during`: what was
    seen while they, and while the run, went on.

    Raises ValueError if it is no Baton, or its workers do not know their steps yet.
    """
    async with Client(target) as client:
        blocks = (await _debug(client, "/debug/kv"))["workers"]
        metrics = await scrape(client)
    return model_of(before, during, blocks, {} if metrics is None else metrics.sums, alone)


def model_of(
    before: Glances, during: Glances, blocks: Workers, sums: Mapping[str, float], alone: Sequence[Record]
) -> LiveModel:
    """`blocks`: of /debug/kv, `sums`: of /metrics. Raises ValueError as `learn` does."""
    host_s, overhead_s = _outside(_steps_of(before, blocks, sums), alone)
    learnt = _steps_of(during, blocks, sums)
    device = replace(learnt.device, host_s=host_s)
    return replace(learnt, device=device, overhead_s=overhead_s, pace=during.pace())


def _steps_of(glances: Glances, blocks: Workers, sums: Mapping[str, float]) -> LiveModel:
    """Without what lies outside of steps."""
    engine = EngineConfig()  # limits are taken to be the defaults: the server does not tell them
    workers = glances.seen[-1][1]
    speeds = [1e9 * peer["gigabytes_per_s"] for worker in workers for peer in worker["peers"]]
    # NOTE: a worker remembers fewer decode steps than a run has, but more prompts: of these its last word is the mean.
    prefill, decode = _mean_costs(workers, "mixed"), _mean_costs(glances.workers, "decode")
    device = Device(
        "live",
        prefill_base_s=prefill[0],
        token_s=prefill[1],
        square_s=prefill[2],
        decode_base_s=decode[0],
        stream_s=decode[1],
        context_s=decode[2],
        host_s=0.0,
        kv_bytes_per_token=max(int(sums.get(_SENT_BYTES, 0.0) / max(sums.get(_PROMPT_TOKENS, 0.0), 1.0)), 1),
        kv_tokens=BLOCK_TOKENS * min((worker["total"] for worker in blocks), default=0),
        link_bytes_per_s=min(speeds, default=1e9),
        max_streams=engine.max_num_seqs,
        fused_stream_s=prefill[3],
    )
    # What placement takes the mixed workers of a small fleet for (coordinator/predict.py).
    homes: tuple[RoleLabel, ...] = tuple(
        "prefill" if worker["role"] == "prefill" else "mixed" for worker in workers
    )
    chunk = engine.max_chunk_tokens
    error, margin = _mean_of(glances.workers, "error"), max(_mean_of(glances.workers, "margin"), 1.0)
    # A mean absolute error is 0.8 of the standard deviation where errors are normal.
    return LiveModel(device, Layout(homes, chunk, chunk, 1), 0.0, min(1.25 * error, MAX_NOISE), margin)


def _mean_costs(workers: Workers, kind: str) -> list[float]:
    """Costs of decodes as the decode pool knows them, of prompts as the prefill pool does, else as anybody does: means
    of coefficients predict means of steps.
    """
    known = [worker for worker in workers if _knows(worker, kind)]
    pool = "prefill" if kind == "mixed" else "decode"
    chosen = [worker for worker in known if worker["role"] == pool] or known
    if not chosen:
        raise ValueError(
            f"/debug/peers: expected a worker that knows what {kind} steps cost but got none; run longer"
        )
    columns = zip(*(worker["steps"][kind] for worker in chosen), strict=True)
    return [sum(column) / len(chosen) for column in columns]


def _knows(worker: Mapping[str, Any], kind: str) -> bool:
    return bool((worker.get("steps") or {}).get(f"is_{kind}_known"))


def _mean_of(workers: Workers, name: str) -> float:
    values = [float(worker["steps"][name]) for worker in workers if worker.get("steps")]
    return sum(values) / max(len(values), 1)


def _outside(learnt: LiveModel, alone: Sequence[Record]) -> tuple[float, float]:
    """(host_s, overhead_s): what lone requests took beyond their steps, per step and per first token; never less than
    nothing."""
    model = learnt.device.step_model()
    answered = [record for record in alone if record.is_good and ttft_s(record) is not None]
    host = [
        (tpot_s(record) or 0.0)
        - model.decode_step_s(1, record.num_input_tokens + record.num_output_tokens / 2)
        for record in answered
        if record.num_output_tokens >= LEAST_OUTPUT
    ]
    if not host:
        raise ValueError(f"expected lone requests with answers of {LEAST_OUTPUT} tokens or more but got none")
    host_s = max(median(host), 0.0)
    chunk = learnt.layout.read_chunk
    overhead = [
        (ttft_s(record) or 0.0)
        - model.prefill_s(record.num_input_tokens, 0, chunk)
        - host_s * -(-record.num_input_tokens // chunk)
        for record in answered
    ]
    return host_s, max(median(overhead), 0.0)


async def _debug(client: Client, path: str) -> dict[str, Any]:
    status, body = await client.get(path)
    if status != 200:
        raise ValueError(
            f"{path}: expected Baton on this machine (or its admin key as --api-key) but got {status}"
        )
    answer = json.loads(body)
    if not isinstance(answer, dict):
        raise ValueError(f"{path}: expected an object but got {type(answer).__name__}")
    return answer
