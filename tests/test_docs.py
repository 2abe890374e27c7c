"""What the documents name is there: files, configuration keys, metrics, make targets, YAML that loads."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from contracts.config import BatonConfig, load_config
from contracts.metrics import METRICS

ROOT = Path(__file__).resolve().parent.parent
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    "deploy/README.md",
    *(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md")),
)
FOLDERS = (
    "contracts",
    "engine",
    "kvtransfer",
    "worker",
    "benchmarks",
    "examples",
    "prefill",
    "decode",
    "coordinator",
    "tests",
    "docs",
    "deploy",
)
SECTIONS = {
    name: field.annotation.model_fields  # type: ignore[union-attr]
    for name, field in BatonConfig.model_fields.items()
}

pages = pytest.mark.parametrize("page", sorted(PAGES))


def read(page: str) -> str:
    return (ROOT / page).read_text()


@pages
def test_every_file_that_is_named_exists(page: str) -> None:
    named = set(re.findall(rf"(?<![\w/.-])((?:{'|'.join(FOLDERS)})/[\w./-]*[\w/])", read(page)))
    named |= set(re.findall(r"\]\(([\w./-]+)\)", read(page)))
    homes = (ROOT, (ROOT / page).parent)
    assert not sorted(name for name in named if not any((home / name).exists() for home in homes))


@pages
def test_every_configuration_key_that_is_named_exists(page: str) -> None:
    named = set(re.findall(rf"`(?:\w+ )?({'|'.join(SECTIONS)})\.(\w+)(?=[`:={{ ])", read(page)))
    modules = {(path.parent.name, path.stem) for name in SECTIONS for path in (ROOT / name).glob("*")}
    named -= {key for key in named if key[1] == "py"}
    assert not sorted(key for key in named - modules if key[1] not in SECTIONS[key[0]])


@pages
def test_every_metric_that_is_named_exists(page: str) -> None:
    named = set(re.findall(r"\b(baton_[a-z_]+[a-z])\b", read(page)))
    assert not named - {metric.name for metric in METRICS}


@pages
def test_every_make_target_that_is_named_exists(page: str) -> None:
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert not set(re.findall(r"(?:^|`)make ([a-z]+)", read(page), re.MULTILINE)) - targets


def test_the_configuration_of_the_readme_is_accepted(tmp_path: Path) -> None:
    [example] = re.findall(r"```yaml\n(.*?)```", read("README.md"), re.DOTALL)
    file = tmp_path / "baton.yaml"
    file.write_text(example)
    assert load_config(file).decode.num_replicas == 2
