"""Chat templates in their sandbox."""

from __future__ import annotations

import pytest

from contracts.errors import ConfigError, RequestError
from engine.text.template import ChatTemplate
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
