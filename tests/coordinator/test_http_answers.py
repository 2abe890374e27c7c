"""Answers: form, text, usage, logprobs, several choices; streamed and whole say the same."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from contracts.request import Finished, GenerateRequest, Timings
from engine.text.tokenizer import TextModel, load_text
from tests.coordinator.fake_backend import EOS, Script, reply
from tests.coordinator.http_tools import MODEL, error_of, events, joined, make_config, service
from tests.engine.text.builders import make_text

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def body(path: str, **fields: Any) -> dict[str, Any]:
    prompt = {"messages": [{"role": "user", "content": "hi"}]} if path == CHAT else {"prompt": "hi"}
    return {"model": MODEL, **prompt, **fields}


def text_of(choice: dict[str, Any]) -> str:
    text: str = choice["message"]["content"] if "message" in choice else choice["text"]
    return text


async def test_a_chat_answer_has_openais_form() -> None:
    async with service(reply("Hello!"), num_cached=3) as s:
        response = await s.chat(max_tokens=50)
        answer = response.json()
        assert response.headers["content-type"] == "application/json"
        assert answer["id"].startswith("chatcmpl-")
        assert (answer["object"], answer["model"]) == ("chat.completion", MODEL)
        assert abs(answer["created"] - time.time()) < 60
        assert answer["choices"] == [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello!", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ]
        num_prompt = len(s.backend.requests[0].prompt_ids)
        assert answer["usage"] == {
            "prompt_tokens": num_prompt,
            "completion_tokens": 7,
            "total_tokens": num_prompt + 7,
            "prompt_tokens_details": {"cached_tokens": 3},
        }


async def test_completions_default_to_16_tokens_and_chat_to_the_rest() -> None:
    async with service(reply("x" * 100), max_total_tokens=200) as s:
        answer = (await s.complete()).json()
        assert (answer["object"], answer["id"][:5]) == ("text_completion", "cmpl-")
        assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == ("x" * 16, "length")
        await s.chat()
        request = s.backend.requests[1]
        assert request.max_total_tokens == 200


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"max_tokens": 2},
        {"stop": ["wor"]},
        {"stop": ["wor"], "include_stop_str_in_output": True},
        {"stop": ["H"]},
        {"stop": ["zzz", "d!zz"]},
        {"stop_token_ids": [ord("w")]},
        {"ignore_eos": True},
        {"n": 3, "temperature": 0},
        {"n": 2, "seed": 7},
    ],
)
async def test_a_stream_joins_to_the_whole_answer(path: str, fields: dict[str, Any]) -> None:
    logprobs: dict[str, Any] = {"logprobs": True, "top_logprobs": 2} if path == CHAT else {"logprobs": 2}
    fields = {"max_tokens": 40, **fields, **logprobs}
    async with service(reply("Hello 😀 world!")) as s:
        whole = (await s.client.post(path, json=body(path, **fields))).json()
        options = {"stream": True, "stream_options": {"include_usage": True}}
        response = await s.client.post(path, json=body(path, **fields, **options))
        *chunks, usage = events(response)
        assert usage["choices"] == []
        assert usage["usage"] == whole["usage"]
        assert all(chunk["usage"] is None for chunk in chunks)
        for choice in whole["choices"]:
            parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
            assert joined(chunks, choice["index"]) == text_of(choice)
            reasons = [part["finish_reason"] for part in parts]
            assert reasons[-1] == choice["finish_reason"]
            assert set(reasons[:-1]) <= {None}
            assert entries(parts) == entries([choice])
        counted = sum(len(entries([choice])) for choice in whole["choices"])
        assert counted == whole["usage"]["completion_tokens"]


def entries(parts: list[dict[str, Any]]) -> list[Any]:
    found: list[Any] = []
    for part in parts:
        logprobs = part["logprobs"] or {}
        found += logprobs.get("content") or []
        found += zip(
            *(logprobs.get(key, []) for key in ("tokens", "token_logprobs", "text_offset")), strict=True
        )
    return found


async def test_a_chat_stream_keeps_the_exact_sequence() -> None:
    async with service(reply("Hi😀")) as s:
        response = await s.chat(stream=True)
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert response.headers["cache-control"] == "no-cache"
        assert response.headers["x-accel-buffering"] == "no"
        assert "content-length" not in response.headers
        chunks = events(response)
        assert "usage" not in chunks[0]
        assert len({(c["id"], c["created"], c["model"], c["object"]) for c in chunks}) == 1
        assert chunks[0]["object"] == "chat.completion.chunk"
        assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert chunks[-1]["choices"][0]["delta"] == {}
        assert all("role" not in c["choices"][0]["delta"] for c in chunks[1:])
        assert joined(chunks) == "Hi😀"
        assert "\ufffd" not in response.text


async def test_role_chunks_of_all_choices_come_first_and_in_order() -> None:
    async with service() as s:
        chunks = events(await s.chat(stream=True, n=3, seed=1))
        assert [c["choices"][0]["index"] for c in chunks[:3]] == [0, 1, 2]
        assert all("role" in c["choices"][0]["delta"] for c in chunks[:3])


async def test_continuous_usage_never_decreases_and_ends_at_the_total() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with service() as s:
        chunks = events(await s.chat(stream=True, stream_options=options))
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts)
        assert counts[-1] == 7


@pytest.mark.parametrize("options", [{}, None, {"include_obfuscation": False}])
async def test_no_usage_unless_asked(options: Any) -> None:
    async with service() as s:
        assert all("usage" not in c for c in events(await s.chat(stream=True, stream_options=options)))


TIMINGS = Timings(0.001, 0.25, 0.0123456, 1.5, num_attempts=2)
TIMINGS_MS = {"queue": 1.0, "prefill": 250.0, "handoff": 12.346, "decode": 1500.0, "attempts": 2}


def timed(*found: Timings | None) -> Script:
    """An answer for each request in turn, with these timings."""
    rest = list(found)
    return lambda request: [65, Finished("stop", timings=rest.pop(0))]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("fields", [{"include_timings": True}, {"stream_options": {"include_timings": True}}])
async def test_timings_come_with_the_last_usage_of_a_stream(path: str, fields: dict[str, Any]) -> None:
    async with service(timed(TIMINGS)) as s:
        *chunks, last = events(await s.client.post(path, json=body(path, stream=True, **fields)))
        assert last["choices"] == []
        assert last["usage"]["timings_ms"] == TIMINGS_MS
        assert all(chunk["usage"] is None for chunk in chunks)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_timings_come_with_the_usage_of_a_whole_answer(path: str) -> None:
    async with service(timed(TIMINGS)) as s:
        answer = (await s.client.post(path, json=body(path, include_timings=True))).json()
        assert answer["usage"]["timings_ms"] == TIMINGS_MS
        assert answer["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize("asked", [{}, {"include_timings": False}, {"include_timings": None}])
async def test_no_timings_unless_asked(asked: dict[str, Any]) -> None:
    async with service(timed(TIMINGS, TIMINGS)) as s:
        answer = (await s.chat(**asked)).json()
        assert set(answer["usage"]) == {
            "prompt_tokens", "completion_tokens", "total_tokens", "prompt_tokens_details",
        }  # fmt: skip
        options = {"include_usage": True, **asked}
        chunks = events(await s.chat(stream=True, stream_options=options))
        assert all("timings_ms" not in (chunk["usage"] or {}) for chunk in chunks)


async def test_timings_of_several_outputs_are_those_of_the_longest() -> None:
    quick = Timings(0.5, 0.25, 0.0, 0.5)
    for found in ([quick, TIMINGS], [TIMINGS, quick]):
        async with service(timed(*found)) as s:
            answer = (await s.chat(n=2, temperature=1, include_timings=True)).json()
            assert answer["usage"]["timings_ms"] == TIMINGS_MS


async def test_timings_that_are_not_known_are_null() -> None:
    async with service(timed(TIMINGS, None)) as s:
        answer = (await s.chat(n=2, temperature=1, include_timings=True)).json()
        assert answer["usage"]["timings_ms"] is None
    async with service(timed(Timings(0.0, 0.5, None, 0.5))) as s:
        assert (await s.chat(include_timings=True)).json()["usage"]["timings_ms"]["handoff"] is None
    async with service(reply("one two")) as s:
        answer = (await s.chat(stop=["two"], include_timings=True)).json()
        assert answer["usage"]["timings_ms"] is None
        answer = (await s.complete(max_tokens=0, echo=True, include_timings=True)).json()
        assert answer["usage"]["timings_ms"] is None


async def test_sampled_choices_have_seeds_of_their_own_and_greedy_ones_run_once() -> None:
    async with service() as s:
        answer = (await s.chat(n=3, seed=7, temperature=1)).json()
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
        seeds = [request.sampling.seed for request in s.backend.requests]
        assert seeds[0] == 7
        assert len(set(seeds)) == 3
        assert answer["usage"]["completion_tokens"] == 21
        assert answer["usage"]["prompt_tokens"] == len(s.backend.requests[0].prompt_ids)
        answer = (await s.chat(n=2, temperature=0)).json()
        assert len(s.backend.requests) == 4
        assert text_of(answer["choices"][0]) == text_of(answer["choices"][1])
        assert answer["usage"]["completion_tokens"] == 14


async def test_batches_are_prompt_major_and_echo_their_prompts() -> None:
    async with service(num_cached=1) as s:
        prompts = ["alpha beta", "gamma delta"]
        answer = (await s.complete(prompts, n=2, echo=True, temperature=1)).json()
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
        texts = [choice["text"] for choice in answer["choices"]]
        assert texts == ["alpha betaHello!"] * 2 + ["gamma deltaHello!"] * 2
        assert answer["usage"]["prompt_tokens"] == sum(map(len, prompts))
        assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
        chunks = events(await s.complete(prompts, n=2, echo=True, stream=True))
        assert [joined(chunks, i) for i in range(4)] == texts


@pytest.mark.parametrize(("hits", "cached"), [((48, 0, 32), 0), ((16, 16, 16), 16)])
async def test_what_one_choice_has_read_for_another_is_no_cache_hit(
    hits: tuple[int, ...], cached: int
) -> None:
    """Of a prompt that nobody had read, one choice reads it, whichever comes first, and the others find it."""
    left = iter(hits)
    async with service(lambda _: [*b"Hi", Finished("length", next(left))]) as s:
        answer = (await s.chat(n=3, temperature=1)).json()
        assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": cached}


async def test_a_choice_that_a_stop_string_ended_says_nothing_of_the_cache() -> None:
    """What it found there is told at the end, which nobody waited for; the other choices of the prompt were told."""
    left = iter([b"Ho!", b"Hi"])
    async with service(lambda _: [*next(left), Finished("length", 16)]) as s:
        answer = (await s.chat(n=2, temperature=1, stop="o!")).json()
        assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 16}


async def test_echo_alone_returns_the_prompt_and_runs_nothing() -> None:
    async with service() as s:
        answer = (await s.complete("The END", max_tokens=0, echo=True, stop=["END"])).json()
        assert text_of(answer["choices"][0]) == "The END"
        assert answer["usage"]["completion_tokens"] == 0
        assert not s.backend.requests
        assert joined(events(await s.complete("The END", max_tokens=0, echo=True, stream=True))) == "The END"


async def test_token_id_prompts_are_used_verbatim() -> None:
    async with service() as s:
        await s.complete([104, 105])
        await s.complete([[104], [105, 106]])
        assert [r.prompt_ids for r in s.backend.requests] == [(104, 105), (104,), (105, 106)]


async def test_a_stop_string_counts_tokens_up_to_the_completing_one() -> None:
    async with service(reply("one two three")) as s:
        answer = (await s.chat(stop=["three", "two"])).json()
        choice = answer["choices"][0]
        assert (text_of(choice), choice["finish_reason"], choice["stop_reason"]) == ("one ", "stop", "two")
        assert answer["usage"]["completion_tokens"] == 7
        assert answer["usage"]["prompt_tokens_details"] is None


async def test_stops_wait_for_min_tokens() -> None:
    async with service(reply("a a a a")) as s:
        answer = (await s.chat(stop=["a"], min_tokens=4)).json()
        assert text_of(answer["choices"][0]) == "a a "


async def test_nothing_of_a_stop_string_is_ever_streamed() -> None:
    async with service(reply("The quick brown fox jumps")) as s:
        for response in (
            await s.chat(stop=["own fox"], stream=True),
            await s.complete(stop=["own fox"], stream=True, max_tokens=50),
        ):
            assert joined(events(response)) == "The quick br"


async def test_chat_logprobs_carry_real_bytes_and_finite_numbers() -> None:
    async with service(reply("😀")) as s:
        choice = (await s.chat(logprobs=True, top_logprobs=3)).json()["choices"][0]
        content = choice["logprobs"]["content"]
        assert bytes(byte for entry in content[:4] for byte in entry["bytes"]).decode() == "😀"
        assert [alternative["logprob"] for alternative in content[0]["top_logprobs"]] == [-0.5, -1.0, -9999.0]
        choice = (await s.chat(logprobs=True)).json()["choices"][0]
        assert [entry["top_logprobs"] for entry in choice["logprobs"]["content"]] == [[]] * 5


async def test_completion_logprobs_are_parallel_arrays() -> None:
    async with service(reply("ab")) as s:
        logprobs = (await s.complete(logprobs=2)).json()["choices"][0]["logprobs"]
        assert logprobs["tokens"] == ["a", "b", "<|im_end|>"]
        assert logprobs["text_offset"] == [0, 1, 2]
        assert [
            set(top) >= {token}
            for top, token in zip(logprobs["top_logprobs"], logprobs["tokens"], strict=True)
        ]
        logprobs = (await s.complete(logprobs=0)).json()["choices"][0]["logprobs"]
        assert logprobs["top_logprobs"][0] == {"a": -0.5}
        ids = (await s.complete(logprobs=1, return_tokens_as_token_ids=True)).json()["choices"][0]["logprobs"]
        assert ids["tokens"] == ["token_id:97", "token_id:98", f"token_id:{EOS}"]


async def test_a_cut_character_is_one_replacement_at_the_very_end() -> None:
    async with service(reply("😀😀")) as s:
        answer = (await s.chat(max_tokens=6)).json()
        assert text_of(answer["choices"][0]) == "😀\ufffd"
        assert joined(events(await s.chat(max_tokens=6, stream=True))) == "😀\ufffd"


async def test_text_parts_read_like_a_string_and_developer_like_system() -> None:
    async with service() as s:
        await s.chat("hi")
        await s.chat([{"type": "text", "text": "hi"}])
        first, second = s.backend.requests
        assert first.prompt_ids == second.prompt_ids
        for role in ("system", "developer"):
            await s.client.post(CHAT, json={"messages": [{"role": role, "content": ""}]})
        assert s.backend.requests[2].prompt_ids == s.backend.requests[3].prompt_ids


async def test_continuing_the_last_message_adds_only_new_text_unless_echoed() -> None:
    messages = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "one two"}]
    async with service(reply(" three")) as s:
        for echo, expected in ((False, " three"), (True, "one two three")):
            fields = {"add_generation_prompt": False, "continue_final_message": True, "echo": echo}
            answer = (await s.client.post(CHAT, json={"messages": messages, **fields})).json()
            assert text_of(answer["choices"][0]) == expected
        assert bytes(s.backend.requests[0].prompt_ids[-7:]) == b"one two"


async def test_a_template_that_refuses_is_400_with_its_words() -> None:
    text = make_text("{{ raise_exception('roles must alternate') }}")
    async with service(text=text) as s:
        response = await s.chat()
        assert response.status_code == 400
        assert "roles must alternate" in error_of(response)["message"]


async def test_a_model_without_template_refuses_chats_only() -> None:
    async with service(text=make_text(None)) as s:
        assert (await s.chat()).status_code == 400
        assert (await s.complete()).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_what_cannot_fit_is_refused_before_any_work(stream: bool) -> None:
    async with service(max_total_tokens=100) as s:
        for response, param in (
            (await s.chat("word " * 100, stream=stream), "messages"),
            (await s.complete("word " * 1000, stream=stream), "prompt"),
            (await s.complete([5] * 101, stream=stream), "prompt"),
            (await s.chat("hi", max_tokens=100, stream=stream), "max_tokens"),
            (await s.chat("hi", max_completion_tokens=100, stream=stream), "max_completion_tokens"),
        ):
            assert response.status_code == 400
            error = error_of(response)
            assert (error["code"], error["param"]) == ("context_length_exceeded", param)
            assert "100" in error["message"]
        assert not s.backend.requests


async def test_the_models_own_sampling_defaults_apply_until_the_client_speaks() -> None:
    text: TextModel = make_text(sampling_defaults={"temperature": 0.6, "top_k": 20.0})
    async with service(text=text) as s:
        await s.chat()
        await s.chat(temperature=0.1, top_k=0)
        found = [(r.sampling.temperature, r.sampling.top_k) for r in s.backend.requests]
        assert found == [(0.6, 20), (0.1, 0)]


async def test_a_request_over_the_choice_limit_is_refused() -> None:
    async with service(config=make_config(server={"max_choices": 2})) as s:
        assert error_of(await s.chat(n=3))["param"] == "n"


async def test_chats_reach_the_backend_as_the_golden_prompt_ids(embedded_model_path: Path) -> None:
    cases = json.loads((Path(__file__).parents[1] / "data" / "smollm2_greedy.json").read_text())["cases"]
    text = load_text(embedded_model_path)

    def golden(request: GenerateRequest) -> list[int]:
        return next(case["output_ids"] for case in cases if case["prompt_ids"] == list(request.prompt_ids))

    async with service(golden, text=text) as s:
        for case in cases:
            body = {"messages": case["request"], "max_tokens": len(case["output_ids"]), "temperature": 0}
            answer = (await s.client.post(CHAT, json=body)).json()
            assert text_of(answer["choices"][0]) == case["text"]
