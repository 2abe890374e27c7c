"""What the server of the client tests answers, by a word of the request."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from contracts.errors import WorkerLostError
from contracts.request import GenerateRequest
from tests.coordinator.fake_backend import EOS, Step

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


def script(request: GenerateRequest) -> Sequence[Step]:
    """`weather`: a call, or an answer once there is a result; `json`, `break`, `wait`: as they say; else a greeting."""
    asked = bytes(i for i in request.prompt_ids if i < 256).decode()
    if "sunny" in asked:
        return [*b"It is sunny.", EOS]
    if "weather?" in asked or "\nweather" in asked:
        return [*CALL.encode(), EOS]
    if "\njson" in asked:
        return [*b'{"a": 1}', EOS]
    if "\nbreak" in asked:
        return [72, WorkerLostError("lost")]
    if "\nwait" in asked:
        return [72, asyncio.Event()]
    return [*b"Hello!", EOS]
