"""What the conformance rows need: a client that speaks raw HTTP, so that nothing is smoothed over."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import httpx

MODEL = "smollm2-135m-instruct"
COUNT = [{"role": "user", "content": "Count from one to thirty in words."}]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@dataclass
class Streamed:
    """A stream as it came: chunks and raw bytes."""

    status: int
    headers: httpx.Headers
    raw: bytes
    chunks: list[dict[str, Any]] = field(default_factory=list)

    @property
    def choices(self) -> list[dict[str, Any]]:
        return [choice for chunk in self.chunks for choice in chunk["choices"]]

    def text(self, index: int = 0) -> str:
        mine = [choice for choice in self.choices if choice["index"] == index]
        return "".join((c["delta"].get("content") or "") if "delta" in c else c["text"] for c in mine)

    def reasons(self, index: int = 0) -> list[str]:
        mine = [c["finish_reason"] for c in self.choices if c["index"] == index]
        return [reason for reason in mine if reason is not None]

    def logprobs(self) -> list[dict[str, Any]]:
        return [e for c in self.choices if c["logprobs"] for e in c["logprobs"]["content"]]

    def tool_calls(self) -> list[dict[str, Any]]:
        """Assembled as clients do, after checking what their assembly rests on."""
        calls: list[dict[str, Any]] = []
        for choice in self.choices:
            for delta in choice["delta"].get("tool_calls", []):
                if delta["index"] == len(calls):
                    assert delta["id"]
                    assert delta["type"] == "function"
                    assert delta["function"]["name"]
                    calls.append({"id": delta["id"], "type": "function", "function": dict(delta["function"])})
                else:
                    assert set(delta) == {"index", "function"}, delta
                    assert set(delta["function"]) == {"arguments"}, delta
                    calls[delta["index"]]["function"]["arguments"] += delta["function"]["arguments"]
        return calls


class Api:
    """Raw requests to one server."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._client = httpx.Client(base_url=url, timeout=120.0)

    def close(self) -> None:
        self._client.close()

    def get(self, path: str) -> httpx.Response:
        return self._client.get(path)

    def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> httpx.Response:
        if isinstance(body, bytes):
            headers = {"content-type": "application/json", **(headers or {})}
            return self._client.post(path, content=body, headers=headers)
        return self._client.post(path, json=body, headers=headers)

    def chat(self, messages: Any = COUNT, **fields: Any) -> dict[str, Any]:
        return self.ok(CHAT, {"model": MODEL, "messages": _messages(messages), **GREEDY, **fields})

    def text(self, prompt: Any = "The capital of France is", **fields: Any) -> dict[str, Any]:
        return self.ok(TEXT, {"model": MODEL, "prompt": prompt, **GREEDY, **fields})

    def ok(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        response = self.post(path, body)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("application/json")
        found: dict[str, Any] = response.json()
        return found

    def refused(self, path: str, body: Any, param: str | None = None, status: int = 400) -> dict[str, Any]:
        begun = time.monotonic()
        response = self.post(path, body)
        assert response.status_code == status, (response.status_code, response.text[:300])
        assert time.monotonic() - begun < 5.0
        return error_of(response, param)

    def stream(self, path: str, body: dict[str, Any]) -> Streamed:
        """A whole stream, whose framing is checked byte by byte."""
        raw = b""
        with self._client.stream("POST", path, json={**body, "stream": True}) as response:
            for part in response.iter_raw():
                raw += part
            found = Streamed(response.status_code, response.headers, raw)
        assert found.status == 200, raw
        *blocks, rest = raw.decode().split("\n\n")
        assert rest == ""
        data = [block for block in blocks if not block.startswith(":")]
        assert all(block.startswith("data: ") and "\n" not in block for block in data)
        assert data[-1] == "data: [DONE]"
        assert data.count("data: [DONE]") == 1
        assert blocks[-1] == data[-1]
        found.chunks = [json.loads(block.removeprefix("data: ")) for block in data[:-1]]
        return found

    def chat_stream(self, messages: Any = COUNT, **fields: Any) -> Streamed:
        return self.stream(CHAT, {"model": MODEL, "messages": _messages(messages), **GREEDY, **fields})

    def text_stream(self, prompt: Any = "The capital of France is", **fields: Any) -> Streamed:
        return self.stream(TEXT, {"model": MODEL, "prompt": prompt, **GREEDY, **fields})

    def ids(self, text: str) -> list[int]:
        found: list[int] = self.ok("/tokenize", {"prompt": text, "add_special_tokens": False})["tokens"]
        return found

    def together(self, bodies: list[dict[str, Any]], path: str = CHAT) -> list[httpx.Response]:
        """All at once, each on a connection of its own."""
        found: list[httpx.Response | None] = [None] * len(bodies)

        def run(number: int) -> None:
            found[number] = httpx.post(self.url + path, json=bodies[number], timeout=120.0)

        threads = [threading.Thread(target=run, args=(i,)) for i in range(len(bodies))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [response for response in found if response is not None]


GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 16}


def _messages(messages: Any) -> Any:
    return [{"role": "user", "content": messages}] if isinstance(messages, str) else messages


def error_of(response: httpx.Response, param: str | None = None) -> dict[str, Any]:
    body = response.json()
    assert set(body) == {"error"}, body
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert isinstance(body["error"]["message"], str)
    assert isinstance(body["error"]["code"], str | None)
    if param is not None:
        assert body["error"]["param"] == param, body
    error: dict[str, Any] = body["error"]
    return error


def content(answer: dict[str, Any], index: int = 0) -> str:
    found: str = answer["choices"][index]["message"]["content"]
    return found


def reason(answer: dict[str, Any], index: int = 0) -> str:
    found: str = answer["choices"][index]["finish_reason"]
    return found
