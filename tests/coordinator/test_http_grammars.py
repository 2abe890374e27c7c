"""Grammars of strangers over HTTP: what costs too much is refused by name before any work, and nobody waits for it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from contracts.errors import GrammarError
from tests.coordinator.gateway.gateway_tools import bearer, gateway_service, write_keys
from tests.coordinator.http_tools import error_of, service

Json = dict[str, Any]
NESTED = "((a{100}){100}){100}"
SPINS = {"type": "integer", "multipleOf": -2147483648}
GOOD = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
}


@pytest.mark.parametrize(
    "asked",
    [
        {"structured_outputs": {"regex": NESTED}},
        {"guided_regex": NESTED},
        {"structured_outputs": {"json": {"type": "string", "pattern": NESTED}}},
        {"structured_outputs": {"grammar": f"start: /{NESTED}/"}},
        {"guided_grammar": 'root ::= x{100}\nx ::= y{100}\ny ::= "a"{100}'},
    ],
)
async def test_what_would_cost_too_much_is_refused_by_name(asked: Json) -> None:
    (param,) = asked
    async with service() as s:
        for path, body in GOOD.items():
            response = await s.client.post(path, json=body | asked)
            assert (response.status_code, error_of(response)["param"]) == (400, param), response.text
            assert error_of(response)["message"].startswith(param)
            assert "at most 20000 characters" in error_of(response)["message"]
        assert not s.backend.requests


RULES = "\n".join([*(f"r{i} ::= r{i + 1}" for i in range(12_000)), 'r12000 ::= "a"', "root ::= r0"])


@pytest.mark.parametrize("grammar", [RULES, "\n" * 250_000 + "x", " " * 250_000 + "x"])
async def test_a_grammar_that_takes_minutes_to_translate_keeps_nobody_waiting(
    grammar: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.text.trial.CPU_S", 0.2)
    ends: list[int] = []
    async with service() as s:

        async def ask(**asked: Any) -> None:
            ends.append((await s.complete(**asked)).status_code)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(ask(guided_grammar=grammar))
            tasks.create_task(ask())
    assert ends == [200, 400]


@pytest.mark.parametrize("size", [3000, 40_000])
async def test_a_schema_of_megabytes_is_measured_before_anybody_walks_through_it(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    large: Json = {
        "type": "object",
        "properties": {f"p{i}": {"type": "string", "pattern": "a.b"} for i in range(size)},
    }
    walked: list[int] = []
    for where in ("coordinator.shape.json_grammar", "coordinator.tools.fault_in"):
        monkeypatch.setattr(where, lambda *_: walked.append(1) or "walked")
    tool = {"type": "function", "function": {"name": "f", "parameters": large}}
    async with service() as s:
        for field, value in (("guided_json", large), ("tools", [tool])):
            response = await s.chat(**{field: value})
            assert (response.status_code, error_of(response)["param"]) == (400, field)
            is_measured = "at most 262144 bytes" in error_of(response)["message"]
            assert is_measured is (size == 40_000)
    assert len(walked) == (2 if size == 3000 else 0)


async def test_a_tenants_hostile_grammars_do_not_keep_anothers_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.text.trial.CPU_S", 0.2)
    hostile, honest = write_keys(tmp_path / "keys.json", "hostile", "honest")
    ends: list[str] = []
    async with gateway_service(folder=tmp_path, keys_file=str(tmp_path / "keys.json")) as s:

        async def ask(key: str, name: str, structure: Json) -> tuple[int, Any]:
            body = GOOD["/v1/completions"] | {"structured_outputs": structure}
            response = await s.client.post("/v1/completions", json=body, headers=bearer(key))
            ends.append(name)
            return response.status_code, response.status_code != 200 and error_of(response)["param"]

        async with asyncio.TaskGroup() as tasks:
            spinning = [
                tasks.create_task(ask(hostile, "hostile", {"json": SPINS | {"title": str(i)}}))
                for i in range(5)
            ]
            other = tasks.create_task(ask(honest, "honest", {"regex": "[A-Z]ello!"}))
        assert other.result() == (200, False)
        assert [task.result() for task in spinning] == [(400, "structured_outputs")] * 5
        assert ends[0] == "honest"


async def test_an_output_that_cannot_go_on_names_the_field_of_its_grammar() -> None:
    def script(_: Any) -> list[Any]:
        return [GrammarError("the output cannot follow its grammar any further: it is too complex")]

    async with service(script) as s:
        response = await s.complete(structured_outputs={"regex": "a+"})
        assert (response.status_code, error_of(response)["param"]) == (400, "structured_outputs")
        response = await s.complete(guided_regex="H+", stream=True)
        assert (response.status_code, error_of(response)["param"]) == (400, "guided_regex")


@pytest.mark.parametrize(
    "asked",
    [
        {"guided_grammar": "root ::= "}, {"guided_grammar": 'root ::= ""'}, {"guided_grammar": 'start: ""'},
        {"structured_outputs": {"grammar": "root ::= \n"}}, {"guided_regex": "a{0}"}, {"guided_regex": "()"},
        {"guided_regex": ""}, {"guided_choice": [""]},
    ],
)  # fmt: skip
async def test_a_grammar_of_nothing_but_an_empty_output_is_refused(asked: Json) -> None:
    (param,) = asked
    async with service() as s:
        response = await s.complete(**asked)
        assert (response.status_code, error_of(response)["param"]) == (400, param)


INSIDE = (
    "llguidance",
    "<non-verbose",
    ".rs",
    "NoExtensionBias",
    "f64",
    "Unimplemented",
    "lexer error",
    "WordUnicode",
    "Failed to",
    "\n",
    "^",
)


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"structured_outputs": {"regex": "(a+"}}, "'(a+' is none at character 1: unclosed group"),
        ({"structured_outputs": {"regex": "a(?=x)"}}, "at character 2: look-around"),
        ({"guided_json": {"type": "string", "pattern": "(a+"}}, "'(a+' is none at character 1: unclosed group"),
        ({"guided_json": {"not": {"type": "string"}}}, 'none of the keywords that cannot be enforced but got "not"'),
        ({"guided_json": {"type": "hiccup"}}, "one that JSON Schema has but got hiccup"),
        ({"guided_json": {"minimum": "x", "type": "integer"}}, "minimum: expected another type"),
        ({"guided_json": {"$ref": "http://elsewhere/x"}}, "$ref to a part of this schema but got 'http://elsewhere/x'"),
        ({"guided_json": {"oneOf": [{"type": "string"}, {"minLength": 3}]}}, "no oneOf of which two may be met"),
        ({"guided_json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}}, "a rule is nothing but itself"),
        ({"guided_json": {"type": "string", "format": "iri"}}, "expected a format that can be enforced but got iri"),
        ({"guided_json": {"type": "number", "minimum": 1e300}}, "bounds that numbers of 64 bits can meet"),
        ({"guided_json": {"type": "string", "pattern": r"\ba"}}, "expected no word boundary in a pattern"),
        ({"guided_regex": r"a\b"}, "expected no word boundary in a pattern"),
        ({"guided_grammar": "start: missing"}, "line 1, column 8: expected a rule named missing"),
        ({"guided_grammar": "start: x\nx: (a"}, "line 2, column 6: expected ')' but got '"),
        ({"guided_grammar": 'start: "a'}, "line 1, column 10: expected a name, a quoted text"),
        ({"guided_grammar": "start: start"}, "a rule is nothing but itself"),
        ({"guided_grammar": 'start: x\nx: "a"\nx: "b"'}, "line 3, column 4: expected one rule named x but got two"),
        ({"guided_grammar": 'x ::= "a"'}, "expected a rule named start (Lark) or root (GBNF) but got none"),
        ({"guided_grammar": "root ::= a-b"}, "expected a rule named a-b but there is none"),
        ({"guided_grammar": "root ::= ((("}, "line 1, behind 'root ::= ((('"),
        ({"guided_grammar": 'root ::= x\nx ::= "\\'}, "it ends too early"),
        ({"guided_json": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(500)}}},
         "too many ways at once"),
    ],
)  # fmt: skip
async def test_why_a_grammar_is_refused_is_said_in_our_own_words(asked: Json, told: str) -> None:
    (param,) = asked
    async with service() as s:
        response = await s.complete(**asked)
        error = error_of(response)
        assert (response.status_code, error["param"]) == (400, param)
        assert told in error["message"], error["message"]
        assert error["message"].startswith(param)
        assert not [word for word in INSIDE if word in error["message"]], error["message"]
