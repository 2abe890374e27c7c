"""Tool calls and reasoning in text that may be cut anywhere."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.call_readers import HermesReader, LlamaReader, MistralReader
from coordinator.calls import Argued, Called, CallReader, Part, Said, Thought
from coordinator.forms import gathered
from coordinator.reading import MessageReader, Reading, ThoughtCount

NAMES = frozenset({"f", "g"})
READERS = {"hermes": HermesReader, "llama": lambda: LlamaReader(NAMES), "mistral": MistralReader}
CASES: list[tuple[str, str, str, list[tuple[str, Any]]]] = [
    ("hermes", "Hello, 1 < 2 <tool", "Hello, 1 < 2", []),
    ("hermes", "Hello, 1 < 2 <", "Hello, 1 < 2 <", []),
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": "}<\\""}}\n</tool_call>', "", [("f", {"a": '}<"'})]),
    (
        "hermes",
        'So:\n<tool_call>{"name":"f","arguments":{}}</tool_call>\n<tool_call>{"arguments":{"x":[1,{}]},"name":"g"}</tool_call>\n',
        "So:",
        [("f", {}), ("g", {"x": [1, {}]})],
    ),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", [("f", {})]),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", {})]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", {"a": 1})]),
    ("hermes", "<tool_call>nothing</tool_call> of it", "<tool_call>nothing</tool_call> of it", []),
    ("llama", '{"name": "f", "parameters": {"a": {"b": 1}}}', "", [("f", {"a": {"b": 1}})]),
    ("llama", '<|python_tag|>{"name":"f","parameters":{}}; {"name":"g"}', "", [("f", {}), ("g", {})]),
    ("llama", '{"city": "Paris", "name": 5}', '{"city": "Paris", "name": 5}', []),
    ("llama", '{"name": "unknown", "parameters": {}}', '{"name": "unknown", "parameters": {}}', []),
    ("llama", "Just text {with} brackets", "Just text {with} brackets", []),
    (
        "mistral",
        'Ok [TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]',
        "Ok",
        [("f", {"a": 1}), ("g", {})],
    ),
    (
        "mistral",
        '[TOOL_CALLS]f[ARGS]{"a": "[TOOL_CALLS]"}[TOOL_CALLS]g[ARGS]{}',
        "",
        [("f", {"a": "[TOOL_CALLS]"}), ("g", {})],
    ),
    ("mistral", "A [list] of things", "A [list] of things", []),
]  # fmt: skip


def pieces(text: str, cuts: list[int]) -> list[str]:
    marks = [0, *sorted({cut % (len(text) + 1) for cut in cuts}), len(text)]
    return [text[low:high] for low, high in pairwise(marks)]


def read(reader: CallReader | MessageReader, parts: list[str]) -> list[Part]:
    return [found for text in parts for found in reader.push(text)] + reader.flush()


def calls_of(message: dict[str, Any]) -> list[tuple[str, Any]]:
    functions = [call["function"] for call in message.get("tool_calls", [])]
    return [(function["name"], json.loads(function["arguments"])) for function in functions]


@pytest.mark.parametrize(("family", "text", "said", "calls"), CASES)
@given(cuts=st.lists(st.integers(0, 500), max_size=12))
def test_calls_are_found_wherever_the_text_is_cut(
    family: str, text: str, said: str, calls: list[tuple[str, Any]], cuts: list[int]
) -> None:
    inside = {i for m in re.finditer(r"\[[A-Z_]+\]", text) for i in range(m.start() + 1, m.end())}
    cuts = [cut for cut in cuts if cut % (len(text) + 1) not in inside]  # a special token comes whole
    message = gathered(read(READERS[family](), pieces(text, cuts)))
    assert (message["content"] or "") == said
    assert calls_of(message) == calls


def test_a_call_is_told_with_its_name_and_its_arguments_as_they_come() -> None:
    fresh = HermesReader()
    (called,) = fresh.push('<tool_call>\n{"name": "f", ')
    assert isinstance(called, Called)
    assert (called.index, called.name) == (0, "f")
    assert fresh.push('"arguments": {"a": ') == [Argued(0, '{"a": ')]
    assert not fresh.is_whole
    assert fresh.push("1}}\n</tool_call>") == [Argued(0, "1}")]
    assert fresh.is_whole


def test_half_a_call_is_never_text() -> None:
    assert read(HermesReader(), ['<tool_call>\n{"name"']) == []
    assert read(MistralReader(), ['[TOOL_CALLS][{"na']) == []


def test_ids_differ_and_have_the_form_that_the_family_wants() -> None:
    text = '[TOOL_CALLS][{"name":"f","arguments":{}},{"name":"f","arguments":{}}]'
    ids = [part.call_id for part in read(MistralReader(), [text]) if isinstance(part, Called)]
    assert len(set(ids)) == 2
    assert all(len(each) == 9 and each.isalnum() for each in ids)


def test_calls_after_the_first_are_dropped_if_only_one_is_wanted() -> None:
    text = '<tool_call>{"name":"f","arguments":{}}</tool_call>\n<tool_call>{"name":"g","arguments":{}}</tool_call>'
    reader = MessageReader(Reading(make_reader=HermesReader, is_single=True))
    assert calls_of(gathered(read(reader, [text]))) == [("f", {})]
    assert reader.has_called


THOUGHTS = [
    ("<think>\nhm\n</think>\n\nYes", False, "\nhm\n", "Yes"),
    ("hm</think>Yes", True, "hm", "Yes"),
    ("Yes, <think> is a word", False, "", "Yes, <think> is a word"),
    ("<think>without end", False, "without end", ""),
    ("<thin", False, "", "<thin"),
]


@pytest.mark.parametrize(("text", "is_open", "thought", "said"), THOUGHTS)
@given(cuts=st.lists(st.integers(0, 60), max_size=8))
def test_reasoning_is_apart_wherever_the_text_is_cut(
    text: str, is_open: bool, thought: str, said: str, cuts: list[int]
) -> None:
    parts = read(MessageReader(Reading(thinks=True, begins_in_thought=is_open)), pieces(text, cuts))
    assert "".join(part.text for part in parts if isinstance(part, Thought)) == thought
    assert "".join(part.text for part in parts if isinstance(part, Said)) == said


def test_reasoning_that_is_not_wanted_is_left_out() -> None:
    reader = MessageReader(Reading(thinks=True, shows_thoughts=False))
    assert gathered(read(reader, ["<think>a</think>b"])) == {"content": "b"}


@pytest.mark.parametrize(
    ("tokens", "is_open", "expected"),
    [
        (["<think>", "a", "b", "</think>", "c", "d"], False, 4),
        (["<th", "ink>", "a", "</thi", "nk>", "c"], False, 5),
        (["a", "b", "</think>", "c"], True, 3),
        (["no", " thought"], False, 0),
        ([" ", "<think>", "never ends"], False, 3),
    ],
)
def test_tokens_of_the_reasoning_are_counted(tokens: list[str], is_open: bool, expected: int) -> None:
    count = ThoughtCount(Reading(thinks=True, begins_in_thought=is_open))
    for token in tokens:
        count.push(token)
    assert count.num_tokens == expected
