"""API keys: made once, shown once, kept as hashes, looked up on every request.

    python -m coordinator.gateway.keys create --file keys.json --tenant acme [--scopes inference,batch] [--days 90]
    python -m coordinator.gateway.keys list   --file keys.json
    python -m coordinator.gateway.keys revoke --file keys.json KEY_ID

A key is `sk-baton-<id>-<secret>`. The id is public and finds the record; the secret is 256 random bits. The file holds
HMAC-SHA256(pepper of the file, key). A slow hash (scrypt) protects what people think up; nobody guesses 256 bits, and a
slow hash on every request would cost more than the request's whole way through the edge.

The file is written whole and renamed, under a lock; a running server reads it again when it has changed.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import hmac
import json
import os
import re
import secrets
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from contracts.config_gateway import TenantName
from contracts.errors import AuthenticationError, ConfigError
from coordinator.gateway.context import SCOPES, Caller

_KEY = re.compile(r"sk-baton-([0-9a-f]{12})-([A-Za-z0-9_-]{43})")
_DAY_S = 86_400
# A changed file is seen this late at most.
_LOOK_EVERY_S = 1.0


class KeyRecord(BaseModel):
    """One key as it is kept. Times are seconds since the epoch; `expires_at` None: never."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    tenant: TenantName
    digest: str
    scopes: tuple[str, ...] = SCOPES
    created_at: int
    expires_at: int | None = None
    revoked_at: int | None = None


class KeyFile(BaseModel):
    """The file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    pepper: Annotated[str, Field(min_length=32)]
    keys: tuple[KeyRecord, ...] = ()

    def digest(self, key: str) -> str:
        return hmac.digest(self.pepper.encode(), key.encode(), hashlib.sha256).hex()


def make_key(file: KeyFile, tenant: str, scopes: Sequence[str], days: int | None) -> tuple[str, KeyFile]:
    """(the key, the file with its record). Raises ConfigError for an unknown scope or a bad name."""
    for scope in scopes:
        if scope not in SCOPES:
            raise ConfigError(f"scopes: expected some of {', '.join(SCOPES)} but got {scope!r}")
    now, key_id = int(time.time()), secrets.token_hex(6)
    key = f"sk-baton-{key_id}-{secrets.token_urlsafe(32)}"
    try:
        record = KeyRecord(
            id=key_id,
            tenant=tenant,
            digest=file.digest(key),
            scopes=tuple(scopes),
            created_at=now,
            expires_at=None if days is None else now + days * _DAY_S,
        )
    except ValidationError:
        raise ConfigError(
            f"tenant: expected letters, digits, '.', '_', '-', at most 64, but got {tenant[:80]!r}"
        ) from None
    return key, file.model_copy(update={"keys": (*file.keys, record)})


def revoke(file: KeyFile, key_id: str) -> KeyFile:
    """Raises ConfigError for an id that is not there."""
    if all(record.id != key_id for record in file.keys):
        raise ConfigError(f"expected the id of a key of this file but got {key_id[:40]!r}")
    now = int(time.time())
    keys = tuple(
        record.model_copy(update={"revoked_at": record.revoked_at or now}) if record.id == key_id else record
        for record in file.keys
    )
    return file.model_copy(update={"keys": keys})


def read_file(path: Path) -> KeyFile:
    """Raises ConfigError for what is no key file."""
    try:
        return KeyFile.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ConfigError(
            f"gateway.keys_file: expected a readable file but {path}: {error.strerror}"
        ) from error
    except ValidationError as error:
        detail = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, detail["loc"]))
        raise ConfigError(f"gateway.keys_file: {path}: {where}: {detail['msg']}") from None


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Alone with the file; two commands at once lose no key."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _write_file(path: Path, file: KeyFile) -> None:
    fresh = path.with_name(path.name + ".new")
    with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as out:
        json.dump(file.model_dump(mode="json"), out, indent=1)
        out.flush()
        os.fsync(out.fileno())
    os.replace(fresh, path)


class Keys:
    """The keys of a running server."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError if the file cannot be read: a server that was to ask for keys does not start without."""
        self._path = path
        self._looked_at = time.monotonic()
        self._stamp = self._look()
        self._load(read_file(path))

    def caller(self, authorization: str | None) -> Caller:
        """Who holds the key of this header. Raises AuthenticationError, the same for all wrong keys."""
        self._reload()
        scheme, _, given = (authorization or "").partition(" ")
        given = given.strip()
        if scheme.lower() != "bearer" or not given:
            raise AuthenticationError("expected an API key: Authorization: Bearer sk-baton-…")
        match = _KEY.fullmatch(given)
        record = self._records.get(match[1]) if match else None
        # One digest and one comparison whatever is wrong: time tells nothing.
        expected = self._nobody if record is None else record.digest
        is_right = hmac.compare_digest(self._file.digest(given[:200]), expected)
        if record is None or not is_right:
            raise AuthenticationError("expected a valid API key but got another one")
        if record.revoked_at is not None:
            raise AuthenticationError("this API key was revoked")
        if record.expires_at is not None and time.time() >= record.expires_at:
            raise AuthenticationError("this API key has expired")
        return Caller(record.tenant, record.id, record.scopes)

    def _load(self, file: KeyFile) -> None:
        self._file = file
        self._records = {record.id: record for record in file.keys}
        self._nobody = file.digest("nobody")

    def _look(self) -> tuple[int, int, int]:
        try:
            found = self._path.stat()
        except (
            OSError
        ):  # gone: nobody's key is known to be good any more, but a reader tells why better than we
            return (0, 0, 0)
        return (found.st_mtime_ns, found.st_size, found.st_ino)

    def _reload(self) -> None:
        now = time.monotonic()
        if now - self._looked_at < _LOOK_EVERY_S:
            return
        self._looked_at = now
        stamp = self._look()
        if stamp != self._stamp:
            self._load(read_file(self._path))
            self._stamp = stamp


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; see the module docstring."""
    parser = argparse.ArgumentParser(
        prog="python -m coordinator.gateway.keys", description="API keys of Baton"
    )
    commands = parser.add_subparsers(dest="command", required=True)
    create = commands.add_parser("create", help="make a key and show it once")
    create.add_argument("--tenant", required=True)
    create.add_argument("--scopes", default=",".join(SCOPES), help="default: %(default)s")
    create.add_argument("--days", type=int, help="until it expires; default: never")
    show = commands.add_parser("list", help="all keys, without their secrets")
    drop = commands.add_parser("revoke", help="make a key useless")
    drop.add_argument("key_id")
    for each in (create, show, drop):
        each.add_argument("--file", required=True, type=Path, help="gateway.keys_file of the configuration")
    options = parser.parse_args(arguments)
    if options.command == "create" and options.days is not None and options.days < 1:
        parser.error(f"--days: expected at least 1 but got {options.days}")
    try:
        _run(options)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _run(options: argparse.Namespace) -> None:
    path: Path = options.file.expanduser()
    if options.command == "list":
        for record in read_file(path).keys:
            print("  ".join((record.id, record.tenant, ",".join(record.scopes), _state(record))))
        return
    with _locked(path):
        is_new = options.command == "create" and not path.exists()
        file = KeyFile(pepper=secrets.token_hex(32)) if is_new else read_file(path)
        if options.command == "create":
            key, file = make_key(file, options.tenant, options.scopes.split(","), options.days)
            _write_file(path, file)
            print(key)
        else:
            _write_file(path, revoke(file, options.key_id))


def _state(record: KeyRecord) -> str:
    if record.revoked_at is not None:
        return f"revoked {_date(record.revoked_at)}"
    if record.expires_at is None:
        return "valid"
    return f"{'expired' if time.time() >= record.expires_at else 'valid until'} {_date(record.expires_at)}"


def _date(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d")


if __name__ == "__main__":
    sys.exit(main())
