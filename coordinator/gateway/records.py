"""Files, batches and sums of usage as they are kept, files and batches also as clients see them. No database here:
whoever only names these must not load one.

batch:  validating ─┬─► in_progress ─► finalizing ─► completed │ expired
                    │        └──► cancelling ─► cancelled
                    └─► failed   (no such file can be a batch: nothing was run)
"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass, fields
from typing import Any

COMPLETION_WINDOW_S = 86_400
UNFINISHED = ("validating", "in_progress", "finalizing", "cancelling")


@dataclass(frozen=True, slots=True)
class FileRecord:
    """An uploaded file, or the output of a batch; its bytes lie beside the database under its id."""

    id: str
    tenant: str
    filename: str
    purpose: str
    num_bytes: int
    created_at: int

    def as_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.num_bytes,
            "created_at": self.created_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "expires_at": None,
        }


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """One batch. Times are seconds since the epoch, None: not yet. `errors`, `metadata`: JSON text."""

    id: str
    tenant: str
    key_id: str
    endpoint: str
    input_file_id: str
    metadata: str
    status: str
    created_at: int
    expires_at: int
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    num_total: int = 0
    num_completed: int = 0
    num_failed: int = 0
    errors: str | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None

    def as_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": {"object": "list", "data": json.loads(self.errors)} if self.errors else None,
            "input_file_id": self.input_file_id,
            "completion_window": "24h",
            "status": self.status,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": self.created_at,
            "in_progress_at": self.in_progress_at,
            "expires_at": self.expires_at,
            "finalizing_at": self.finalizing_at,
            "completed_at": self.completed_at,
            "failed_at": self.failed_at,
            "expired_at": self.expired_at,
            "cancelling_at": self.cancelling_at,
            "cancelled_at": self.cancelled_at,
            "request_counts": {
                "total": self.num_total,
                "completed": self.num_completed,
                "failed": self.num_failed,
            },
            "metadata": json.loads(self.metadata),
        }


@dataclass(frozen=True, slots=True)
class LineResult:
    """One line's end, as the line of the output or error file."""

    number: int
    is_error: bool
    text: str


@dataclass(frozen=True, slots=True)
class UsageKey:
    """Whose sum. `endpoint` is a path, with ` (batch)` behind it for lines of a batch."""

    tenant: str
    key_id: str
    model: str
    endpoint: str


@dataclass(slots=True)
class Usage:
    """A sum. `failed`: a status of 400 and above; `replayed`: answered from memory, without tokens."""

    requests: int = 0
    failed: int = 0
    replayed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0

    def add(self, other: Usage) -> None:
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))


def new_id(prefix: str) -> str:
    return f"{prefix}{secrets.token_hex(12)}"
