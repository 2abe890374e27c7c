"""cluster.yaml and deploy/*.yaml are read by Ray's own checks, and name the same pools as Baton's configuration."""

from __future__ import annotations

import copy
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from contracts.config import BatonConfig, load_config

ROOT = Path(__file__).resolve().parents[2]


def read(name: str) -> dict[str, Any]:
    content = yaml.safe_load((ROOT / name).read_text())
    assert isinstance(content, dict)
    return content


@pytest.fixture(scope="module")
def gpu_config() -> BatonConfig:
    return load_config(ROOT / "deploy" / "gpu.yaml")


@pytest.mark.parametrize("name", ["cluster.yaml", "deploy/on-prem.yaml"])
def test_ray_accepts_the_cluster(name: str) -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    validate_config(prepare_config(read(name)))


def test_ray_refuses_an_unknown_key() -> None:
    from jsonschema import ValidationError
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = read("cluster.yaml") | {"idle_timeout": 15}
    with pytest.raises(ValidationError, match="idle_timeout"):
        validate_config(prepare_config(config))


def test_cloud_nodes_offer_what_the_pools_ask_for(gpu_config: BatonConfig) -> None:
    cluster = read("cluster.yaml")
    types = cluster["available_node_types"]
    assert set(types) == {"head", "prefill", "decode"}
    for role in ("prefill", "decode"):
        pool = getattr(gpu_config, role)
        assert types[role]["resources"] == pool.resources == {role: 1}
        assert 1 <= types[role]["min_workers"] <= types[role]["max_workers"]
        assert pool.num_gpus == 1
    assert sum(types[role]["max_workers"] for role in ("prefill", "decode")) <= cluster["max_workers"]
    assert cluster["idle_timeout_minutes"] > 0


@pytest.mark.parametrize("name", ["cluster.yaml", "deploy/on-prem.yaml"])
def test_every_node_runs_serve_the_same_way(name: str) -> None:
    cluster = read(name)
    starts = [cluster[key][-1] for key in ("head_start_ray_commands", "worker_start_ray_commands")]
    assert all("RAY_SERVE_ENABLE_HA_PROXY=1" in start for start in starts)
    assert any("pip install" in command for command in cluster["setup_commands"])


@pytest.mark.parametrize(
    ("pool", "resources"), [("prefill\n", {"prefill": 1}), ("prefill decode\n", {"prefill": 1, "decode": 1})]
)
def test_a_machines_pool_file_becomes_its_resources(
    pool: str, resources: dict[str, int], tmp_path: Path
) -> None:
    (tmp_path / "baton-pool").write_text(pool)
    (tmp_path / "ray").write_text('#!/bin/sh\nfor each; do echo "$each"; done\n')
    (tmp_path / "ray").chmod(0o700)
    command = read("deploy/on-prem.yaml")["worker_start_ray_commands"][-1].replace(
        "$HOME/venv/bin", str(tmp_path)
    )
    environment = {"HOME": str(tmp_path), "PATH": os.defpath, "RAY_HEAD_IP": "192.0.2.10"}
    told = subprocess.run(
        ["bash", "-c", command], env=environment, check=True, timeout=60, capture_output=True, text=True
    ).stdout
    [given] = [
        line.removeprefix("--resources=") for line in told.splitlines() if line.startswith("--resources=")
    ]
    assert json.loads(given) == resources
    assert "--address=192.0.2.10:6379" in told


def test_serve_accepts_the_application() -> None:
    from ray.serve.schema import ServeDeploySchema

    parsed = ServeDeploySchema.model_validate(read("serve.yaml"))
    [application] = parsed.applications
    assert application.import_path == "coordinator.app:build"
    assert application.route_prefix == "/"


def test_kuberay_runs_the_same_application(gpu_config: BatonConfig) -> None:
    from ray.serve.schema import ServeDeploySchema

    service = read("deploy/kuberay.yaml")
    assert (service["apiVersion"], service["kind"]) == ("ray.io/v1", "RayService")
    serve_config = yaml.safe_load(service["spec"]["serveConfigV2"])
    ServeDeploySchema.model_validate(serve_config)
    there, here = (
        copy.deepcopy(serve_config["applications"]),
        copy.deepcopy(read("serve.yaml")["applications"]),
    )
    assert there[0].pop("args") == {"config": "/opt/baton/deploy/gpu.yaml"}
    assert here[0].pop("args") == {}
    assert there == here


def test_kuberay_groups_offer_what_the_pools_ask_for(gpu_config: BatonConfig) -> None:
    cluster = read("deploy/kuberay.yaml")["spec"]["rayClusterConfig"]
    groups = {group["groupName"]: group for group in cluster["workerGroupSpecs"]}
    assert set(groups) == {"prefill", "decode"}
    for role, group in groups.items():
        offered = json.loads(json.loads(group["rayStartParams"]["resources"]))
        assert offered == getattr(gpu_config, role).resources
        [container] = group["template"]["spec"]["containers"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
        assert {"name": "RAY_SERVE_ENABLE_HA_PROXY", "value": "1"} in container["env"]
    assert cluster["enableInTreeAutoscaling"] is True
