"""What a generation tells its sink, as an iterator: for tests that look at each token, or leave in the middle."""

from __future__ import annotations

import asyncio
from typing import Protocol, Self

from contracts.request import Finished, GenerateRequest, Token, TokenSink
from contracts.service import Service


class Generates(Protocol):
    """A backend, or a flow."""

    async def generate(
        self,
        request: GenerateRequest,
        sink: TokenSink,
        deadline_s: float | None,
        service: Service | None = None,
    ) -> Finished | None: ...


class Stream:
    """Tokens, then the end; raises what the generation raises. Its work starts with the first `anext`."""

    def __init__(
        self,
        source: Generates,
        request: GenerateRequest,
        deadline_s: float | None,
        service: Service | None = None,
    ) -> None:
        self._source = source
        self._request = request
        self._deadline_s = deadline_s
        self._service = service
        self._inbox: asyncio.Queue[Token | Finished | BaseException] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None
        self._is_over = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Token | Finished:
        if self._is_over:
            raise StopAsyncIteration
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        try:
            item = await self._inbox.get()
        except asyncio.CancelledError:
            await self.aclose()
            raise
        if isinstance(item, Token):
            return item
        self._is_over = True
        await self._task
        if isinstance(item, BaseException):
            raise item
        return item

    async def aclose(self) -> None:
        """Nothing of it runs any more."""
        self._is_over = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        try:
            end = await self._source.generate(self._request, self._take, self._deadline_s, self._service)
        except Exception as error:
            self._inbox.put_nowait(error)
        else:
            assert end is not None, "the sink never has enough"
            self._inbox.put_nowait(end)

    def _take(self, token: Token) -> bool:
        self._inbox.put_nowait(token)
        return True
