"""Every row of the OpenAI surface against one engine that reads and writes: no pool of readers, no handoff, no Ray."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvicorn

from coordinator.http import make_app
from engine.text.tokenizer import load_text
from tests.conformance_rows import CHECKS, ROWS, body_of
from tests.conformance_tools import Api
from tests.local.cluster import local_cluster

START_TIMEOUT_S = 120.0


async def serve(
    model: Path, listener: socket.socket, started: threading.Event, stop: threading.Event
) -> None:
    """Until told to stop; the cluster then checks that no block is held."""
    async with local_cluster(model, num_prefills=0, engine__max_num_seqs=16) as cluster:
        app = make_app(cluster.config, load_text(model), cluster.backend)
        async with app.state.gateway.running(app):
            server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            started.set()
            await asyncio.to_thread(stop.wait)
            server.should_exit = True
            await serving


@pytest.fixture(scope="module")
def api(embedded_model_path: Path) -> Iterator[Api]:
    started, stop, errors = threading.Event(), threading.Event(), []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def run() -> None:
            try:
                asyncio.run(serve(embedded_model_path, listener, started, stop))
            except Exception as error:
                errors.append(error)
                started.set()

        thread = threading.Thread(target=run)
        thread.start()
        assert started.wait(START_TIMEOUT_S)
        client = Api(f"http://127.0.0.1:{listener.getsockname()[1]}")
        yield client
        client.close()
        stop.set()
        thread.join(30.0)
    assert not errors
    assert not thread.is_alive()


@pytest.mark.parametrize("row_id", sorted(ROWS))
def test_row(api: Api, row_id: str) -> None:
    CHECKS[row_id](api, body_of(row_id))
