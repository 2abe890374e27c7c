"""Messages as bytes: msgpack maps {v, kind, ...fields}, read through an explicit kind table, never pickle.

`decode` is total: whatever the bytes, it returns a message or raises ProtocolError. Unknown fields are ignored (a newer
peer), unknown kinds and versions are errors with both sides' values.
"""

from __future__ import annotations

import re
from dataclasses import fields, is_dataclass
from typing import Any, get_args

import msgpack
from pydantic import TypeAdapter, ValidationError

from contracts.errors import ProtocolError
from contracts.messages import PROTOCOL_VERSION, Message


def _kind(cls: type) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()


KINDS: dict[str, type] = {_kind(cls): cls for cls in get_args(Message)}
_NAMES: dict[type, str] = {cls: kind for kind, cls in KINDS.items()}
_FIELDS: dict[type, tuple[str, ...]] = {}
_READERS: dict[str, TypeAdapter[Any]] = {}


def encode(message: Message) -> bytes:
    """One frame's payload. Raises TypeError for an object that is not in the kind table."""
    kind = _NAMES.get(type(message))
    if kind is None:
        raise TypeError(f"expected a message of contracts.messages but got {type(message).__name__}")
    packed: bytes = msgpack.packb({"v": PROTOCOL_VERSION, "kind": kind, **_plain(message)}, default=_plain)
    return packed


def decode(payload: bytes) -> Message:
    """The message in `payload`. Raises ProtocolError on anything else."""
    try:
        raw = msgpack.unpackb(payload, strict_map_key=True)
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        raise ProtocolError(f"expected a msgpack map but got {len(payload)} unreadable bytes") from error
    if not isinstance(raw, dict):
        raise ProtocolError(f"expected a msgpack map but got {type(raw).__name__}")
    if not all(isinstance(key, str) for key in raw):
        raise ProtocolError("expected field names to be strings but got bytes")
    if raw.get("v") != PROTOCOL_VERSION:
        raise ProtocolError(
            f"expected protocol version {PROTOCOL_VERSION} but peer sent {str(raw.get('v'))[:32]}"
        )
    kind = raw.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        raise ProtocolError(f"expected one of {len(KINDS)} message kinds but peer sent {str(kind)[:64]!r}")
    try:
        message: Message = _reader(kind).validate_python(raw)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ProtocolError(f"message {kind!r}: field {where!r}: {first['msg']}") from None
    return message


def _reader(kind: str) -> TypeAdapter[Any]:
    reader = _READERS.get(kind)
    if reader is None:
        reader = _READERS[kind] = TypeAdapter(KINDS[kind])
    return reader


def _plain(value: Any) -> dict[str, Any]:
    cls = type(value)
    names = _FIELDS.get(cls)
    if names is None:
        if not is_dataclass(cls):
            raise TypeError(f"expected a dataclass of contracts but got {cls.__name__}")
        names = _FIELDS[cls] = tuple(f.name for f in fields(cls))
    return {name: getattr(value, name) for name in names}
