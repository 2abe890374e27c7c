"""engine/kernels/native/build.py: built once, by one process, or not there and said once."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from engine.kernels.native import build


class FakeCompiler:
    """Stands in for the compiler's process: writes the library, or says why not."""

    def __init__(self, error: str | None = None) -> None:
        self.error = error
        self.num_compiled = 0

    def __call__(self, command: Sequence[str], _timeout_s: float) -> bytes | str:
        if "-dM" in command:
            return b"#define __VERSION__ 1"
        self.num_compiled += 1
        if self.error is not None:
            return self.error
        Path(command[-1]).write_bytes(b"library")
        return b""


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> FakeCompiler:
    fake = FakeCompiler()
    monkeypatch.setattr(build, "_run", fake)
    monkeypatch.setattr(build, "_compiler", lambda: "c++")
    return fake


def test_built_once_and_then_cached(compiler: FakeCompiler, tmp_path: Path) -> None:
    messages: list[str] = []
    first = build.build(messages.append, tmp_path)
    assert first.read_bytes() == b"library"
    assert build.build(messages.append, tmp_path) == first
    assert compiler.num_compiled == 1
    assert len(messages) == 2


def test_four_at_once_build_once(compiler: FakeCompiler, tmp_path: Path) -> None:
    threads = [threading.Thread(target=build.build, args=(lambda _message: None, tmp_path)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert compiler.num_compiled == 1


def test_another_cpu_or_compiler_gets_its_own(compiler: FakeCompiler, tmp_path: Path) -> None:
    first = build._key(("-O3",), b"#define __AVX2__ 1")
    assert first == build._key(("-O3",), b"#define __AVX2__ 1")
    assert len({first, build._key(("-O2",), b"#define __AVX2__ 1"), build._key(("-O3",), b"")}) == 3


def test_a_failed_build_leaves_nothing_and_says_why(compiler: FakeCompiler, tmp_path: Path) -> None:
    compiler.error = "linear.cpp:1: error: no"
    with pytest.raises(build.BuildError, match=r"linear\.cpp:1: error: no"):
        build.build(lambda _message: None, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["build.lock"]


def test_without_a_compiler_there_is_one_warning_and_no_library(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    uncached = build.library.__wrapped__
    with caplog.at_level(logging.WARNING, logger="baton.engine.native"):
        assert uncached() is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "expected a C++ compiler but found none of no-such-compiler" in caplog.text


def test_set_up_never_fails_for_want_of_a_compiler(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    build.main()
    assert "Baton runs without them" in capsys.readouterr().out


def test_a_command_that_hangs_or_fails_is_told() -> None:
    assert build._run(["sleep", "10"], 0.01) == "expected it to end in 0 s"
    assert build._run(["false"], 10.0) == "exit status 1"
    assert build._run(["echo", "yes"], 10.0) == b"yes\n"
