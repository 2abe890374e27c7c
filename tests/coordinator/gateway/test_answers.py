"""Kept answers: bounded, in time and in bytes."""

from __future__ import annotations

from typing import Any

import pytest

from contracts.errors import ConflictError, RequestError
from coordinator.gateway.answers import AnswerStore, KeptAnswer, Recorder, fingerprint_of, is_deterministic

KEY, OTHER = ("acme", "k"), ("acme", "l")


def kept(size: int = 10) -> KeptAnswer:
    return KeptAnswer((), b"x" * size)


def test_an_answer_is_found_until_its_time_is_over() -> None:
    store = AnswerStore(10_000, ttl_s=60.0)
    store.begin(KEY, b"f")
    answer = kept()
    store.end(KEY, b"f", answer, now=0.0)
    assert store.find(KEY, b"f", now=59.9) is answer
    assert store.find(("globex", "k"), b"f", now=0.0) is None
    with pytest.raises(RequestError, match="Idempotency-Key"):
        store.find(KEY, b"g", now=0.0)
    assert store.find(KEY, b"f", now=60.0) is None
    assert store._num_bytes == 0


def test_one_request_runs_per_key() -> None:
    store = AnswerStore(10_000, 60.0)
    store.begin(KEY, b"f")
    with pytest.raises(ConflictError):
        store.begin(KEY, b"f")
    with pytest.raises(RequestError):
        store.begin(KEY, b"g")
    store.end(KEY, b"f", None, 0.0)
    store.begin(KEY, b"g")


def test_the_oldest_goes_when_there_is_no_room() -> None:
    store = AnswerStore(2 * (1000 + 512), 60.0)
    for name in "abc":
        store.end(("acme", name), b"f", kept(1000), 0.0)
    assert [store.find(("acme", name), b"f", 0.0) is None for name in "abc"] == [True, False, False]
    store.end(KEY, b"f", kept(5000), 0.0)
    assert store.find(KEY, b"f", 0.0) is None
    for _ in range(3):
        store.end(("acme", "b"), b"f", kept(1000), 0.0)
    assert store._num_bytes == 2 * 1512


async def record(status: int, *bodies: bytes, is_whole: bool = True) -> KeptAnswer | None:
    async def send(message: Any) -> None: ...

    recorder = Recorder(send, max_bytes=100)
    await recorder({"type": "http.response.start", "status": status, "headers": []})
    for i, body in enumerate(bodies):
        more = not is_whole or i < len(bodies) - 1
        await recorder({"type": "http.response.body", "body": body, "more_body": more})
    return recorder.answer


async def test_only_a_whole_success_is_kept() -> None:
    assert await record(200, b"a", b"b") == KeptAnswer((), b"ab")
    assert await record(500, b"a") is None
    assert await record(200, b"a", is_whole=False) is None
    assert await record(200, b"a" * 60, b"b" * 60) is None
    assert await record(200, b'data: {"choices":[]}\n\n', b'data: {"error":{}}\n\n') is None


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"temperature": 0}, True),
        ({"temperature": 0.0}, True),
        ({"seed": 7}, True),
        ({}, False),
        ({"temperature": False}, False),
        ({"temperature": 0.5}, False),
        ({"seed": True}, False),
        ({"seed": 7, "include_timings": True}, False),
        ({"temperature": 0, "stream_options": {"include_timings": True}}, False),
    ],
)
def test_deterministic_is_what_must_come_out_again(body: dict[str, Any], expected: bool) -> None:
    assert is_deterministic(body) is expected


def test_the_order_of_keys_does_not_matter_and_everything_else_does() -> None:
    assert fingerprint_of("/a", {"x": 1, "y": 2}, []) == fingerprint_of("/a", {"y": 2, "x": 1}, [])
    found = {
        fingerprint_of(path, body, beside)
        for path in ("/a", "/b")
        for body in ({"x": 1}, {"x": 1.5}, {"x": "1"})
        for beside in ([None, "batch"], ["batch", None])
    }
    assert len(found) == 12
