"""What the routes take, as an OpenAPI document for a fuzzer: parameters come from the models that check them."""

from __future__ import annotations

from typing import Any

from coordinator.schema import ChatParams, CompletionParams, Params

Json = dict[str, Any]

_TEXT: Json = {"type": "string"}
_ID: Json = {"name": "item_id", "in": "path", "required": True, "schema": _TEXT}
_HEADERS: list[Json] = [
    {"name": name, "in": "header", "required": False, "schema": _TEXT}
    for name in ("Idempotency-Key", "x-request-timeout", "x-request-id", "Authorization", "Origin")
]
_PAGE: list[Json] = [{"name": name, "in": "query", "schema": _TEXT} for name in ("limit", "after")]
_MESSAGE: Json = {
    "type": "object",
    "properties": {"role": {"enum": ["system", "user", "assistant", "tool"]}, "content": _TEXT},
    "required": ["role", "content"],
}
_PROMPT: Json = {"anyOf": [_TEXT, {"type": "array", "items": {"type": "integer"}}]}
_BATCH: Json = {
    "type": "object",
    "properties": {
        "input_file_id": _TEXT,
        "endpoint": {"enum": ["/v1/chat/completions", "/v1/completions"]},
        "completion_window": {"enum": ["24h"]},
        "metadata": {"type": "object", "additionalProperties": _TEXT},
    },
    "required": ["input_file_id", "endpoint", "completion_window"],
}
_FILE: Json = {
    "type": "object",
    "properties": {"purpose": _TEXT, "file": {"type": "string", "format": "binary"}},
    "required": ["purpose", "file"],
}


def document() -> Json:
    """OpenAPI 3.1 of every route that reads something of its caller's."""
    chat = _params(ChatParams, {"messages": {"type": "array", "items": _MESSAGE}})
    completion = _params(CompletionParams, {"prompt": _PROMPT})
    tokens = {"type": "object", "properties": {"tokens": {"type": "array", "items": {"type": "integer"}}}}
    paths: dict[str, Json] = {
        "/v1/chat/completions": {"post": _post(chat)},
        "/v1/completions": {"post": _post(completion)},
        "/tokenize": {"post": _post(completion)},
        "/detokenize": {"post": _post(tokens)},
        "/v1/models/{item_id}": {"get": _get(_ID)},
        "/v1/files": {"post": _post(_FILE, "multipart/form-data"), "get": _get(*_PAGE)},
        "/v1/files/{item_id}": {"get": _get(_ID), "delete": _get(_ID)},
        "/v1/files/{item_id}/content": {"get": _get(_ID)},
        "/v1/batches": {"post": _post(_BATCH), "get": _get(*_PAGE)},
        "/v1/batches/{item_id}": {"get": _get(_ID)},
        "/v1/batches/{item_id}/cancel": {"post": _get(_ID)},
    }
    return {"openapi": "3.1.0", "info": {"title": "Baton", "version": "1"}, "paths": paths}


def _params(model: type[Params], more: Json) -> Json:
    schema = model.model_json_schema(ref_template="#/$defs/{model}")
    options = schema.pop("$defs", {}).get("StreamOptions", {})
    properties = {**schema["properties"], "stream_options": options, **more}
    return {"type": "object", "properties": properties, "required": list(more)}


def _post(body: Json, kind: str = "application/json") -> Json:
    content = {"required": True, "content": {kind: {"schema": body}}}
    return {**_get(), "requestBody": content}


def _get(*parameters: Json) -> Json:
    return {"parameters": [*parameters, *_HEADERS], "responses": {"default": {"description": "any"}}}
