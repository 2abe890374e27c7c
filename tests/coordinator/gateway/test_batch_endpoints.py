"""A batch of each endpoint that has one: its lines are that endpoint's own requests, and so are the answers."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.coordinator.fake_backend import reply
from tests.coordinator.gateway.gateway_tools import gateway_service

QUESTION = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("endpoint", "body", "kind"),
    [
        ("/v1/chat/completions", {"messages": QUESTION}, "chat.completion"),
        ("/v1/completions", {"prompt": "hi"}, "text_completion"),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 9}, "response"),
    ],
)
async def test_lines_are_answered_in_their_endpoints_form(
    endpoint: str, body: dict[str, Any], kind: str, tmp_path: Path
) -> None:
    lines = [
        {"custom_id": "good", "method": "POST", "url": endpoint, "body": body},
        {"custom_id": "bad", "method": "POST", "url": endpoint, "body": body | {"temperature": 9}},
    ]
    async with gateway_service(reply("ok"), folder=tmp_path) as s:
        sent = {"file": ("in.jsonl", "\n".join(map(json.dumps, lines)))}
        file = (await s.client.post("/v1/files", files=sent, data={"purpose": "batch"})).json()
        asked = {"input_file_id": file["id"], "endpoint": endpoint, "completion_window": "24h"}
        batch = (await s.client.post("/v1/batches", json=asked)).json()
        async with asyncio.timeout(10.0):
            while batch["status"] != "completed":
                batch = (await s.client.get(f"/v1/batches/{batch['id']}")).json()
        assert batch["request_counts"] == {"total": 2, "completed": 1, "failed": 1}
        good = (await s.client.get(f"/v1/files/{batch['output_file_id']}/content")).json()
        assert (good["custom_id"], good["response"]["body"]["object"]) == ("good", kind)
        bad = (await s.client.get(f"/v1/files/{batch['error_file_id']}/content")).json()
        assert bad["response"]["body"]["error"]["param"] == "temperature"
