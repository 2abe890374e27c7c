from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.errors import EngineError
from contracts.request import SamplingParams, Token
from engine.sampler import MIN_LOGPROB, Sampler, SamplingRow, logprobs_of, uniform
from engine.text.grammar import Grammars, regex_grammar
from tests.engine.text.builders import make_text

GREEDY = SamplingParams(max_tokens=8, temperature=0.0)
RANDOM = SamplingParams(max_tokens=8)


def draw(logits: list[float], params: SamplingParams, position: int = 0, **row: object) -> Token:
    (token,) = Sampler((1,)).sample(torch.tensor([logits]), [SamplingRow(params, position, **row)])  # type: ignore[arg-type]
    return token


def support(logits: list[float], params: SamplingParams, num_draws: int = 400) -> set[int]:
    rows = [SamplingRow(replace(params, seed=seed), 3) for seed in range(num_draws)]
    return {token.token_id for token in Sampler((1,)).sample(torch.tensor([logits] * num_draws), rows)}


def test_greedy_takes_the_lowest_id_on_ties() -> None:
    assert draw([0.0, 2.0, 2.0], GREEDY) == Token(0, 1)
    assert draw([0.0, 2.0, 2.0], replace(GREEDY, num_logprobs=0)).token_id == 1


def test_wrong_shape_and_broken_logits_are_engine_errors() -> None:
    sampler = Sampler(())
    with pytest.raises(EngineError, match=r"expected logits \[1, V\]"):
        sampler.sample(torch.zeros(2, 4), [SamplingRow(GREEDY, 0)])
    for value in (math.nan, math.inf):
        with pytest.raises(EngineError, match="finite"):
            sampler.sample(torch.tensor([[0.0, value]]), [SamplingRow(GREEDY, 0)])
    assert sampler.sample(torch.zeros(0, 4), []) == []


@given(temperature=st.floats(5e-324, 0.0099))
def test_tiny_temperatures_are_argmax_and_never_overflow(temperature: float) -> None:
    params = replace(RANDOM, temperature=temperature)
    assert support([1.0, 3.0, -2.0], params, num_draws=20) == {1}


def test_top_k_keeps_k_and_ties_fall_to_lower_ids() -> None:
    assert support([1.0, 1.0, 1.0, 2.0], replace(RANDOM, top_k=3)) == {0, 1, 3}
    assert support([1.0, 1.0], replace(RANDOM, top_k=50)) == {0, 1}


def test_top_p_keeps_the_fewest_that_reach_it() -> None:
    logits = [math.log(p) for p in (0.1, 0.4, 0.2, 0.3)]
    assert support(logits, replace(RANDOM, top_p=0.65)) == {1, 3}
    assert support(logits, replace(RANDOM, top_p=0.75)) == {1, 2, 3}
    assert support(logits, replace(RANDOM, top_p=0.0)) == {1}
    assert support([0.0] * 4, replace(RANDOM, top_p=0.5)) == {0, 1}


def test_top_p_counts_what_top_k_left() -> None:
    logits = [math.log(p) for p in (0.4, 0.3, 0.2, 0.1)]
    assert support(logits, replace(RANDOM, top_k=2, top_p=0.55)) == {0}


def test_top_p_is_right_where_the_mass_is_spread_wide() -> None:
    num_vocab = 3000
    rows = [SamplingRow(replace(RANDOM, top_p=0.5, seed=seed), 0) for seed in range(300)]
    tokens = Sampler(()).sample(torch.zeros(300, num_vocab), rows)
    assert max(token.token_id for token in tokens) < num_vocab // 2
    assert max(token.token_id for token in tokens) > num_vocab // 2 - 100


def test_min_p_is_relative_to_the_best() -> None:
    logits = [math.log(p) for p in (0.5, 0.3, 0.15, 0.05)]
    assert support(logits, replace(RANDOM, min_p=0.29)) == {0, 1, 2}


def test_the_draw_follows_the_distribution() -> None:
    """Exact, not statistical: the token is the inverse CDF, in id order, of the uniform number."""
    probabilities = [0.1, 0.4, 0.2, 0.3]
    logits = [math.log(p) for p in probabilities]
    for seed in range(200):
        number, total, expected = uniform(seed, 5), 0.0, 0
        for expected, probability in enumerate(probabilities):  # noqa: B007
            total += probability
            if number < total:
                break
        assert draw(logits, replace(RANDOM, seed=seed), position=5).token_id == expected


def test_uniform_is_fixed_for_ever() -> None:
    """A fail-over to another version of Baton must draw the same tokens."""
    assert (uniform(0, 0), uniform(1, 0)) == (0.7012121095215252, 0.9435642308648544)
    assert uniform(42, 7) == 0.11138329335761343
    numbers = [uniform(seed, position) for seed in (-1, 0, 1, 2**63 - 1, 2**80) for position in range(50)]
    assert all(0.0 <= number < 1.0 for number in numbers)
    assert uniform(-1, 0) == uniform(2**64 - 1, 0)
    assert len({uniform(seed, position) for seed in range(50) for position in range(50)}) == 2500


def test_penalties_see_outputs_and_repetition_sees_the_prompt_too() -> None:
    logits = [1.0, 0.9, -1.0]
    assert draw(logits, replace(GREEDY, presence_penalty=0.2), output_counts={0: 5}).token_id == 1
    assert draw(logits, replace(GREEDY, frequency_penalty=0.04), output_counts={0: 5}).token_id == 1
    assert draw(logits, replace(GREEDY, frequency_penalty=0.04), output_counts={0: 2}).token_id == 0
    assert draw(logits, replace(GREEDY, presence_penalty=2.0), prompt_ids=frozenset({0})).token_id == 0
    assert draw(logits, replace(GREEDY, repetition_penalty=1.5), prompt_ids=frozenset({0})).token_id == 1
    negative = [-1.0, -1.2]
    assert draw(negative, replace(GREEDY, repetition_penalty=1.5), output_counts={0: 1}).token_id == 1
    assert draw(negative, replace(GREEDY, repetition_penalty=0.5), output_counts={1: 1}).token_id == 1


def test_penalties_come_before_bias() -> None:
    """2 / 2 + 1 = 2; the other way round, (2 + 1) / 2 = 1.5 would lose against 1.9."""
    params = replace(GREEDY, repetition_penalty=2.0, logit_bias=((0, 1.0),))
    assert draw([2.0, 1.9], params, prompt_ids=frozenset({0})).token_id == 0


def test_bias_comes_before_temperature() -> None:
    """0.05 / 0.01 = 5 makes token 0 all but sure; the other way round it would be a coin toss."""
    params = replace(RANDOM, temperature=0.01, logit_bias=((0, 0.05),))
    seeds = [seed for seed in range(50) if 0.55 < uniform(seed, 0) < 0.95]
    assert seeds
    assert {draw([0.0, 0.0], replace(params, seed=seed)).token_id for seed in seeds} == {0}


def test_bias_decides_and_unknown_ids_are_ignored() -> None:
    assert (
        draw([5.0, 0.0, 0.0], replace(GREEDY, logit_bias=((2, 100.0), (99, 100.0), (-1, 100.0)))).token_id
        == 2
    )
    assert support([5.0, 0.0, 0.0], replace(RANDOM, logit_bias=((0, -100.0),))) == {1, 2}


def test_min_tokens_masks_eos_and_stop_tokens() -> None:
    params = replace(GREEDY, min_tokens=2, stop_token_ids=(2,))
    assert draw([0.0, 9.0, 8.0, -5.0], params, position=1).token_id == 0
    assert draw([0.0, 9.0, 8.0, -5.0], params, position=2).token_id == 1


def test_a_mask_that_leaves_nothing_is_no_mask() -> None:
    assert draw([1.0, 2.0], replace(GREEDY, min_tokens=2, stop_token_ids=(0,))).token_id == 1


def test_logprobs_are_of_the_raw_logits_and_sorted() -> None:
    logits = [math.log(p) for p in (0.1, 0.4, 0.2, 0.3)]
    params = replace(GREEDY, temperature=0.0, num_logprobs=3, logit_bias=((0, 50.0),))
    token = draw(logits, params)
    assert token.token_id == 0
    assert token.logprob == pytest.approx(math.log(0.1))
    assert [token_id for token_id, _ in token.top] == [1, 3, 2]
    assert [logprob for _, logprob in token.top] == pytest.approx([math.log(p) for p in (0.4, 0.3, 0.2)])
    assert draw(logits, replace(params, num_logprobs=0)).top == ()
    assert len(draw(logits, replace(params, num_logprobs=20)).top) == 4


def test_minus_infinity_leaves_as_a_number() -> None:
    token = draw([0.0, -math.inf], replace(GREEDY, num_logprobs=2, logit_bias=((0, -3.0),)))
    assert token.top == ((0, 0.0), (1, MIN_LOGPROB))
    assert support([0.0, -math.inf, 0.0], RANDOM) == {0, 2}


def test_only_allowed_tokens_are_drawn() -> None:
    assert draw([3.0, 1.0, 2.0], replace(GREEDY, allowed_token_ids=(1, 2, 999))).token_id == 2
    assert support([0.0] * 4, replace(RANDOM, allowed_token_ids=(0, 3))) == {0, 3}


def test_a_bad_sequence_bars_its_last_token_behind_the_others_only() -> None:
    params = replace(GREEDY, bad_token_ids=((2,), (0, 3)))
    logits = [0.0, 1.0, 9.0, 5.0]
    assert draw(logits, params, output_ids=[1]).token_id == 3
    assert draw(logits, params, output_ids=[1, 0]).token_id == 1


def test_masks_that_leave_nothing_are_passed_over() -> None:
    params = replace(GREEDY, allowed_token_ids=(1,), bad_token_ids=((1,),))
    assert draw([3.0, 1.0, 2.0], params).token_id == 1


TEXT = make_text()
EOS = 257


def grammar_draw(pattern: str, output: str, favourite: int, **params: object) -> int:
    """The token drawn behind `output` by a model that wants `favourite`, then EOS, then lower ids."""
    grammar = Grammars(TEXT).compile(regex_grammar(pattern))
    for byte in output.encode():
        grammar.advance(byte)
    logits = torch.arange(260, 0, -1, dtype=torch.float32)[None]
    logits[0, EOS], logits[0, favourite] = 500.0, 1000.0
    row = SamplingRow(replace(GREEDY, **params), len(output), grammar=grammar)  # type: ignore[arg-type]
    return Sampler((EOS,)).sample(logits, [row])[0].token_id


def test_a_grammar_bars_what_it_does_not_know_and_the_end_before_its_time() -> None:
    assert grammar_draw("ab+", "", ord("b")) == ord("a")
    assert grammar_draw("ab+", "a", ord("x")) == ord("b")
    assert grammar_draw("ab+", "ab", ord("x")) == EOS
    assert grammar_draw("ab+", "ab", ord("b")) == ord("b")


def test_a_best_token_that_the_grammar_allows_needs_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Sampler, "_grammar_mask")
    assert grammar_draw("a[b-d]+", "ab", ord("c")) == ord("c")


def test_a_grammar_outranks_every_other_mask() -> None:
    assert grammar_draw("ab+", "", 0, allowed_token_ids=(ord("b"),)) == ord("a")
    assert grammar_draw("ab", "ab", 0, min_tokens=9) == EOS
    assert grammar_draw("ab+", "ab", 0, min_tokens=9) == ord("b")


def test_an_end_that_is_ignored_still_comes_where_nothing_else_may() -> None:
    assert grammar_draw("ab+", "ab", 0, ignore_eos=True) == ord("b")
    assert grammar_draw("ab", "ab", 0, ignore_eos=True) == EOS


def test_logprobs_of_given_tokens_are_those_of_a_draw() -> None:
    logits = torch.tensor([[math.log(p) for p in (0.1, 0.4, 0.2, 0.3)]] * 2)
    (logprob, top), (other, _) = logprobs_of(logits, [2, 1], 2)
    assert (logprob, other) == (pytest.approx(math.log(0.2)), pytest.approx(math.log(0.4)))
    assert [token_id for token_id, _ in top] == [1, 3]


ANY_PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.just(8),
    temperature=st.sampled_from([0.0, 0.001, 0.7, 1.0, 2.0]),
    top_p=st.sampled_from([0.0, 0.3, 0.9, 1.0]),
    top_k=st.sampled_from([0, 1, 3, 40]),
    min_p=st.sampled_from([0.0, 0.1]),
    seed=st.integers(-(2**63), 2**63 - 1),
    presence_penalty=st.sampled_from([0.0, -1.0, 1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.5]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    logit_bias=st.sampled_from([(), ((3, -100.0), (4, 2.0))]),
    min_tokens=st.sampled_from([0, 4]),
    stop_token_ids=st.sampled_from([(), (2,)]),
    num_logprobs=st.sampled_from([None, 0, 2]),
    allowed_token_ids=st.sampled_from([(), (3, 4, 5)]),
    bad_token_ids=st.sampled_from([(), ((4,), (5, 3))]),
)
ANY_ROW = st.builds(
    SamplingRow,
    params=ANY_PARAMS,
    position=st.integers(0, 6),
    output_counts=st.dictionaries(st.integers(0, 11), st.integers(1, 3), max_size=3),
    prompt_ids=st.frozensets(st.integers(0, 11), max_size=4),
)


@settings(max_examples=150)
@given(
    rows=st.lists(ANY_ROW, min_size=1, max_size=5),
    seed=st.integers(0, 2**32),
    scale=st.sampled_from([0.0, 1.0, 30.0]),
)
def test_a_row_does_not_depend_on_its_batch(rows: list[SamplingRow], seed: int, scale: float) -> None:
    logits = scale * torch.randn(len(rows), 12, generator=torch.Generator().manual_seed(seed))
    sampler = Sampler((1,))
    together = sampler.sample(logits, rows)
    alone = [sampler.sample(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)]
    assert together == alone
    for token, row in zip(together, rows, strict=True):
        assert 0 <= token.token_id < 12
        assert token.index == row.position
        assert row.position >= row.params.min_tokens or token.token_id not in (1, *row.params.stop_token_ids)


@settings(max_examples=100)
@given(row=ANY_ROW, seed=st.integers(0, 2**32))
def test_top_1_is_greedy(row: SamplingRow, seed: int) -> None:
    logits = torch.randn(1, 12, generator=torch.Generator().manual_seed(seed))
    sampler = Sampler((1,))
    (greedy,) = sampler.sample(logits, [replace(row, params=replace(row.params, temperature=0.0))])
    for cut in ({"top_k": 1}, {"top_p": 0.0}, {"min_p": 1.0}):
        params = replace(row.params, temperature=0.8, **cut)
        assert sampler.sample(logits, [replace(row, params=params)]) == [greedy]
