"""The names that clients may use, and what /v1/models tells of each.

    this server's model ── its LoRA adapters ── models of other servers ── aliases of any of them

An adapter is listed with its base, as vLLM lists it, so that clients find it where they look; a request for one is
refused by name, since no worker applies adapters yet (docs/decisions.md, 20).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from contracts.config import BatonConfig
from contracts.errors import ConfigError, ModelNotFoundError, UnsupportedError


class Models:
    """`own`: the server's model; `max_len`: its enforced limit in tokens, by a function that may raise until known."""

    def __init__(self, config: BatonConfig, own: str, max_len: Callable[[], int]) -> None:
        """Raises ConfigError for an adapter whose name something else has."""
        gateway = config.gateway
        self.own = own
        self._adapters = config.model.adapters
        self._aliases = gateway.aliases
        self._names = gateway.names_of(own, self._adapters)
        self._max_len = max_len
        self._created = int(time.time())
        for name in self._adapters:
            if name in (own, *gateway.upstreams, *gateway.aliases):
                raise ConfigError(f"model.adapters: expected a name that nothing else has but got {name!r}")

    def require(self, name: str) -> None:
        """Raises ModelNotFoundError, or UnsupportedError for an adapter, unless it is a name of the server's model."""
        meant = self._aliases.get(name, name)
        if meant in self._adapters:
            raise UnsupportedError(
                f"model: {name[:100]!r} is a LoRA adapter of {self.own!r}, and this server cannot apply adapters yet",
                param="model",
            )
        if meant != self.own:
            raise ModelNotFoundError(f"model: expected {self.own!r} but got {name[:100]!r}", param="model")

    def cards(self) -> list[dict[str, Any]]:
        return [self._card(name) for name in self._names]

    def card(self, name: str) -> dict[str, Any]:
        """Raises as `require`, for what is not listed."""
        if name not in self._names:
            self.require(name)
        return self._card(name)

    def _card(self, name: str) -> dict[str, Any]:
        """How long a model of another server may be is not known here."""
        card = {"id": name, "object": "model", "created": self._created, "owned_by": "baton"}
        meant = self._aliases.get(name, name)
        if meant in self._adapters:
            return {**card, "root": self._adapters[meant], "parent": self.own}
        if meant != self.own:
            return card
        return {**card, "root": self.own, "parent": None, "max_model_len": self._max_len()}
