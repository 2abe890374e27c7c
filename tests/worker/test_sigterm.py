"""SIGTERM drains a worker, though only Ray's main thread may say what a signal does."""

from __future__ import annotations

import inspect
import signal
from collections.abc import Iterator
from types import FunctionType

import pytest

from worker.sigterm import _EXIT, drain_on_sigterm

HANDLER = f"""
def {_EXIT}(message, exit_code=1):
    raise SystemExit(message)

def handler(number, frame):
    {_EXIT}("The process receives a SIGTERM.", exit_code=1)
"""


@pytest.fixture
def rays() -> Iterator[FunctionType]:
    """A handler as Ray installs one."""
    scope: dict[str, FunctionType] = {}
    exec(HANDLER, scope)
    before = signal.signal(signal.SIGTERM, scope["handler"])
    yield scope["handler"]
    signal.signal(signal.SIGTERM, before)


def test_the_first_signal_drains_and_the_second_one_ends(rays: FunctionType) -> None:
    drained: list[int] = []
    assert drain_on_sigterm(lambda: drained.append(1))
    signal.raise_signal(signal.SIGTERM)
    assert drained == [1]
    with pytest.raises(SystemExit, match="receives a SIGTERM"):
        signal.raise_signal(signal.SIGTERM)


def test_a_handler_of_somebody_else_is_left_alone() -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)  # Ray's own may be there, from other tests
    try:
        assert not drain_on_sigterm(lambda: None)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)


def test_rays_handler_is_the_one_that_we_know() -> None:
    from ray._private import worker

    assert hasattr(worker, _EXIT)
    source = inspect.getsource(worker.Worker.main_loop)
    assert "set_sigterm_handler(sigterm_handler)" in source
    assert _EXIT in source
