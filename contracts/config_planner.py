"""When workers change their role, and how many there are. A section of contracts/config.py."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import BaseModel, ConfigDict, Field


class PlannerConfig(BaseModel):
    """Works only with promises (slo) and a prefill pool."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    enabled: bool = Field(
        True,
        description="Whether workers change between reading prompts and writing answers as the demand asks for. "
        "Without both promises of slo, or without prefill workers, it never happens.",
    )
    interval_s: float = Field(1.0, gt=0, description="How often the split is weighed.")
    window_s: float = Field(
        10.0, gt=0, description="Memory of the demand: the age at which a request counts a third (1/e)."
    )
    dead_band: float = Field(
        0.05, ge=0, description="Gain in requests per second, as a share, below which nobody changes."
    )
    cool_down_s: float = Field(
        10.0, ge=0, description="Shortest time before a change is followed by one the other way."
    )
    upscale_delay_s: float = Field(
        10.0, ge=0, description="How long more replicas are wanted before Serve starts them."
    )
    downscale_delay_s: float = Field(
        120.0, ge=0, description="How long fewer replicas are wanted before Serve takes one away."
    )


def replica_faults(role: str, bounds: tuple[int, int, int], is_planned: bool) -> Iterator[str]:
    """What is wrong with (fewest, at the start, most) replicas of a pool whose number may move."""
    fewest, start, most = bounds
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
