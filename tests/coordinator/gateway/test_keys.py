"""Keys: made by the command line, kept as hashes, good until they are revoked or expire."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from contracts.errors import AuthenticationError, ConfigError
from coordinator.gateway import keys as module
from coordinator.gateway.keys import Keys, main


def create(path: Path, capsys: pytest.CaptureFixture[str], *more: str) -> str:
    assert main(["create", "--file", str(path), *more]) == 0
    return capsys.readouterr().out.strip()


def refused(keys: Keys, key: str | None) -> str:
    with pytest.raises(AuthenticationError) as error:
        keys.caller(None if key is None else f"Bearer {key}")
    return str(error.value)


def test_a_key_is_its_tenants_and_its_file_does_not_hold_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "new" / "keys.json"
    key = create(path, capsys, "--tenant", "acme", "--scopes", "inference")
    other = create(path, capsys, "--tenant", "globex")
    caller = Keys(path).caller(f"Bearer {key}")
    assert (caller.tenant, caller.scopes, caller.is_batch) == ("acme", ("inference",), False)
    assert Keys(path).caller(f"bearer  {other}").tenant == "globex"
    text = path.read_text()
    assert key not in text
    assert key.split("-", 3)[3] not in text
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    "change", [lambda k: k[:-1] + ("A" if k[-1] != "A" else "B"), lambda k: k + "x", str.upper]
)
def test_a_key_that_differs_anywhere_is_refused_as_an_unknown_one(
    change: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "keys.json"
    key = create(path, capsys, "--tenant", "acme")
    assert callable(change)
    keys = Keys(path)
    unknown = refused(keys, f"sk-baton-{'0' * 12}-{'A' * 43}")
    assert refused(keys, change(key)) == unknown
    assert refused(keys, "x" * 5000) == unknown
    assert key not in unknown
    assert "Authorization" in refused(keys, None)
    with pytest.raises(AuthenticationError):
        keys.caller(f"Basic {key}")


def test_a_revoked_key_is_refused_by_a_running_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "keys.json"
    key, other = (create(path, capsys, "--tenant", name) for name in ("acme", "globex"))
    keys = Keys(path)
    assert keys.caller(f"Bearer {key}").tenant == "acme"
    assert main(["revoke", "--file", str(path), key.split("-")[2]]) == 0
    monkeypatch.setattr(module, "_LOOK_EVERY_S", 0.0)
    assert "revoked" in refused(keys, key)
    assert keys.caller(f"Bearer {other}").tenant == "globex"
    path.unlink()  # no file, no keys
    with pytest.raises(ConfigError):
        keys.caller(f"Bearer {other}")


def test_a_key_ends_with_its_days(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "keys.json"
    key = create(path, capsys, "--tenant", "acme", "--days", "2")
    keys = Keys(path)
    now = json.loads(path.read_text())["keys"][0]["created_at"]
    monkeypatch.setattr(module.time, "time", lambda: now + 2 * 86400 - 1.0)
    assert keys.caller(f"Bearer {key}").tenant == "acme"
    monkeypatch.setattr(module.time, "time", lambda: now + 2 * 86400.0)
    assert "expired" in refused(keys, key)
    assert main(["list", "--file", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "acme" in shown
    assert "expired" in shown
    assert key not in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["create", "--tenant", "a/b"], "tenant"),
        (["create", "--tenant", "a", "--scopes", "admin"], "scopes"),
        (["revoke", "nobody"], "id of a key"),
    ],
)
def test_a_command_that_cannot_be_done_says_why(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "keys.json"
    create(path, capsys, "--tenant", "acme")
    before = path.read_bytes()
    assert main([*arguments, "--file", str(path)]) == 2
    assert message in capsys.readouterr().err
    assert path.read_bytes() == before


def test_a_server_does_not_start_without_its_key_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="keys_file"):
        Keys(tmp_path / "missing.json")
    (tmp_path / "broken.json").write_text('{"pepper": "short"}')
    with pytest.raises(ConfigError, match="pepper"):
        Keys(tmp_path / "broken.json")
