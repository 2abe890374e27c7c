"""Grammars of requests, compiled on threads so that neither the event loop nor the engine waits for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from contracts.errors import BatonError
from contracts.request import GenerateRequest
from engine.text.grammar import GrammarState, LazyGrammars


class GrammarLine:
    """On the event loop."""

    def __init__(self, grammars: LazyGrammars) -> None:
        self._grammars = grammars
        self._tasks: set[asyncio.Task[None]] = set()

    def behind(
        self,
        request: GenerateRequest,
        start: Callable[[GrammarState | None], None],
        fail: Callable[[BatonError], None],
    ) -> None:
        """Call `start` with the state behind the request's outputs: when it is compiled, or at once if it has none."""
        if not request.sampling.grammar:
            start(None)
            return
        task = asyncio.create_task(self._compile(request, start, fail))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _compile(
        self,
        request: GenerateRequest,
        start: Callable[[GrammarState | None], None],
        fail: Callable[[BatonError], None],
    ) -> None:
        try:
            grammar = await asyncio.to_thread(
                self._grammars.behind, request.sampling.grammar, request.output_ids
            )
        except BatonError as error:
            fail(error)
            return
        start(grammar)
