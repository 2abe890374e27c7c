"""Grammars are tried in a process of their own: one that crashes or spins is refused, and nobody else notices."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from collections.abc import Iterator

import pytest

from contracts.errors import RequestError
from engine.text.grammar import inline_json, json_grammar, lark_grammar, regex_grammar
from engine.text.trial import GrammarTrial
from tests.engine.text.builders import make_text

CRASHES = {"type": "integer", "minimum": -(2**63), "maximum": -(2**63)}
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
    assert trial._holder[0] is first, "one process for all that do no harm"


@pytest.mark.parametrize("source", [json_grammar(CRASHES), lark_grammar("start: " + inline_json(CRASHES))])
async def test_what_crashes_the_compiler_is_refused(trial: GrammarTrial, source: str) -> None:
    for _ in range(2):
        with pytest.raises(RequestError, match="it crashed"):
            await trial.check(source)
    await trial.check(regex_grammar("a+"))


async def test_what_never_ends_is_refused_and_the_next_one_waits_for_no_longer_than_that(
    trial: GrammarTrial, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.text.trial.COMPILE_TIMEOUT_S", 0.5)
    await trial.check(regex_grammar("a"))
    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        hostile = tasks.create_task(refusal(trial, json_grammar(SPINS)))
        same = tasks.create_task(refusal(trial, json_grammar(SPINS)))
        other = tasks.create_task(refusal(trial, regex_grammar("b+")))
    assert "compiles within 0.5 s" in hostile.result()
    assert same.result() == hostile.result()
    assert other.result() == ""


async def test_a_killed_process_is_replaced(trial: GrammarTrial) -> None:
    await trial.check(regex_grammar("a"))
    os.kill(trial._holder[0].pid, signal.SIGKILL)
    trial._holder[0].wait(10.0)
    await trial.check(regex_grammar("b"))


async def test_the_process_ends_with_the_trial() -> None:
    trial = GrammarTrial(make_text())
    await trial.check(regex_grammar("a"))
    process = trial._holder[0]
    del trial
    gc.collect()
    assert process.wait(10.0) == -signal.SIGKILL


async def refusal(trial: GrammarTrial, source: str) -> str:
    """Why it is refused; "" if it is not."""
    try:
        await trial.check(source)
    except RequestError as error:
        return error.message
    return ""
