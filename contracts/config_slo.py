"""The promises that placement keeps in mind. A section of contracts/config.py, which is long enough without it."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from contracts.config_section import Section


class SloConfig(Section):
    """The two promises to users. Both or neither; they guide placement and refuse nobody."""

    ttft_ms: float | None = Field(
        None,
        gt=0,
        description="Time to first token, from the request's arrival. "
        "With both promises set, requests are placed by predicted times; empty: by load.",
    )
    itl_ms: float | None = Field(None, gt=0, description="Mean time between two tokens of one answer.")

    @property
    def is_set(self) -> bool:
        return self.ttft_ms is not None and self.itl_ms is not None

    @model_validator(mode="after")
    def _check_both(self) -> Self:
        if (self.ttft_ms is None) != (self.itl_ms is None):
            missing, given = ("ttft_ms", "itl_ms") if self.ttft_ms is None else ("itl_ms", "ttft_ms")
            raise ValueError(f"slo.{missing}: expected a number beside slo.{given} but got none")
        return self
