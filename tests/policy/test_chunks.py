"""Steps end before the tightest deadline, and use the time there is."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy.chunks import Cadence, Prompt, plan_step
from policy.step_model import Work
from tests.policy.builders import make_model

prompts_of = st.lists(
    st.builds(Prompt, st.integers(1, 10_000), st.integers(0, 10_000)), min_size=1, max_size=5
)


@given(prompts=prompts_of, decodes=st.integers(0, 200), budget_ms=st.integers(1, 300))
def test_a_step_keeps_its_budget_or_reads_nothing(
    prompts: list[Prompt], decodes: int, budget_ms: int
) -> None:
    plan = plan_step(make_model(), Work(0, 0, decodes, decodes * 500), prompts, budget_ms / 1000)
    assert not plan.chunks or plan.predicted_s <= budget_ms / 1000 * (1 + 1e-9)
    assert sum(plan.chunks) <= 4096
    assert all(0 < chunk <= prompt.num_tokens for chunk, prompt in zip(plan.chunks, prompts, strict=False))
    # Only the last chunk may leave something of its prompt.
    assert all(chunk == prompt.num_tokens for chunk, prompt in zip(plan.chunks[:-1], prompts, strict=False))


def test_without_streams_the_cap_decides() -> None:
    plan = plan_step(make_model(), Work(), [Prompt(3000, 0), Prompt(3000, 0)], cap=4096)
    assert plan.chunks == (3000, 1096)


def test_short_prompts_share_a_step() -> None:
    plan = plan_step(make_model(), Work(), [Prompt(100, 0)] * 3, cap=4096)
    assert plan.chunks == (100, 100, 100)


def test_under_pressure_nothing_is_read() -> None:
    plan = plan_step(make_model(), Work(0, 0, 100, 100_000), [Prompt(1000, 0)], budget_s=0.012)
    assert plan.chunks == ()


def test_a_starved_prompt_gets_its_least() -> None:
    plan = plan_step(make_model(), Work(0, 0, 100, 100_000), [Prompt(1000, 0)] * 2, budget_s=0.012, least=64)
    assert plan.chunks == (64,)


def test_saved_time_may_be_spent_up_to_the_bank() -> None:
    cadence = Cadence(0.040, share=1.0, bank=2.0)
    assert cadence.due_s(0.0, 1, 0.0) == pytest.approx(0.040)
    assert cadence.due_s(0.0, 10, 0.30) == pytest.approx(0.40)
    assert cadence.due_s(0.0, 100, 1.0) == pytest.approx(1.0 + 3 * 0.040)


def test_short_answers_shorten_the_longest_step() -> None:
    assert math.isclose(Cadence(0.040, 1.0, 0.0).longest_step_s, 0.040)
    short = Cadence(0.040, 1.0, 0.5, short_output=5, arrival_s=0.0)
    assert short.longest_step_s == pytest.approx(0.040 * 4 / 5)
    lengths = (3, 5, 10, 100, 1000)
    longest = [Cadence(0.040, 1.0, 0.5, short_output=n).longest_step_s for n in lengths]
    assert longest == sorted(longest)
