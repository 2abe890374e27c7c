"""The product's OpenAPI document for a fuzzer, with headers that it does not list and hostile clients send."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from coordinator import openapi

_HEADERS: list[dict[str, Any]] = [
    {"name": name, "in": "header", "required": False, "schema": {"type": "string"}}
    for name in ("Authorization", "Origin", "Idempotency-Key", "x-request-timeout")
]


def document() -> dict[str, Any]:
    """OpenAPI 3.1 of every public route."""
    found = deepcopy(openapi.document("1"))
    del found["security"]  # the fuzzer would send keys of its own
    for operations in found["paths"].values():
        for operation in operations.values():
            known = {parameter["name"] for parameter in operation["parameters"]}
            operation["parameters"] += [header for header in _HEADERS if header["name"] not in known]
    return found
