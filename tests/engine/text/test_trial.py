"""Grammars are tried in a process of their own: one that crashes or spins is refused, and nobody else notices."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from llguidance import LLMatcher

from contracts.errors import OverloadedError, RequestError
from engine.text.grammar import json_grammar, lark_grammar, regex_grammar
from engine.text.trial import GrammarTrial
from tests.engine.text.builders import make_text

# As it comes to the library where nobody looked at it before; `exact` refuses it.
CRASHES = json.dumps({"type": "integer", "minimum": -(2**63), "maximum": -(2**63)})
SPINS = {"type": "integer", "multipleOf": -2147483648}


@pytest.fixture
def trial() -> Iterator[GrammarTrial]:
    yield GrammarTrial(make_text())
    gc.collect()


async def test_a_good_grammar_passes_and_a_bad_one_says_why(trial: GrammarTrial) -> None:
    await trial.check(regex_grammar("a+"))
    with pytest.raises(RequestError, match="expected a grammar that an output can follow"):
        await trial.check(regex_grammar("(?=a)"))
    first = trial._holder[0]
    await trial.check(json_grammar({"type": "object"}))
    assert trial._holder[0] is first, "one nursery for all"


@pytest.mark.parametrize(
    "source",
    [LLMatcher.grammar_from_json_schema(CRASHES), lark_grammar("start: %json " + CRASHES)],
)
async def test_what_crashes_the_compiler_is_refused(trial: GrammarTrial, source: str) -> None:
    for _ in range(2):
        with pytest.raises(RequestError, match="it crashed"):
            await trial.check(source)
    await trial.check(regex_grammar("a+"))


async def test_what_never_ends_is_refused_and_nobody_waits_for_it(
    trial: GrammarTrial, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its processor time, which others do not add to."""
    monkeypatch.setattr("engine.text.trial.CPU_S", 0.2)
    await trial.check(regex_grammar("a"))
    ends: list[str] = []

    async def ended(name: str, source: str, tenant: str) -> str:
        told = await refusal(trial, source, tenant)
        ends.append(name)
        return told

    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        hostile = [
            tasks.create_task(ended("spins", json_grammar({**SPINS, "title": str(i)}), "a")) for i in range(4)
        ]
        other = tasks.create_task(ended("other", regex_grammar("b+"), "b"))
    assert all("within 0.2 s of processor time" in task.result() for task in hostile)
    assert other.result() == ""
    assert ends[0] == "other"


async def test_the_same_grammar_is_tried_once(trial: GrammarTrial, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.text.trial.NUM_AT_ONCE_OF_ONE", 1)
    asked = []
    tried = trial._tried
    monkeypatch.setattr(trial, "_tried", lambda source: asked.append(source) or tried(source))
    async with asyncio.TaskGroup() as tasks:
        same = [tasks.create_task(refusal(trial, regex_grammar("(?=a)"))) for _ in range(3)]
    assert len({task.result() for task in same}) == 1
    assert len(asked) == 1


COSTLY = [
    regex_grammar("((a{100}){100}){100}"),
    regex_grammar("(((a{10}){10}){10}){10}{10}{10}"),
    json_grammar({"type": "string", "pattern": "^((a{100}){100}){100}$"}),
    lark_grammar('start: y{100}\ny: X{100}\nX: "a"{100}'),
    lark_grammar("start: /((a{100}){100}){100}/"),
    json_grammar({"type": "array", "minItems": 1000, "items": {"type": "string", "minLength": 1000}}),
]
EXPLODES = regex_grammar("(a?){1000}a{1000}")


@pytest.mark.parametrize("source", COSTLY)
async def test_what_has_to_be_too_long_is_refused_before_it_is_compiled(
    trial: GrammarTrial, source: str
) -> None:
    assert "output of at most 20000 characters" in await refusal(trial, source)


async def test_what_explodes_with_the_first_tokens_is_refused_before_it_has_any(trial: GrammarTrial) -> None:
    assert "too many ways at once" in await refusal(trial, EXPLODES)


async def test_honest_grammars_pass(trial: GrammarTrial) -> None:
    text = {"type": "string", "pattern": "^[a-z]{1,20}$"}
    for source in (
        regex_grammar(r"(.{1,200}\n){1,100}"),
        regex_grammar(r"([A-Z][a-z]{1,100}( [a-z]{1,100}){1,100}\. ){1,10}"),
        regex_grammar("[a-z]{0,50000}"),
        json_grammar({"type": "array", "maxItems": 100000, "items": {"type": "string", "maxLength": 100000}}),
        json_grammar({"type": "object", "properties": {f"p{i}": text for i in range(300)}}),
    ):
        await trial.check(source)


async def test_who_leaves_while_it_starts_leaves_nothing_half_started(trial: GrammarTrial) -> None:
    first = asyncio.create_task(trial.check(regex_grammar("a")))
    async with asyncio.timeout(30):
        while not trial._starting.locked():
            await asyncio.sleep(0)
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    await trial.check(regex_grammar("b"))


async def test_a_nursery_that_is_killed_at_work_is_replaced_and_asked_again(
    trial: GrammarTrial, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.text.trial.CPU_S", 0.2)
    await trial.check(regex_grammar("a"))
    asked = asyncio.create_task(refusal(trial, json_grammar(SPINS)))
    await next_child(trial)
    trial._holder[0].process.kill()
    assert "within 0.2 s of processor time" in await asked


async def test_a_child_that_somebody_killed_says_nothing_of_its_grammar(trial: GrammarTrial) -> None:
    await trial.check(regex_grammar("a"))
    asked = asyncio.create_task(trial.check(json_grammar(SPINS)))
    first = await next_child(trial)
    os.kill(first, signal.SIGKILL)
    os.kill(await next_child(trial, but=first), signal.SIGKILL)
    with pytest.raises(OverloadedError, match="from outside"):
        await asked
    assert "of processor time" in await refusal(trial, json_grammar(SPINS)), (
        "what was not tried is not remembered"
    )


async def test_a_killed_process_is_replaced(trial: GrammarTrial) -> None:
    await trial.check(regex_grammar("a"))
    trial._holder[0].process.kill()
    trial._holder[0].process.wait(10.0)
    await trial.check(regex_grammar("b"))


async def test_the_process_ends_with_the_trial() -> None:
    trial = GrammarTrial(make_text())
    await trial.check(regex_grammar("a"))
    process = trial._holder[0].process
    del trial
    gc.collect()
    assert process.wait(10.0) == -signal.SIGKILL


async def next_child(trial: GrammarTrial, but: int = 0) -> int:
    """The process in which a grammar is tried; `but`: one that was known before."""
    pid = trial._holder[0].process.pid
    async with asyncio.timeout(30):
        while True:
            found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            if others := [int(child) for child in found if int(child) != but]:
                return others[0]
            await asyncio.sleep(0)


async def refusal(trial: GrammarTrial, source: str, tenant: str = "") -> str:
    """Why it is refused; "" if it is not."""
    try:
        await trial.check(source, tenant)
    except RequestError as error:
        return error.message
    return ""
