"""The short ways of an ordinary answer say what the long ones say."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.request import Finished, Token
from coordinator.answer import CompletionWriter
from coordinator.backend import Capacity
from coordinator.forms import Envelope, make_form
from coordinator.job import Job, make_job
from coordinator.outputs import OutputText, Piece, PlainText
from coordinator.prompts import Prompt
from coordinator.schema import parse_chat, parse_completion
from tests.engine.text.builders import make_text

TEXT = make_text()
MODEL = "100%d"


def make(endpoint: Literal["chat", "completions"], **fields: Any) -> Job:
    body: dict[str, Any] = {"model": MODEL, "stream": True, "max_tokens": 50, **fields}
    params = parse_chat(body) if endpoint == "chat" else parse_completion(body)
    prompt = Prompt((65, 0xF0, 0x9F), "A" if fields.get("echo") else "")
    return make_job(endpoint, MODEL, params, [prompt], TEXT, Capacity(1000))


def is_plain(job: Job) -> bool:
    (plan,) = job.plans
    assert plan.request is not None
    return PlainText.suits(plan, plan.request, job)


@given(st.lists(st.integers(0, 257), max_size=40), st.booleans(), st.booleans())
def test_text_that_goes_straight_through_is_that_of_the_long_way(
    ids: list[int], skip: bool, ignore_eos: bool
) -> None:
    job = make("chat", skip_special_tokens=skip, ignore_eos=ignore_eos, stop_token_ids=[66])
    (plan,) = job.plans
    assert plan.request is not None
    assert is_plain(job)
    found = []
    for kind in (PlainText, OutputText):
        output = kind(plan, plan.request, job, TEXT)
        pieces = [output.push(Token(i, token_id)) for i, token_id in enumerate(ids)]
        pieces.append(output.finish(Finished("length")))
        found.append([(piece.texts, piece.num_tokens, piece.end) for piece in pieces])
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("endpoint", "fields"),
    [
        ("chat", {"stop": ["x"]}),
        ("chat", {"logprobs": True}),
        ("completions", {"logprobs": 0}),
        ("completions", {"echo": True}),
        ("completions", {"echo": True, "logprobs": 1}),
    ],
)
def test_whoever_wants_more_than_text_goes_the_long_way(
    endpoint: Literal["chat", "completions"], fields: dict[str, Any]
) -> None:
    assert not is_plain(make(endpoint, **fields))


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
@pytest.mark.parametrize("wants_usage", [False, True])
@given(text=st.text(max_size=20))
def test_a_chunk_that_is_known_beforehand_is_the_one_that_is_made_each_time(
    endpoint: Literal["chat", "completions"], wants_usage: bool, text: str
) -> None:
    job = make(endpoint, stream_options={"include_usage": wants_usage})
    form, envelope, piece = make_form(job, TEXT), Envelope(job, TEXT), Piece([text], [], 1)
    assert form.around is not None
    short = list(CompletionWriter(job, TEXT).events({job.plans[0]: piece}))
    assert short == [envelope.chunk(choice, 1) for choice in form.deltas(0, piece)]
