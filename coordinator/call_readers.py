"""The readers of the families' formats.

Hermes, Qwen    <tool_call>\\n{"name": …, "arguments": {…}}\\n</tool_call>
Llama 3         [<|python_tag|>]{"name": …, "parameters": {…}}[; {…}]
Mistral         [TOOL_CALLS][{"name": …, "arguments": {…}}, …]     or     [TOOL_CALLS]name[ARGS]{…}
"""

from __future__ import annotations

from coordinator.calls import Argued, Calls, JsonValue, Part, Said, held_length, short_id

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_SURE = "<tool"  # nobody means anything else by it
PYTHON_TAG = "<|python_tag|>"
TOOL_CALLS, ARGS = "[TOOL_CALLS]", "[ARGS]"


class HermesReader:
    """Text, with calls between their marks. White space around calls belongs to them."""

    def __init__(self) -> None:
        self._calls = Calls()
        self._buffer = ""
        self._in_call = False
        self._is_closing = False

    @property
    def num_calls(self) -> int:
        return self._calls.num_calls

    @property
    def is_whole(self) -> bool:
        return not self._in_call or self._is_closing

    def push(self, text: str) -> list[Part]:
        self._buffer += text
        parts: list[Part] = []
        while self._buffer:
            size = len(self._buffer)
            parts += self._inside() if self._in_call else self._outside()
            if len(self._buffer) == size:
                break
        return parts

    def flush(self) -> list[Part]:
        """What was held back as a possible mark; half a call stays untold, and so does what can only be half a mark."""
        text, self._buffer = self._buffer, ""
        if self._in_call:
            return []
        held = held_length(text, OPEN)
        return self._said(text if held < len(_SURE) else text[: len(text) - held].rstrip())

    def _outside(self) -> list[Part]:
        before, mark, after = self._buffer.partition(OPEN)
        if mark:
            self._buffer, self._in_call = after, True
            self._calls.begin()
            return self._said(before.rstrip())
        held = held_length(before, OPEN)
        # Space before a mark is the mark's; it comes out with the text behind it.
        text = before[: len(before) - held].rstrip()
        self._buffer = before[len(text) :]
        return self._said(text)

    def _said(self, text: str) -> list[Part]:
        if self._calls.num_calls and not text.strip():
            return []
        return [Said(text)] if text else []

    def _inside(self) -> list[Part]:
        if self._is_closing:
            _, mark, after = self._buffer.partition(CLOSE)
            self._buffer = after if mark else self._buffer[-len(CLOSE) + 1 :]
            if mark:
                self._in_call = self._is_closing = False
            return []
        text, self._buffer = self._buffer, ""
        parts = self._calls.push(text)
        call = self._calls.object
        if call.is_broken and not self._calls.is_told:
            self._in_call = False
            return [Said(OPEN + call.seen)]
        if call.is_done or call.is_broken:
            self._is_closing, self._buffer = True, call.rest
        return parts


class LlamaReader:
    """The whole output is calls, or it is text: a call has no mark that it must begin with."""

    def __init__(self, names: frozenset[str]) -> None:
        self._calls = Calls()
        self._names = names
        self._begun = ""
        self._state = "begin"  # begin │ call │ between │ text

    @property
    def num_calls(self) -> int:
        return self._calls.num_calls

    @property
    def is_whole(self) -> bool:
        return self._state != "call"

    def push(self, text: str) -> list[Part]:
        if self._state == "text":
            return [Said(text)] if text else []
        if self._state == "call":
            return self._in_call(text)
        self._begun += text
        rest = self._begun.lstrip("; \t\r\n" if self._state == "between" else None)
        if not rest or (len(rest) < len(PYTHON_TAG) and PYTHON_TAG.startswith(rest)):
            return []
        rest = rest.removeprefix(PYTHON_TAG).lstrip()
        if not rest:
            return []
        if rest.startswith("{"):
            self._state, self._begun = "call", ""
            self._calls.begin()
            return self._in_call(rest)
        if self._state == "between":  # nothing is to be said behind a call
            self._begun = ""
            return []
        self._state, text = "text", self._begun
        return [Said(text)]

    def flush(self) -> list[Part]:
        if self._state == "begin" and self._begun:
            return [Said(self._begun)]
        if self._state == "call" and not self._calls.is_told and not self._calls.num_calls:
            return [Said(self._calls.object.seen)]
        return []

    def _in_call(self, text: str) -> list[Part]:
        parts = self._calls.push(text, self._names)
        call = self._calls.object
        if call.is_broken and not self._calls.is_told:
            self._state = "text" if not self._calls.num_calls else "between"
            return [Said(call.seen)] if self._state == "text" else []
        if call.is_done or call.is_broken:
            self._state = "between"
            parts += self.push(call.rest)
        return parts


class MistralReader:
    """Text up to the mark, and nothing but calls behind it."""

    def __init__(self) -> None:
        self._calls = Calls(short_id)
        self._buffer = ""
        self._state = "text"  # text │ between │ object │ name │ arguments
        self._value = JsonValue()

    @property
    def num_calls(self) -> int:
        return self._calls.num_calls

    @property
    def is_whole(self) -> bool:
        return self._state in ("text", "between")

    def push(self, text: str) -> list[Part]:
        self._buffer += text
        parts: list[Part] = []
        while self._buffer:
            before = (self._state, len(self._buffer))
            parts += getattr(self, f"_{self._state}")()
            if before == (self._state, len(self._buffer)):
                break
        return parts

    def flush(self) -> list[Part]:
        text, self._buffer = self._buffer, ""
        return [Said(text)] if text and self._state == "text" else []

    def _text(self) -> list[Part]:
        said, mark, after = self._buffer.partition(TOOL_CALLS)
        if mark:
            self._state, self._buffer = "between", after
            said = said.rstrip()
        else:
            held = held_length(said, TOOL_CALLS)
            text = said[: len(said) - held].rstrip()
            said, self._buffer = text, said[len(text) :]
        return [Said(said)] if said else []

    def _between(self) -> list[Part]:
        rest = self._buffer.lstrip("[], \t\r\n") if not self._buffer.startswith("[T") else self._buffer
        if rest.startswith(TOOL_CALLS):
            rest = rest[len(TOOL_CALLS) :]
        elif TOOL_CALLS.startswith(rest) and rest:
            self._buffer = rest
            return []
        self._buffer = rest
        if rest:
            self._state = "object" if rest[0] == "{" else "name"
            self._calls.begin()
        return []

    def _object(self) -> list[Part]:
        text, self._buffer = self._buffer, ""
        parts = self._calls.push(text)
        call = self._calls.object
        if call.is_done or call.is_broken:
            self._state, self._buffer = "between", call.rest
        return parts

    def _name(self) -> list[Part]:
        end = self._buffer.find("{")
        if end < 0:
            return []
        name = self._buffer[:end].replace(ARGS, "").strip()
        self._state, self._buffer = "arguments", self._buffer[end:]
        self._value = JsonValue()
        return [self._calls.tell(name)]

    def _arguments(self) -> list[Part]:
        end = self._value.end(self._buffer, 0)
        text, self._buffer = self._buffer[:end], "" if end is None else self._buffer[end:]
        if end is not None:
            self._state = "between"
        return [Argued(self._calls.num_calls - 1, text)]
