"""`serve run coordinator.app:build key=value …`: what is wrong with the keys is told in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from ray.serve._private import application_state
from ray.serve.exceptions import RayServeException
from ray.serve.schema import LoggingConfig
from ray.serve.scripts import cli

from contracts.config import BatonConfig
from contracts.errors import ConfigError
from coordinator.app import build, read_args

WRONG: list[tuple[dict[str, str], str]] = [
    ({"modle": "x"}, "modle: unknown key; did you mean model? (model=PATH, config=FILE, or section.key=value)"),
    ({"zzz": "1"}, f"zzz: unknown key; the sections are {', '.join(BatonConfig.model_fields)} "
                   "(model=PATH, config=FILE, or section.key=value)"),
    ({"engine.blocksize": "32"}, "engine.blocksize: unknown key; did you mean engine.block_size?"),
    ({"engine.block_size": "many"}, "engine.block_size: expected a valid integer, unable to parse string as an "
                                    "integer but got 'many'"),
    ({"engine": "5"}, "engine: expected a section ("),
    ({"config": "/no/such.yaml"}, "CONFIG: expected a readable YAML file but /no/such.yaml: No such file or directory"),
]  # fmt: skip


@pytest.mark.parametrize(("args", "message"), WRONG)
def test_an_import_path_with_wrong_keys_ends_with_one_line(args: dict[str, str], message: str) -> None:
    given = [f"{key}={value}" for key, value in args.items()]
    result = CliRunner().invoke(cli, ["run", "coordinator.app:build", *given])
    assert (result.exit_code, type(result.exception)) == (1, SystemExit)
    [said] = [line for line in result.output.splitlines() if "Running import path" not in line]
    assert said.startswith(f"Error: {message}")
    assert "Traceback" not in result.output


@pytest.mark.parametrize(("args", "message"), WRONG)
def test_a_file_with_wrong_keys_is_told_without_a_traceback(
    args: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Serve's controller builds what `serve run serve.yaml` has sent it; what comes back is the status it shows."""
    monkeypatch.setattr(application_state, "configure_component_logger", lambda **_: None)
    built = application_state.build_serve_application._function  # the task's own function
    _, _, told = built("coordinator.app:build", "1", "baton", args, LoggingConfig(), None, {}, {}, {})
    assert told.startswith(message)
    assert "\n" not in told


def test_the_error_is_one_of_the_configuration_all_the_same() -> None:
    for kind in (ConfigError, RayServeException):
        with pytest.raises(kind):
            build({"zzz": 1})


def test_sections_may_be_given_whole(tmp_path: Path) -> None:
    config = read_args({"model": "here", "engine": {"block_size": 32}, "decode.num_replicas": "2"})
    assert (config.model.path, config.engine.block_size, config.decode.num_replicas) == ("here", 32, 2)
