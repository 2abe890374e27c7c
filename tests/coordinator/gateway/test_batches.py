"""Files and batches over HTTP, on a real SQLite file, through restarts of the application."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import threading
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from starlette.types import ASGIApp

from contracts.errors import EngineError, OverloadedError
from contracts.request import GenerateRequest
from coordinator.gateway import runner as runner_module
from coordinator.gateway.records import LineResult
from coordinator.gateway.store import JobStore
from tests.coordinator.fake_backend import Step, reply
from tests.coordinator.gateway.gateway_tools import GatewayService, bearer, gateway_service, write_keys
from tests.coordinator.http_tools import MODEL, error_of

ENDPOINT = "/v1/completions"
SOON_S = 10.0


def line(custom_id: str, prompt: Any = "hi", **fields: Any) -> dict[str, Any]:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 2, **fields}
    return {"custom_id": custom_id, "method": "POST", "url": ENDPOINT, "body": body}


def jsonl(*lines: Any) -> bytes:
    return b"".join(
        (each if isinstance(each, bytes) else json.dumps(each).encode()) + b"\n" for each in lines
    )


async def upload(s: GatewayService, content: bytes, headers: dict[str, str] | None = None) -> str:
    response = await s.client.post(
        "/v1/files", files={"file": ("in.jsonl", content)}, data={"purpose": "batch"}, headers=headers or {}
    )
    assert response.status_code == 200, response.text
    return str(response.json()["id"])


async def start(s: GatewayService, content: bytes, headers: dict[str, str] | None = None) -> str:
    file_id = await upload(s, content, headers)
    body = {
        "input_file_id": file_id,
        "endpoint": ENDPOINT,
        "completion_window": "24h",
        "metadata": {"a": "b"},
    }
    response = await s.client.post("/v1/batches", json=body, headers=headers or {})
    assert response.status_code == 200, response.text
    assert response.json()["status"] == "validating"
    return str(response.json()["id"])


async def ended(s: GatewayService, batch_id: str, headers: dict[str, str] | None = None) -> dict[str, Any]:
    """The batch, once its runner is done with it."""
    over = ("completed", "failed", "cancelled", "expired")
    return await until(s, batch_id, lambda batch: batch["status"] in over, headers)


async def until(
    s: GatewayService, batch_id: str, condition: Any, headers: dict[str, str] | None = None
) -> dict[str, Any]:
    """The batch as a client that asks again and again sees it."""
    async with asyncio.timeout(SOON_S):
        while True:
            batch = (await s.client.get(f"/v1/batches/{batch_id}", headers=headers or {})).json()
            if condition(batch):
                return dict(batch)


async def output(s: GatewayService, file_id: str) -> list[dict[str, Any]]:
    response = await s.client.get(f"/v1/files/{file_id}/content")
    assert response.status_code == 200
    return [json.loads(each) for each in response.text.splitlines()]


async def given_up(s: GatewayService, batch: dict[str, Any]) -> list[tuple[str, str]]:
    """(custom_id, code) of the lines in the error file, none of which has an answer."""
    found = await output(s, batch["error_file_id"])
    assert all(each["response"] is None and each["error"]["message"] for each in found)
    return [(each["custom_id"], each["error"]["code"]) for each in found]


async def test_a_batch_gives_each_line_its_answer_in_the_order_of_the_input(tmp_path: Path) -> None:
    lines = [line(f"r{i}", max_tokens=i + 1) for i in range(6)]
    lines[2]["body"]["temperature"] = 9
    async with gateway_service(reply("Hello!"), folder=tmp_path) as s:
        batch = await ended(s, await start(s, jsonl(*lines, b"")))
        assert batch["status"] == "completed"
        assert batch["request_counts"] == {"total": 6, "completed": 5, "failed": 1}
        assert batch["metadata"] == {"a": "b"}
        assert (
            batch["completed_at"] >= batch["finalizing_at"] >= batch["in_progress_at"] >= batch["created_at"]
        )
        good, [bad] = await output(s, batch["output_file_id"]), await output(s, batch["error_file_id"])
        assert [each["custom_id"] for each in good] == ["r0", "r1", "r3", "r4", "r5"]
        for each in good:
            assert set(each) == {"id", "custom_id", "response", "error"}
            response = each["response"]
            assert (response["status_code"], each["error"]) == (200, None)
            text = "Hello!"[: int(each["custom_id"][1:]) + 1]
            assert response["body"]["choices"][0]["text"] == text
        assert len({each["response"]["request_id"] for each in good}) == 5
        assert (bad["custom_id"], bad["response"]["status_code"]) == ("r2", 400)
        assert bad["response"]["body"]["error"]["param"] == "temperature"
        shown = (await s.client.get(f"/v1/files/{batch['output_file_id']}")).json()
        assert (shown["purpose"], shown["bytes"] > 0) == ("batch_output", True)


@pytest.mark.parametrize(
    ("content", "where", "param"),
    [
        (b"", None, None),
        (jsonl(b"{"), 1, None),
        (jsonl(line("a"), line("b"), line("a")), 3, "custom_id"),
        (jsonl({**line("a"), "custom_id": 7}), 1, "custom_id"),
        (jsonl({**line("a"), "method": "GET"}), 1, "method"),
        (jsonl({**line("a"), "url": "/v1/chat/completions"}), 1, "url"),
        (jsonl({**line("a"), "body": []}), 1, "body"),
        (jsonl(line("a", stream=True)), 1, "body.stream"),
        (b'{"custom_id": "\\ud800"}\n', 1, None),
        (b"\xff\n", 1, None),
        (jsonl(line("a", "x" * 5000)), 1, None),
        (jsonl(*(line(f"r{i}") for i in range(9))), 9, None),
    ],
)
async def test_a_file_that_cannot_be_a_batch_fails_as_a_whole(
    content: bytes, where: int | None, param: str | None, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"batch_max_requests": 8, "server": {"max_body_bytes": 4096}}
    async with gateway_service(folder=tmp_path, **settings) as s:
        batch = await ended(s, await start(s, content))
        assert batch["status"] == "failed"
        [error] = batch["errors"]["data"]
        assert (error["line"], error["param"]) == (where, param)
        assert error["message"]
        assert (batch["output_file_id"], batch["failed_at"] is not None) == (None, True)
        assert not s.backend.requests


async def test_a_line_that_is_no_request_gets_an_error_of_its_own(tmp_path: Path) -> None:
    async with gateway_service(folder=tmp_path) as s:
        wrong = ({**line("b"), "method": "GET"}, b"{", {**line("d"), "custom_id": 7}, line("e", stream=True))
        batch = await ended(s, await start(s, jsonl(line("a"), *wrong, line("f"))))
        assert batch["status"] == "completed"
        assert batch["request_counts"] == {"total": 6, "completed": 2, "failed": 4}
        assert [each["custom_id"] for each in await output(s, batch["output_file_id"])] == ["a", "f"]
        failed = await output(s, batch["error_file_id"])
        assert [each["custom_id"] for each in failed] == ["b", None, None, "e"]
        assert {each["response"]["status_code"] for each in failed} == {400}
        params = [each["response"]["body"]["error"]["param"] for each in failed]
        assert params == ["method", None, "custom_id", "body.stream"]
        assert len(s.backend.requests) == 2


async def test_a_batch_goes_on_after_a_restart_with_the_lines_that_are_not_done(tmp_path: Path) -> None:
    never = asyncio.Event()

    def stuck_on_the_third(request: GenerateRequest) -> list[Step]:
        return [never] if bytes(request.prompt_ids) == b"2" else [72, 105]

    lines = [line(f"r{i}", str(i)) for i in range(5)]
    async with gateway_service(stuck_on_the_third, folder=tmp_path, batch_concurrency=1) as s:
        batch_id = await start(s, jsonl(*lines))
        await until(s, batch_id, lambda batch: batch["request_counts"]["completed"] == 2)
        await s.backend.started.wait()
    async with gateway_service(reply("Hi"), folder=tmp_path, batch_concurrency=1) as s:
        batch = await ended(s, batch_id)
        assert batch["request_counts"] == {"total": 5, "completed": 5, "failed": 0}
        assert [bytes(request.prompt_ids) for request in s.backend.requests] == [b"2", b"3", b"4"]
        results = await output(s, batch["output_file_id"])
        assert [each["custom_id"] for each in results] == [f"r{i}" for i in range(5)]
    async with gateway_service(folder=tmp_path) as s:
        assert (await s.client.get(f"/v1/batches/{batch_id}")).json() == batch
        assert not s.backend.requests


async def test_a_drain_waits_for_the_lines_at_work_and_begins_no_other(tmp_path: Path) -> None:
    go, both = asyncio.Event(), asyncio.Event()
    begun: list[GenerateRequest] = []

    def script(request: GenerateRequest) -> list[Step]:
        begun.append(request)
        if len(begun) == 2:
            both.set()
        return [go, 72, 105]

    async with gateway_service(script, folder=tmp_path, batch_concurrency=2) as s:
        batch_id = await start(s, jsonl(*(line(f"r{i}", str(i)) for i in range(5))))
        async with asyncio.timeout(SOON_S):
            await both.wait()
        draining = asyncio.create_task(s.drain.drain(SOON_S))
        go.set()
        assert await draining == 0
        batch = await until(s, batch_id, lambda batch: batch["request_counts"]["completed"] == 2)
        assert batch["status"] == "in_progress"
        assert len(s.backend.requests) == 2
    async with gateway_service(reply("Hi"), folder=tmp_path) as s:
        assert (await ended(s, batch_id))["request_counts"]["completed"] == 5
        assert len(s.backend.requests) == 3


async def test_a_cancelled_batch_ends_at_once_and_keeps_what_is_done(tmp_path: Path) -> None:
    never = asyncio.Event()

    def script(request: GenerateRequest) -> list[Step]:
        return [72, 105] if bytes(request.prompt_ids) == b"0" else [72, never]

    async with gateway_service(script, folder=tmp_path, batch_concurrency=2) as s:
        batch_id = await start(s, jsonl(*(line(f"r{i}", str(i)) for i in range(5))))
        await until(s, batch_id, lambda batch: batch["request_counts"]["completed"] == 1)
        assert (await s.client.post(f"/v1/batches/{batch_id}/cancel")).json()["status"] == "cancelling"
        batch = await ended(s, batch_id)
        assert batch["status"] == "cancelled"
        assert batch["request_counts"] == {"total": 5, "completed": 1, "failed": 0}
        assert [each["custom_id"] for each in await output(s, batch["output_file_id"])] == ["r0"]
        assert await given_up(s, batch) == [(f"r{i}", "batch_cancelled") for i in range(1, 5)]
        assert not s.backend.running
        again = await s.client.post(f"/v1/batches/{batch_id}/cancel")
        assert (again.status_code, again.json()["status"]) == (200, "cancelled")


async def test_a_line_may_take_longer_than_somebody_would_wait(tmp_path: Path) -> None:
    async with gateway_service(reply("Hi"), folder=tmp_path, max_request_timeout_s=1e-9) as s:
        response = await s.client.post("/v1/completions", json={"prompt": "hi"})
        assert response.status_code == 504
        batch = await ended(s, await start(s, jsonl(line("a"))))
        assert batch["request_counts"] == {"total": 1, "completed": 1, "failed": 0}


async def test_a_batch_is_cancelled_while_it_waits_for_another(tmp_path: Path) -> None:
    never = asyncio.Event()
    async with gateway_service(lambda _: [never], folder=tmp_path) as s:
        first = await start(s, jsonl(line("a")))
        await s.backend.started.wait()
        second = await start(s, jsonl(line("b")))
        assert (await s.client.post(f"/v1/batches/{second}/cancel")).status_code == 200
        batch = await ended(s, second)
        assert (batch["status"], batch["request_counts"]["total"]) == ("cancelled", 1)
        assert await given_up(s, batch) == [("b", "batch_cancelled")]
        assert (await s.client.get(f"/v1/batches/{first}")).json()["status"] == "in_progress"


async def test_a_database_that_somebody_else_holds_is_a_reason_to_come_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.gateway.store._BUSY_MS", 1)
    async with gateway_service(folder=tmp_path) as s:
        assert (await s.client.get("/v1/batches")).status_code == 200
        other = sqlite3.connect(tmp_path / "jobs.db", isolation_level=None)
        other.execute("BEGIN EXCLUSIVE")
        file = {"file": ("in.jsonl", jsonl(line("a")))}
        response = await s.client.post("/v1/files", files=file, data={"purpose": "batch"})
        assert (response.status_code, error_of(response)["code"]) == (503, "overloaded")
        assert response.headers["retry-after"] == "1"
        other.close()
        assert (await ended(s, await start(s, jsonl(line("a")))))["status"] == "completed"
        assert len(list((tmp_path / "files").iterdir())) == 2  # what was not entered is not kept


async def test_a_batch_that_was_to_be_cancelled_is_cancelled_after_a_restart(tmp_path: Path) -> None:
    never = asyncio.Event()
    async with gateway_service(lambda _: [never], folder=tmp_path) as s:
        batch_id = await start(s, jsonl(line("a")))
        await s.backend.started.wait()
        assert s.gateway.jobs._opening is not None
        s.gateway.jobs._opening.result().move(batch_id, ["in_progress"], "cancelling")
    async with gateway_service(folder=tmp_path) as s:
        batch = await ended(s, batch_id)
        assert batch["status"] == "cancelled"
        assert await given_up(s, batch) == [("a", "batch_cancelled")]
        assert not s.backend.requests


async def test_a_result_that_is_being_written_when_the_batch_is_cancelled_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, released = threading.Event(), threading.Event()
    plain = JobStore.add_result

    def slow(store: JobStore, batch_id: str, result: LineResult) -> str:
        entered.set()
        assert released.wait(SOON_S)
        return plain(store, batch_id, result)

    monkeypatch.setattr(JobStore, "add_result", slow)
    never = asyncio.Event()

    def script(request: GenerateRequest) -> list[Step]:
        return [72, 105] if bytes(request.prompt_ids) == b"0" else [never]

    async with gateway_service(script, folder=tmp_path) as s:
        batch_id = await start(s, jsonl(*(line(f"r{i}", str(i)) for i in range(2))))
        assert await asyncio.to_thread(entered.wait, SOON_S)
        assert (await s.client.post(f"/v1/batches/{batch_id}/cancel")).status_code == 200
        released.set()
        batch = await ended(s, batch_id)
        assert batch["request_counts"] == {"total": 2, "completed": 1, "failed": 0}
        assert [each["custom_id"] for each in await output(s, batch["output_file_id"])] == ["r0"]
        assert await given_up(s, batch) == [("r1", "batch_cancelled")]


@pytest.mark.parametrize("status", ["cancelling", "finalizing"])
async def test_a_batch_whose_input_is_gone_ends_all_the_same(status: str, tmp_path: Path) -> None:
    never = asyncio.Event()
    async with gateway_service(lambda _: [never], folder=tmp_path) as s:
        batch_id = await start(s, jsonl(line("a")))
        await s.backend.started.wait()
        assert s.gateway.jobs._opening is not None
        s.gateway.jobs._opening.result().move(batch_id, ["in_progress"], status)
    for file in (tmp_path / "files").iterdir():
        file.unlink()
    async with gateway_service(folder=tmp_path) as s:
        expected = "cancelled" if status == "cancelling" else "expired"
        assert (await ended(s, batch_id))["status"] == expected
        assert (await ended(s, await start(s, jsonl(line("b")))))["status"] == "completed"


async def test_an_overloaded_server_is_asked_again_and_a_failing_one_a_few_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_module, "_pause_s", lambda headers: 0.0)
    attempts: dict[bytes, int] = {}

    def script(request: GenerateRequest) -> list[Step]:
        prompt = bytes(request.prompt_ids)
        attempts[prompt] = attempts.get(prompt, 0) + 1
        if prompt == b"busy" and attempts[prompt] < 10:
            return [OverloadedError("queue is full")]
        return [EngineError("broken")] if prompt == b"bad" else [72, 105]

    async with gateway_service(script, folder=tmp_path) as s:
        batch = await ended(s, await start(s, jsonl(line("a", "busy"), line("b", "bad"))))
        assert batch["request_counts"] == {"total": 2, "completed": 1, "failed": 1}
        assert attempts == {b"busy": 10, b"bad": 3}
        [bad] = await output(s, batch["error_file_id"])
        assert (bad["custom_id"], bad["response"]["status_code"]) == ("b", 500)


async def test_a_batch_out_of_time_ends_with_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_module, "_is_late", lambda batch: True)
    async with gateway_service(folder=tmp_path) as s:
        batch = await ended(s, await start(s, jsonl(line("a"), line("b"))))
        assert (batch["status"], batch["request_counts"]["completed"]) == ("expired", 0)
        assert await given_up(s, batch) == [("a", "batch_expired"), ("b", "batch_expired")]


async def test_lines_give_way_to_callers(tmp_path: Path) -> None:
    go, seen = asyncio.Event(), asyncio.Event()

    def script(request: GenerateRequest) -> list[Step]:
        if bytes(request.prompt_ids) == b"caller":
            seen.set()
            return [go, 72, 105]
        return [72, 105]

    async with gateway_service(script, folder=tmp_path, batch_concurrency=4) as s:
        gate, most = s.gateway.gate, 0
        first = asyncio.create_task(s.complete("caller", max_tokens=2))
        await seen.wait()
        batch_id = await start(s, jsonl(*(line(f"r{i}") for i in range(8))))
        async with asyncio.timeout(SOON_S):
            while (await s.client.get(f"/v1/batches/{batch_id}")).json()["status"] != "completed":
                most = max(most, gate.num_lines)
        assert most <= 1
        go.set()
        assert (await first).status_code == 200


async def test_files_and_batches_of_another_tenant_are_not_there(tmp_path: Path) -> None:
    acme, globex = write_keys(tmp_path / "keys.json", "acme", "globex")
    async with gateway_service(
        folder=tmp_path, keys_file=str(tmp_path / "keys.json"), requests_per_minute=1
    ) as s:
        batch_id = await start(s, jsonl(line("a"), line("b")), bearer(acme))
        batch = await ended(s, batch_id, bearer(acme))
        assert (
            batch["request_counts"]["completed"] == 2
        )  # a batch is not held to its tenant's requests per minute
        assert [request.salt for request in s.backend.requests] == ["acme/", "acme/"]
        file_id = batch["input_file_id"]
        for method, path in (
            ("GET", f"/v1/files/{file_id}"), ("GET", f"/v1/files/{file_id}/content"),
            ("DELETE", f"/v1/files/{file_id}"), ("GET", f"/v1/batches/{batch_id}"),
            ("POST", f"/v1/batches/{batch_id}/cancel"),
        ):  # fmt: skip
            response = await s.client.request(method, path, headers=bearer(globex))
            assert (response.status_code, error_of(response)["code"]) == (404, "not_found")
        body = {"input_file_id": file_id, "endpoint": ENDPOINT, "completion_window": "24h"}
        assert (await s.client.post("/v1/batches", json=body, headers=bearer(globex))).status_code == 404
        for path in ("/v1/files", "/v1/batches"):
            assert (await s.client.get(path, headers=bearer(globex))).json()["data"] == []


@pytest.mark.parametrize(
    "change",
    [
        {"input_file_id": 3}, {"input_file_id": "file-none"}, {"endpoint": "/v1/embeddings"},
        {"completion_window": "1h"}, {"metadata": {"a": 1}}, {"metadata": []},
        {"output_expires_after": {}}, {"endpoint": None},
    ],
)  # fmt: skip
async def test_a_batch_that_cannot_be_is_refused(change: dict[str, Any], tmp_path: Path) -> None:
    async with gateway_service(folder=tmp_path) as s:
        file_id = await upload(s, jsonl(line("a")))
        body = {"input_file_id": file_id, "endpoint": ENDPOINT, "completion_window": "24h", **change}
        response = await s.client.post("/v1/batches", json=body)
        assert response.status_code in (400, 404)
        error_of(response)


async def test_uploads_are_bounded_and_checked(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"max_file_bytes": 1024, "max_files_bytes": 1500}
    async with gateway_service(folder=tmp_path, **settings) as s:

        async def post(**request: Any) -> tuple[int, str]:
            response = await s.client.post("/v1/files", **request)
            error = error_of(response)
            return response.status_code, str(error["code"])

        form = {"purpose": "batch"}
        assert await post(files={"file": b"x" * 1025}, data=form) == (413, "request_too_large")
        assert await post(files={"file": b"x" * 200_000}, data=form) == (413, "request_too_large")
        assert await post(files={"file": b"x"}, data={"purpose": "fine-tune"}) == (400, "unsupported")
        assert await post(data=form) == (400, "invalid_value")
        assert await post(json=form) == (400, "unsupported")
        broken = {"content-type": "multipart/form-data; boundary=x"}
        assert (await post(content=b"--y\r\nnonsense", headers=broken))[0] == 400
        # A page of somebody else's may send a form, and the browser says whose it is.
        evil = {"Origin": "https://evil.example"}
        assert await post(files={"file": b"x"}, data=form, headers=evil) == (403, "permission_denied")
        await upload(s, b"x" * 1000)
        assert await post(files={"file": b"x" * 1000}, data=form) == (413, "request_too_large")
        assert [p.name for p in (tmp_path / "files").iterdir() if p.suffix] == []


async def test_a_file_that_is_to_go_by_itself_is_refused(tmp_path: Path) -> None:
    async with gateway_service(folder=tmp_path) as s:
        data = {"purpose": "batch", "expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
        response = await s.client.post("/v1/files", files={"file": ("in.jsonl", b"x")}, data=data)
        assert (response.status_code, error_of(response)["param"]) == (400, "expires_after")


async def test_lists_are_paged_newest_first_and_files_can_be_deleted(tmp_path: Path) -> None:
    never = asyncio.Event()
    async with gateway_service(lambda _: [never], folder=tmp_path) as s:
        ids = [await upload(s, b"x") for _ in range(3)]
        page = (await s.client.get("/v1/files", params={"limit": 2})).json()
        assert ([file["id"] for file in page["data"]], page["has_more"]) == ([ids[2], ids[1]], True)
        rest = (await s.client.get("/v1/files", params={"limit": 2, "after": page["last_id"]})).json()
        assert ([file["id"] for file in rest["data"]], rest["has_more"]) == ([ids[0]], False)
        first = (await s.client.get("/v1/files", params={"limit": 1, "order": "asc"})).json()
        assert ([file["id"] for file in first["data"]], first["has_more"]) == ([ids[0]], True)
        rest = (await s.client.get("/v1/files", params={"order": "asc", "after": ids[0]})).json()
        assert [file["id"] for file in rest["data"]] == ids[1:]
        for purpose, count in (("batch", 3), ("batch_output", 0)):
            found = (await s.client.get("/v1/files", params={"purpose": purpose})).json()
            assert len(found["data"]) == count
        everything = (await s.client.get("/v1/files", params={"after": ""})).json()
        assert [file["id"] for file in everything["data"]] == ids[::-1]
        for wrong in ({"limit": "0"}, {"order": "up"}):
            response = await s.client.get("/v1/files", params=wrong)
            assert (response.status_code, error_of(response)["param"]) == (400, *wrong)
        assert (await s.client.delete(f"/v1/files/{ids[0]}")).json()["deleted"] is True
        assert (await s.client.get(f"/v1/files/{ids[0]}")).status_code == 404
        batch_id = await start(s, jsonl(line("a")))
        batch = await until(s, batch_id, lambda batch: batch["status"] == "in_progress")
        assert (await s.client.delete(f"/v1/files/{batch['input_file_id']}")).status_code == 400


async def test_a_batch_whose_file_is_gone_fails_and_the_next_one_runs(tmp_path: Path) -> None:
    never = asyncio.Event()
    async with gateway_service(lambda _: [never], folder=tmp_path) as s:
        lost = await start(s, jsonl(line("bad", temperature=9), line("a")))
        await until(s, lost, lambda batch: batch["request_counts"]["failed"] == 1)
        good = await start(s, jsonl(line("b")))
        source = (await s.client.get(f"/v1/batches/{lost}")).json()["input_file_id"]
    (tmp_path / "files" / source).unlink()
    async with gateway_service(folder=tmp_path) as s:
        batch = await ended(s, lost)
        assert (batch["status"], batch["errors"]["data"][0]["code"]) == ("failed", "file_missing")
        assert [each["custom_id"] for each in await output(s, batch["error_file_id"])] == [
            "bad"
        ]  # what is known
        assert (await ended(s, good))["status"] == "completed"


async def test_only_one_process_runs_the_batches_of_a_folder(tmp_path: Path) -> None:
    never = asyncio.Event()
    async with gateway_service(lambda _: [never], folder=tmp_path) as first:
        batch_id = await start(first, jsonl(line("a")))
        await first.backend.started.wait()
        async with gateway_service(folder=tmp_path) as second:
            assert (await second.client.get(f"/v1/batches/{batch_id}")).json()["status"] == "in_progress"
            assert not second.backend.requests
            assert second.gateway.jobs._opening is not None
            assert not second.gateway.jobs._opening.result().try_own()


async def test_the_official_client_runs_a_batch(tmp_path: Path) -> None:
    async with gateway_service(reply("Hi"), folder=tmp_path) as s:
        app: ASGIApp = s.app
        http = httpx.AsyncClient(transport=httpx.ASGITransport(app))
        async with openai.AsyncOpenAI(base_url="http://baton/v1", api_key="none", http_client=http) as client:
            file = await client.files.create(file=("in.jsonl", jsonl(line("a"))), purpose="batch")
            batch = await client.batches.create(
                input_file_id=file.id, endpoint=ENDPOINT, completion_window="24h"
            )
            await ended(s, batch.id)
            batch = await client.batches.retrieve(batch.id)
            assert batch.request_counts is not None
            assert (batch.status, batch.request_counts.completed) == ("completed", 1)
            assert batch.output_file_id is not None
            content = await client.files.content(batch.output_file_id)
            assert json.loads(content.text)["response"]["body"]["choices"][0]["text"] == "Hi"
            assert [each.id async for each in client.batches.list()] == [batch.id]
            assert len([each async for each in client.files.list()]) == 2
