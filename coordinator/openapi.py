"""The OpenAPI document, written from the very models that read the bodies, and a page that shows it.

FastAPI's own generator knows only handlers whose bodies it parses; ours parse theirs (see http.py). The document is
made when it is first asked for: most servers are never asked.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from fastapi.openapi.docs import get_swagger_ui_html
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from coordinator.errors_http import json_response
from coordinator.gateway.jobs import BatchParams
from coordinator.schema import ChatParams, CompletionParams, Notes

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
_TEXT = {"type": "string"}
_SHAPES = {
    "response_format": _ANY_OBJECT,
    "structured_outputs": _ANY_OBJECT,
    "guided_json": {"anyOf": [_ANY_OBJECT, _TEXT]},
    "guided_regex": _TEXT,
    "guided_choice": {"type": "array", "items": _TEXT},
    "guided_grammar": _TEXT,
    "guided_json_object": {"type": "boolean"},
    "guided_whitespace_pattern": _TEXT,
    "modalities": {"type": "array", "items": {"enum": ["text"]}},
}
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
# Header: what it is for, and whether only requests that generate know it.
_HEADERS = {
    "x-request-id": ("The client's own id of the request, told back.", False),
    "x-request-timeout": ("Seconds until the answer must be whole.", True),
    "Idempotency-Key": ("The same key and body get the same answer.", True),
    "x-baton-class": ("interactive, batch or best_effort.", True),
    "x-baton-ttft-ms": ("The promised time to the first token.", True),
    "x-baton-itl-ms": ("The promised mean time between two tokens.", True),
}


@dataclass(frozen=True, slots=True)
class _Operation:
    """One method of one path. `body` names a schema; `queries` are texts in the query."""

    method: str
    path: str
    about: str
    body: str | None = None
    kind: str = "application/json"
    generates: bool = False
    queries: tuple[str, ...] = ()


_PAGE = ("limit", "after")
_OPERATIONS = (
    _Operation(
        "post",
        "/v1/chat/completions",
        "A chat's next message, streamed with `stream`.",
        "Chat",
        generates=True,
    ),
    _Operation("post", "/v1/completions", "What follows a text.", "Completion", generates=True),
    _Operation("post", "/v1/responses", "A response that is not stored.", "Response", generates=True),
    _Operation("get", "/v1/models", "The models that are served."),
    _Operation("get", "/v1/models/{model_id}", "One model."),
    _Operation("post", "/v1/files", "Upload the input of a batch.", "File", "multipart/form-data"),
    _Operation("get", "/v1/files", "The tenant's files, newest first.", queries=(*_PAGE, "order", "purpose")),
    _Operation("get", "/v1/files/{file_id}", "One file."),
    _Operation("delete", "/v1/files/{file_id}", "Delete a file."),
    _Operation("get", "/v1/files/{file_id}/content", "A file's bytes."),
    _Operation("post", "/v1/batches", "Run the lines of a file, when nobody else waits.", "Batch"),
    _Operation("get", "/v1/batches", "The tenant's batches, newest first.", queries=_PAGE),
    _Operation("get", "/v1/batches/{batch_id}", "One batch."),
    _Operation("post", "/v1/batches/{batch_id}/cancel", "End a batch; what is done is kept."),
    _Operation("post", "/tokenize", "The tokens of a prompt or of messages.", "Tokenize"),
    _Operation("post", "/detokenize", "The text of tokens.", "Detokenize"),
    _Operation("get", "/health", "Whether the process answers."),
    _Operation("get", "/ready", "Whether requests can be served."),
    _Operation("get", "/version", "Baton's version."),
    _Operation("get", "/metrics", "Prometheus metrics."),
)


def routes(version: str) -> list[Route]:
    """`/openapi.json` and `/docs`."""

    async def show(request: Request) -> Response:
        return json_response(document(version))

    async def page(request: Request) -> Response:
        return get_swagger_ui_html(openapi_url="openapi.json", title="Baton")

    return [Route("/openapi.json", show, methods=["GET"]), Route("/docs", page, methods=["GET"])]


@cache
def document(version: str) -> dict[str, Any]:
    """OpenAPI 3.1. Not to be changed by who gets it: there is one."""
    schemas = _schemas()
    nested = {name: part for schema in schemas.values() for name, part in schema.pop("$defs", {}).items()}
    paths: dict[str, dict[str, Any]] = {}
    for operation in _OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _described(operation)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Baton", "version": version},
        "paths": paths,
        # A server without keys takes requests without one.
        "security": [{}, {"key": []}],
        "components": {
            "schemas": schemas | nested,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _schemas() -> dict[str, Any]:
    notes = {
        name: part for name, part in Notes.model_json_schema()["properties"].items() if name != "verbosity"
    }
    return {
        "Error": _ERROR,
        "Chat": _body(ChatParams, {"messages": _MESSAGES, **_TOOLS, **_SHAPES}, ["messages"]),
        "Completion": _body(CompletionParams, {"prompt": _PROMPT, **_SHAPES}, ["prompt"]),
        "Response": {
            "type": "object",
            "required": ["input"],
            "properties": {
                "model": _TEXT,
                "input": {"anyOf": [_TEXT, {"type": "array", "items": _ANY_OBJECT}]},
                "instructions": _TEXT,
                "max_output_tokens": {"type": "integer", "minimum": 1},
                "stream": {"type": "boolean"},
                "text": _ANY_OBJECT,
                "reasoning": _ANY_OBJECT,
                **_TOOLS,
                **notes,
            },
        },
        "File": {
            "type": "object",
            "required": ["purpose", "file"],
            "properties": {"purpose": {"enum": ["batch"]}, "file": {"type": "string", "format": "binary"}},
        },
        "Batch": BatchParams.model_json_schema(),
        "Tokenize": {"type": "object", "properties": {"prompt": _PROMPT, "messages": _MESSAGES}},
        "Detokenize": {
            "type": "object",
            "required": ["tokens"],
            "properties": {"tokens": {"type": "array", "items": {"type": "integer"}}},
        },
    }


def _body(kind: type[ChatParams] | type[CompletionParams], more: Any, required: list[str]) -> Any:
    """A model's schema, with the fields that are read outside of it. Null stands for every default."""
    schema = kind.model_json_schema(ref_template=_REF)
    schema["properties"] |= more
    return schema | {
        "required": required,
        "description": "A field that is not listed is ignored, or refused by name.",
    }


def _described(operation: _Operation) -> dict[str, Any]:
    error = {"application/json": {"schema": {"$ref": _REF.format(model="Error")}}}
    described: dict[str, Any] = {
        "summary": operation.about,
        "parameters": _parameters(operation),
        "responses": {
            "200": {"description": "As OpenAI's."},
            "default": {"description": "An error.", "content": error},
        },
    }
    if operation.body is not None:
        content = {operation.kind: {"schema": {"$ref": _REF.format(model=operation.body)}}}
        described["requestBody"] = {"required": True, "content": content}
    return described


def _parameters(operation: _Operation) -> list[dict[str, Any]]:
    in_path = [part[1:-1] for part in operation.path.split("/") if part.startswith("{")]
    return [
        *({"name": name, "in": "path", "required": True, "schema": _TEXT} for name in in_path),
        *({"name": name, "in": "query", "schema": _TEXT} for name in operation.queries),
        *(
            {"name": name, "in": "header", "description": about, "schema": _TEXT}
            for name, (about, only_generating) in _HEADERS.items()
            if operation.generates or not only_generating
        ),
    ]
