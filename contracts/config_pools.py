"""The two pools of workers. Sections of contracts/config.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from contracts.config_section import Section

_OWN_RESOURCES = ("CPU", "GPU", "memory", "object_store_memory")  # Ray counts these under other options


class PoolConfig(Section):
    """One pool: a Serve deployment."""

    num_replicas: int = Field(1, ge=0, description="Workers in the pool.")
    min_replicas: int = Field(1, ge=1, description="Fewest workers, with max_replicas.")
    max_replicas: int | None = Field(
        None,
        ge=1,
        description="Most workers: the planner moves their number between min_replicas and this, from num_replicas on. Empty: it stays as it is.",
    )
    tensor_parallel_size: int = Field(
        1,
        ge=1,
        description="Ranks per worker: processes of one node that each hold a share of the model's heads, MLPs and vocabulary, and of its KV. Which numbers a model allows, its refusal says.",
    )
    num_cpus: float = Field(0.5, ge=0, description="Ray CPUs per rank of a worker.")
    num_gpus: float = Field(0.0, ge=0, description="Ray GPUs per rank of a worker.")
    resources: dict[str, Annotated[float, Field(gt=0)]] = Field(
        default_factory=dict,
        description="Custom Ray resources per worker, e.g. {prefill: 1}; pins pools to node types.",
    )
    health_check_period_s: float = Field(
        1.0, gt=0, description="How often Serve asks the worker whether it is well."
    )
    health_check_timeout_s: float = Field(
        10.0,
        gt=0,
        description="A worker that does not answer in this time is replaced. Serve replaces after three missed checks, so each gets a third of it.",
    )
    drain_timeout_s: float = Field(
        30.0, ge=0, description="How long a stopping worker may finish its requests."
    )

    @property
    def replica_bounds(self) -> tuple[int, int]:
        """(fewest, most); both are the fixed number where it does not move."""
        if self.max_replicas is None:
            return self.num_replicas, self.num_replicas
        return self.min_replicas, self.max_replicas

    @property
    def most_replicas(self) -> int:
        return self.replica_bounds[1]


class PrefillPoolConfig(PoolConfig):
    """The pool that reads prompts."""

    num_replicas: int = Field(
        1,
        ge=0,
        description="Prefill workers. 0: colocated serving, decode workers read prompts themselves, nothing is handed over.",
    )


class DecodePoolConfig(PoolConfig):
    """The pool that writes answers."""

    num_replicas: int = Field(
        1, ge=1, description="Decode workers. There is no serving without one: only they write answers."
    )


def pool_faults(role: str, pool: PoolConfig, is_planned: bool) -> Iterator[str]:
    """What is wrong with a pool as a whole. `is_planned`: workers change their roles."""
    if pool.max_replicas is not None:
        fewest, start, most = pool.min_replicas, pool.num_replicas, pool.max_replicas
        if not is_planned:
            yield (
                f"{role}.max_replicas: expected both promises (slo), planner.enabled and prefill workers beside it, "
                "because the planner moves the number"
            )
        if not fewest <= start <= most:
            yield (
                f"{role}.num_replicas: expected {fewest} to {most} ({role}.min_replicas, {role}.max_replicas) "
                f"but got {start}"
            )
    if pool.tensor_parallel_size > 1 and not pool.num_cpus and not pool.num_gpus:
        yield (
            f"{role}.num_cpus: expected more than 0, or {role}.num_gpus, for each of "
            f"{role}.tensor_parallel_size={pool.tensor_parallel_size} ranks but got 0"
        )
    for name in _OWN_RESOURCES:
        if name in pool.resources:
            yield f"{role}.resources: expected custom resources but got {name!r}; see {role}.num_cpus, {role}.num_gpus"
