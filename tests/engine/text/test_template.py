"""Chat templates in their sandbox."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel
from tokenizers.models import BPE

from contracts.errors import ConfigError, RequestError
from engine.text.template import ChatTemplate
from engine.text.tokenizer import load_text
from tests.engine.text.builders import CHATML

USER = [{"role": "user", "content": "hi"}]


def render(source: str, messages: list[dict[str, object]] = USER, **options: object) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(messages, **options)  # type: ignore[arg-type]


def test_a_refusal_of_the_template_is_the_callers_error_with_its_words() -> None:
    with pytest.raises(RequestError, match="roles must alternate") as caught:
        render("{{ raise_exception('roles must alternate') }}")
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    ["{{ messages[0].content + 1 }}", "{{ messages[5].x.y }}", "{{ 1 / 0 }}", "{{ ''.__class__.__mro__ }}"],
)
def test_a_failing_template_is_a_request_error(source: str) -> None:
    with pytest.raises(RequestError):
        render(source)


def test_the_sandbox_keeps_messages_unchanged() -> None:
    with pytest.raises(RequestError):
        render("{{ messages.append(1) }}")


def test_a_broken_template_is_a_config_error_at_load() -> None:
    with pytest.raises(ConfigError):
        ChatTemplate("{% for %}", {})


def test_hugging_face_helpers_exist() -> None:
    source = "{{ bos_token }}{{ {'é': [1]} | tojson }}{{ strftime_now('%Y') | length }}"
    source += "{% generation %}x{% endgeneration %}"
    assert render(source) == '<s>{"é": [1]}4x'


def test_continue_final_message_ends_right_behind_its_text() -> None:
    messages: list[dict[str, object]] = [*USER, {"role": "assistant", "content": "one two "}]
    text = render(CHATML, messages, add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("<|im_start|>assistant\none two ")


def test_parts_are_given_only_to_templates_that_read_parts() -> None:
    assert not ChatTemplate(CHATML, {}).wants_parts
    parts = "{% for m in messages %}{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endfor %}"
    assert ChatTemplate(parts, {}).wants_parts
    assert render(parts) == "[hi]"


def test_template_variables_reach_the_template() -> None:
    assert render("{{ thinking }}", kwargs={"thinking": True}) == "True"


NAMED = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D{{ messages[0].content }}"}]


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"tokenizer_config.json": {"chat_template": "C{{ messages[0].content }}"}}, "Chi"),
        ({"tokenizer_config.json": {"chat_template": NAMED}}, "Dhi"),
        ({"tokenizer_config.json": {"chat_template": NAMED[:1]}}, "T"),
        ({"chat_template.json": {"chat_template": "J{{ messages[0].content }}"}}, "Jhi"),
        ({"chat_template.jinja": "F", "tokenizer_config.json": {"chat_template": NAMED}}, "F"),
    ],
)
def test_a_directory_tells_its_template_in_several_ways(
    tmp_path: Path, files: dict[str, Any], expected: str
) -> None:
    write_directory(tmp_path, files)
    assert load_text(tmp_path).render([{"role": "user", "content": "hi"}]) == expected


@pytest.mark.parametrize("broken", [[{"name": "default", "template": 3}], {"default": "x"}, 7])
def test_a_template_that_is_no_text_is_a_config_error(tmp_path: Path, broken: object) -> None:
    write_directory(tmp_path, {"tokenizer_config.json": {"chat_template": broken}})
    with pytest.raises(ConfigError, match="expected a chat template as text"):
        load_text(tmp_path)


def write_directory(folder: Path, files: dict[str, Any]) -> None:
    tokenizer = Tokenizer(BPE(vocab={"h": 0, "i": 1}, merges=[]))
    tokenizer.decoder = ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
