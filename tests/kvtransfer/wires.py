"""A wire between two processes: slow, cut (a partition: no end is told), or leading elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from tests.kvtransfer.tools import HOST


class Wire:
    """A TCP proxy: `delay_s` per piece; `cut` lets nothing pass, ends included; `lead` takes new ones elsewhere."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_whole = asyncio.Event()
        self._is_whole.set()
        self._server: asyncio.Server | None = None
        self.delay_s = 0.0

    async def start(self) -> int:
        self._server = await asyncio.start_server(self._accept, HOST, 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    def cut(self) -> None:
        self._is_whole.clear()

    def heal(self) -> None:
        self._is_whole.set()

    def reset(self) -> None:
        """All connections through it end, for both sides; new ones are let through."""
        for task in self._tasks:
            task.cancel()

    def lead(self, target: int) -> None:
        self._target = target

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.sleep(0)  # what is aborted is closed in the loop's next turn

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert self._server is not None
        if not self._server.is_serving():
            writer.transport.abort()
            return
        task = asyncio.create_task(self._run(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(
            lambda _: writer.transport.abort()
        )  # NOTE: `finally` is not reached by one that never ran

    async def _run(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._is_whole.wait()
            far_reader, far_writer = await asyncio.open_connection(HOST, self._target)
            try:
                await asyncio.gather(self._pass(reader, far_writer), self._pass(far_reader, writer))
            finally:
                far_writer.transport.abort()
        except OSError:
            pass

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            content = await reader.read(4096 if self.delay_s else 1 << 16)
            await self._is_whole.wait()
            if self.delay_s:
                await asyncio.sleep(self.delay_s)
            if not content:
                raise ConnectionResetError  # ends both directions
            writer.write(content)
            await writer.drain()


@contextlib.asynccontextmanager
async def wires(port: int, address: str) -> AsyncIterator[tuple[list[Wire], int, str]]:
    """Around a listening endpoint: the wires, and the port and data address that lead through them.

    Over shm the data needs no wire: only the control connection can be cut.
    """
    made: list[Wire] = []
    try:
        made.append(Wire(port))
        port = await made[0].start()
        if address.startswith("tcp="):
            host, _, data_port = address.rpartition(":")
            made.append(Wire(int(data_port)))
            address = f"{host}:{await made[1].start()}"
        yield made, port, address
    finally:
        for each in made:
            await each.close()
