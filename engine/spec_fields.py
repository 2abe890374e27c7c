"""Typed access to the fields of a config, whoever wrote it; every complaint names the source and the field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from contracts.errors import ConfigError


class Fields:
    """A field that is absent or null takes the default; without a default that is a ConfigError."""

    def __init__(self, values: Mapping[str, Any], source: str, prefix: str = "") -> None:
        """`prefix` is put before each name that is asked for."""
        self._values = values
        self._source = source
        self._prefix = prefix

    def has(self, name: str) -> bool:
        return self._values.get(self._prefix + name) is not None

    def integer(self, name: str, default: int | None = None) -> int:
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._mistyped(name, "an integer", value)
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._mistyped(name, "a number", value)
        return float(value)

    def optional_number(self, name: str) -> float | None:
        return self.number(name) if self.has(name) else None

    def flag(self, name: str, default: bool) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self._mistyped(name, "true or false", value)
        return value

    def text(self, name: str, default: str | None = None) -> str:
        value = self._get(name, default)
        if not isinstance(value, str):
            raise self._mistyped(name, "a string", value)
        return value

    def items(self, name: str) -> list[Any]:
        value = self._get(name, [])
        if not isinstance(value, list):
            raise self._mistyped(name, "a list", value)
        return value

    def section(self, name: str) -> Fields:
        value = self._get(name, {})
        if not isinstance(value, Mapping):
            raise self._mistyped(name, "an object", value)
        return Fields(value, f"{self._source} {self._prefix}{name}")

    def token_ids(self, name: str) -> tuple[int, ...]:
        """A token id field, which checkpoints write as nothing, one id or a list of ids."""
        value = self._values.get(self._prefix + name)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
            raise self._mistyped(name, "token ids", value)
        return tuple(ids)

    def refuse(self, name: str, expected: str) -> ConfigError:
        """The error for a value that was read but cannot be computed with."""
        return self._mistyped(name, expected, self._values.get(self._prefix + name))

    def _get(self, name: str, default: Any) -> Any:
        value = self._values.get(self._prefix + name)
        if value is not None:
            return value
        if default is None:
            raise ConfigError(f"{self._source}: expected the field {self._prefix + name!r} but it is missing")
        return default

    def _mistyped(self, name: str, expected: str, value: object) -> ConfigError:
        return ConfigError(
            f"{self._source}: expected {self._prefix + name!r} to be {expected} but got {value!r}"
        )
