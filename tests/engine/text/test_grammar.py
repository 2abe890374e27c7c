from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from contracts.errors import EngineError, RequestError
from engine.text.grammar import (
    MAX_SOURCE_BYTES,
    Grammars,
    GrammarState,
    LazyGrammars,
    choice_grammar,
    ebnf_grammar,
    inline_json,
    json_grammar,
    lark_grammar,
    regex_grammar,
    translated,
)
from tests.engine.text.builders import make_text

TEXT = make_text()
GRAMMARS = Grammars(TEXT)
SCHEMA = {
    "type": "object",
    "properties": {"k": {"enum": ["x", "y"]}, "n": {"type": "integer"}},
    "required": ["k", "n"],
    "additionalProperties": False,
}


def follow(source: str, output: str) -> GrammarState | None:
    """The state behind `output`, or None if the grammar does not allow it."""
    state = GRAMMARS.compile(source)
    for byte in output.encode():
        if not state.allowed()[byte]:
            return None
        state.advance(byte)
    return state


def fits(source: str, output: str) -> bool:
    state = follow(source, output)
    return state is not None and state.may_end


@pytest.mark.parametrize("output", ['{"k":"x","n":12}', '{ "k": "y",\n  "n": -3 }'])
def test_a_schema_allows_its_values_however_they_are_spaced(output: str) -> None:
    assert fits(json_grammar(SCHEMA), output)


@pytest.mark.parametrize(
    "output",
    ['{"n":1,"k":"x"}', '{"k":"z","n":1}', '{"k":"x"}', '{"k":"x","n":1,"m":2}', "[]", '{"k":"x","n":1.5}'],
)
def test_a_schema_allows_nothing_else_and_keeps_its_order(output: str) -> None:
    assert not fits(json_grammar(SCHEMA), output)


def test_white_space_has_a_bound() -> None:
    grammar = json_grammar({"type": "object"})
    for indentation in (" " * 12, "\t" * 4):
        assert follow(grammar, "{\n" + indentation + "}") is not None
    for more in (" " * 13, "\t" * 5, " \t", "\t ", "\n", " \n"):
        assert follow(grammar, "{\n" + more) is None
    assert follow(grammar, "{  ") is None


def test_text_that_needs_several_bytes_a_character_is_followed() -> None:
    assert fits(json_grammar({"const": "👩‍🚀 naïve"}), json.dumps("👩‍🚀 naïve", ensure_ascii=False))


@pytest.mark.parametrize(
    ("source", "good", "bad"),
    [
        (regex_grammar(r"\d{3}-\d{4}"), "555-1234", "55-1234"),
        (choice_grammar(["yes", "no", 'a "quoted"\n one']), 'a "quoted"\n one', "maybe"),
        (translated(ebnf_grammar('root ::= "a" ("b" | "c")*')), "abcb", "ba"),
        (translated(ebnf_grammar('start: "a" /[bc]+/')), "acb", "a"),
        (lark_grammar(f'start: "<" x ">"\nx: {inline_json({"type": "integer"})}'), "<12>", "<x>"),
    ],
)
def test_every_kind_of_grammar(source: str, good: str, bad: str) -> None:
    assert fits(source, good)
    assert not fits(source, bad)


@pytest.mark.parametrize(
    "source",
    [
        json_grammar({"type": "hiccup"}),
        json_grammar({"$ref": "http://elsewhere/schema"}),
        json_grammar({"not": {"type": "string"}}),
        json_grammar({"type": "string", "pattern": "(a+"}),
        regex_grammar("(?=x)a"),
        regex_grammar("["),
        lark_grammar("start: missing"),
        lark_grammar("%%%"),
        regex_grammar("x" * (MAX_SOURCE_BYTES + 1)),
    ],
)
def test_what_is_no_grammar_is_the_callers_fault(source: str) -> None:
    with pytest.raises(RequestError):
        GRAMMARS.compile(source)


@pytest.mark.parametrize("text", ['x ::= "a"', "root ::= x", "root ::= a-b", "# c", "root ::= ((("])
def test_what_is_neither_gbnf_nor_lark_is_the_callers_fault(text: str) -> None:
    with pytest.raises(RequestError):
        GRAMMARS.compile(translated(ebnf_grammar(text)))


def test_the_size_of_a_grammar_is_counted_in_bytes() -> None:
    source = lark_grammar(f'start: "{"é" * (MAX_SOURCE_BYTES // 2)}"')
    assert len(source) < MAX_SOURCE_BYTES
    with pytest.raises(RequestError, match=f"at most {MAX_SOURCE_BYTES} bytes"):
        GRAMMARS.compile(source)


def test_ebnf_that_is_neither_dialect_is_the_callers_fault() -> None:
    with pytest.raises(RequestError, match="expected GBNF or Lark but line 1, behind 'root ::= "):
        GRAMMARS.compile(translated(ebnf_grammar("root ::= (((")))


def test_outputs_do_not_share_a_state() -> None:
    source = regex_grammar("ab")
    first, second = GRAMMARS.compile(source), GRAMMARS.compile(source)
    first.advance(ord("a"))
    assert np.flatnonzero(first.allowed()).tolist() == [ord("b")]
    assert np.flatnonzero(second.allowed()).tolist() == [ord("a")]


def test_the_state_is_rebuilt_from_the_tokens() -> None:
    source = json_grammar(SCHEMA)
    output = b'{"k":"x","n":1'
    moved = LazyGrammars(make_text).behind(source, list(output))
    stayed = GRAMMARS.compile(source)
    for byte in output:
        stayed.advance(byte)
    assert (moved.allowed() == stayed.allowed()).all()
    assert moved.may_end is stayed.may_end is False


def test_eos_is_no_part_of_a_grammar() -> None:
    state = GRAMMARS.compile(regex_grammar("a"))
    state.advance(257)
    assert state.error is None
    state.advance(ord("a"))
    assert state.may_end
    assert not state.allowed().any()


def test_a_token_that_is_not_allowed_is_an_error_that_lets_the_output_end() -> None:
    state = GRAMMARS.compile(regex_grammar("abc"))
    state.advance(ord("x"))
    assert isinstance(state.error, RequestError)
    assert state.may_end
    assert not state.allowed().any()


def test_a_model_without_a_tokenizer_says_so() -> None:
    def load() -> Any:
        raise OSError("no such file")

    with pytest.raises(EngineError, match="tokenizer"):
        LazyGrammars(load).behind(regex_grammar("a"), [])


@pytest.mark.parametrize(
    ("source", "output"),
    [(json_grammar({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}), '{"a": 17}'),
     (regex_grammar("[a-d]+é?"), "abcdé")],
)  # fmt: skip
def test_one_token_is_judged_as_by_the_whole_mask(source: str, output: str) -> None:
    state = Grammars(TEXT).compile(source)
    for byte in output.encode():
        mask = state.allowed()
        assert [state.allows(token_id) for token_id in range(-1, TEXT.vocab_size + 1)] == [
            False,
            *mask,
            False,
        ]
        state.advance(byte)
    assert state.error is None
