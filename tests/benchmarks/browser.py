"""A headless Chromium, spoken to over its DevTools protocol: enough to open a page and to ask what became of it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp

TIMEOUT_S = 60.0

_PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_ADDRESS = "DevTools listening on "
_ARGUMENTS = (
    "--headless",
    "--no-sandbox",  # a container's root has no user namespaces; the page is one of ours
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--remote-debugging-port=0",
)


def find_browser() -> str:
    """$BROWSER_PATH, or the first known program. Fails, not skips: a report that nobody opened is not tested."""
    given = os.environ.get("BROWSER_PATH")
    found = given or next((path for name in _PROGRAMS if (path := shutil.which(name))), None)
    if found is None:
        raise AssertionError(
            "expected Chromium to open the report with but found none: install it (Debian: `apt-get install "
            "chromium`), name it in BROWSER_PATH, or leave these tests out with `pytest -m 'not browser'`"
        )
    return found


@dataclass(slots=True)
class Page:
    """One tab. `faults`: errors and warnings of console, exceptions, log; `requests`: every URL asked for."""

    socket: aiohttp.ClientWebSocketResponse
    faults: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    _last_id: int = 0
    _is_loaded: bool = False

    async def open(self, url: str) -> None:
        """Returns when the page has loaded, its scripts have run and two frames were drawn."""
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")
        await self.call("Page.navigate", url=url)
        async with asyncio.timeout(TIMEOUT_S):
            while not self._is_loaded:
                self._note(await self.socket.receive_json())
        await self.value(
            "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))"
        )

    async def value(self, expression: str) -> Any:
        """Of a JavaScript expression; a promise is awaited."""
        answer = await self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._last_id += 1
        await self.socket.send_json({"id": self._last_id, "method": method, "params": params})
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                message = await self.socket.receive_json()
                if message.get("id") == self._last_id:
                    assert "error" not in message, message["error"]
                    return dict(message["result"])
                self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        method, params = message.get("method"), message.get("params", {})
        if method == "Page.loadEventFired":
            self._is_loaded = True
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.faults.append(str(details.get("exception", details).get("description", details)))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.faults.append(" ".join(str(arg.get("value", arg)) for arg in params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.faults.append(params["entry"]["text"])


@contextlib.asynccontextmanager
async def browser_page() -> AsyncIterator[Page]:
    """A fresh browser with one empty tab; gone after the block."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = await asyncio.create_subprocess_exec(
            find_browser(),
            *_ARGUMENTS,
            f"--user-data-dir={profile}",
            "about:blank",
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            port = await _port_of(process)
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                    [tab] = [tab for tab in await answer.json() if tab["type"] == "page"]
                # A page's messages may be large: whole sources in a stack trace.
                async with session.ws_connect(tab["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                    yield Page(socket)
        finally:
            process.terminate()
            await process.communicate()


async def _port_of(process: asyncio.subprocess.Process) -> int:
    assert process.stderr is not None
    async with asyncio.timeout(TIMEOUT_S):
        while line := (await process.stderr.readline()).decode(errors="replace"):
            if line.startswith(_ADDRESS):
                return int(line.rsplit(":", 1)[1].split("/")[0])
    raise AssertionError("expected the browser to listen but it ended")
