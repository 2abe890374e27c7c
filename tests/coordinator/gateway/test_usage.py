"""The ledger: sums that reach the database once, whatever happens to it meanwhile."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
from sqlalchemy import create_engine

from contracts.errors import ConfigError
from coordinator.gateway.records import Usage, UsageKey
from coordinator.gateway.usage import Ledger, export, main, totals

ACME = UsageKey("acme", "k1", "m", "/v1/completions")
GLOBEX = UsageKey("globex", "k2", "m", "/v1/completions")


def written(url: str) -> list[tuple[str, int, int]]:
    engine = create_engine(url)
    try:
        return [(row["tenant"], row["requests"], row["output_tokens"]) for row in totals(engine, "all")]
    finally:
        engine.dispose()


async def test_sums_are_added_over_writes_and_servers(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/usage.db"
    for _ in range(2):
        ledger = Ledger(url, 60.0, lambda: None)
        ledger.add(ACME, Usage(requests=1, output_tokens=5))
        ledger.add(GLOBEX, Usage(requests=1, output_tokens=1))
        ledger.add(ACME, Usage(requests=1, output_tokens=7))
        await ledger.flush()
        await ledger.flush()
        ledger.add(ACME, Usage(requests=1, output_tokens=1))
        await ledger.close()
    assert written(url) == [("acme", 6, 26), ("globex", 2, 2)]


async def test_a_database_that_is_away_loses_nothing_and_what_waits_does_not_grow(tmp_path: Path) -> None:
    failures: list[None] = []
    url = f"sqlite:///{tmp_path}/later/usage.db"
    ledger = Ledger(url, 60.0, lambda: failures.append(None))
    for _ in range(1000):
        ledger.add(ACME, Usage(requests=1))
    await ledger.flush()
    await ledger.flush()
    assert len(failures) == 2
    assert len(ledger._sums) == 1
    (tmp_path / "later").mkdir()
    await ledger.close()
    assert written(url) == [("acme", 1000, 0)]


async def test_usage_is_exported_in_both_forms(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"sqlite:///{tmp_path}/usage.db"
    ledger = Ledger(url, 60.0, lambda: None)
    ledger.add(ACME, Usage(1, 0, 0, 10, 4, 3))
    await ledger.close()
    assert main(["export", "--url", url, "--format", "json", "--by", "all"]) == 0
    rows = json.loads(capsys.readouterr().out)
    expected = {
        "period": "all", "tenant": "acme", "key_id": "k1", "model": "m", "endpoint": "/v1/completions", "requests": 1,
        "failed": 0, "replayed": 0, "prompt_tokens": 10, "cached_tokens": 4, "output_tokens": 3,
    }  # fmt: skip
    assert rows == [expected]
    out = io.StringIO()
    export(rows, "csv", out)
    [row] = csv.DictReader(io.StringIO(out.getvalue()))
    assert row == {name: str(value) for name, value in expected.items()}
    assert main(["export", "--url", f"sqlite:///{tmp_path}/none.db"]) == 2


def test_a_url_that_cannot_be_opened_is_told_at_start() -> None:
    with pytest.raises(ConfigError, match="usage_url"):
        Ledger("nonsense", 1.0, lambda: None)
