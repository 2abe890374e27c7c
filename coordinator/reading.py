"""How one choice's text is read: the model's reasoning apart, tool calls apart, the rest as it is.

    text ──► reasoning? ──► tool calls? ──► Thought │ Said │ Called │ Argued

A job that has neither has no reader, and its text goes straight through.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from coordinator.calls import CallReader, Part, Said, Thought, held_length

THINK, THINK_END = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class Reading:
    """How to read a job's outputs. `shown_ids`: special tokens that the readers must see.

    `begins_in_thought`: the prompt itself opened the reasoning. `is_single`: calls after the first are not wanted.
    `is_forced`: the output is calls and nothing else. `reason_of_calls`: the finish reason of an output that called.
    """

    thinks: bool = False
    begins_in_thought: bool = False
    shows_thoughts: bool = True
    make_reader: Callable[[], CallReader] | None = None
    is_single: bool = False
    is_forced: bool = False
    reason_of_calls: str = "tool_calls"
    shown_ids: frozenset[int] = frozenset()

    @property
    def is_plain(self) -> bool:
        return not self.thinks and self.make_reader is None


class MessageReader:
    """One choice's text in parts."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._thoughts = ThoughtReader(reading.begins_in_thought) if reading.thinks else None
        self._calls = reading.make_reader() if reading.make_reader is not None else None

    @property
    def has_called(self) -> bool:
        """Whether there is a call, and the last one is complete."""
        return self._calls is not None and self._calls.num_calls > 0 and self._calls.is_whole

    @property
    def is_calling(self) -> bool:
        """Whether a call is under way."""
        return self._calls is not None and not self._calls.is_whole

    def push(self, text: str) -> list[Part]:
        return self._kept(self._called(self._thoughts.push(text) if self._thoughts else [Said(text)]))

    def flush(self) -> list[Part]:
        parts = self._called(self._thoughts.flush()) if self._thoughts else []
        return self._kept(parts + (self._calls.flush() if self._calls else []))

    def _called(self, parts: list[Part]) -> list[Part]:
        if self._calls is None:
            return parts
        found: list[Part] = []
        for part in parts:
            found += self._calls.push(part.text) if isinstance(part, Said) else [part]
        return found

    def _kept(self, parts: list[Part]) -> list[Part]:
        """Without what the client does not want: reasoning, or calls after the first."""
        return [part for part in parts if self._is_kept(part)]

    def _is_kept(self, part: Part) -> bool:
        if isinstance(part, Thought):
            return self._reading.shows_thoughts
        if isinstance(part, Said):
            return bool(part.text) and not self._reading.is_forced
        return not self._reading.is_single or part.index == 0


class ThoughtReader:
    """Reasoning up to its end mark, then the answer."""

    def __init__(self, begins_in_thought: bool) -> None:
        self._state = "thinking" if begins_in_thought else "begin"  # begin │ thinking │ behind │ answer
        self._buffer = ""

    def push(self, text: str) -> list[Part]:
        self._buffer += text
        if self._state == "begin":
            rest = self._buffer.lstrip()
            if len(rest) < len(THINK) and THINK.startswith(rest):
                return []
            self._state = "thinking" if rest.startswith(THINK) else "answer"
            self._buffer = rest.removeprefix(THINK) if self._state == "thinking" else self._buffer
        parts: list[Part] = self._thought() if self._state == "thinking" else []
        if self._state == "behind":
            self._buffer = self._buffer.lstrip()
            self._state = "answer" if self._buffer else "behind"
        if self._state == "answer" and self._buffer:
            parts.append(Said(self._buffer))
            self._buffer = ""
        return parts

    def flush(self) -> list[Part]:
        text, self._buffer = self._buffer, ""
        if not text:
            return []
        return [Thought(text) if self._state == "thinking" else Said(text)]

    def _thought(self) -> list[Part]:
        text, mark, after = self._buffer.partition(THINK_END)
        if mark:
            self._state, self._buffer = "behind", after
        else:
            held = held_length(text, THINK_END)
            text, self._buffer = text[: len(text) - held], text[len(text) - held :]
        return [Thought(text)] if text else []


class ThoughtCount:
    """Counts the tokens of the reasoning, its end mark included, by the raw text that they make."""

    def __init__(self, reading: Reading) -> None:
        self._begins_in_thought = reading.begins_in_thought
        self._is_open = reading.thinks
        self._text = ""
        self.num_tokens = 0

    def push(self, text: str) -> None:
        """One token's text."""
        if not self._is_open:
            return
        self._text += text
        self.num_tokens += 1
        if not self._begins_in_thought:
            begun = self._text.lstrip()
            if not (begun.startswith(THINK) or THINK.startswith(begun)):
                self._is_open, self.num_tokens = False, 0
                return
            if not begun.startswith(THINK):
                return
            self._begins_in_thought = True
        if THINK_END in self._text:
            self._is_open = False
        self._text = self._text[-len(THINK_END) - len(text) :]
