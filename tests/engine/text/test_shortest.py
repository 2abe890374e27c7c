"""How long an output must be is read off its grammar: never more than the truth, and found where repeats multiply."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.errors import RequestError
from engine.text.grammar import (
    choice_grammar,
    ebnf_grammar,
    inline_json,
    json_grammar,
    lark_grammar,
    regex_grammar,
    translated,
)
from engine.text.shortest import MAX_SHORTEST, check_shortest, shortest

NESTED = "((a{100}){100}){100}"


@pytest.mark.parametrize(
    ("pattern", "size"),
    [
        ("abc", 3), ("a{3}", 3), ("a{3,5}b?", 3), ("(ab|c)d*", 1), (NESTED, 10**6), ("(?:a{10}){10,}?", 100),
        (r"[a-z\]]{4}\{2}", 7), (r"\p{L}{3}", 3), (r"\d{3}-\d{4}", 8), ("(?i)ab", 2), ("(?P<n>a{7})+", 7),
        ("a??b", 1), (r"^\ba$", 1), ("(a{0,50000}){1,1000}", 0), ("", 0), ("((", 0), ("a{99999999999999}", 1 << 40),
        ("(a|(b{50}|c{2}))", 1), ("[[:alpha:]]{5}", 5), (r"\x{41}{6}", 6),
    ],
)  # fmt: skip
def test_the_shortest_text_of_a_regex(pattern: str, size: int) -> None:
    assert shortest(regex_grammar(pattern)) == size


@pytest.mark.parametrize(
    ("source", "size"),
    [
        (choice_grammar(["yes", "no"]), 2),
        (lark_grammar('start: x{100} y\nx: Z{100}\nZ: "ab"{100}\ny: "c"*'), 2 * 10**6),
        (lark_grammar('start: list\nlist: list "," item | item\nitem: /[0-9]{2}/'), 2),
        (lark_grammar(f'start: "<" x{{3}}\nx: {inline_json({"type": "string", "minLength": 7})}'), 22),
        (lark_grammar(f"start: /{NESTED}/"), 10**6),
        (lark_grammar('start: ["a"] ("b" | "cc")'), 1),
        (lark_grammar('start: <[5]> "a" // "b"\n'), 1),
        (lark_grammar('start: a\na[lazy]: "x"{4}'), 4),
        (translated(ebnf_grammar('root ::= x{100}\nx ::= y{100}\ny ::= "a"{100}')), 10**6),
        (translated(ebnf_grammar('root ::= "a" ("b" | [cd]{2})?')), 1),
        (json_grammar({"type": "string", "pattern": NESTED}), 10**6),
        (json_grammar({"type": "array", "minItems": 5, "items": {"type": "string", "minLength": 9}}), 45),
        (json_grammar({"type": "object", "required": ["a"], "properties": {"a": {"minLength": 9, "type": "string"}}}),
         9),
        (json_grammar({"anyOf": [{"type": "string", "minLength": 9}, {"type": "null"}]}), 0),
        (json_grammar({"allOf": [{"type": "string", "minLength": 9}]}), 9),
        (json_grammar({}), 0),
    ],
)  # fmt: skip
def test_the_shortest_text_of_a_grammar(source: str, size: int) -> None:
    assert shortest(source) == size


def test_rules_that_double_each_other_are_told_at_once() -> None:
    rules = [f"r{i}: r{i + 1} r{i + 1}" for i in range(40)]
    source = lark_grammar("\n".join(["start: r0", *rules, 'r40: "a"']))
    with pytest.raises(RequestError, match=f"at most {MAX_SHORTEST} characters"):
        check_shortest(source)


@given(st.text(max_size=60))
def test_whatever_is_no_regex_and_no_grammar_is_left_to_the_compiler(text: str) -> None:
    assert shortest(regex_grammar(text)) >= 0
    assert shortest(lark_grammar(text)) >= 0
