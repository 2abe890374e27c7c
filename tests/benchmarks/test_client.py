"""One request: how its stream is read, and how each way of ending is recorded."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.client import Call, Client, EventReader, RunClock, Target, Trail, named_model
from benchmarks.records import Record
from tests.benchmarks.builders import fake_server, stamps

STREAM = b": hi\n\ndata: one\n\nevent: x\r\ndata: two\r\ndata:2\r\n\r\ndata: [DONE]\n\n"


@given(st.lists(st.integers(0, len(STREAM)), max_size=8))
def test_events_do_not_depend_on_how_bytes_arrive(cuts: list[int]) -> None:
    reader, bounds = EventReader(), [0, *sorted(cuts), len(STREAM)]
    pieces = [STREAM[start:end] for start, end in pairwise(bounds)]
    assert [event for piece in pieces for event in reader.feed(piece)] == [b"one", b"two\n2", b"[DONE]"]


def make_trail() -> Trail:
    return Trail(Call("r", "hi", 3), 0.0, is_length_fixed=True)


def chunk(delta: dict[str, str], usage: int | None = None) -> bytes:
    content: dict[str, object] = {"choices": [{"delta": delta, "finish_reason": None}]}
    if usage is not None:
        content["usage"] = {"completion_tokens": usage}
    return json.dumps(content).encode()


def test_reasoning_is_output_and_roles_are_not() -> None:
    trail = make_trail()
    trail.take(chunk({"role": "assistant", "content": ""}), 1.0)
    trail.take(chunk({"reasoning_content": "hm"}), 2.0)
    trail.take(chunk({"reasoning": "so"}), 3.0)
    trail.take(chunk({"content": "yes"}), 4.0)
    assert trail.record().chunk_times_s == (2.0, 3.0, 4.0)
    assert trail.record().chunk_tokens == (1, 1, 1)
    assert trail.text == "hmsoyes"


def test_chunk_tokens_are_what_the_usage_grew_by() -> None:
    trail = make_trail()
    trail.take(chunk({"content": "a"}, 1), 1.0)
    trail.take(chunk({"content": ""}, 2), 2.0)  # a token without text
    trail.take(chunk({"content": "b"}, 4), 3.0)
    trail.take(chunk({"content": "c"}, 4), 4.0)  # text that was held back
    assert trail.record().chunk_times_s == (1.0, 3.0, 4.0)
    assert trail.record().chunk_tokens == (1, 3, 0)


@pytest.mark.parametrize("payload", [b"{", b"[1]", b'{"error": {"message": "no"}}', b'{"error": "no"}'])
def test_events_that_are_no_chunk_are_errors(payload: bytes) -> None:
    with pytest.raises(ValueError, match=r"expected|Expecting|no"):
        make_trail().take(payload, 1.0)


def test_a_completions_chunk_has_its_text_beside_the_choice() -> None:
    trail = make_trail()
    trail.take(b'{"choices": [{"text": "a", "finish_reason": "length"}]}', 1.0)
    assert trail.record().chunk_times_s == (1.0,)
    assert trail.is_finished


def test_bodies() -> None:
    chat = Call("r", "hi", 3).body(Target("http://x", "m"))
    assert chat["messages"] == [{"role": "user", "content": "hi"}]
    assert (chat["max_tokens"], chat["ignore_eos"]) == (3, True)
    plain = Call("r", "hi", 3).body(Target("http://x", "m", "completions", is_plain=True))
    assert plain["prompt"] == "hi"
    assert not {"ignore_eos", "skip_special_tokens"} & plain.keys()
    assert plain["stream_options"] == {"include_usage": True}
    timed = Call("r", "hi", 3).body(Target("http://x", "m"), wants_timings=True)
    assert timed["stream_options"] == {**chat["stream_options"], "include_timings": True}
    with pytest.raises(ValueError, match="conversations"):
        Call("r", [{"role": "user", "content": "hi"}], 3).body(Target("http://x", "m", "completions"))


def test_the_url_may_name_the_version() -> None:
    assert Target("http://x:1/v1/").base_url == Target("http://x:1").base_url == "http://x:1"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with fake_server(chunk_tokens=[1, 3], cached_tokens=2) as found:
        yield found


async def ask(url: str, model: str, timeout_s: float = 30.0) -> Record:
    trail = Trail(Call(model, "two words", 8, 7), 0.0, is_length_fixed=True)
    async with Client(Target(url, model, timeout_s=timeout_s)) as client:
        await client.stream(trail, RunClock())
    return trail.record()


@pytest.mark.parametrize("model", ["normal", "crlf", "glued"])
async def test_a_whole_answer(url: str, model: str) -> None:
    record = await ask(url, model)
    assert (record.outcome, record.status, record.finish_reason) == ("ok", 200, "length")
    assert record.chunk_tokens == (1, 3, 1, 3)
    assert (record.prompt_tokens, record.completion_tokens, record.cached_tokens) == (7, 8, 2)
    assert record.is_good
    assert record.sent_s is not None
    assert record.end_s is not None
    assert record.sent_s <= record.chunk_times_s[0] <= record.chunk_times_s[-1] <= record.end_s


async def test_without_usage_per_chunk_a_chunk_is_one_token_and_the_total_is_the_usage(url: str) -> None:
    record = await ask(url, "no_chunk_usage")
    assert record.chunk_tokens == (1, 1, 1, 1)
    assert record.num_output_tokens == 8


async def test_without_any_usage_chunks_are_all_that_is_known(url: str) -> None:
    record = await ask(url, "no_usage")
    assert (record.completion_tokens, record.num_output_tokens, record.cached_tokens) == (None, 4, None)
    assert not record.is_good


async def test_tokens_without_text_count_with_the_next_chunk(url: str) -> None:
    record = await ask(url, "hidden")
    assert record.chunk_tokens == (1, 4)
    assert record.completion_tokens == 8


async def test_an_answer_without_text_has_no_first_token(url: str) -> None:
    record = await ask(url, "eos")
    assert (record.outcome, record.chunk_times_s, record.completion_tokens) == ("ok", (), 0)


@pytest.mark.parametrize(
    ("model", "status", "message"),
    [
        ("reject", 503, "scripted"),
        ("error", 500, "scripted"),
        ("error_event", 200, "scripted failure"),
        ("broken", 200, "finish_reason"),
    ],
)
async def test_a_failure_is_recorded_with_what_came_before(
    url: str, model: str, status: int, message: str
) -> None:
    record = await ask(url, model)
    assert (record.outcome, record.status) == ("error", status)
    assert message in record.error
    assert len(record.chunk_times_s) == (status == 200)
    assert record.is_rejected == (model == "reject")


async def test_patience_ends(url: str) -> None:
    record = await ask(url, "silent", timeout_s=0.05)
    assert (record.outcome, record.chunk_times_s) == ("timeout", ())
    assert record.end_s is not None
    assert record.end_s >= 0.05


async def test_nobody_there_is_an_error_record() -> None:
    record = await ask("http://127.0.0.1:9", "normal")
    assert (record.outcome, record.status) == ("error", None)
    assert "connect" in record.error.lower()


async def test_the_model_is_the_first_one_served_unless_named(url: str) -> None:
    assert await named_model(Target(url)) == "normal"
    assert await named_model(Target(url, "mine")) == "mine"


TIMINGS_MS = {"queue": 1.5, "prefill": 250, "handoff": 4.0, "decode": 900.0, "attempts": 1}


@pytest.mark.parametrize(
    ("told", "stages"),
    [
        (TIMINGS_MS, {"queue": 0.0015, "prefill": 0.25, "handoff": 0.004, "decode": 0.9}),
        ({**TIMINGS_MS, "handoff": None}, {"queue": 0.0015, "prefill": 0.25, "decode": 0.9}),
        ({"queue": True, "prefill": "1", "decode": -1.0, "handoff": 10**400}, None),
        ({"queue": float("inf"), "prefill": float("nan")}, None),
        ({}, None),
        ([1.0], None),
        (None, None),
    ],
)
def test_stages_are_what_the_usage_told_in_seconds(told: object, stages: dict[str, float] | None) -> None:
    trail = make_trail()
    trail.take(
        json.dumps({"choices": [], "usage": {"completion_tokens": 3, "timings_ms": told}}).encode(), 1.0
    )
    assert trail.record().stages == stages


async def test_stage_times_are_asked_for_unless_plain() -> None:
    with fake_server(timings_ms=TIMINGS_MS) as url:
        for is_plain in (False, True):
            trail = Trail(Call("r", "hi", 2), 0.0, is_length_fixed=False)
            async with Client(Target(url, "normal", is_plain=is_plain)) as client:
                await client.stream(trail, RunClock())
            assert (trail.record().stages is None) == is_plain


async def test_a_server_that_refuses_to_tell_stages_is_asked_once() -> None:
    with fake_server() as url:
        async with Client(Target(url, "strict")) as client:
            trails = [Trail(Call(name, "hi", 2), 0.0, is_length_fixed=True) for name in ("first", "second")]
            for trail in trails:
                await client.stream(trail, RunClock())
        sent = stamps(url)
    for trail in trails:
        assert (trail.record().outcome, trail.record().status, trail.record().stages) == ("ok", 200, None)
    assert [sent[name]["num_sent"] for name in ("first", "second")] == [2, 1]


async def test_a_refusal_of_something_else_is_no_reason_to_ask_again(url: str) -> None:
    await ask(url, "error")
    assert stamps(url)["error"]["num_sent"] == 1


async def test_a_core_takes_two_thousand_streamed_tokens_a_second() -> None:
    """By the client's own processor time, so that other processes do not matter."""
    num_tokens = 4000
    with fake_server() as url:
        async with Client(Target(url, "normal")) as client:
            trail = Trail(Call("flood", "hi", num_tokens), 0.0, is_length_fixed=True)
            started_s = time.process_time()
            await client.stream(trail, RunClock())
            used_s = time.process_time() - started_s
        assert len(stamps(url)["flood"]["chunks_s"]) == num_tokens
    assert trail.record().completion_tokens == num_tokens
    assert num_tokens / used_s >= 2000
