"""Starting and stopping a server in a mode, with a launcher that costs nothing."""

from __future__ import annotations

import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from benchmarks.servers import Arm, GivenHost, Launch, OurHost, ServerError, running

LAUNCHER = (sys.executable, str(Path(__file__).parent / "fake_launcher.py"))


def test_a_mode_is_compared_at_equal_numbers_of_workers() -> None:
    split, together = Arm.of("disaggregated", "1:2"), Arm.of("colocated", "1:2")
    assert (split.name, split.overrides()) == (
        "disaggregated 1:2",
        {"prefill.num_replicas": 1, "decode.num_replicas": 2},
    )
    assert (together.name, together.overrides()) == (
        "colocated 0:3",
        {"prefill.num_replicas": 0, "decode.num_replicas": 3},
    )
    assert Arm.parse("disaggregated") == Arm.of("disaggregated", "1:1")
    assert Arm.parse("colocated:2:1") == Arm.of("colocated", "2:1")
    assert Arm.of("local-only", "2:1").overrides() == {
        "prefill.num_replicas": 2,
        "decode.num_replicas": 1,
        "coordinator.placement": "local",
    }


@pytest.mark.parametrize(
    ("mode", "split", "message"),
    [
        ("local-only", "1:0", "split: expected P:D"),
        ("both", "1:1", "expected one of disaggregated, colocated, local-only but got 'both'"),
        ("disaggregated", "0:1", "split: expected P:D"),
        ("colocated", "1-1", "split: expected P:D"),
    ],
)
def test_what_there_is_not_is_refused_by_name(mode: str, split: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Arm.of(mode, split)


def test_the_configuration_is_the_file_the_settings_and_the_arm(tmp_path: Path) -> None:
    file = tmp_path / "base.yaml"
    file.write_text("engine: {block_size: 32}\nprefill: {num_cpus: 0.25}\n")
    tree = Launch("m.gguf", file, {"engine.max_num_seqs": 8}).tree(Arm.of("colocated"))
    assert tree == {
        "model": {"path": "m.gguf"},
        "engine": {"block_size": 32, "max_num_seqs": 8},
        "prefill": {"num_cpus": 0.25, "num_replicas": 0},
        "decode": {"num_replicas": 2},
    }
    with pytest.raises(ValueError, match=r"engine\.blocks: unknown key"):
        Launch(settings={"engine.blocks": 1}).tree()


def test_a_started_server_answers_within_the_block_and_is_gone_after_it() -> None:
    lines: list[str] = []
    with OurHost(Launch(command=LAUNCHER), lines.append).open(Arm.of("disaggregated")) as url:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=10) as answer:
            assert answer.status == 200
        assert lines[0].startswith("starting disaggregated 1:1 on port")
        assert lines[1:] == ["[  0.0 s] starting Ray", f"Baton is ready after 0.1 s: {url}"]
    with pytest.raises(urllib.error.URLError, match="refused"):
        urllib.request.urlopen(f"{url}/v1/models", timeout=10)


def test_a_server_is_stopped_when_its_block_fails() -> None:
    with pytest.raises(KeyError), running(Arm.of("colocated"), Launch(command=LAUNCHER), str) as url:
        raise KeyError
    with pytest.raises(urllib.error.URLError, match="refused"):
        urllib.request.urlopen(f"{url}/v1/models", timeout=10)


def test_a_server_that_does_not_start_ends_with_its_last_words() -> None:
    launch = Launch(command=(*LAUNCHER, "--fail"))
    with pytest.raises(ServerError, match=r"(?s)it ended.*starting Ray.*start failed: as asked"):
        with running(Arm.of("disaggregated"), launch, str):
            pass


def test_a_given_server_is_left_alone() -> None:
    with GivenHost("http://x").open(None) as url:
        assert url == "http://x"
