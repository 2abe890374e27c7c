"""A Serve application with Baton's shape and no model, for tests of the launcher."""

from __future__ import annotations

import os
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle

http = FastAPI()


@serve.deployment(ray_actor_options={"num_cpus": 0.1})
class Worker:
    def pid(self) -> int:
        return os.getpid()


@serve.deployment(ray_actor_options={"num_cpus": 0.1})
@serve.ingress(http)
class Coordinator:
    def __init__(self, prefill: DeploymentHandle, decode: DeploymentHandle, given: dict[str, str]) -> None:
        self.given = given
        self.pools = {"prefill": prefill, "decode": decode}

    @http.get("/ready")
    async def ready(self) -> dict[str, str]:
        return {"status": "ready"}

    @http.get("/given")
    async def told(self) -> dict[str, str]:
        return self.given

    @http.get("/v1/models")
    async def models(self) -> dict[str, Any]:
        return {"data": [{"id": "tiny"}]}

    @http.get("/debug/kv")
    async def kv(self) -> dict[str, Any]:
        pids = {role: await pool.pid.remote() for role, pool in self.pools.items()}
        return {
            "workers": [{"worker_id": f"{role}-0", "role": role, "pid": pid} for role, pid in pids.items()]
        }


def build(given: dict[str, str]) -> serve.Application:
    prefill, decode = (Worker.options(name=name).bind() for name in ("Prefill", "Decode"))
    return Coordinator.bind(prefill, decode, given)


def main() -> int:
    """The launcher with this application in the place of Baton's."""
    from coordinator.launch import main as launch

    return launch(build=build)


if __name__ == "__main__":
    # Not `__main__.build`: Serve's processes import the application by the name of its module.
    from tests.deploy.tiny_app import main as run

    os._exit(run())
