"""From a configuration to a model that computes: what every rank of a worker does alike, and the only rank of most.

meet ──► weights (this rank's shard) ──► as many KV blocks as fit everywhere ──► slab ──► runner
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from contracts.config import BatonConfig, EngineConfig
from contracts.errors import ConfigError
from engine.kv import KvSlab, num_blocks_for
from engine.model import Model
from engine.parallel.group import ALONE, Ranks
from engine.parallel.shards import WHOLE, Shard
from engine.quantization import resolve_quantization
from engine.runner import Runner, StepItem
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

    def slab(self, loaded: LoadedModel, num_blocks: int, block_size: int) -> KvSlab: ...

    def step(self, items: Sequence[StepItem]) -> AbstractContextManager[None]: ...


class Solo:
    """One rank, which has all. What rank 0 of several has beyond `Company`: see worker.ranks.RankZero."""

    shard = WHOLE
    failure: str | None = None

    def group(self, device: torch.device) -> Ranks:
        return ALONE

    def agree(self, mine: int, timeout_s: float) -> int:
        return mine

    def slab(self, loaded: LoadedModel, num_blocks: int, block_size: int) -> KvSlab:
        device = loaded.weights.final_norm.device
        return KvSlab.allocate(loaded.spec, num_blocks, block_size, loaded.dtype, device)

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
    config: BatonConfig, path: Path, company: Company, progress: Callable[[int, int], None] | None = None
) -> Engine:
    """Raises ConfigError if the model does not fit, or not this engine, or if another rank could not load its part."""
    engine = config.engine
    torch.set_num_threads(engine.compute_threads)
    device = torch.device(resolve_device(engine.device))
    dtype = resolve_dtype(config.model.dtype, device)
    kv_bytes = planned_kv_bytes(engine, device.type)
    quantization = resolve_quantization(engine.quantization, device)
    group = company.group(device)
    model = load_model(
        path, dtype, progress, device, kv_bytes, quantization=quantization, shard=company.shard
    )
    num_blocks = engine.num_blocks or num_blocks_for(
        kv_bytes or _free_gpu_kv_bytes(), model.spec, engine.block_size, dtype
    )
    num_blocks = company.agree(num_blocks, LOAD_TIMEOUT_S)
    if num_blocks < 2:
        raise ConfigError(
            f"engine.kv_cache_bytes: expected room for at least 2 blocks but it holds {num_blocks}"
        )
    slab = company.slab(model, num_blocks, engine.block_size)
    return Engine(
        model,
        slab,
        Runner(
            Model(model, group, engine.batch_invariant), slab, engine.compute_threads, within=company.step
        ),
    )


def resolve_device(name: str) -> str:
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "engine.device: expected a GPU that torch can use but there is none; try device: cpu"
        )
    return name


def planned_kv_bytes(engine: EngineConfig, device: str) -> int:
    """What is known before the weights are read; 0: blocks are counted, or a GPU's free memory will decide."""
    if engine.num_blocks:
        return 0
    return engine.kv_cache_bytes or (CPU_KV_BYTES if device == "cpu" else 0)


def _free_gpu_kv_bytes() -> int:
    """To be asked when the weights are loaded."""
    free, _total = torch.cuda.mem_get_info()
    return int(free * GPU_KV_SHARE)
