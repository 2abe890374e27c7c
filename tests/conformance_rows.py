"""The OpenAI surface from the outside: tests/data/conformance.jsonl says what is expected, and every row has a
check here. tests/cluster/test_conformance.py asks two pools under Ray, tests/local/test_conformance.py one engine.

Rows that need a killed worker, a key or a crowd are tests/cluster/test_lives.py's, test_serve.py's and the gateway's.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from tests.cluster.instance import wait_until
from tests.conformance_tools import (
    CHAT,
    COUNT,
    GREEDY,
    MODEL,
    TEXT,
    Api,
    content,
    error_of,
    reason,
)

ROWS = {
    row["id"]: row
    for row in map(
        json.loads,
        (Path(__file__).parent / "data" / "conformance.jsonl").read_text("utf-8").splitlines(),
    )
}
CHECKS: dict[str, Callable[[Api, dict[str, Any]], None]] = {}
Check = Callable[[Api, dict[str, Any]], None]
LIMIT = 8192


def row(*ids: str) -> Callable[[Check], Check]:
    """The check of these rows; it gets the row's body without its `$` directions, and with the model's name."""

    def register(check: Check) -> Check:
        CHECKS.update(dict.fromkeys(ids, check))
        return check

    return register


def body_of(row_id: str) -> dict[str, Any]:
    body = {key: value for key, value in (ROWS[row_id]["body"] or {}).items() if not key.startswith("$")}
    return body | ({"model": MODEL} if "model" in body else {})


# --- routes and models ------------------------------------------------------------------------------------------------


@row("H01")
def check_health(api: Api, body: dict[str, Any]) -> None:
    begun = time.monotonic()
    assert api.get("/health").status_code == 200
    assert time.monotonic() - begun < 1.0


@row("H02")
def check_ready(api: Api, body: dict[str, Any]) -> None:
    assert api.get("/ready").json()["is_ready"] is True


@row("M01", "M02")
def check_models(api: Api, body: dict[str, Any]) -> None:
    listed = api.get("/v1/models").json()
    assert listed["object"] == "list"
    (card,) = listed["data"]
    assert (card["id"], card["object"], card["owned_by"]) == (MODEL, "model", "baton")
    assert isinstance(card["created"], int)
    assert card["max_model_len"] == LIMIT
    assert api.get(f"/v1/models/{MODEL}").json() == card
    error_of(api.get("/v1/models/no%2Fsuch"), "model")


@row("Z01")
def check_tokenize(api: Api, body: dict[str, Any]) -> None:
    found = api.ok("/tokenize", body)
    assert found["count"] == len(found["tokens"])
    assert found["max_model_len"] == LIMIT
    assert api.ok("/detokenize", {"tokens": found["tokens"]}) == {"prompt": "hello"}
    for tokens in ([-1], [10**12], ["x"]):
        api.refused("/detokenize", {"tokens": tokens}, "tokens")


@row("R01")
def check_request_id(api: Api, body: dict[str, Any]) -> None:
    for extra in ({}, {"stream": True}, {"temperature": -1}):
        response = api.post(CHAT, body | extra, headers={"X-Request-Id": "conf-123"})
        assert response.headers["x-request-id"] == "conf-123"
    made = {
        api.post(CHAT, body, headers=h).headers["x-request-id"] for h in ({}, {"X-Request-Id": "x" * 300})
    }
    assert len(made) == 2
    assert all(len(each) <= 128 for each in made)


@row("R02")
def check_equal_request_ids(api: Api, body: dict[str, Any]) -> None:
    first, second = api.together([body | {"request_id": "dup"}] * 2)
    assert first.status_code == second.status_code == 200
    assert first.json()["id"] != second.json()["id"]
    assert content(first.json()) == content(second.json())


# --- errors -----------------------------------------------------------------------------------------------------------


@row("E01")
def check_broken_bodies(api: Api, body: dict[str, Any]) -> None:
    for raw in (b'{"model": ', b"[1,2]", b"null", b"42", b'"str"', b""):
        api.refused(CHAT, raw)


@row("E03")
def check_content_types(api: Api, body: dict[str, Any]) -> None:
    raw = json.dumps(
        {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    ).encode()
    refused = httpx.post(api.url + CHAT, content=raw, headers={"content-type": "text/plain"})
    assert refused.status_code in (400, 415)
    error_of(refused)
    taken = httpx.post(
        api.url + CHAT, content=raw, headers={"content-type": "Application/JSON; charset=utf-8"}
    )
    assert taken.status_code == 200


@row("E06")
def check_half_a_surrogate(api: Api, body: dict[str, Any]) -> None:
    raw = ROWS["E06"]["body"]["$raw"].replace("MODEL", MODEL).encode()
    response = api.post(CHAT, raw)
    assert response.status_code in (200, 400)
    api.chat("hi", max_tokens=2)


@row("E07")
def check_no_numbers(api: Api, body: dict[str, Any]) -> None:
    for name in ("temperature", "top_p", "presence_penalty", "frequency_penalty"):
        for value in ("NaN", "Infinity", "-Infinity", "1e999"):
            api.refused(CHAT, f'{{"messages":[{{"role":"user","content":"hi"}}],"{name}":{value}}}'.encode())


@row("E10")
def check_unknown_model(api: Api, body: dict[str, Any]) -> None:
    error = api.refused(CHAT, body | {"model": "no-such-model"}, "model", 404)
    assert error["code"] == "model_not_found"


@row("E11")
def check_nothing_asked(api: Api, body: dict[str, Any]) -> None:
    api.refused(CHAT, body, "messages")
    api.refused(CHAT, body | {"messages": []}, "messages")
    for extra in ({}, {"prompt": ""}, {"prompt": []}, {"prompt": [[]]}):
        api.refused(TEXT, {"model": MODEL, **extra}, "prompt")


@row("E14", "E15", "P17", "P19")
def check_harmless_fields(api: Api, body: dict[str, Any]) -> None:
    api.ok(CHAT, {"max_tokens": 4} | body)


@row("E17")
def check_too_long_a_prompt(api: Api, body: dict[str, Any]) -> None:
    long = [{"role": "user", "content": "word " * 4 * LIMIT}]
    for extra in ({}, {"stream": True}):
        error = api.refused(CHAT, body | {"messages": long} | extra, "messages")
        assert error["code"] == "context_length_exceeded"
        assert str(LIMIT) in error["message"]


@row("E18")
def check_too_long_an_answer(api: Api, body: dict[str, Any]) -> None:
    for extra in ({}, {"stream": True}):
        error = api.refused(CHAT, body | {"max_tokens": LIMIT} | extra, "max_tokens")
        assert error["code"] == "context_length_exceeded"


@row("P01", "P02", "P04", "P05")
def check_ranges(api: Api, body: dict[str, Any]) -> None:
    (values,) = [r["body"]["$values"] for r in ROWS.values() if r["body"] and body_of(r["id"]) == body]
    ((name, bad),) = values.items()
    for value in bad:
        api.refused(CHAT, body | {name: value}, name)
        api.refused(TEXT, {"model": MODEL, "prompt": "hi", name: value}, name)


@row("P09")
def check_ids_out_of_vocabulary(api: Api, body: dict[str, Any]) -> None:
    api.refused(CHAT, body, "logit_bias")
    plain = {key: value for key, value in body.items() if key != "logit_bias"}
    for name in ("stop_token_ids", "allowed_token_ids"):
        for bad in ([99999999], [-1]):
            api.refused(CHAT, plain | {name: bad, "min_tokens": 1}, name)
    api.refused(CHAT, plain | {"logit_bias": {"-1": 5}}, "logit_bias")


@row("P10")
def check_top_logprobs(api: Api, body: dict[str, Any]) -> None:
    api.refused(CHAT, body, "top_logprobs")
    api.refused(CHAT, body | {"logprobs": True, "top_logprobs": 21}, "top_logprobs")
    api.ok(CHAT, body | {"logprobs": True, "top_logprobs": 0})


@row("P12")
def check_integers(api: Api, body: dict[str, Any]) -> None:
    api.refused(CHAT, body, "seed")
    for seed in (-1, 2**63 - 1):
        api.ok(CHAT, body | {"seed": seed})
    for name, value in (("min_tokens", 17), ("top_k", -2), ("repetition_penalty", 0)):
        api.refused(CHAT, body | {"seed": 1, name: value}, name)


@row("P13")
def check_stream_options(api: Api, body: dict[str, Any]) -> None:
    api.refused(CHAT, body, "stream_options")
    api.ok(CHAT, body | {"stream_options": None})


@row("P16")
def check_what_is_not_built(api: Api, body: dict[str, Any]) -> None:
    api.refused(TEXT, body, "suffix")
    plain = {key: value for key, value in body.items() if key != "suffix"}
    api.refused(TEXT, plain | {"use_beam_search": True}, "use_beam_search")
    api.refused(TEXT, plain | {"best_of": 2, "stream": True}, "best_of")
    assert len(api.ok(TEXT, plain | {"best_of": 2, "temperature": 1})["choices"]) == 1


# --- chat -------------------------------------------------------------------------------------------------------------


@row("C01")
def check_chat(api: Api, body: dict[str, Any]) -> None:
    answer = api.ok(CHAT, body)
    assert answer["id"].startswith("chatcmpl-")
    assert (answer["object"], answer["model"]) == ("chat.completion", MODEL)
    assert abs(answer["created"] - time.time()) < 60
    (choice,) = answer["choices"]
    assert (choice["index"], choice["message"]["role"], choice["logprobs"]) == (0, "assistant", None)
    assert choice["finish_reason"] in ("stop", "length")
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


@row("C03")
def check_two_limits(api: Api, body: dict[str, Any]) -> None:
    assert api.ok(CHAT, body)["usage"]["completion_tokens"] <= 3
    api.refused(CHAT, body | {"max_completion_tokens": 0}, "max_completion_tokens")


@row("C05", "D02")
def check_min_tokens(api: Api, body: dict[str, Any]) -> None:
    body |= {"messages": [{"role": "user", "content": "Say only: ok"}]}
    for extra in ({}, {"stop": ["a", "e"]}, {"stop_token_ids": api.ids(" the")[:1]}):
        assert api.ok(CHAT, body | extra)["usage"]["completion_tokens"] >= 20


@row("C06")
def check_prompt_tokens(api: Api, body: dict[str, Any]) -> None:
    counted = api.ok("/tokenize", {"messages": body["messages"]})["count"]
    assert api.ok(CHAT, body)["usage"]["prompt_tokens"] == counted


@row("C08")
def check_n(api: Api, body: dict[str, Any]) -> None:
    answer = api.ok(CHAT, body)
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2]
    texts = {content(answer, i) for i in range(3)}
    assert len(texts) > 1
    single = api.ok(CHAT, body | {"n": 1})
    assert answer["usage"]["prompt_tokens"] == single["usage"]["prompt_tokens"]
    assert content(single) == content(answer)
    stream = api.stream(CHAT, body)
    assert [stream.text(i) for i in range(3)] == [content(answer, i) for i in range(3)]
    greedy = api.ok(CHAT, body | {"n": 2, "temperature": 0})
    assert content(greedy, 0) == content(greedy, 1)


@row("C11")
def check_content_parts(api: Api, body: dict[str, Any]) -> None:
    parts, plain = api.ok(CHAT, body), api.chat("hi")
    assert content(parts) == content(plain)
    assert parts["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]
    two = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert content(api.chat(two)) == content(api.chat("a\nb"))
    api.chat([{"role": "user", "content": "", "name": "n"}])


@row("C14")
def check_odd_roles(api: Api, body: dict[str, Any]) -> None:
    orders = ("user user", "assistant user", "user system user", "developer user", "system")
    for roles in orders:
        messages = [{"role": role, "content": role} for role in roles.split()]
        assert api.post(CHAT, body | {"messages": messages}).status_code in (200, 400)
    api.ok(
        CHAT, body | {"messages": [{"role": "developer", "content": "x"}, {"role": "user", "content": "y"}]}
    )


@row("C15")
def check_continuing(api: Api, body: dict[str, Any]) -> None:
    text = content(api.ok(CHAT, body))
    assert not text.startswith("one two")
    assert content(api.ok(CHAT, body | {"echo": True})) == "one two" + text
    api.refused(CHAT, body | {"add_generation_prompt": True}, "continue_final_message")


@row("C18")
def check_tool_history(api: Api, body: dict[str, Any]) -> None:
    for arguments in ("null", "", "[1]", '"x"', "{bad", '{"city":"Paris"}'):
        body["messages"][1]["tool_calls"][0]["function"]["arguments"] = arguments
        assert api.post(CHAT, body).status_code in (200, 400)
    body["messages"][1] |= {"tool_calls": [], "content": "x"}
    api.ok(CHAT, body)


# --- completions ------------------------------------------------------------------------------------------------------


@row("K01")
def check_completion(api: Api, body: dict[str, Any]) -> None:
    answer = api.ok(TEXT, body)
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    assert answer["usage"]["completion_tokens"] <= 16
    assert isinstance(answer["choices"][0]["text"], str)


@row("K02")
def check_batches(api: Api, body: dict[str, Any]) -> None:
    answer = api.ok(TEXT, body)
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2, 3]
    begins = [c["text"].startswith(body["prompt"][i // 2]) for i, c in enumerate(answer["choices"])]
    assert all(begins)
    alone = [api.text(prompt, max_tokens=1)["usage"]["prompt_tokens"] for prompt in body["prompt"]]
    assert answer["usage"]["prompt_tokens"] == sum(alone)


@row("K04", "D07")
def check_prompt_logprobs(api: Api, body: dict[str, Any]) -> None:
    for _ in range(2):  # the second time the prefix could be cached
        answer = api.ok(TEXT, body)
        (choice,) = answer["choices"]
        found, usage = choice["logprobs"], answer["usage"]
        num_tokens = usage["prompt_tokens"] + usage["completion_tokens"]
        assert usage["completion_tokens"] == body["max_tokens"]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert len(found[name]) == num_tokens
        assert found["token_logprobs"][0] is found["top_logprobs"][0] is None
        assert all(math.isfinite(value) and value <= 0 for value in found["token_logprobs"][1:])
        assert all(found["top_logprobs"][1:])
        assert "".join(found["tokens"][: usage["prompt_tokens"]]) == body["prompt"]
        for token, offset in zip(found["tokens"], found["text_offset"], strict=True):
            assert choice["text"][offset:].startswith(token)
        if body["max_tokens"] == 0:
            assert choice["text"] == body["prompt"]


@row("K05")
def check_echo_with_logprobs(api: Api, body: dict[str, Any]) -> None:
    check_prompt_logprobs(api, body)
    found = api.ok(TEXT, body)["choices"][0]["logprobs"]
    for token, top in zip(found["tokens"][1:], found["top_logprobs"][1:], strict=True):
        assert 2 <= len(top) <= 3
        assert token in top
    streamed = api.stream(TEXT, body)
    assert [t for c in streamed.choices if c["logprobs"] for t in c["logprobs"]["tokens"]] == found["tokens"]
    zero = api.ok(TEXT, body | {"logprobs": 0})["choices"][0]["logprobs"]
    assert all(len(top) == 1 for top in zero["top_logprobs"][1:])
    assert api.ok(TEXT, body | {"logprobs": None})["choices"][0]["logprobs"] is None
    api.refused(TEXT, body | {"logprobs": 21}, "logprobs")


@row("K09")
def check_streamed_logprobs(api: Api, body: dict[str, Any]) -> None:
    whole = api.ok(TEXT, body | {"stream": False})["choices"][0]["logprobs"]
    streamed = api.stream(TEXT, body)
    for name in ("tokens", "text_offset", "token_logprobs"):
        joined = [entry for c in streamed.choices if c["logprobs"] for entry in c["logprobs"][name]]
        assert joined == whole[name]


# --- streams ----------------------------------------------------------------------------------------------------------


@row("S01", "S02", "S04")
def check_stream(api: Api, body: dict[str, Any]) -> None:
    stream = api.stream(CHAT, body)
    assert stream.headers["content-type"].startswith("text/event-stream")
    assert stream.headers["cache-control"] == "no-cache"
    assert stream.headers["x-accel-buffering"] == "no"
    assert "content-length" not in stream.headers
    for name in ("id", "created", "model", "object"):
        assert len({chunk[name] for chunk in stream.chunks}) == 1
    assert stream.chunks[0]["object"] == "chat.completion.chunk"
    assert stream.chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all({"index", "delta", "finish_reason"} <= set(choice) for choice in stream.choices)
    assert all(choice["finish_reason"] != "" for choice in stream.choices)


@row("S05")
def check_stream_equals_whole(api: Api, body: dict[str, Any]) -> None:
    whole, stream = api.ok(CHAT, body | {"stream": False}), api.stream(CHAT, body)
    assert stream.reasons() == [reason(whole)]
    assert stream.choices[-1]["finish_reason"] is not None
    assert stream.text() == content(whole)


@row("S07", "S08", "D10")
def check_stream_usage(api: Api, body: dict[str, Any]) -> None:
    whole = api.ok(CHAT, body | {"stream": False, "stream_options": None})["usage"]
    stream = api.stream(CHAT, body)
    assert stream.chunks[-1]["choices"] == []
    usage = stream.chunks[-1]["usage"]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert usage[name] == whole[name]
    assert 0 <= usage["prompt_tokens_details"]["cached_tokens"] <= usage["prompt_tokens"]
    counts = [chunk["usage"]["completion_tokens"] for chunk in stream.chunks if chunk["usage"]]
    assert counts == sorted(counts)
    is_continuous = body["stream_options"].get("continuous_usage_stats", False)
    assert len(counts) == (len(stream.chunks) if is_continuous else 1)


@row("S10", "D04")
def check_logprobs_of_a_stream(api: Api, body: dict[str, Any]) -> None:
    for extra in ({}, {"stop": ["three"]}):
        whole = api.ok(CHAT, body | extra | {"stream": False})
        entries = whole["choices"][0]["logprobs"]["content"]
        stream = api.stream(CHAT, body | extra | {"stream_options": {"include_usage": True}})
        assert len(entries) == whole["usage"]["completion_tokens"] == len(stream.logprobs())
        assert [e["token"] for e in entries] == [e["token"] for e in stream.logprobs()]


@row("S11")
def check_stream_comes_piece_by_piece(api: Api, body: dict[str, Any]) -> None:
    with httpx.stream("POST", api.url + CHAT, json=body | {"max_tokens": 4000}, timeout=60.0) as response:
        lines = (line for line in response.iter_lines() if line)
        assert all(next(lines).startswith("data: {") for _ in range(10))
        assert _num_held(api) > 0, "expected the answer to be written still"


@row("S13")
def check_no_cross_talk(api: Api, body: dict[str, Any]) -> None:
    bodies = [
        body | {"stream": False, "max_tokens": 8, "messages": [{"role": "user", "content": f"Number {i}?"}]}
        for i in range(32)
    ]
    together = api.together(bodies)
    assert not [response.text for response in together if response.status_code != 200]
    assert len({response.json()["id"] for response in together}) == 32
    for number in (0, 13, 31):
        assert content(together[number].json()) == content(api.ok(CHAT, bodies[number]))


@row("S16")
def check_leaving(api: Api, body: dict[str, Any]) -> None:
    for _ in range(5):
        with httpx.stream("POST", api.url + CHAT, json=body, timeout=60.0) as response:
            lines = (line for line in response.iter_lines() if line)
            assert [next(lines) for _ in range(3)]
    wait_until(lambda: _num_held(api) == 0, 5.0, "the blocks of clients that left to be free")


@row("S17")
def check_leaving_what_does_not_stream(api: Api, body: dict[str, Any]) -> None:
    for _ in range(5):
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(api.url + CHAT, json=body, timeout=0.5)
    wait_until(lambda: _num_held(api) == 0, 5.0, "the blocks of clients that left to be free")
    api.chat("hi", max_tokens=10)


def _num_held(api: Api) -> int:
    workers = api.get("/debug/kv").json()["workers"]
    return sum(worker[state] for worker in workers for state in ("running", "reserved", "in_handoff"))


# --- stops, text, logprobs, sampling ----------------------------------------------------------------------------------


@cache
def reference(api: Api) -> tuple[str, list[str]]:
    """The answer without a stop, and its tokens."""
    answer = api.chat(COUNT, max_tokens=64, logprobs=True)
    return content(answer), [entry["token"] for entry in answer["choices"][0]["logprobs"]["content"]]


@row("T01", "T02", "T04", "T05")
def check_stops(api: Api, body: dict[str, Any]) -> None:
    text, tokens = reference(api)
    across = tokens[5][-2:] + tokens[6][:2]
    for stop in ([across], [text[40:44], text[20:24]], [text[0]]):
        at = min(text.index(each) + len(each) for each in stop)
        (first,) = {each for each in stop if text.index(each) + len(each) == at}
        expected = text[: at - len(first)]
        whole = api.ok(CHAT, body | {"stop": stop, "stream": False})
        assert (content(whole), reason(whole)) == (expected, "stop")
        assert whole["usage"]["completion_tokens"] >= 1
        stream = api.stream(CHAT, body | {"stop": stop})
        assert (stream.text(), stream.reasons()) == (expected, ["stop"])


@row("T07")
def check_stops_ignore_the_prompt(api: Api, body: dict[str, Any]) -> None:
    assert api.ok(TEXT, body)["choices"][0]["text"].startswith(body["prompt"])


@row("T08", "D05")
def check_stop_ids(api: Api, body: dict[str, Any]) -> None:
    text, tokens = reference(api)
    for position in (0, 6):
        (stop_id,) = api.ids(tokens[position])[:1]
        first = next(i for i, token in enumerate(tokens) if token == tokens[position])
        answer = api.ok(CHAT, body | {"stop_token_ids": [stop_id]})
        assert reason(answer) == "stop"
        assert answer["usage"]["completion_tokens"] == first + 1
        assert content(answer) == "".join(tokens[:first])
        kept = api.ok(CHAT, body | {"stop_token_ids": [stop_id], "include_stop_str_in_output": True})
        assert content(kept) == "".join(tokens[: first + 1])
    assert text.startswith(tokens[0])


@row("U01")
def check_characters(api: Api, body: dict[str, Any]) -> None:
    const = body["response_format"]["json_schema"]["schema"]["const"]
    stream = api.stream(CHAT, body)
    assert json.loads(stream.text()) == const
    assert all("\ufffd" not in json.dumps(chunk, ensure_ascii=False) for chunk in stream.chunks)


@row("U02")
def check_a_cut_character(api: Api, body: dict[str, Any]) -> None:
    whole, stream = api.ok(CHAT, body), api.stream(CHAT, body)
    assert reason(whole) == "length"
    assert content(whole) == stream.text()
    assert content(whole).rstrip("\ufffd") in '"😀😀😀😀"'
    assert content(whole).count("\ufffd") <= 1


@row("L01")
def check_logprobs(api: Api, body: dict[str, Any]) -> None:
    answer = api.ok(CHAT, body)
    entries = answer["choices"][0]["logprobs"]["content"]
    assert len(entries) == answer["usage"]["completion_tokens"]
    for entry in entries:
        ranked = [top["logprob"] for top in entry["top_logprobs"]]
        assert len(ranked) == 5
        assert ranked == sorted(ranked, reverse=True)
        assert entry["token"] == entry["top_logprobs"][0]["token"]
        assert bytes(entry["bytes"]).decode("utf-8", "replace") == entry["token"]
    none = api.ok(CHAT, {**body, "top_logprobs": 0})["choices"][0]["logprobs"]["content"]
    assert all(entry["top_logprobs"] == [] for entry in none)


@row("L03")
def check_impossible_alternatives(api: Api, body: dict[str, Any]) -> None:
    (token_id,) = api.ids("x")
    answer = api.ok(CHAT, body | {"allowed_token_ids": [token_id]})
    assert content(answer) == "xxx"
    assert "NaN" not in json.dumps(answer)


@row("G01")
def check_bias(api: Api, body: dict[str, Any]) -> None:
    (token_id,) = api.ids("x")
    answer = api.ok(CHAT, body | {"logit_bias": {str(token_id): 100}})
    assert {entry["token"] for entry in answer["choices"][0]["logprobs"]["content"]} == {"x"}
    first = api.chat("hi", max_tokens=1)
    (banned,) = api.ids(content(first))[:1]
    assert content(api.chat("hi", max_tokens=1, logit_bias={str(banned): -100})) != content(first)


@row("G02")
def check_penalties_spare_the_prompt(api: Api, body: dict[str, Any]) -> None:
    def ranking(**extra: Any) -> list[str]:
        (entry,) = api.ok(CHAT, body | extra)["choices"][0]["logprobs"]["content"]
        return [top["token"] for top in entry["top_logprobs"]]

    assert ranking() == ranking(presence_penalty=0, frequency_penalty=0)


@row("D01")
def check_one_token(api: Api, body: dict[str, Any]) -> None:
    answer = api.ok(CHAT, body)
    assert answer["usage"]["completion_tokens"] == 1
    assert len(answer["choices"][0]["logprobs"]["content"]) == 1


# --- tools and structure ----------------------------------------------------------------------------------------------


def schemas(body: dict[str, Any]) -> dict[str, Any]:
    return {tool["function"]["name"]: tool["function"]["parameters"] for tool in body["tools"]}


def check_calls(calls: list[dict[str, Any]], body: dict[str, Any]) -> None:
    for call in calls:
        assert call["type"] == "function"
        arguments = json.loads(call["function"]["arguments"])
        jsonschema.validate(arguments, schemas(body)[call["function"]["name"]])
    assert len({call["id"] for call in calls}) == len(calls)


@row("X01", "X02", "X04", "X08")
def check_forced_calls(api: Api, body: dict[str, Any]) -> None:
    body |= {"max_tokens": 200}
    is_named = body["tool_choice"] != "required"
    whole = api.ok(CHAT, body | {"stream": False})
    message, why = whole["choices"][0]["message"], reason(whole)
    assert not message["content"]
    stream = api.stream(CHAT, body)
    assert stream.reasons() == [why]
    assert not stream.text()
    assert why in (("stop", "length") if is_named else ("tool_calls", "length"))
    if why != "length":
        check_calls(message["tool_calls"], body)
        check_calls(stream.tool_calls(), body)
    functions = [call["function"] for call in message["tool_calls"]]
    assert functions == [call["function"] for call in stream.tool_calls()]
    assert {call["id"] for call in message["tool_calls"]}.isdisjoint(c["id"] for c in stream.tool_calls())
    if is_named or body.get("parallel_tool_calls") is False:
        assert len(functions) == 1
    if is_named:
        assert functions[0]["name"] == "get_weather"
        api.refused(
            CHAT, body | {"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"
        )


@row("X05")
def check_a_cut_call(api: Api, body: dict[str, Any]) -> None:
    for max_tokens in (4, 12, 20):
        whole = api.ok(CHAT, body | {"max_tokens": max_tokens})
        assert reason(whole) == "length"
        assert api.stream(CHAT, body | {"max_tokens": max_tokens}).reasons() == ["length"]
        assert "<tool" not in (whole["choices"][0]["message"]["content"] or "")


@row("X09")
def check_tools_not_used(api: Api, body: dict[str, Any]) -> None:
    answer = api.ok(CHAT, body)
    message = answer["choices"][0]["message"]
    assert reason(answer) in ("stop", "length", "tool_calls")
    assert (reason(answer) == "tool_calls") == bool(message.get("tool_calls"))
    assert "<tool_call>" not in (message["content"] or "")
    assert api.stream(CHAT, body).text() == (message["content"] or "")
    assert content(api.ok(CHAT, body | {"tool_choice": "none"})) is not None


@row("J01")
def check_json_object(api: Api, body: dict[str, Any]) -> None:
    whole, stream = api.ok(CHAT, body), api.stream(CHAT, body)
    assert stream.text() == content(whole)
    if reason(whole) == "stop":
        assert isinstance(json.loads(content(whole)), dict)


@row("J02")
def check_json_schema(api: Api, body: dict[str, Any]) -> None:
    answer = api.ok(CHAT, body)
    found = json.loads(content(answer))
    assert list(found) == ["k", "n"]
    assert found["k"] in ("x", "y")
    assert isinstance(found["n"], int)


@row("J04")
def check_a_cut_value(api: Api, body: dict[str, Any]) -> None:
    answer = api.ok(CHAT, body)
    assert reason(answer) == "length"
    assert content(answer).lstrip().startswith("{")


@row("J05")
def check_constraints_are_never_dropped(api: Api, body: dict[str, Any]) -> None:
    guided = api.ok(CHAT, body)
    assert content(guided).lstrip().startswith("{")
    if reason(guided) == "stop":
        assert isinstance(json.loads(content(guided)), dict)
    for kind, expected in ({"regex": r"\d{3}"}, None), ({"choice": ["xyzzy"]}, "xyzzy"):
        for path, prompt in ((CHAT, {"messages": COUNT}), (TEXT, {"prompt": "a"})):
            (choice,) = api.ok(path, {**GREEDY, **prompt, "structured_outputs": kind})["choices"]
            text = choice["message"]["content"] if path == CHAT else choice["text"]
            assert text == expected if expected else text.isdecimal()
            assert choice["finish_reason"] == "stop"


@row("V01")
def check_responses(api: Api, body: dict[str, Any]) -> None:
    with httpx.stream("POST", f"{api.url}/v1/responses", json=body, timeout=60.0) as response:
        assert response.status_code == 200
        blocks = response.read().decode().strip().split("\n\n")
    events = []
    for block in blocks:
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    assert [each["sequence_number"] for each in events] == list(range(len(events)))
    kinds = [each["type"].removeprefix("response.") for each in events]
    assert [kind for kind in dict.fromkeys(kinds) if kind != "incomplete"] == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta", "output_text.done",
        "content_part.done", "output_item.done", *(["completed"] if kinds[-1] == "completed" else []),
    ]  # fmt: skip
    assert kinds[-1] in ("completed", "incomplete")
    final = events[-1]["response"]
    assert final["output"][0]["content"][0]["text"] == events[-4]["text"]
    usage = final["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert {"input_tokens_details", "output_tokens_details"} <= set(usage)
