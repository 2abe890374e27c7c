"""The OpenAPI document, written from the very models that read the bodies, and a page that shows it.

FastAPI's own generator knows only handlers whose bodies it parses; ours parse theirs (see http.py).
"""

from __future__ import annotations

from typing import Any

from fastapi.openapi.docs import get_swagger_ui_html
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from coordinator.errors_http import json_response
from coordinator.schema import ChatParams, CompletionParams

_REF = "#/components/schemas/{model}"
_ANY_OBJECT = {"type": "object"}
_MESSAGES = {"type": "array", "minItems": 1, "items": _ANY_OBJECT}
_PROMPT = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}},
        {"type": "array", "items": {"type": "integer"}},
        {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
    ]
}
_TOOLS = {
    "tools": {"type": "array", "items": _ANY_OBJECT},
    "tool_choice": {"anyOf": [{"enum": ["none", "auto", "required"]}, _ANY_OBJECT]},
    "parallel_tool_calls": {"type": "boolean"},
}
_SHAPES = {"response_format": _ANY_OBJECT, "structured_outputs": _ANY_OBJECT}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_GETS = {
    "/v1/models": "The model that is served.",
    "/v1/models/{model_id}": "One model.",
    "/health": "Whether the process answers.",
    "/ready": "Whether requests can be served.",
    "/version": "Baton's version.",
    "/metrics": "Prometheus metrics.",
}


def routes(version: str) -> list[Route]:
    """`/openapi.json` and `/docs`."""
    found = document(version)

    async def show(request: Request) -> Response:
        return json_response(found)

    async def page(request: Request) -> Response:
        return get_swagger_ui_html(openapi_url="openapi.json", title="Baton")

    return [Route("/openapi.json", show, methods=["GET"]), Route("/docs", page, methods=["GET"])]


def document(version: str) -> dict[str, Any]:
    """OpenAPI 3.1."""
    schemas: dict[str, Any] = {
        "Error": _ERROR,
        "Chat": _body(ChatParams, {"messages": _MESSAGES, **_TOOLS, **_SHAPES}, ["messages"]),
        "Completion": _body(CompletionParams, {"prompt": _PROMPT, **_SHAPES}, ["prompt"]),
        "Response": {
            "type": "object",
            "required": ["input"],
            "properties": {
                "model": {"type": "string"},
                "input": {"anyOf": [{"type": "string"}, {"type": "array", "items": _ANY_OBJECT}]},
                "instructions": {"type": "string"},
                "max_output_tokens": {"type": "integer", "minimum": 1},
                "stream": {"type": "boolean"},
                "text": _ANY_OBJECT,
                **_TOOLS,
            },
        },
        "Tokenize": {"type": "object", "properties": {"prompt": _PROMPT, "messages": _MESSAGES}},
        "Detokenize": {
            "type": "object",
            "required": ["tokens"],
            "properties": {"tokens": {"type": "array", "items": {"type": "integer"}}},
        },
    }
    nested = {name: part for schema in schemas.values() for name, part in schema.pop("$defs", {}).items()}
    posts = {
        "/v1/chat/completions": ("Chat", "A chat's next message, streamed with `stream`."),
        "/v1/completions": ("Completion", "What follows a text."),
        "/v1/responses": ("Response", "A response that is not stored."),
        "/tokenize": ("Tokenize", "The tokens of a prompt or of messages."),
        "/detokenize": ("Detokenize", "The text of tokens."),
    }
    paths = {path: {"post": _operation(about, name)} for path, (name, about) in posts.items()}
    paths |= {path: {"get": _operation(about)} for path, about in _GETS.items()}
    paths["/v1/models/{model_id}"]["get"]["parameters"] = [
        {"name": "model_id", "in": "path", "required": True, "schema": {"type": "string"}}
    ]
    return {
        "openapi": "3.1.0",
        "info": {"title": "Baton", "version": version},
        "paths": paths,
        "components": {"schemas": schemas | nested},
    }


def _body(kind: type[ChatParams] | type[CompletionParams], more: Any, required: list[str]) -> Any:
    """A model's schema, with the fields that are read outside of it. Null stands for every default."""
    schema = kind.model_json_schema(ref_template=_REF)
    schema["properties"] |= more
    return schema | {
        "required": required,
        "description": "A field that is not listed is ignored, or refused by name.",
    }


def _operation(about: str, body: str | None = None) -> dict[str, Any]:
    error = {"application/json": {"schema": {"$ref": _REF.format(model="Error")}}}
    operation: dict[str, Any] = {
        "summary": about,
        "responses": {
            "200": {"description": "As OpenAI's."},
            "default": {"description": "An error.", "content": error},
        },
    }
    if body is not None:
        content = {"application/json": {"schema": {"$ref": _REF.format(model=body)}}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation
