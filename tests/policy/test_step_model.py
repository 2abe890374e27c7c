"""The step model finds the truth from steps, follows it when it moves, and its inverse is its inverse."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy.step_model import Coefficients, Sample, StepModel, Work
from tests.policy.builders import make_model, true_step_s


def random_work(rng: random.Random) -> Work:
    decodes = rng.randrange(0, 200)
    work = Work(0, 0, decodes, decodes * rng.randrange(100, 3000))
    if rng.random() < 0.5 or not decodes:
        work = work.plus_chunk(rng.randrange(100, 4000), rng.randrange(0, 8000))
    return work


def sweep(num_samples: int, seed: int, noise: float = 0.0, factor: float = 1.0) -> list[Sample]:
    rng = random.Random(seed)
    works = [random_work(rng) for _ in range(num_samples)]
    return [Sample(w, factor * true_step_s(w) * (1 + rng.uniform(-noise, noise))) for w in works]


def worst_error(model: StepModel, factor: float = 1.0) -> float:
    return max(abs(model.predict_s(s.work) / s.step_s - 1) for s in sweep(200, seed=99, factor=factor))


def test_a_sweep_gives_the_truth() -> None:
    model = StepModel.from_sweep(sweep(120, seed=1))
    assert worst_error(model) < 0.06
    assert model.num_samples == 120


def test_a_noisy_sweep_gives_nearly_the_truth_and_a_margin() -> None:
    model = StepModel.from_sweep(sweep(400, seed=1, noise=0.1))
    assert worst_error(model) < 0.12
    assert 1.0 <= model.margin < 1.15
    assert 0.0 < model.error < 0.12


def test_wrong_constants_are_unlearnt() -> None:
    model = StepModel(
        Coefficients(0.013, decode_s=26e-6, context_s=13e-9),
        Coefficients(0.0065, 130e-6, 1.3e-9, 130e-6, 13e-9),
    )
    for sample in sweep(300, seed=2, noise=0.03):
        model.observe(sample.work, sample.step_s)
    assert worst_error(model) < 0.06


def test_a_machine_that_becomes_slower_is_followed() -> None:
    model = make_model()
    for sample in sweep(1500, seed=3, factor=1.4):
        model.observe(sample.work, sample.step_s)
    assert worst_error(model, factor=1.4) < 0.05


def test_one_stall_teaches_no_coefficient() -> None:
    model = make_model()
    for sample in sweep(100, seed=4):
        model.observe(sample.work, sample.step_s)
    before = (model.decode, model.mixed)
    model.observe(Work(0, 0, 10, 1000), 5.0)
    assert (model.decode, model.mixed) == before
    assert model.margin <= StepModel.MAX_MARGIN


def test_the_same_step_for_ever_does_not_blow_the_fit_up() -> None:
    model = make_model()
    work = Work(0, 0, 16, 16_000)
    for _ in range(20_000):
        model.observe(work, true_step_s(work))
    assert model.predict_s(work) == pytest.approx(true_step_s(work), rel=0.01)
    assert worst_error(model) < 0.3


def test_an_impossible_time_is_refused() -> None:
    with pytest.raises(ValueError, match="positive time"):
        make_model().observe(Work(0, 0, 1, 10), 0.0)


def test_a_sweep_of_one_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="with and without"):
        StepModel.from_sweep([Sample(Work(0, 0, 1, 10), 0.01)])


@given(
    decodes=st.integers(0, 300),
    context=st.integers(10, 3000),
    past=st.integers(0, 50_000),
    budget_ms=st.integers(1, 500),
)
def test_the_largest_chunk_fits_and_one_more_does_not(
    decodes: int, context: int, past: int, budget_ms: int
) -> None:
    model, work, budget_s = make_model(), Work(0, 0, decodes, decodes * context), budget_ms / 1000
    chunk = model.largest_chunk(work, past, budget_s, cap=100_000)
    if chunk:
        assert model.predict_s(work.plus_chunk(chunk, past)) <= budget_s * (1 + 1e-9)
    more = model.predict_s(work.plus_chunk(chunk + 2, past))
    assert more > budget_s or chunk == 100_000


def test_no_chunk_where_decodes_alone_take_the_time() -> None:
    assert make_model().largest_chunk(Work(0, 0, 200, 200_000), 0, 0.015, 4096) == 0


@given(
    num_new=st.integers(1, 20_000),
    past=st.integers(0, 20_000),
    decodes=st.sampled_from([(1, 100), (30, 30_000), (200, 200_000)]),
    budget_s=st.floats(0.001, 0.2),
    cap=st.integers(1, 4096),
)
def test_reading_in_chunks_is_the_largest_chunk_and_its_step(
    num_new: int, past: int, decodes: tuple[int, int], budget_s: float, cap: int
) -> None:
    model, middle = make_model(), past + num_new // 2
    work = Work(0, 0, *decodes)
    chunk = model.largest_chunk(work, middle, budget_s, min(cap, num_new))
    found = model.reading_s(num_new, past, decodes, budget_s, cap, least=32)
    if chunk < min(32, cap, num_new):
        assert found == (math.inf, math.inf)
        return
    step_s = model.predict_s(work.plus_chunk(chunk, middle))
    extra_s = step_s - model.decode_step_s(*decodes)
    assert found == pytest.approx((num_new / chunk * step_s, num_new / chunk * extra_s), abs=1e-9)
