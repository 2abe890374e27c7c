"""Tool calls inside a model's text, found while it streams.

    text ──► CallReader ──► Said │ Called │ Argued …        one reader per choice, made by a family's format

A call is told as soon as its name is known, its arguments as they come. What could still become a call's mark is held
back; what turns out to be none comes out as text; a mark or half a call never does.
"""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

_SPACE = " \t\r\n"
_ARGUMENT_KEYS = ("arguments", "parameters")


@dataclass(frozen=True, slots=True)
class Said:
    """Text for the reader of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Thought:
    """Text of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class Called:
    """A call begins; `index` counts the choice's calls from 0."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class Argued:
    """More of the JSON text of a call's arguments."""

    index: int
    text: str


Part = Said | Thought | Called | Argued


class CallReader(Protocol):
    """`is_whole`: no call is under way."""

    @property
    def num_calls(self) -> int: ...

    @property
    def is_whole(self) -> bool: ...

    def push(self, text: str) -> list[Part]: ...

    def flush(self) -> list[Part]: ...


def held_length(text: str, mark: str) -> int:
    """How much of the end of `text` may be the beginning of `mark`."""
    return next(
        (size for size in range(min(len(mark) - 1, len(text)), 0, -1) if mark.startswith(text[-size:])), 0
    )


class JsonValue:
    """Finds the end of one JSON value in text that comes in pieces. Only brackets and quotes count."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._is_escaped = False
        self._has_begun = False

    def end(self, text: str, start: int) -> int | None:
        """The position behind the value in `text`, whose characters before `start` were seen before; None: not yet."""
        for i in range(start, len(text)):
            char = text[i]
            if self._in_string:
                if self._is_escaped:
                    self._is_escaped = False
                elif char == "\\":
                    self._is_escaped = True
                elif char == '"':
                    self._in_string = False
                    if self._depth == 0:
                        return i + 1
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return i + 1 if self._depth == 0 else i
            elif self._depth == 0 and self._has_begun and char in ", \t\r\n":
                return i
            self._has_begun = True
        return None


@dataclass(slots=True)
class CallObject:
    """`{"name": …, "arguments": {…}}` in pieces. `push` gives what is known of the arguments, once `name` is."""

    name: str | None = None
    is_done: bool = False
    is_broken: bool = False
    rest: str = ""  # behind the object, once it is done
    seen: str = ""
    _pos: int = 0
    _key: str | None = None
    _value: JsonValue | None = None
    _value_start: int = 0
    _held: str = ""  # arguments that came before the name
    _has_arguments: bool = False
    _streams: bool = False

    def push(self, text: str) -> str:
        """The next piece of the arguments' JSON text."""
        self.seen += text
        out = ""
        while not (self.is_done or self.is_broken):
            if self._value is not None:
                more = self._in_value()
                if more is None:
                    break
                out += more
            elif not self._between():
                break
        return out + self._known()

    def _known(self) -> str:
        """Arguments that waited for the name; `{}` for a call that gives none."""
        if self.is_done and self.name is None:
            self.is_broken = True
        if self.name is None or self.is_broken:
            return ""
        if self.is_done and not self._has_arguments:
            self._has_arguments, self._held = True, "{}"
        held, self._held = self._held, ""
        return held

    def _between(self) -> bool:
        """One step outside of values; False: more text is needed."""
        while self._pos < len(self.seen) and self.seen[self._pos] in _SPACE:
            self._pos += 1
        if self._pos == len(self.seen):
            return False
        char = self.seen[self._pos]
        if self._key is not None:
            if char == ":":
                self._pos += 1
                return True
            self._value, self._value_start = JsonValue(), self._pos
            self._streams = self._key in _ARGUMENT_KEYS and char == "{" and self.name is not None
        elif char == '"':
            end = JsonValue().end(self.seen, self._pos)
            if end is None:
                return False
            self._key, self._pos = self._loaded(self.seen[self._pos : end]), end
        elif char == "}" and self._pos:
            self.is_done, self.rest = True, self.seen[self._pos + 1 :]
        elif char in "{,":
            self._pos += 1
        else:
            self.is_broken = True
        return True

    def _in_value(self) -> str | None:
        assert self._value is not None
        start = self._pos
        end = self._value.end(self.seen, start)
        self._pos = len(self.seen) if end is None else end
        fresh = self.seen[start : self._pos]
        if end is None:
            return (fresh or None) if self._streams else None
        self._end_value(self.seen[self._value_start : end])
        return fresh if self._streams else ""

    def _end_value(self, source: str) -> None:
        if self._key == "name":
            self.name = self._loaded(source)
        elif self._key in _ARGUMENT_KEYS and not self._has_arguments:
            self._has_arguments = True
            if not self._streams:
                self._held = _as_arguments(source)
        self._key = self._value = None

    def _loaded(self, source: str) -> str | None:
        try:
            value = json.loads(source, strict=False)
        except ValueError:
            value = None
        if not isinstance(value, str):
            self.is_broken = True
            return None
        return value


def _as_arguments(source: str) -> str:
    """Some models write the arguments as a string of JSON, or null."""
    if source.startswith('"'):
        try:
            return str(json.loads(source, strict=False))
        except ValueError:
            return source
    return "{}" if source == "null" else source


def long_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def short_id() -> str:
    """What Mistral's templates insist on: nine letters or digits."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


@dataclass(slots=True)
class Calls:
    """Counts and names the calls of one choice."""

    make_id: Callable[[], str] = long_id
    num_calls: int = 0
    _is_told: bool = False
    _object: CallObject = field(default_factory=CallObject)

    def begin(self) -> None:
        self._object, self._is_told = CallObject(), False

    def push(self, text: str, names: frozenset[str] | None = None) -> list[Part]:
        """Of the call's object. `names`: a call of anything else is none."""
        call = self._object
        arguments = call.push(text)
        parts: list[Part] = []
        if call.name is not None and not call.is_broken and not self._is_told:
            if names is not None and call.name not in names:
                call.is_broken = True
                return []
            parts.append(self.tell(call.name))
            self._is_told = True
        if arguments and self._is_told:
            parts.append(Argued(self.num_calls - 1, arguments))
        return parts

    def tell(self, name: str) -> Called:
        self.num_calls += 1
        return Called(self.num_calls - 1, self.make_id(), name)

    @property
    def object(self) -> CallObject:
        return self._object

    @property
    def is_told(self) -> bool:
        return self._is_told
