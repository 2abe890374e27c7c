"""A `Worker` with the methods that Serve calls on a replica. What knows Ray is beside it: `prefill.server`,
`decode.server`, and `ray_ranks` for a worker of several ranks."""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import secrets
import sys
from typing import TYPE_CHECKING, ClassVar

from contracts.config import BatonConfig
from contracts.heap import loading
from contracts.messages import Role, WorkerInfo
from engine.embedded import resolve_model
from worker.sigterm import drain_on_sigterm

if TYPE_CHECKING:
    from worker.phases import PhaseFactory
    from worker.ranks import StartRank

EXIT_STUCK = 70


class ServedWorker:
    """Base of both pools' deployments. The constructor returns when the worker can serve."""

    role: ClassVar[Role]

    async def __init__(self, config: BatonConfig, secret: bytes, phases: PhaseFactory) -> None:  # type: ignore[misc]
        log_to_stderr()
        with loading():
            # NOTE: imported here, in the worker's own process: whoever describes the graph needs no torch.
            from worker.worker import Worker

            start_rank: StartRank | None = None
            if config.pool(self.role).tensor_parallel_size > 1:
                from worker import ray_ranks

                start_rank = ray_ranks.start_rank
            worker_id = f"{self.role}-{secrets.token_hex(3)}"
            self._worker = Worker(self.role, worker_id, config, secret, phases, end_process, start_rank)
            path = await asyncio.to_thread(resolve_model, config.model.path)
            await self._worker.start(path, config.transfer.host or "")
            self._grace_s = config.pool(self.role).drain_timeout_s
            self._loop = asyncio.get_running_loop()
            if not drain_on_sigterm(self._told_to_end):
                logging.getLogger("baton.worker").warning("%s: SIGTERM will not drain it", worker_id)

    def _told_to_end(self) -> None:
        """On the main thread."""
        self._loop.call_soon_threadsafe(self._drain_soon)

    def _drain_soon(self) -> None:
        self._draining = asyncio.create_task(self._leave())

    async def _leave(self) -> None:
        """After the drain the process ends; Serve starts another one in its place."""
        try:
            await self._worker.drain(self._grace_s)
            await self._worker.close()
        except Exception:  # the process's outer edge: whatever it is, the process ends
            logging.getLogger("baton.worker").exception("the drain failed")
        finally:
            os._exit(0)

    async def describe(self) -> WorkerInfo:
        """Who this worker is and where it listens."""
        return self._worker.info

    async def hold(self, request_id: str) -> None:
        """Returns when the request has ended here."""
        await self._worker.hold(request_id)

    async def check_health(self) -> None:
        """Serve replaces the replica when this raises, or does not answer in time."""
        self._worker.check_health()

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Serve asks for it where the number of replicas moves; read by coordinator/replicas.py."""
        return {"wanted_replicas": self._worker.pool_size}

    async def __del__(self) -> None:
        """Serve calls this after the drain."""
        await self._worker.close()


def end_process(reason: str) -> None:
    """Leave at once, with all threads' stacks on stderr: Ray and every peer notice a dead process without delay.

    NOTE: no logging and no clean-up here: whatever is stuck may hold their locks. Requests go on elsewhere.
    """
    os.write(2, f"worker process {os.getpid()} ends itself: {reason}\n".encode())
    faulthandler.dump_traceback(file=2)
    os._exit(EXIT_STUCK)


def log_to_stderr() -> None:
    logger = logging.getLogger("baton")
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
