"""The usage ledger: what each tenant used of each model, in a database that outlives the server.

    request ends ─► Ledger.add: sums in memory ─► every usage_flush_s, in a thread ─► one row per sum ─► export

What waits in memory is bounded by the number of (tenant, key, model, endpoint), not by traffic: while the database is
away the sums just grow. Rows are only ever added, so several servers may write to one database, and no statement
depends on its kind. The export adds up.

    python -m coordinator.gateway.usage export --url sqlite:////path/usage.db --format csv|json [--by day|hour|all]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import csv
import json
import logging
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any, TextIO

from sqlalchemy import (
    BigInteger,
    Column,
    Engine,
    Integer,
    MetaData,
    String,
    Table,
    create_engine,
    insert,
    select,
)
from sqlalchemy.exc import SQLAlchemyError

from contracts.errors import ConfigError
from coordinator.gateway.records import Usage, UsageKey

logger = logging.getLogger(__name__)

_METADATA = MetaData()
_KEYS = ("tenant", "key_id", "model", "endpoint")
_COUNTS = ("requests", "failed", "replayed", "prompt_tokens", "cached_tokens", "output_tokens")
USAGE = Table(
    "baton_usage",
    _METADATA,
    Column("id", Integer, primary_key=True, autoincrement=True),
    Column("written_at", BigInteger, nullable=False, index=True),
    Column("tenant", String(64), nullable=False),
    Column("key_id", String(16), nullable=False),
    Column("model", String(512), nullable=False),
    Column("endpoint", String(64), nullable=False),
    *(Column(name, BigInteger, nullable=False) for name in _COUNTS),
)
_PERIODS = {"hour": "%Y-%m-%dT%H:00Z", "day": "%Y-%m-%d", "all": "all"}


def open_database(url: str) -> Engine:
    """Raises ConfigError for a URL that SQLAlchemy cannot use. Connects later."""
    try:
        return create_engine(url, pool_pre_ping=True)
    except (SQLAlchemyError, ImportError, ValueError) as error:
        raise ConfigError(
            f"gateway.usage_url: expected a URL that SQLAlchemy can open but: {error}"
        ) from error


class Ledger:
    """Written by one event loop; `close` writes what is left."""

    def __init__(self, url: str, flush_s: float, on_failure: Callable[[], None]) -> None:
        self._engine = open_database(url)
        self._flush_s = flush_s
        self._on_failure = on_failure
        self._sums: dict[UsageKey, Usage] = {}
        self._is_made = False
        self._writing = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._is_closed = False

    def add(self, key: UsageKey, usage: Usage) -> None:
        """Count; never waits, never fails."""
        self._sums.setdefault(key, Usage()).add(usage)
        if self._task is None and not self._is_closed:
            self._task = asyncio.create_task(self._write_often(), name="usage-ledger")

    async def flush(self) -> None:
        """Write what is there. A failure is counted and logged, and the sums stay for the next time."""
        async with self._writing:
            sums, self._sums = self._sums, {}
            if not sums:
                return
            written = asyncio.ensure_future(asyncio.to_thread(self._write, sums))
            try:
                await asyncio.shield(written)
            except SQLAlchemyError as error:
                self._on_failure()
                logger.error("usage was not written, will be tried again: %s", error)
                for key, usage in sums.items():
                    self._sums.setdefault(key, Usage()).add(usage)
            except asyncio.CancelledError:
                await asyncio.wait([written])  # half written must not be written again
                raise

    async def close(self) -> None:
        self._is_closed = True
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None
        await self.flush()
        self._engine.dispose()

    async def _write_often(self) -> None:
        while True:
            await asyncio.sleep(self._flush_s)
            await self.flush()

    def _write(self, sums: dict[UsageKey, Usage]) -> None:
        if not self._is_made:
            _METADATA.create_all(self._engine)
            self._is_made = True
        now = int(time.time())
        rows = [
            {"written_at": now}
            | {name: getattr(key, name) for name in _KEYS}
            | {name: getattr(usage, name) for name in _COUNTS}
            for key, usage in sums.items()
        ]
        with self._engine.begin() as connection:
            connection.execute(insert(USAGE), rows)


def totals(engine: Engine, period: str = "day") -> list[dict[str, Any]]:
    """Sums by period, tenant, key, model and endpoint, in that order. Raises SQLAlchemyError."""
    form = _PERIODS[period]
    sums: dict[tuple[str, ...], Usage] = {}
    with engine.connect() as connection:
        for row in connection.execute(select(USAGE)).mappings():
            when = datetime.fromtimestamp(row["written_at"], UTC).strftime(form)
            key = (when, *(row[name] for name in _KEYS))
            sums.setdefault(key, Usage()).add(Usage(**{name: row[name] for name in _COUNTS}))
    return [
        dict(zip(("period", *_KEYS), key, strict=True)) | {name: getattr(usage, name) for name in _COUNTS}
        for key, usage in sorted(sums.items())
    ]


def export(rows: list[dict[str, Any]], form: str, out: TextIO) -> None:
    """`csv` with a line of names, or one JSON list."""
    if form == "json":
        json.dump(rows, out, indent=1)
        out.write("\n")
        return
    writer = csv.DictWriter(out, ("period", *_KEYS, *_COUNTS), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; see the module docstring."""
    parser = argparse.ArgumentParser(prog="python -m coordinator.gateway.usage", description="Usage of Baton")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("export", help="sums by period, tenant, key, model and endpoint")
    command.add_argument("--url", required=True, help="gateway.usage_url, e.g. sqlite:////path/usage.db")
    command.add_argument("--format", choices=("csv", "json"), default="csv")
    command.add_argument("--by", choices=tuple(_PERIODS), default="day", help="default: %(default)s (UTC)")
    options = parser.parse_args(arguments)
    try:
        engine = open_database(options.url)
        try:
            rows = totals(engine, options.by)
        finally:
            engine.dispose()
    except (ConfigError, SQLAlchemyError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    export(rows, options.format, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
