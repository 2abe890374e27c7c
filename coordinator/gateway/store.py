"""Files and batches on disk: SQLite for what is known of them, one plain file each for the bytes.

    <state_dir>/jobs.db       tables baton_files, baton_batches, baton_batch_results
    <state_dir>/files/<id>    bytes, written whole and renamed
    <state_dir>/batches.lock  whoever holds it runs the batches

A line's result and the batch's counts are one transaction, so after a crash each line is either done and counted, or
runs again. Everything here blocks; callers use threads.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, BinaryIO

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Connection,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    create_engine,
    delete,
    event,
    func,
    insert,
    select,
    update,
)
from sqlalchemy.exc import OperationalError

from contracts.errors import NotFoundError, OverloadedError, PayloadTooLarge, RequestError
from coordinator.gateway.records import UNFINISHED, BatchRecord, FileRecord, LineResult, new_id

_METADATA = MetaData()
FILES = Table(
    "baton_files",
    _METADATA,
    Column("seq", Integer, primary_key=True, autoincrement=True),
    Column("id", String(64), nullable=False, unique=True),
    Column("tenant", String(64), nullable=False, index=True),
    Column("filename", String(255), nullable=False),
    Column("purpose", String(32), nullable=False),
    Column("num_bytes", BigInteger, nullable=False),
    Column("created_at", BigInteger, nullable=False),
)
_TIMES = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
BATCHES = Table(
    "baton_batches",
    _METADATA,
    Column("seq", Integer, primary_key=True, autoincrement=True),
    Column("id", String(64), nullable=False, unique=True),
    Column("tenant", String(64), nullable=False, index=True),
    Column("key_id", String(16), nullable=False),
    Column("endpoint", String(64), nullable=False),
    Column("input_file_id", String(64), nullable=False),
    Column("metadata", Text, nullable=False),
    Column("status", String(16), nullable=False, index=True),
    Column("created_at", BigInteger, nullable=False),
    Column("expires_at", BigInteger, nullable=False),
    *(Column(f"{name}_at", BigInteger) for name in _TIMES),
    Column("num_total", Integer, nullable=False),
    Column("num_completed", Integer, nullable=False),
    Column("num_failed", Integer, nullable=False),
    Column("errors", Text),
    Column("output_file_id", String(64)),
    Column("error_file_id", String(64)),
)
RESULTS = Table(
    "baton_batch_results",
    _METADATA,
    Column("batch_id", String(64), primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("is_error", Boolean, nullable=False),
    Column("text", Text, nullable=False),
)
_BUSY_MS = 10_000


class JobStore:
    """One folder. Threads may share it, and so may processes."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._files = folder / "files"
        self._files.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock_path = folder / "batches.lock"
        self._lock: int | None = None
        self._engine = create_engine(f"sqlite:///{folder / 'jobs.db'}")
        event.listen(self._engine, "connect", _prepare)
        try:
            _METADATA.create_all(self._engine)
        except OperationalError:  # another replica made the same tables at the same time
            _METADATA.create_all(self._engine)

    def close(self) -> None:
        self._engine.dispose()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def try_own(self) -> bool:
        """Whether this process is the one that runs the batches of this folder; once it is, until `close`."""
        if self._lock is None:
            lock = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
                return False
            self._lock = lock
        return True

    # Files

    def path_of(self, file_id: str) -> Path:
        return self._files / file_id

    def add_file(self, tenant: str, filename: str, source: BinaryIO, max_total: int) -> FileRecord:
        """Keep an upload. Raises PayloadTooLarge if the tenant has no room for it."""
        record = FileRecord(new_id("file-"), tenant, filename[:255], "batch", 0, int(time.time()))
        fresh = self._files / f"{record.id}.new"
        try:
            with fresh.open("wb") as out:
                shutil.copyfileobj(source, out)
                out.flush()
                os.fsync(out.fileno())
            record = replace(record, num_bytes=fresh.stat().st_size)
            if self.num_bytes(tenant) + record.num_bytes > max_total:
                raise PayloadTooLarge(
                    f"expected files of at most {max_total} bytes in all; delete some first", param="file"
                )
            os.replace(fresh, self.path_of(record.id))
        finally:
            fresh.unlink(missing_ok=True)
        try:
            with self._writing() as connection:
                connection.execute(insert(FILES).values(**asdict(record)))
        except BaseException:
            self.path_of(record.id).unlink(missing_ok=True)
            raise
        return record

    def num_bytes(self, tenant: str) -> int:
        with self._reading() as connection:
            found = connection.execute(select(func.sum(FILES.c.num_bytes)).where(FILES.c.tenant == tenant))
            return int(found.scalar() or 0)

    def file(self, tenant: str, file_id: str) -> FileRecord:
        """Raises NotFoundError, for another tenant's too."""
        found = self._rows(select(FILES).where(FILES.c.id == file_id, FILES.c.tenant == tenant))
        if not found:
            raise NotFoundError(f"no such file: {file_id[:80]!r}")
        return FileRecord(**found[0])

    def files(
        self,
        tenant: str,
        limit: int,
        after: str | None,
        purpose: str | None = None,
        is_rising: bool = False,
    ) -> list[FileRecord]:
        """Newest first, or oldest, those that come behind `after`; one more than `limit` if there are more."""
        rows = self._page(FILES, tenant, limit, after, purpose, is_rising)
        return [FileRecord(**row) for row in rows]

    def delete_file(self, tenant: str, file_id: str) -> None:
        """Raises NotFoundError; RequestError while a batch reads it."""
        self.file(tenant, file_id)
        busy = select(BATCHES.c.id).where(
            BATCHES.c.input_file_id == file_id, BATCHES.c.status.in_(UNFINISHED)
        )
        with self._writing() as connection:
            batch_id = connection.execute(busy).scalar()
            if batch_id is not None:
                raise RequestError(f"expected a file that no batch reads, but {batch_id} does")
            connection.execute(delete(FILES).where(FILES.c.id == file_id))
        self.path_of(file_id).unlink(missing_ok=True)

    # Batches

    def add_batch(self, batch: BatchRecord) -> None:
        with self._writing() as connection:
            connection.execute(insert(BATCHES).values(**asdict(batch)))

    def batch(self, tenant: str | None, batch_id: str) -> BatchRecord:
        """`tenant` None: anybody's. Raises NotFoundError."""
        query = select(BATCHES).where(BATCHES.c.id == batch_id)
        found = self._rows(query if tenant is None else query.where(BATCHES.c.tenant == tenant))
        if not found:
            raise NotFoundError(f"no such batch: {batch_id[:80]!r}")
        return BatchRecord(**found[0])

    def batches(self, tenant: str, limit: int, after: str | None) -> list[BatchRecord]:
        """As `files`."""
        return [BatchRecord(**row) for row in self._page(BATCHES, tenant, limit, after)]

    def unfinished(self) -> list[BatchRecord]:
        """Oldest first."""
        query = select(BATCHES).where(BATCHES.c.status.in_(UNFINISHED)).order_by(BATCHES.c.seq)
        return [BatchRecord(**row) for row in self._rows(query)]

    def move(self, batch_id: str, sources: Iterable[str], status: str, **values: Any) -> bool:
        """From one of `sources` to `status`, with its time; False if it was in none of them."""
        stamped = {"status": status, f"{status}_at": int(time.time()), **values}
        query = update(BATCHES).where(BATCHES.c.id == batch_id, BATCHES.c.status.in_(tuple(sources)))
        with self._writing() as connection:
            return bool(connection.execute(query.values(**stamped)).rowcount)

    def add_result(self, batch_id: str, result: LineResult) -> str:
        """Keep a line's end and count it; the batch's status, for whoever ran the line."""
        counted = BATCHES.c.num_failed if result.is_error else BATCHES.c.num_completed
        with self._writing() as connection:
            connection.execute(insert(RESULTS).values(batch_id=batch_id, **asdict(result)))
            connection.execute(
                update(BATCHES).where(BATCHES.c.id == batch_id).values({counted.name: counted + 1})
            )
            status = connection.execute(select(BATCHES.c.status).where(BATCHES.c.id == batch_id))
            return str(status.scalar_one())

    def add_late(self, batch_id: str, results: list[LineResult], num_total: int) -> None:
        """Keep results that count neither as completed nor as failed. `num_total`: lines of the batch."""
        with self._writing() as connection:
            if results:
                rows = [{"batch_id": batch_id, **asdict(each)} for each in results]
                connection.execute(insert(RESULTS), rows)
            connection.execute(update(BATCHES).where(BATCHES.c.id == batch_id).values(num_total=num_total))

    def done_lines(self, batch_id: str) -> set[int]:
        with self._reading() as connection:
            found = connection.execute(select(RESULTS.c.number).where(RESULTS.c.batch_id == batch_id))
            return set(found.scalars())

    def finish(self, batch: BatchRecord, status: str, errors_text: str | None = None) -> None:
        """Write the output and error files and end the batch as `status`. Again after a crash, it does the same.
        `errors_text`: see BatchRecord.errors.
        """
        output, errors = (self._write_output(batch, is_error) for is_error in (False, True))
        with self._writing() as connection:
            for file in (output, errors):
                if file is not None:
                    connection.execute(insert(FILES).values(**asdict(file)))
            connection.execute(
                update(BATCHES)
                .where(BATCHES.c.id == batch.id)
                .values(
                    **{"status": status, f"{status}_at": int(time.time()), "errors": errors_text},
                    output_file_id=None if output is None else output.id,
                    error_file_id=None if errors is None else errors.id,
                )
            )
            connection.execute(delete(RESULTS).where(RESULTS.c.batch_id == batch.id))

    def _write_output(self, batch: BatchRecord, is_error: bool) -> FileRecord | None:
        """One of the two files, in the order of the input; None if it would be empty."""
        kind = "error" if is_error else "output"
        record = FileRecord(
            new_id("file-"), batch.tenant, f"{batch.id}_{kind}.jsonl", "batch_output", 0, int(time.time())
        )
        fresh = self._files / f"{record.id}.new"
        num_lines = 0
        with fresh.open("wb") as out:
            for text in self._texts(batch.id, is_error):
                out.write(text.encode() + b"\n")
                num_lines += 1
            out.flush()
            os.fsync(out.fileno())
        if num_lines == 0:
            fresh.unlink()
            return None
        os.replace(fresh, self.path_of(record.id))
        return replace(record, num_bytes=self.path_of(record.id).stat().st_size)

    def _texts(self, batch_id: str, is_error: bool) -> Iterator[str]:
        query = select(RESULTS.c.text).where(RESULTS.c.batch_id == batch_id, RESULTS.c.is_error == is_error)
        with self._reading() as connection:
            yield from connection.execute(query.order_by(RESULTS.c.number)).scalars()

    @contextmanager
    def _writing(self) -> Iterator[Connection]:
        """One transaction. Raises OverloadedError while another process holds the database for too long."""
        with _patient(), self._engine.begin() as connection:
            yield connection

    @contextmanager
    def _reading(self) -> Iterator[Connection]:
        """As `_writing`."""
        with _patient(), self._engine.connect() as connection:
            yield connection

    def _page(
        self,
        table: Table,
        tenant: str,
        limit: int,
        after: str | None,
        purpose: str | None = None,
        is_rising: bool = False,
    ) -> list[dict[str, Any]]:
        seq = table.c.seq
        query = select(table).where(table.c.tenant == tenant)
        if purpose is not None:
            query = query.where(table.c.purpose == purpose)
        if after is not None:
            found = self._rows(query.where(table.c.id == after))
            if not found:
                raise RequestError(f"after: expected an id of the list but got {after[:80]!r}", param="after")
            last = select(seq).where(table.c.id == after).scalar_subquery()
            query = query.where(seq > last if is_rising else seq < last)
        return self._rows(query.order_by(seq.asc() if is_rising else seq.desc()).limit(limit + 1))

    def _rows(self, query: Any) -> list[dict[str, Any]]:
        with self._reading() as connection:
            rows = connection.execute(query).mappings()
            return [{name: value for name, value in row.items() if name != "seq"} for row in rows]


@contextmanager
def _patient() -> Iterator[None]:
    try:
        yield
    except OperationalError as error:
        if "locked" in str(error.orig) or "busy" in str(error.orig):
            raise OverloadedError("files and batches are busy; try again") from error
        raise


def _prepare(connection: Any, _record: Any) -> None:
    """Readers beside one writer, and a writer waits for another instead of failing."""
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.execute(f"PRAGMA busy_timeout={_BUSY_MS}")
    cursor.close()
