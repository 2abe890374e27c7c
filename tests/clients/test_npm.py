"""The official npm package (`make clients` installs it) over a real socket. What it must see: openai_package.mjs."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

from tests.clients.scripted import script
from tests.coordinator.http_tools import make_config
from tests.coordinator.test_http_clients import server

HERE = Path(__file__).parent
TIMEOUT_S = 60.0


async def test_the_npm_package_sees_what_it_expects(tmp_path: Path) -> None:
    node = shutil.which("node")
    assert node, "expected node: `make clients` installs it"
    assert (HERE / "node_modules" / "openai").is_dir(), "expected the package: `make clients` installs it"
    config = make_config(gateway={"state_dir": str(tmp_path)})
    async with server(script, config) as (url, backend):
        process = await asyncio.create_subprocess_exec(
            node,
            HERE / "openai_package.mjs",
            url,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(TIMEOUT_S):
                told, errors = await process.communicate()
                await backend.idle.wait()  # also for the client that stopped reading
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    assert process.returncode == 0, errors.decode()
    assert told.decode() == "14 checks\n"
