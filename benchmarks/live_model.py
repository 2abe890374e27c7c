"""A running Baton as the simulator sees it: what its workers have learnt of their steps, and what they do not see.

/debug/peers   step costs, pools, speed of the KV paths          /debug/kv   blocks
one request at a time: first token and gap, less what the step costs explain, is what lies outside of steps
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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
MAX_NOISE = 0.3  # what is more is no noise but another machine
_SENT_BYTES, _PROMPT_TOKENS = "baton_handoff_bytes_total", "baton_prompt_tokens_total"


@dataclass(frozen=True, slots=True)
class LiveModel:
    """`overhead_s`: of a first token, `device.host_s`: of every step, both outside of the workers' own clock. `noise`:
    of a step around its cost. `margin`: that the workers themselves put on predictions.
    """

    device: Device
    layout: Layout
    overhead_s: float
    noise: float
    margin: float

    def step_model(self) -> StepModel:
        """As the workers believe it."""
        model = self.device.step_model()
        model.margin = self.margin
        return model

    def setup(self, slo: Slo, seed: int) -> Setup:
        return Setup(self.device, len(self.layout.homes), slo, seed, self.noise, self.overhead_s)

    def row(self) -> Row:
        device = self.device
        return {
            "run": "model",
            "workers": len(self.layout.homes),
            "overhead_ms": 1000 * self.overhead_s,
            "host_ms": 1000 * device.host_s,
            "noise": self.noise,
            "margin": self.margin,
            "prompt_base_ms": 1000 * device.prefill_base_s,
            "prompt_token_us": 1e6 * device.token_s,
            "attended_ns": 1e9 * device.square_s,
            "decode_base_ms": 1000 * device.decode_base_s,
            "stream_us": 1e6 * device.stream_s,
            "context_us": 1e6 * device.context_s,
            "kv_tokens": device.kv_tokens,
        }


async def learn(target: Target, alone: Sequence[Record]) -> LiveModel:
    """The cluster at `target`, after a run. `alone`: requests that had it for themselves.

    Raises ValueError if it is no Baton, or its workers do not know their steps yet.
    """
    async with Client(target) as client:
        workers = (await _debug(client, "/debug/peers"))["workers"]
        blocks = (await _debug(client, "/debug/kv"))["workers"]
        metrics = await scrape(client)
    return model_of(workers, blocks, {} if metrics is None else metrics.sums, alone)


def model_of(
    workers: Sequence[dict[str, Any]],
    blocks: Sequence[dict[str, Any]],
    sums: Mapping[str, float],
    alone: Sequence[Record],
) -> LiveModel:
    """`workers`: of /debug/peers, `blocks`: of /debug/kv, `sums`: of /metrics. Raises ValueError as `learn` does."""
    engine = EngineConfig()  # limits are taken to be the defaults: the server does not tell them
    speeds = [1e9 * peer["gigabytes_per_s"] for worker in workers for peer in worker["peers"]]
    prefill, decode = _mean_costs(workers, "mixed"), _mean_costs(workers, "decode")
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
    error, margin = _mean_of(workers, "error"), max(_mean_of(workers, "margin"), 1.0)
    # A mean absolute error is 0.8 of the standard deviation where errors are normal.
    learnt = LiveModel(device, Layout(homes, chunk, chunk, 1), 0.0, min(1.25 * error, MAX_NOISE), margin)
    return _with_overheads(learnt, alone)


def _mean_costs(workers: Sequence[dict[str, Any]], kind: str) -> list[float]:
    """Costs of decodes as the decode pool knows them, of prompts as the prefill pool does, else as anybody does: means
    of coefficients predict means of steps.
    """
    known = [worker for worker in workers if (worker.get("steps") or {}).get(f"is_{kind}_known")]
    pool = "prefill" if kind == "mixed" else "decode"
    chosen = [worker for worker in known if worker["role"] == pool] or known
    if not chosen:
        raise ValueError(
            f"/debug/peers: expected a worker that knows what {kind} steps cost but got none; run longer"
        )
    columns = zip(*(worker["steps"][kind] for worker in chosen), strict=True)
    return [sum(column) / len(chosen) for column in columns]


def _mean_of(workers: Sequence[dict[str, Any]], name: str) -> float:
    values = [float(worker["steps"][name]) for worker in workers if worker.get("steps")]
    return sum(values) / max(len(values), 1)


def _with_overheads(learnt: LiveModel, alone: Sequence[Record]) -> LiveModel:
    """What lone requests took beyond their steps, per step and per first token; never less than nothing."""
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
    device = replace(learnt.device, host_s=host_s)
    return replace(learnt, device=device, overhead_s=max(median(overhead), 0.0))


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
