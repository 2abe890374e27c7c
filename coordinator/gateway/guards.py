"""Guardrail hooks: what an operator's own code sees of requests and answers, and what it may do to them.

An input guard is `async def guard(request: GuardedRequest) -> dict | None`: the body to go on with, None for
unchanged. An output guard is `async def guard(window: Window) -> Iterable[Edit]`: what to replace. Either may raise
`Refusal`: a 400 before the first byte, an error event after.

    text of one choice:   already sent (context) │ to be sent now │ held back: the last `window_chars` characters
                          ◄────────────────────────── Window.text ──────────────────────────►
                                                 ▲ num_sent

Guards see raw text, never their own edits, so a match that is still growing is not replaced too early: an edit counts
once it is wholly outside of what is held back, and one that reaches into it moves the border to its start. So whatever
is at most `window_chars` long is seen whole before any of it is sent.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import inspect
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from contracts.errors import ConfigError, Fault, RequestError


class Refusal(RequestError):
    """A guard said no. Its message is shown to the client."""

    code = "guardrail"


@dataclass(frozen=True, slots=True)
class GuardedRequest:
    """A request as it came, but for what guards before this one changed. `endpoint` is the path."""

    tenant: str
    endpoint: str
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Window:
    """A stretch of one choice's text. What lies before `num_sent` cannot be changed any more."""

    tenant: str
    text: str
    num_sent: int
    is_last: bool


@dataclass(frozen=True, slots=True)
class Edit:
    """Put `replacement` in place of text[start:end]."""

    start: int
    end: int
    replacement: str


InputGuard = Callable[[GuardedRequest], Awaitable[dict[str, Any] | None]]
OutputGuard = Callable[[Window], Awaitable[Iterable[Edit]]]


def load_hook(path: str) -> Callable[..., Any]:
    """`package.module:function`. Raises ConfigError if it is not there or not async."""
    module_name, _, name = path.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"gateway guards: expected to import {path!r} but: {error}") from error
    if not (inspect.iscoroutinefunction(found) or inspect.iscoroutinefunction(type(found).__call__)):
        raise ConfigError(f"gateway guards: expected {path!r} to be an async callable")
    function: Callable[..., Any] = found
    return function


class Guards:
    """The hooks of a server, in their order, each within its time."""

    def __init__(
        self, inputs: Sequence[str], outputs: Sequence[str], window_chars: int, timeout_s: float
    ) -> None:
        """Raises ConfigError as `load_hook`."""
        self._inputs: list[tuple[str, InputGuard]] = [(path, load_hook(path)) for path in inputs]
        self._outputs: list[tuple[str, OutputGuard]] = [(path, load_hook(path)) for path in outputs]
        self.window_chars = window_chars
        self._timeout_s = timeout_s

    @property
    def has_input(self) -> bool:
        return bool(self._inputs)

    @property
    def has_output(self) -> bool:
        return bool(self._outputs)

    async def input(self, request: GuardedRequest) -> dict[str, Any]:
        """The body to go on with. Raises Refusal; Fault if a guard breaks or takes too long: no guard, no answer."""
        body = request.body
        for path, guard in self._inputs:
            work = functools.partial(guard, GuardedRequest(request.tenant, request.endpoint, body))
            changed = await self._run(path, work)
            if changed is not None:
                if not isinstance(changed, dict):
                    raise Fault(f"expected {path} to return a body or None but got {type(changed).__name__}")
                body = changed
        return body

    async def output(self, window: Window) -> list[Edit]:
        """All guards' edits of the unsent part, in order, none overlapping. Raises as `input`."""
        found: list[Edit] = []
        for path, guard in self._outputs:
            edits = await self._run(path, functools.partial(guard, window))
            for edit in edits:
                if not isinstance(edit, Edit) or not 0 <= edit.start <= edit.end <= len(window.text):
                    raise Fault(f"expected {path} to return edits within the window but got {edit!r:.100}")
                found.append(Edit(max(edit.start, window.num_sent), edit.end, edit.replacement))
        found = [edit for edit in found if edit.end > window.num_sent]
        return _apart(sorted(found, key=lambda edit: (edit.start, -edit.end)))

    async def _run(self, path: str, work: Callable[[], Awaitable[Any]]) -> Any:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await work()
        except RequestError:
            raise
        except RecursionError as error:  # a guard that walks through what a client has nested
            raise RequestError("expected JSON but it is nested too deeply") from error
        except Exception as error:  # somebody else's code: the request ends with it
            raise Fault(f"guard {path} failed: {type(error).__name__}: {error}") from error


def _apart(edits: list[Edit]) -> list[Edit]:
    """Where two overlap, one that covers both; the replacement of the first."""
    found: list[Edit] = []
    for edit in edits:
        if found and edit.start < found[-1].end:
            last = found[-1]
            found[-1] = Edit(last.start, max(last.end, edit.end), last.replacement)
        else:
            found.append(edit)
    return found


class GuardedText:
    """One choice's text on its way through the output guards."""

    def __init__(self, guards: Guards, tenant: str) -> None:
        self._guards = guards
        self._tenant = tenant
        self._sent = ""  # the last characters that were sent, before edits
        self._held = ""

    async def push(self, text: str, is_last: bool = False) -> str:
        """What may be sent now; "" often. Raises Refusal, Fault."""
        self._held += text
        if not self._held:
            return ""
        width = self._guards.window_chars
        if not is_last and len(self._held) <= width:
            return ""
        start = len(self._sent)
        window = Window(self._tenant, self._sent + self._held, start, is_last)
        edits = await self._guards.output(window)
        border = len(window.text) if is_last else len(window.text) - width
        for edit in edits:
            if edit.start < border < edit.end:
                # Longer than the window: it must go now, or it could grow for ever.
                border = edit.start if edit.start > start or len(self._held) <= 2 * width else edit.end
                break
        shown, position = [], start
        for edit in edits:
            if edit.end <= border:
                shown += [window.text[position : edit.start], edit.replacement]
                position = edit.end
        shown.append(window.text[position:border])
        self._sent, self._held = window.text[max(border - width, 0) : border], window.text[border:]
        return "".join(shown)
