"""Why a grammar is refused, in our words: what the library that reads it says is for its own authors."""

from __future__ import annotations

import re

_MAX_REASON = 300
_REGEX_FAULT = re.compile(r"regex parse error:\n(?P<lines>(?:    .*\n)+)error: (?P<words>.*)")
_PLACE = re.compile(r"(?:at )?(\d+)\((\d+)\): ")
_GBNF_PLACE = re.compile(r"(?P<words>.*) at line (?P<line>\d+), (?P<before>.*) \^ (?P<behind>.*)", re.DOTALL)
_TOO_COMPLEX = "its outputs may go on in too many ways at once"
_WORDS = (
    (r"too many expressions constructed|Too many items|Current row has|too many (?:lexer )?states|fuel", _TOO_COMPLEX),
    (r"grammar (?:size )?too (?:large|big)|grammar_size", "it is too large"),
    (r"NoExtensionBias", "a rule is nothing but itself"),
    (r"(?:unknown name: \"?|Rule ')([^\"']*)[\"']?(?: not found)?", r"expected a rule named \1 but there is none"),
    (r"duplicate rule: \"?([^\"]*)\"?|Rule '([^']*)' already exists", r"expected one rule named \1\2 but got two"),
    (r"no start rule found|No 'root' rule found", "expected a rule named start (Lark) or root (GBNF) but got none"),
    (r"lexer error|Expected name", "expected a name, a quoted text, a /regex/ or an operator"),
    (r"Expected token ('.*?'), found ('.*?') \(at .*", r"expected \1 but got \2"),
    (r"Unimplemented keys: \[(.*)\]", r"expected none of the keywords that cannot be enforced but got \1"),
    (r"oneOf constraints are not supported.*", "expected no oneOf of which two may be met; anyOf can be enforced"),
    (r"Resource '(.*?)' is not present.*", r"expected a $ref to a part of this schema but got '\1'"),
    (r"Pointer '(.*?)' does not exist", r"expected a $ref to a part of this schema but got '#\1'"),
    (r"Unsatisfiable schema: (.*)", r"nothing satisfies it: \1"),
    (r"Invalid type: (.*)", r"type: expected one that JSON Schema has but got \1"),
    (r"Expected (?:f64|positive integer|array) for '(\w+)', got (.*)", r"\1: expected another type but got \2"),
    (r"Unknown format: (.*)", r"expected a format that can be enforced but got \1"),
    (r"Failed to generate regex for \w+ range", "expected bounds that numbers of 64 bits can meet"),
    (r"lookarounds not supported", "expected no word boundary in a pattern, since it cannot be enforced"),
    (r"invalid multiple of", "multipleOf: expected a number above 0"),
    (r"unknown special token: (\".*?\").*", r"expected a special token of this model but got \1"),
    (r"Unknown common regex: ([\w.]+);.*", r"expected a name that can be imported but got \1"),
)  # fmt: skip


def reason_of(told: str) -> str:
    """One line, with the place in the client's text where there is one; what is not known here stays as it is."""
    if fault := _REGEX_FAULT.search(told):
        pattern, caret = fault["lines"].split("\n")[:2]
        where = caret.find("^") - 4  # both lines are indented by four
        return f"the expression {pattern[4:104]!r} is none at character {where + 1}: {fault['words']}"[
            :_MAX_REASON
        ]
    line = told.strip().split("\n")[0]
    place = _PLACE.match(line)
    words = line[place.end() :] if place else line
    for known, ours in _WORDS:
        if found := re.search(known, words):
            words = found.expand(ours) if "\\" in ours else ours
            break
    return f"{f'line {place[1]}, column {place[2]}: ' if place else ''}{words}"[:_MAX_REASON]


def reason_of_gbnf(told: str) -> str:
    """As `reason_of`, of what the translator from GBNF says."""
    place = _GBNF_PLACE.fullmatch(told)
    if place is None:
        return reason_of(told)
    words = reason_of(place["words"][:1].upper() + place["words"][1:])
    words = words[:1].lower() + words[1:]
    return f"line {place['line']}, behind {place['before'][:60]}: {words}"[:_MAX_REASON]
