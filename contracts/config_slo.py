"""The promises that the queue and placement keep in mind. A section of contracts/config.py, which is long enough
without it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Self

from pydantic import Field, model_validator

from contracts.config_section import Section
from contracts.service import Service, ServiceClass


class Promise(Section):
    """The two promises to users. Empty: as without it."""

    ttft_ms: float | None = Field(
        None,
        gt=0,
        description="Time to first token, from the request's arrival. "
        "With both promises set, requests wait by slack and are placed by predicted times; empty: by load.",
    )
    itl_ms: float | None = Field(None, gt=0, description="Mean time between two tokens of one answer.")


class SloConfig(Promise):
    """The two promises to users, both or neither, and what is done to keep them."""

    classes: dict[ServiceClass, Promise] = Field(
        default_factory=dict,
        description="Promises by request class, e.g. {interactive: {ttft_ms: 300}}; what is missing there is as above. batch and best_effort have only the promises that stand here, for the count: they are served from what is left over.",
    )
    models: dict[Annotated[str, Field(min_length=1, max_length=512)], Promise] = Field(
        default_factory=dict,
        description="Promises of interactive requests by the name that the client uses for the model (an alias of gateway.aliases, for one); before those of the class.",
    )
    refuse: bool = Field(
        False,
        description="Refuse an interactive request that no worker can serve within its promise, with 503 + Retry-After. false: it is served late, after those that can be in time.",
    )
    min_ttft_ms: float | None = Field(
        None,
        gt=0,
        description="Least that the header x-baton-ttft-ms may ask for. Empty: the request's own promise, so that it can only be loosened.",
    )
    max_ttft_ms: float | None = Field(
        None, gt=0, description="Most that the header x-baton-ttft-ms may ask for. Empty: no bound."
    )
    min_itl_ms: float | None = Field(
        None, gt=0, description="Least that the header x-baton-itl-ms may ask for. Empty: as above."
    )
    max_itl_ms: float | None = Field(
        None, gt=0, description="Most that the header x-baton-itl-ms may ask for. Empty: no bound."
    )
    leftover_share: float = Field(
        0.5,
        gt=0,
        le=1,
        description="Share of a decode worker's sequences, and of its KV blocks, that batch and best_effort requests may hold; one request always may.",
    )
    age_cap_s: float = Field(
        30.0,
        gt=0,
        description="An interactive or batch request that has waited this long goes before younger ones, whatever their promises.",
    )

    @property
    def is_set(self) -> bool:
        return self.ttft_ms is not None and self.itl_ms is not None

    @property
    def tightest_itl_s(self) -> float | None:
        """What a step beside any interactive request's answer must leave room for."""
        parts = [
            *self.models.values(),
            *([self.classes["interactive"]] if "interactive" in self.classes else []),
        ]
        known = [self.itl_ms, self.min_itl_ms, *(promise.itl_ms for promise in parts)]
        found = [itl_ms for itl_ms in known if itl_ms is not None]
        return min(found) / 1000.0 if found and self.is_set else None

    def service(
        self, service_class: ServiceClass = "interactive", model: str = "", tenant: str = ""
    ) -> Service:
        """What a request of this class is promised when it asks for nothing."""
        sources: list[Promise] = [self.classes[service_class]] if service_class in self.classes else []
        if service_class == "interactive":
            sources = [*([self.models[model]] if model in self.models else []), *sources, self]
        return Service(
            service_class,
            _seconds(promise.ttft_ms for promise in sources),
            _seconds(promise.itl_ms for promise in sources),
            tenant,
        )

    @model_validator(mode="after")
    def _check_both(self) -> Self:
        if (self.ttft_ms is None) != (self.itl_ms is None):
            missing, given = ("ttft_ms", "itl_ms") if self.ttft_ms is None else ("itl_ms", "ttft_ms")
            raise ValueError(f"slo.{missing}: expected a number beside slo.{given} but got none")
        for name in ("classes", "models", "refuse", "min_ttft_ms", "max_ttft_ms", "min_itl_ms", "max_itl_ms"):
            if not self.is_set and getattr(self, name):
                raise ValueError(f"slo.{name}: expected slo.ttft_ms and slo.itl_ms beside it but got none")
        for name in ("ttft_ms", "itl_ms"):
            least, most = getattr(self, f"min_{name}"), getattr(self, f"max_{name}")
            if least is not None and most is not None and least > most:
                raise ValueError(
                    f"slo.max_{name}: expected at least slo.min_{name}={least:g} but got {most:g}"
                )
        return self


def _seconds(values_ms: Iterator[float | None]) -> float | None:
    """The first that is given."""
    value_ms = next((value for value in values_ms if value is not None), None)
    return None if value_ms is None else value_ms / 1000.0
