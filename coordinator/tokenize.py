"""`/tokenize` and `/detokenize`: what a prompt costs, without running it.

Same forms as the generation endpoints.
"""

from __future__ import annotations

from typing import Any

from contracts.errors import RequestError
from coordinator.fields import shown
from coordinator.prompts import chat_prompt, completion_prompts, read_messages, read_prompts
from coordinator.schema import parse_chat, parse_completion
from coordinator.tools import read_tools
from engine.text.tokenizer import TextModel


def tokenize(body: dict[str, Any], text: TextModel, max_tokens: int) -> dict[str, Any]:
    """Ids of `messages` (through the template) or of one `prompt`.

    Raises RequestError as those endpoints do, and for both at once.
    """
    if body.get("messages") is not None and body.get("prompt") is not None:
        raise RequestError("prompt: expected no messages beside it", param="prompt")
    wants_texts = body.get("return_token_strs")
    if not isinstance(wants_texts, bool | None):
        raise RequestError(
            f"return_token_strs: expected true or false but got {shown(wants_texts)}",
            param="return_token_strs",
        )
    if body.get("messages") is not None:
        ids = chat_prompt(text, read_messages(body), parse_chat(body), max_tokens, read_tools(body)).ids
    elif body.get("prompt") == "":  # nothing to go on from, but not nothing to count
        ids = tuple(text.encode("", add_special_tokens=parse_completion(body).add_special_tokens))
    else:
        prompts = read_prompts(body, text.vocab_size, 1, max_tokens)
        ids = completion_prompts(text, prompts, parse_completion(body), max_tokens)[0].ids
    answer: dict[str, Any] = {"count": len(ids), "max_model_len": max_tokens, "tokens": list(ids)}
    if wants_texts:
        answer["token_strs"] = [text.token_text(i) for i in ids]
    return answer


def detokenize(body: dict[str, Any], text: TextModel) -> dict[str, Any]:
    """The text of `tokens`, special ones included. Raises RequestError for what is no list of known ids."""
    tokens = body.get("tokens")
    if not isinstance(tokens, list):
        raise RequestError(f"tokens: expected a list of token ids but got {shown(tokens)}", param="tokens")
    for token_id in tokens:
        if type(token_id) is not int or not 0 <= token_id < text.vocab_size:
            raise RequestError(
                f"tokens: expected ids from 0 to {text.vocab_size - 1} but got {shown(token_id)}",
                param="tokens",
            )
    return {"prompt": text.decode(tokens, skip_special_tokens=False)}
