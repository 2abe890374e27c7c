"""The context limit is exact: prompt + max_tokens at the limit is served, one more is refused before any work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from coordinator.http import make_app
from tests.coordinator.fake_backend import reply
from tests.coordinator.http_tools import TEXT, error_of, events, make_config, service
from tests.engine.tiny_models import make_config as model_config
from tests.engine.tiny_models import make_oracle, write_hf
from tests.local.cluster import LocalCluster, local_cluster

LIMIT = 50
SPLITS = [(1, LIMIT - 1), (LIMIT - 1, 1), (33, LIMIT - 33)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trained for LIMIT positions, which is no multiple of a block; vocabulary of the tests' tokenizer."""
    config = model_config(vocab_size=TEXT.vocab_size, max_position_embeddings=LIMIT, eos_token_id=257)
    return write_hf(tmp_path_factory.mktemp("models") / "tiny", config, make_oracle(config))


def body(prompt_len: int, max_tokens: int, **fields: Any) -> dict[str, Any]:
    prompt = [65 + i % 26 for i in range(prompt_len)]
    return {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, **fields}


async def ask(cluster: LocalCluster, **fields: Any) -> httpx.Response:
    app = make_app(cluster.config, TEXT, cluster.backend)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://baton") as client:
        return await client.post("/v1/completions", json=fields)


@pytest.mark.parametrize(("prompt_len", "max_tokens"), SPLITS)
async def test_exactly_the_limit_is_served(prompt_len: int, max_tokens: int) -> None:
    async with service(reply("x" * LIMIT), max_total_tokens=LIMIT) as s:
        answer = (await s.complete(**body(prompt_len, max_tokens))).json()
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["total_tokens"] == LIMIT
        streamed = await s.complete(**body(prompt_len, max_tokens, stream=True))
        assert events(streamed)[-1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(("prompt_len", "max_tokens"), SPLITS)
@pytest.mark.parametrize("stream", [False, True])
async def test_one_more_than_the_limit_is_refused_before_any_work(
    prompt_len: int, max_tokens: int, stream: bool
) -> None:
    async with service(max_total_tokens=LIMIT) as s:
        for extra in ((1, 0), (0, 1)):
            fields = body(prompt_len + extra[0], max_tokens + extra[1], stream=stream)
            response = await s.complete(**fields)
            assert (response.status_code, error_of(response)["code"]) == (400, "context_length_exceeded")
        assert not s.backend.requests


async def test_chat_has_the_same_limit() -> None:
    async with service(reply("x" * 99), max_total_tokens=4096) as s:
        prompt_len = (await s.chat("hi", max_tokens=1)).json()["usage"]["prompt_tokens"]
    async with service(reply("x" * 99), max_total_tokens=prompt_len + 5) as s:
        for name in ("max_tokens", "max_completion_tokens"):
            answer = (await s.chat("hi", **{name: 5})).json()
            assert answer["choices"][0]["finish_reason"] == "length"
            refused = await s.chat("hi", **{name: 6})
            assert (error_of(refused)["code"], error_of(refused)["param"]) == (
                "context_length_exceeded",
                name,
            )


@pytest.mark.parametrize("num_prefills", [0, 1])
@pytest.mark.parametrize(
    ("sections", "limit"),
    [({}, LIMIT), ({"engine__num_blocks": 3}, 48), ({"model__max_len": 49}, 49)],
    ids=["context of the model", "blocks of the worker", "configured"],
)
async def test_a_real_worker_serves_exactly_the_limit(
    model: Path, num_prefills: int, sections: dict[str, Any], limit: int
) -> None:
    async with local_cluster(model, num_prefills, **sections) as cluster:
        assert cluster.backend.capacity().max_total_tokens == limit
        for prompt_len in (1, 15, 16, 17, limit - 2, limit - 1):
            response = await ask(cluster, **body(prompt_len, limit - prompt_len))
            assert response.status_code == 200, response.text
            answer = response.json()
            assert answer["choices"][0]["finish_reason"] == "length"
            assert answer["usage"]["total_tokens"] == limit
            refused = await ask(cluster, **body(prompt_len, limit - prompt_len + 1))
            assert error_of(refused)["code"] == "context_length_exceeded"


async def test_an_answer_without_a_given_length_ends_at_the_limit(model: Path) -> None:
    async with local_cluster(model) as cluster:
        app = make_app(make_config(), TEXT, cluster.backend)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://baton") as client:
            messages = [{"role": "user", "content": "a"}]
            fields = {"messages": messages, "add_generation_prompt": False, "ignore_eos": True}
            answer = (await client.post("/v1/chat/completions", json=fields)).json()
        assert answer["usage"]["total_tokens"] == LIMIT
        assert answer["choices"][0]["finish_reason"] == "length"
