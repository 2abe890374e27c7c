from __future__ import annotations

from dataclasses import replace

import pytest

from contracts.errors import ConfigError
from contracts.request import Finished, SamplingParams, Token
from engine.sequence import EndRules, Sequence
from tests.builders import make_request

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


def test_the_models_length_counts_the_prompt() -> None:
    ends = EndRules((0,), max_model_len=5)
    assert ends.finished(sequence([1])) is None
    assert ends.finished(sequence([1, 1])) == Finished("length")
    with pytest.raises(ConfigError, match="got 0"):
        EndRules((), 0)
