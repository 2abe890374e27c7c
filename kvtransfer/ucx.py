"""The transport over UCX: NVLink, RDMA, shared memory or TCP, whichever UCX finds (UCX_TLS of the environment chooses).

    dialler:  endpoint ──stream: token──►   listener: endpoint, token ──awaited──► link
              ◄──stream: 1 byte─────────
    a message: tagged sends, its length and its bytes in parts (ucx_transfer.py)

A tag is  prefix (40 bits, from the token) | direction | part | tag (22 bits):  a UCX worker matches by tag alone,
whichever peer sends, and only the pair of a token knows its prefix.

Life of an Op: it is final when UCX has said so of both parts. `close` closes the endpoint, which makes UCX end every
request of it, and returns when the last one is final: from then on no buffer is touched. The peer's death closes the
endpoint by itself; a peer that is merely stopped is the control connection's to notice.

This is the only file of the package that imports ucxx, and only when it is asked for.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import hashlib
import importlib
import logging
import os
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

from contracts.errors import ConfigError
from kvtransfer.doorman import UNBOUND_TIMEOUT_S, Doorman
from kvtransfer.tcp import split_address
from kvtransfer.transport import TOKEN_BYTES, Link, LinkClosed, OnBytes, Op
from kvtransfer.ucx_engine import UcxEngine
from kvtransfer.ucx_transfer import TAG_BITS, Receiving, Sending, Transfer

logger = logging.getLogger("baton.kvtransfer")

CLOSE_TIMEOUT_S = 5.0
CLOSE_PERIOD_NS, CLOSE_ATTEMPTS = 10_000_000, 100

# Where the environment does not say otherwise. TCP with UCX's small default segments has a third of the speed; without
# keep-alives the loss of a host (not of a process) takes minutes to show.
OPTIONS = {
    "TCP_TX_SEG_SIZE": "1M",
    "TCP_RX_SEG_SIZE": "1M",
    "TCP_KEEPIDLE": "3s",
    "TCP_KEEPINTVL": "1s",
    "TCP_KEEPCNT": "3",
    "KEEPALIVE_INTERVAL": "2s",
    "POSIX_ERROR_HANDLING": "y",  # or UCX's shared memory is never taken by an endpoint that notices its peer's end
    "WARN_UNUSED_ENV_VARS": "n",
}
# Two processes that share a core move 0.2 GB/s through UCX's shared memory (TCP: 3). So unless UCX_TLS asks for it, a
# pair of CPU workers of one host takes shm, and this is left to devices and networks.
DEFAULT_TLS = "^posix,sysv"


def load_ucxx() -> ModuleType:
    """The core module of ucxx. Raises ConfigError with the reason if it cannot be loaded here."""
    try:
        import ucxx._lib.libucxx as api

        importlib.import_module("ucxx._lib.arr")
    except (ImportError, OSError, RuntimeError) as error:
        raise ConfigError(
            f"transfer.transport: ucx cannot be loaded ({error}); set transfer.transport to tcp or auto"
        ) from error
    module: ModuleType = api
    return module


def options() -> dict[str, str]:
    """What we ask of UCX. NOTE: a UCX_… variable is the user's word, and UCX reads it itself: it is left out here."""
    wanted = {**OPTIONS, "TLS": DEFAULT_TLS}
    return {name: value for name, value in wanted.items() if f"UCX_{name}" not in os.environ}


class UcxLink:
    """One end. What begins with `_start`, `_end` or `_on` runs on the engine thread, everything else on the loop."""

    def __init__(self, ucx: _Ucx, endpoint: Any, token: bytes, is_dialler: bool) -> None:
        self.library = ucx
        self._endpoint = endpoint
        prefix = int.from_bytes(hashlib.blake2b(token, digest_size=5).digest())
        self._send_base = prefix << 24 | is_dialler << 23
        self._receive_base = prefix << 24 | (not is_dialler) << 23
        self._is_closed = False
        self._is_released = False
        ucx.engine.num_links += 1
        self._is_ended = False  # the engine thread's
        self._num_open = 0
        self._on_quiet: list[Callable[[], None]] = []

    def staging(self, tag: int) -> memoryview | None:
        return None

    def post_recv(self, tag: int, buffer: memoryview, on_bytes: OnBytes | None = None) -> Op:
        return self._start(Receiving(self, buffer, _tagged(self._receive_base, tag), on_bytes))

    def send(self, tag: int, buffer: memoryview) -> Op:
        return self._start(Sending(self, buffer, _tagged(self._send_base, tag)))

    async def close(self) -> None:
        """Raises LinkClosed if UCX does not let go of the buffers in time: they must not be used again."""
        self._is_closed = True
        if self._is_released:
            return
        quiet = asyncio.Event()
        self.library.engine.submit(partial(self._end, quiet.set))
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await quiet.wait()
        except TimeoutError as error:
            raise LinkClosed(f"ucx did not end its transfers within {CLOSE_TIMEOUT_S} s") from error

    def _start(self, transfer: Transfer) -> Op:
        if self._is_closed:
            transfer.op.fail(LinkClosed("link is closed"))
        else:
            self.library.engine.submit_soon(transfer.start)
        return transfer.op

    # --- engine thread ----------------------------------------------------------------------------------------------

    def _start_watching(self) -> None:
        """Notice the peer's end. NOTE: UCX does not take a callback for an endpoint that has ended already."""
        if self._endpoint.alive:
            with contextlib.suppress(RuntimeError):
                self._endpoint.set_close_callback(lambda: self.library.engine.submit(self._end))
        if not self._endpoint.alive:
            self._end()

    def _end(self, on_quiet: Callable[[], None] | None = None) -> None:
        """Close the endpoint; `on_quiet` is called on the loop when no request of it is left."""
        if on_quiet is not None:
            self._on_quiet.append(on_quiet)
        if not self._is_ended:
            self._is_ended = True
            self.library.engine.tell(self._shut)
            self._endpoint.close_blocking(CLOSE_PERIOD_NS, CLOSE_ATTEMPTS)
        self._end_if_quiet()

    def _shut(self) -> None:
        self._is_closed = True

    @property
    def open_endpoint(self) -> Any | None:
        return self._endpoint if not self._is_ended and self._endpoint.alive else None

    def opened(self) -> None:
        self._num_open += 1

    def closed(self) -> None:
        self._num_open -= 1
        self._end_if_quiet()

    def _end_if_quiet(self) -> None:
        if self._is_ended and not self._num_open:
            self._endpoint = None  # on this thread: UCX objects must not be destroyed on another
            for call in (self._release, *self._on_quiet):
                self.library.engine.tell(call)
            self._on_quiet.clear()

    def _release(self) -> None:
        if not self._is_released:
            self._is_released = True
            self.library.engine.num_links -= 1


def _tagged(base: int, tag: int) -> int:
    assert not tag >> TAG_BITS, f"a link's own tags have {TAG_BITS} bits"
    return base | tag


class _Ucx:
    """The library and the engine, with short names for what links need of them."""

    def __init__(self, api: ModuleType) -> None:
        self.api = api
        self.array = importlib.import_module("ucxx._lib.arr").Array
        self.truncated = api.UCXMessageTruncatedError
        self.engine = UcxEngine(lambda: api.UCXWorker(api.UCXContext(options())))

    def tag(self, value: int) -> Any:
        return self.api.UCXXTag(value)


class UcxTransport:
    """Listens on any port of every interface (UCX offers no choice); `host` is what it publishes."""

    name = "ucx"

    def __init__(self, host: str) -> None:
        self._host = host
        self._ucx: _Ucx | None = None
        self._listener: Any = None
        self._links: Doorman[UcxLink] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._unbound: set[Any] = set()

    async def listen(self) -> str:
        ucx = await self._start()
        loop = asyncio.get_running_loop()
        self._links = Doorman[UcxLink](self._drop)
        port: asyncio.Future[int] = loop.create_future()

        def listen() -> None:
            try:
                self._listener = ucx.api.UCXListener.create(
                    ucx.engine.worker, 0, self._arrived, deliver_endpoint=True
                )
                number = self._listener.port
            except Exception as error:
                reason = ConfigError(f"ucx cannot listen: {error}")
                ucx.engine.tell(lambda: port.set_exception(reason))
            else:
                ucx.engine.tell(lambda: port.set_result(number))

        ucx.engine.submit(listen)
        return f"{self._host}:{await port}"

    async def connect(self, address: str, token: bytes, timeout_s: float) -> Link:
        host, port = split_address(address)
        ucx = await self._start()

        def dial() -> Any:
            return ucx.api.UCXEndpoint.create(ucx.engine.worker, host, port, True)

        try:
            async with asyncio.timeout(timeout_s):
                endpoint = await self._call(dial, lambda late: self._drop(UcxLink(ucx, late, token, True)))
                link = UcxLink(ucx, endpoint, token, True)
                try:
                    await self._stream(endpoint, "stream_send", bytearray(token))
                    await self._stream(endpoint, "stream_recv", bytearray(1))
                except BaseException:
                    self._drop(link)
                    raise
        except TimeoutError as error:
            raise LinkClosed(f"cannot reach data address {address} within {timeout_s} s") from error
        ucx.engine.submit(link._start_watching)
        return link

    async def accept(self, token: bytes, timeout_s: float) -> Link:
        assert self._links is not None, "accept comes after listen"
        return await self._links.accept(token, timeout_s)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._ucx is not None:
            self._ucx.engine.submit(self._forget)
            await self._ucx.engine.stop()

    # --- inside -----------------------------------------------------------------------------------------------------

    async def _start(self) -> _Ucx:
        if self._ucx is None:
            ucx = _Ucx(load_ucxx())
            try:
                await ucx.engine.start()
            except Exception as error:
                raise ConfigError(f"transfer.transport: ucx cannot be started ({error})") from error
            self._ucx = ucx
        return self._ucx

    def _forget(self) -> None:
        self._listener = None
        self._unbound.clear()

    def _drop(self, link: UcxLink) -> None:
        link.library.engine.submit(link._end)

    async def _call(self, make: Callable[[], Any], drop: Callable[[Any], None] | None = None) -> Any:
        """The result of `make` on the engine thread. Raises LinkClosed for an error of UCX.

        `drop` gets what is made for somebody who was cancelled meanwhile.
        """
        assert self._ucx is not None
        engine = self._ucx.engine
        result: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        def run() -> None:
            try:
                made = make()
            except Exception as error:
                reason = LinkClosed(f"ucx: {error}")
                engine.tell(lambda: None if result.done() else result.set_exception(reason))
            else:
                engine.tell(lambda: give(made))

        def give(made: Any) -> None:
            if not result.done():
                result.set_result(made)
            elif drop is not None:
                drop(made)

        engine.submit(run)
        try:
            return await result
        except asyncio.CancelledError:
            if drop is not None and not result.cancelled() and result.exception() is None:
                drop(result.result())
            raise

    async def _stream(self, endpoint: Any, method: str, content: bytearray) -> bytes:
        """Send or receive all of `content` over the endpoint's stream. Raises LinkClosed."""
        assert self._ucx is not None
        ucx = self._ucx
        buffer = array.array("B", bytes(content))
        done: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        done.add_done_callback(lambda end: end.cancelled() or end.exception())  # its waiter may have left

        def finish(error: Exception | None) -> None:
            if done.done():
                return
            if error is None:
                done.set_result(buffer.tobytes())
            else:
                done.set_exception(LinkClosed(f"ucx: {error}"))

        def begin() -> Any:
            if (
                not endpoint.alive
            ):  # with a failed endpoint, UCX would never return, and no link of ours would go on
                raise LinkClosed("the peer is gone")
            request = getattr(endpoint, method)(ucx.array(buffer))
            ucx.engine.watch(request, lambda error: ucx.engine.tell(partial(finish, error)))

        await self._call(begin)
        return await done

    def _arrived(self, endpoint: Any) -> None:
        """On the engine thread, within progress: nothing may be begun here."""
        assert self._ucx is not None
        self._unbound.add(endpoint)
        self._ucx.engine.tell(lambda: self._spawn(self._bind(endpoint)))

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _bind(self, endpoint: Any) -> None:
        """Make the endpoint the link of whoever awaits its token, or close it."""
        assert self._ucx is not None
        assert self._links is not None
        link: UcxLink | None = None
        is_bound = False
        try:
            if self._links.is_full:
                return
            with self._links.place():
                async with asyncio.timeout(UNBOUND_TIMEOUT_S):
                    token = await self._stream(endpoint, "stream_recv", bytearray(TOKEN_BYTES))
                link = UcxLink(self._ucx, endpoint, token, False)
                self._ucx.engine.submit(link._start_watching)
                is_bound = await self._links.present(token, link)
                if is_bound:
                    await self._stream(endpoint, "stream_send", bytearray(1))
        except (LinkClosed, TimeoutError) as error:
            logger.warning("data port: closed a link without an expected token (%s)", type(error).__name__)
        finally:
            if not is_bound:
                self._drop(link or UcxLink(self._ucx, endpoint, bytes(TOKEN_BYTES), False))
            self._ucx.engine.submit(partial(self._unbound.discard, endpoint))
