"""The configuration tree: bad input names the field, what was expected and what came; the docs are in step."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from contracts.config import BatonConfig, load_config
from contracts.errors import ConfigError


def refusal(overrides: dict[str, object]) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(overrides=overrides)
    return caught.value.message


def test_no_input_gives_the_defaults() -> None:
    assert load_config() == BatonConfig()


def test_later_sources_win(tmp_path: Path) -> None:
    file = tmp_path / "baton.yaml"
    file.write_text("engine: {block_size: 32, max_num_seqs: 8}\n")
    config = load_config(file, {"engine.block_size": 64})
    assert (config.engine.block_size, config.engine.max_num_seqs) == (64, 8)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"engine.block_size": 0}, "engine.block_size: expected ≥ 1 but got 0"),
        ({"engine.block_size": "300"}, "engine.block_size: expected ≤ 256 but got '300'"),
        ({"transfer.lease_s": 0}, "transfer.lease_s: expected > 0 but got 0"),
        ({"transfer.lease_s": float("inf")}, "transfer.lease_s: expected a finite number but got inf"),
        ({"model.dtype": "fp8"}, "model.dtype: expected 'auto', 'float32' or 'bfloat16' but got 'fp8'"),
        ({"decode.num_replicas": 0}, "decode.num_replicas: expected ≥ 1 but got 0"),
        ({"server.port": 0}, "server.port: expected ≥ 1 but got 0"),
        ({"decode.resources": {"decode": 0}}, "decode.resources.decode: expected > 0 but got 0"),
        ({"decode.resources": 1}, "decode.resources: expected a mapping of names to amounts but got 1"),
        (
            {"model": "/m"},
            "model: expected a section (model.path, model.served_name, model.adapters, model.dtype, "
            "model.max_len) but got '/m'",
        ),
        (
            {"engine": 3, "engine.block_size": 16},
            "engine.block_size: expected engine to be a section but it is int",
        ),
    ],
)
def test_a_bad_value_is_told_with_its_field_and_what_was_expected(
    overrides: dict[str, object], message: str
) -> None:
    assert refusal(overrides) == message


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("engine.blocksize", "engine.blocksize: unknown key; did you mean engine.block_size?"),
        ("modle.path", "modle: unknown key; did you mean model?"),
        ("max_num_seqs", "max_num_seqs: unknown key; did you mean engine.max_num_seqs?"),
        ("engine.max_len", "engine.max_len: unknown key; did you mean model.max_len?"),
        (
            "num_replica",
            "num_replica: unknown key; did you mean prefill.num_replicas or decode.num_replicas or "
            "coordinator.num_replicas?",
        ),
        (
            "engine.zzz",
            f"engine.zzz: unknown key; engine has {', '.join(load_config().engine.__class__.model_fields)}",
        ),
        ("zzz", f"zzz: unknown key; the sections are {', '.join(BatonConfig.model_fields)}"),
        ("gateway.tenants.acme.zzz", "gateway.tenants.acme.zzz: unknown key"),
    ],
)
def test_an_unknown_key_is_refused_with_the_one_probably_meant(key: str, message: str) -> None:
    assert refusal({key: 1}) == message


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"transfer.transport": "memory"},
            "transfer.transport: expected auto, shm, ucx or tcp but got 'memory', which ends at its own process "
            "(prefill.num_replicas=1)",
        ),
        (
            {"transfer.host": "0.0.0.0"},
            "transfer.host: expected an address that other workers can connect to, or none, but got '0.0.0.0'",
        ),
        (
            {"engine.num_blocks": 255, "model.max_len": 4090},
            "engine.num_blocks: expected at least 256 (model.max_len=4090 in blocks of 16 tokens) but got 255",
        ),
        (
            {"engine.chunk_with_decodes": 33, "engine.max_chunk_tokens": 32},
            "engine.chunk_with_decodes: expected at most engine.max_chunk_tokens=32 but got 33",
        ),
        (
            {"prefill.resources": {"GPU": 1}},
            "prefill.resources: expected custom resources but got 'GPU'; see prefill.num_cpus, prefill.num_gpus",
        ),
        (
            {"decode.max_replicas": 3},
            "decode.max_replicas: expected both promises (slo), planner.enabled and prefill workers beside it, "
            "because the planner moves the number",
        ),
        (
            {"slo.ttft_ms": 1.0, "slo.itl_ms": 1.0, "decode.max_replicas": 3, "decode.num_replicas": 4},
            "decode.num_replicas: expected 1 to 3 (decode.min_replicas, decode.max_replicas) but got 4",
        ),
    ],
)
def test_fields_that_contradict_each_other_are_refused(overrides: dict[str, object], message: str) -> None:
    assert refusal(overrides) == message


@pytest.mark.parametrize(
    "overrides",
    [
        {"transfer.transport": "auto"},
        {"transfer.transport": "tcp"},
        {"transfer.transport": "ucx"},
        {"transfer.transport": "memory", "prefill.num_replicas": 0},
        {"engine.num_blocks": 256, "model.max_len": 4096},
        {"engine.num_blocks": 2},
        {"engine.max_chunk_tokens": 16},
    ],
)
def test_defaults_give_way_to_what_is_set(overrides: dict[str, object]) -> None:
    load_config(overrides=overrides)


def test_all_faults_are_told_at_once() -> None:
    assert refusal({"engine.block_size": 0, "decode.replicas": 2}) == (
        "engine.block_size: expected ≥ 1 but got 0; "
        "decode.replicas: unknown key; did you mean decode.num_replicas?"
    )
    assert refusal({"transfer.transport": "memory", "transfer.host": "::"}).count("expected") == 2


def test_no_prefill_worker_means_colocated() -> None:
    assert load_config(overrides={"prefill.num_replicas": 0}).is_colocated
    assert not load_config().is_colocated


def test_labels_move_only_with_promises_and_a_prefill_pool() -> None:
    slo = {"slo.ttft_ms": 500, "slo.itl_ms": 50}
    assert load_config(overrides=slo).is_planned
    assert not load_config().is_planned
    assert not load_config(overrides=slo | {"prefill.num_replicas": 0}).is_planned
    assert not load_config(overrides=slo | {"planner.enabled": False}).is_planned


def test_an_empty_section_of_a_file_is_the_default(tmp_path: Path) -> None:
    file = tmp_path / "baton.yaml"
    file.write_text("engine:\n  # block_size: 32\nmodel: {max_len: 64}\n")
    config = load_config(file, {"engine.max_num_seqs": 3})
    assert (config.engine.block_size, config.engine.max_num_seqs, config.model.max_len) == (16, 3, 64)


@pytest.mark.parametrize("content", [b"- a\n- b\n", b"a: [", b"3", b"\xff\xfe"])
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "baton.yaml"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match="CONFIG: expected"):
        load_config(file)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"CONFIG: expected a readable YAML file but .*none\.yaml"):
        load_config(tmp_path / "none.yaml")


def test_the_reference_in_the_docs_is_generated_from_the_model() -> None:
    # To mend: python -m contracts.config > docs/configuration.md
    printed = subprocess.run(
        [sys.executable, "-m", "contracts.config"], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    assert Path("docs/configuration.md").read_text() == printed, (
        "run: python -m contracts.config > docs/configuration.md"
    )
