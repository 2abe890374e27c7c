"""Guards that keep e-mail addresses out of prompts and answers: an example for gateway.input_guards and output_guards.

    gateway:
      input_guards: ["examples.mask_emails:mask_prompt"]
      output_guards: ["examples.mask_emails:mask_answer"]

The module must be importable by the coordinator: `make serve` in this repository's root, or any installed package.
"""

from __future__ import annotations

import re
from typing import Any

from coordinator.gateway.guards import Edit, GuardedRequest, Window

EMAIL = re.compile(r"[A-Za-z0-9._%+-]{1,64}@[A-Za-z0-9.-]{1,128}\.[A-Za-z]{2,24}")
MASK = "[e-mail]"


async def mask_answer(window: Window) -> list[Edit]:
    """Every address that the text of an answer holds so far. Baton sees to it that none is sent in two halves."""
    return [Edit(match.start(), match.end(), MASK) for match in EMAIL.finditer(window.text)]


async def mask_prompt(request: GuardedRequest) -> dict[str, Any]:
    """The body with every address in every text of it masked."""
    return {name: _masked(value) for name, value in request.body.items()}


def _masked(value: Any) -> Any:
    if isinstance(value, str):
        return EMAIL.sub(MASK, value)
    if isinstance(value, list):
        return [_masked(item) for item in value]
    if isinstance(value, dict):
        return {name: _masked(item) for name, item in value.items()}
    return value
