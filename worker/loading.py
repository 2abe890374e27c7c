"""From a configuration to a model that computes: what every rank of a worker does alike, and the only rank of most.

meet ──► weights (this rank's shard) ──► as many KV blocks as fit everywhere ──► slab ──► runner
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from contracts.config import BatonConfig, EngineConfig
from contracts.errors import ConfigError
from engine.cuda_graphs import CudaRecorder
from engine.fit import graph_bytes
from engine.graphs import DecodeGraphs, Recorder, buckets_up_to
from engine.kv import FP8, KvSlab, SlabPlan, block_bytes, num_blocks_for, resolve_kv_dtype
from engine.kv_scales import scales_of
from engine.model import Model
from engine.parallel.group import ALONE, Ranks
from engine.parallel.shards import WHOLE, Shard
from engine.quantization import resolve_quantization
from engine.runner import Runner, StepItem
from engine.spec import ModelSpec
from engine.weights import LoadedModel, load_model, resolve_dtype

CPU_KV_BYTES = 1 << 30
GPU_KV_SHARE = 0.85
LOAD_TIMEOUT_S = 1800.0
"""Longest wait for another rank to read its weights."""


class Company(Protocol):
    """The ranks of a worker, as one of them sees them."""

    @property
    def shard(self) -> Shard: ...

    def group(self, device: torch.device) -> Ranks: ...

    def agree(self, mine: int, timeout_s: float) -> int: ...

    def slab(self, plan: SlabPlan) -> KvSlab: ...

    def step(self, items: Sequence[StepItem]) -> AbstractContextManager[None]: ...


class Solo:
    """One rank, which has all. What rank 0 of several has beyond `Company`: see worker.ranks.RankZero."""

    shard = WHOLE
    failure: str | None = None

    def group(self, device: torch.device) -> Ranks:
        return ALONE

    def agree(self, mine: int, timeout_s: float) -> int:
        return mine

    def slab(self, plan: SlabPlan) -> KvSlab:
        return plan.allocate()

    def slabs(self, mine: KvSlab) -> tuple[Tensor, ...]:
        return (mine.data,)

    def step(self, items: Sequence[StepItem]) -> AbstractContextManager[None]:
        return nullcontext()

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Engine:
    """One rank's."""

    model: LoadedModel
    slab: KvSlab
    runner: Runner


def load_engine(
    config: BatonConfig,
    path: Path,
    company: Company,
    progress: Callable[[int, int], None] | None = None,
    decodes: bool = True,
) -> Engine:
    """`decodes`: whether it may ever write answers, for which decode steps are recorded.

    Raises ConfigError if the model does not fit, or not this engine, or if another rank could not load its part.
    """
    engine = config.engine
    torch.set_num_threads(engine.compute_threads)
    device = torch.device(resolve_device(engine.device))
    dtype = resolve_dtype(config.model.dtype, device)
    kv_dtype = resolve_kv_dtype(engine.kv_dtype, dtype, device)
    kv_bytes = partial(planned_kv_bytes, engine, device.type, kv_dtype)
    may_record = decodes and engine.cuda_graphs and company.shard.size == 1
    recorder = recorder_on(device) if may_record else None
    buckets = buckets_up_to(engine.max_num_seqs) if recorder else ()
    quantization = resolve_quantization(engine.quantization, device)
    group = company.group(device)
    model = load_model(
        path,
        dtype,
        progress,
        device,
        kv_bytes,
        quantization=quantization,
        shard=company.shard,
        graph_buckets=buckets,
    )
    if model.spec.is_sparse:
        buckets = ()
    num_blocks = engine.num_blocks or num_blocks_for(
        kv_bytes(model.spec) or _free_gpu_kv_bytes(graph_bytes(model.spec, buckets)),
        model.spec,
        engine.block_size,
        kv_dtype,
    )
    num_blocks = company.agree(num_blocks, LOAD_TIMEOUT_S)
    if num_blocks < 2:
        raise ConfigError(
            f"engine.kv_cache_bytes: expected room for at least 2 blocks but it holds {num_blocks}"
        )
    scales = scales_of(model) if kv_dtype == FP8 else None
    num_scratch = 1 if buckets else 0
    slab = company.slab(
        SlabPlan(model.spec, num_blocks, engine.block_size, kv_dtype, device, scales, num_scratch)
    )
    ready = Model(model, group, engine.batch_invariant)
    graphs: DecodeGraphs | None = None
    if recorder and buckets:
        max_len = min(max_model_len(config, model.spec), num_blocks * engine.block_size)
        graphs = DecodeGraphs(ready, slab, buckets, max_len, recorder)
    return Engine(model, slab, Runner(ready, slab, engine.compute_threads, company.step, graphs))


def recorder_on(device: torch.device) -> Recorder | None:
    """What records decode steps; None where it gains nothing."""
    return CudaRecorder(device) if device.type == "cuda" else None


def max_model_len(config: BatonConfig, spec: ModelSpec) -> int:
    """Longest sequence: what the model was trained for, or less where the configuration says so."""
    wanted = config.model.max_len
    return min(wanted, spec.max_position) if wanted else spec.max_position


def resolve_device(name: str) -> str:
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "engine.device: expected a GPU that torch can use but there is none; try device: cpu"
        )
    return name


def planned_kv_bytes(engine: EngineConfig, device: str, kv_dtype: torch.dtype, spec: ModelSpec) -> int:
    """What is known before the weights are read; 0: a GPU's free memory will decide. `spec`: of this rank."""
    if engine.num_blocks:
        return engine.num_blocks * block_bytes(spec, engine.block_size, kv_dtype)
    return engine.kv_cache_bytes or (CPU_KV_BYTES if device == "cpu" else 0)


def _free_gpu_kv_bytes(reserved: int) -> int:
    """To be asked when the weights are loaded. `reserved`: what will be taken after the KV cache."""
    free, _total = torch.cuda.mem_get_info()
    return int(max(0, free - reserved) * GPU_KV_SHARE)
