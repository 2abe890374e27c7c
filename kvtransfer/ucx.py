"""Where UCX enters: the only file that imports ucxx, and only when it is asked for."""

from __future__ import annotations

from types import ModuleType

from contracts.errors import ConfigError


def load_ucxx() -> ModuleType:
    """The ucxx module. Raises ConfigError with the reason if it cannot be loaded here."""
    try:
        import ucxx
    except (ImportError, OSError, RuntimeError) as error:
        raise ConfigError(
            f"transfer.transport: ucx cannot be loaded ({error}); set transfer.transport to tcp or auto"
        ) from error
    module: ModuleType = ucxx
    return module
