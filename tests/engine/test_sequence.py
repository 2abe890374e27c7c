from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from contracts.errors import BatonError, ConfigError, RequestError
from contracts.request import Finished, SamplingParams, Token
from engine.sequence import EndRules, Sequence
from engine.text.grammar import Grammars, regex_grammar
from tests.builders import make_request
from tests.engine.text.builders import make_text

PARAMS = SamplingParams(max_tokens=5, stop_token_ids=(7,))


def sequence(outputs: list[int], params: SamplingParams = PARAMS) -> Sequence:
    seq = Sequence(make_request(3, sampling=params))
    for token_id in outputs:
        seq.append(token_id)
    return seq


def test_outputs_sent_before_count_as_outputs() -> None:
    seq = Sequence(make_request(3, output_ids=(5, 5)))
    seq.append(6)
    assert (seq.num_prompt, seq.num_outputs, seq.num_tokens) == (3, 3, 6)
    assert seq.output_counts == {5: 2, 6: 1}
    assert seq.sampling_row().position == 3


def test_a_handoff_continues_after_its_first_token() -> None:
    seq = sequence([])
    seq.take_over(Token(0, 9), num_cached_tokens=2)
    assert (seq.num_computed, seq.num_uncomputed, seq.num_cached_tokens) == (3, 1, 2)


def test_the_sampler_sees_the_prompt_only_for_the_repetition_penalty() -> None:
    assert sequence([1]).sampling_row().prompt_ids == frozenset()
    row = sequence([1], replace(PARAMS, repetition_penalty=1.1)).sampling_row()
    assert row.prompt_ids == set(make_request(3).prompt_ids)


@pytest.mark.parametrize(
    ("outputs", "params", "expected"),
    [
        ([1], PARAMS, None),
        ([1, 0], PARAMS, Finished("stop")),
        ([1, 7], PARAMS, Finished("stop", stop_token_id=7)),
        ([1, 0], replace(PARAMS, ignore_eos=True), None),
        ([1, 7], replace(PARAMS, ignore_eos=True), Finished("stop", stop_token_id=7)),
        ([1, 0], replace(PARAMS, min_tokens=2), None),
        ([1, 1, 0], replace(PARAMS, min_tokens=2), Finished("stop")),
        ([1] * 5, PARAMS, Finished("length")),
        ([1] * 4 + [0], PARAMS, Finished("stop")),
    ],
)
def test_end_rules(outputs: list[int], params: SamplingParams, expected: Finished | None) -> None:
    assert EndRules((0,)).finished(sequence(outputs, params)) == expected


def test_a_grammar_ends_with_eos_even_if_eos_is_ignored_and_with_its_own_failure() -> None:
    params = replace(PARAMS, ignore_eos=True, grammar=regex_grammar("a"))
    grammars = Grammars(make_text())

    def end(*outputs: int) -> Finished | BatonError | None:
        seq = Sequence(make_request(3, sampling=params), grammar=grammars.compile(params.grammar))
        for token_id in outputs:
            seq.append(token_id)
        return EndRules((257,)).end(seq)

    assert end(ord("a")) is None
    assert end(ord("a"), 257) == Finished("stop")
    assert isinstance(end(ord("b")), RequestError)


def test_prompt_logprobs_come_with_the_first_token_however_the_prompt_was_cut() -> None:
    request = make_request(3, sampling=replace(PARAMS, num_prompt_logprobs=1))
    logits = torch.randn(3, 24, generator=torch.Generator().manual_seed(1))
    told = []
    for cuts in ((3,), (1, 2), (2, 1)):
        seq = Sequence(request)
        for size in cuts:
            seq.read_prompt(logits[seq.num_computed : seq.num_computed + size])
            seq.num_computed += size
        told.append(seq.told(Token(0, 5)).prompt)
        seq.append(5)
        assert seq.told(Token(1, 5)).prompt == ()
        assert not seq.wants_prompt_logprobs
    assert told[0] == told[1] == told[2]
    first, second, third = told[0]
    assert (first.logprob, first.top) == (None, ())
    expected = torch.log_softmax(logits.double(), -1)
    assert second.logprob == pytest.approx(float(expected[0, request.prompt_ids[1]]))
    assert third.logprob == pytest.approx(float(expected[1, request.prompt_ids[2]]))
    assert third.top[0][0] == int(expected[1].argmax())


def test_a_prompt_whose_logprobs_are_wanted_meets_no_cached_block() -> None:
    plain = make_request(3, salt="s")
    asked = [make_request(3, salt="s", sampling=replace(PARAMS, num_prompt_logprobs=0)) for _ in range(2)]
    assert plain.cache_key == "s"
    assert len({plain.cache_key, *(request.cache_key for request in asked)}) == 3


def test_the_models_length_counts_the_prompt() -> None:
    ends = EndRules((0,), max_model_len=5)
    assert ends.finished(sequence([1])) is None
    assert ends.finished(sequence([1, 1])) == Finished("length")
    with pytest.raises(ConfigError, match="got 0"):
        EndRules((), 0)
