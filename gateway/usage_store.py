"""Who used what, day by day, in an SQLite file. Blocking: `usage.py` calls it from a thread of its own.

Several servers may share a file: each adds to what is there.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path

from msgspec import Struct
from msgspec.structs import astuple, fields

MIGRATIONS: Sequence[str] = (
    """
    CREATE TABLE usage (
        day TEXT NOT NULL,
        tenant TEXT NOT NULL,
        model TEXT NOT NULL,
        class TEXT NOT NULL,
        requests INTEGER NOT NULL,
        prompt_tokens INTEGER NOT NULL,
        cached_tokens INTEGER NOT NULL,
        output_tokens INTEGER NOT NULL,
        aborted INTEGER NOT NULL,
        refused INTEGER NOT NULL,
        PRIMARY KEY (day, tenant, model, class)
    ) WITHOUT ROWID
    """,
)
"""Statement k takes a file of version k to version k + 1; a new file has version 0. Never change one: add."""

BUSY_S = 5.0
"""How long another server may hold the file."""


class UsageError(Exception):
    """The file of usage cannot be used; the message names it."""


class UsageRow(Struct, frozen=True, kw_only=True, rename={"sla_class": "class"}):
    """What a tenant used of a model in one class on one day (UTC).

    `requests` are those that a backend took, `aborted` those of them that did not come to their end (the
    client went away, a deadline passed, something failed); `refused` are those that no backend took, for want
    of room or by a limit. Aborted requests count the tokens that were sent.
    """

    day: str
    tenant: str
    model: str
    sla_class: str
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    aborted: int = 0
    refused: int = 0

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What there is one row for."""
        return self.day, self.tenant, self.model, self.sla_class

    def __add__(self, other: UsageRow) -> UsageRow:
        """Both together; their keys must be the same."""
        sums = {name: getattr(self, name) + getattr(other, name) for name in COUNTS}
        return UsageRow(day=self.day, tenant=self.tenant, model=self.model, sla_class=self.sla_class, **sums)


class UsageFilter(Struct, frozen=True, kw_only=True):
    """Which rows are wanted; None is all. Days are `2026-01-31`, both ends included."""

    tenant: str | None = None
    since: str | None = None
    until: str | None = None


COLUMNS = tuple(field.encode_name for field in fields(UsageRow))
COUNTS = COLUMNS[4:]
ADD = (
    f"INSERT INTO usage ({', '.join(COLUMNS)}) VALUES ({', '.join('?' * len(COLUMNS))})"
    " ON CONFLICT (day, tenant, model, class) DO UPDATE SET "
    + ", ".join(f"{name} = {name} + excluded.{name}" for name in COUNTS)
)
SELECT = (
    f"SELECT {', '.join(COLUMNS)} FROM usage WHERE tenant = coalesce(?, tenant)"
    " AND day >= coalesce(?, day) AND day <= coalesce(?, day) ORDER BY day, tenant, model, class"
)


class UsageStore:
    """An open file. Its methods may be called from any thread, but from one at a time."""

    def __init__(self, path: Path) -> None:
        """Open or make the file, and bring it up to date. Raises `UsageError`."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._connection = _connect(path)
        except (OSError, sqlite3.Error) as error:
            raise UsageError(f"the usage file {path} cannot be opened: {error}") from error
        try:
            # Readers do not hold up the writer; a crash of the process loses nothing that was committed.
            self._connection.execute("PRAGMA journal_mode = WAL")
            self._connection.execute("PRAGMA synchronous = NORMAL")
            migrate(self._connection)
        except (UsageError, sqlite3.Error) as error:
            self._connection.close()
            raise UsageError(f"the usage file {path} cannot be used: {error}") from error

    def add(self, rows: Iterable[UsageRow]) -> None:
        """Add to what is there, all or nothing. Raises `sqlite3.Error`."""
        with self._connection:
            self._connection.executemany(ADD, [astuple(row) for row in rows])

    def rows(self, wanted: UsageFilter) -> list[UsageRow]:
        """What there is, by day, tenant, model and class. Raises `sqlite3.Error`."""
        return _rows(self._connection, wanted)

    def close(self) -> None:
        """Release the file."""
        self._connection.close()


def read_usage(path: Path, wanted: UsageFilter) -> list[UsageRow]:
    """What a file has, without changing it, also while a server writes. Raises `UsageError`."""
    if not path.is_file():
        raise UsageError(f"there is no usage file {path}")
    try:
        with closing(_connect(path)) as connection:
            if (version := _version(connection)) != len(MIGRATIONS):
                raise UsageError(_other_version(version, len(MIGRATIONS)))
            return _rows(connection, wanted)
    except (UsageError, sqlite3.Error) as error:
        raise UsageError(f"the usage file {path} cannot be read: {error}") from error


def usage_table(rows: Sequence[UsageRow]) -> str:
    """Rows for people, with a line of sums."""
    if not rows:
        return "No usage.\n"
    cells = [COLUMNS, *(tuple(map(str, astuple(row))) for row in rows)]
    sums = (str(sum(getattr(row, name) for row in rows)) for name in COUNTS)
    cells.append(("total", "", "", "", *sums))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "".join(_line(row, widths) for row in cells)


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    names = [f"{cell:{width}}" for cell, width in zip(row[:4], widths, strict=False)]
    counts = [f"{cell:>{width}}" for cell, width in zip(row[4:], widths[4:], strict=True)]
    return "  ".join([*names, *counts]) + "\n"


def migrate(connection: sqlite3.Connection, migrations: Sequence[str] = MIGRATIONS) -> None:
    """Bring a file to the newest version, a transaction a step. Raises `UsageError` if it is newer."""
    while (version := _version(connection)) < len(migrations):
        connection.execute("BEGIN IMMEDIATE")
        with connection:
            # Another server may have been first.
            if _version(connection) == version:
                connection.execute(migrations[version])
                connection.execute(f"PRAGMA user_version = {version + 1}")
    if version > len(migrations):
        raise UsageError(_other_version(version, len(migrations)))


def _connect(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(path, timeout=BUSY_S, check_same_thread=False)


def _version(connection: sqlite3.Connection) -> int:
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def _other_version(version: int, known: int) -> str:
    return f"it is of version {version}, and this program writes version {known}"


def _rows(connection: sqlite3.Connection, wanted: UsageFilter) -> list[UsageRow]:
    found = connection.execute(SELECT, (wanted.tenant, wanted.since, wanted.until))
    return [UsageRow(**dict(zip(UsageRow.__struct_fields__, row, strict=True))) for row in found]
