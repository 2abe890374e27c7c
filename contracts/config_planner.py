"""When workers change their role, and how many there are. A section of contracts/config.py."""

from __future__ import annotations

from pydantic import Field

from contracts.config_section import Section


class PlannerConfig(Section):
    """Works only with promises (slo) and a prefill pool."""

    enabled: bool = Field(
        True,
        description="Whether workers change between reading prompts and writing answers as the demand asks for. "
        "Without both promises of slo, or without prefill workers, it never happens.",
    )
    interval_s: float = Field(1.0, gt=0, description="How often the number of readers is weighed.")
    window_s: float = Field(
        10.0, gt=0, description="Memory of the demand: the age at which a request counts a third (1/e)."
    )
    dead_band: float = Field(
        0.05,
        ge=0,
        description="Gain in requests per second, as a share, below which nobody changes; all mixed counts for so much more.",
    )
    cool_down_s: float = Field(
        10.0,
        ge=0,
        description="Shortest time before a change is followed by one the other way, but for the first change.",
    )
    upscale_delay_s: float = Field(
        10.0, ge=0, description="How long more replicas are wanted before Serve starts them."
    )
    downscale_delay_s: float = Field(
        120.0, ge=0, description="How long fewer replicas are wanted before Serve takes one away."
    )
