"""Who used what: counted, kept through a crash, and shown to whom it concerns."""

from __future__ import annotations

import asyncio
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from surefoot.backends.errors import EngineFailed, Overloaded
from surefoot.backends.fake import FakeBackend, Script
from surefoot.gateway.admin import AdminKey
from surefoot.gateway.clock import FakeClock
from surefoot.gateway.tenants import Tenant, TenantLimits, hash_key
from surefoot.gateway.usage import UsageBook
from surefoot.gateway.usage_store import (
    COLUMNS,
    MIGRATIONS,
    UsageError,
    UsageFilter,
    UsageRow,
    UsageStore,
    migrate,
    read_usage,
    usage_table,
)

from .harness import Serve, bearer, client_of, hashes

CHAT, USAGE = "/v1/chat/completions", "/v1/surefoot/usage"
BODY: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": "one two"}]}
ALL = UsageFilter()
ROW = UsageRow(day="2026-01-31", tenant="a", model="m", sla_class="batch", requests=1, prompt_tokens=5)
DAY_S = 86400
NOON = 1_769_860_800.0
"""Of 2026-01-31, UTC."""
ADMIN = AdminKey(hash_key("admin"))
TENANTS = (
    Tenant(id="a", key_hashes=hashes("a")),
    Tenant(id="b", key_hashes=hashes("b"), limits=TenantLimits(requests_per_minute=1)),
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Where a file of usage may be made, in a folder that is not there yet."""
    return tmp_path / "state" / "usage.db"


def test_rows_add_up(file: Path) -> None:
    """What is added for the same day, tenant, model and class becomes one row; others stay apart."""
    with closing(UsageStore(file)) as store:
        store.add([ROW, replace(ROW, tenant="b")])
        store.add([replace(ROW, requests=2, output_tokens=7), replace(ROW, day="2026-02-01")])
        assert store.rows(ALL) == [
            replace(ROW, requests=3, prompt_tokens=10, output_tokens=7),
            replace(ROW, tenant="b"),
            replace(ROW, day="2026-02-01"),
        ]
        assert [row.tenant for row in store.rows(UsageFilter(tenant="b"))] == ["b"]
        assert len(store.rows(UsageFilter(since="2026-02-01"))) == 1
        assert len(store.rows(UsageFilter(until="2026-01-31"))) == 2
    assert len(read_usage(file, ALL)) == 3


def test_two_servers_share_a_file(file: Path) -> None:
    """What two writers add at once is all there."""

    def write() -> None:
        with closing(UsageStore(file)) as store:
            for _ in range(20):
                store.add([ROW])

    threads = [Thread(target=write) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert read_usage(file, ALL) == [replace(ROW, requests=40, prompt_tokens=200)]


def test_a_file_is_brought_up_to_date(file: Path) -> None:
    """A file of an older version keeps its rows; its version says what was done."""
    with closing(UsageStore(file)) as store:
        store.add([ROW])
    with closing(sqlite3.connect(file)) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (len(MIGRATIONS),)
        connection.execute("PRAGMA user_version = 1")
        newer = (*MIGRATIONS[:1], "ALTER TABLE usage ADD COLUMN later INTEGER NOT NULL DEFAULT 3")
        migrate(connection, newer)
        migrate(connection, newer)
        assert connection.execute("PRAGMA user_version").fetchone() == (2,)
        assert connection.execute("SELECT tenant, later FROM usage").fetchall() == [("a", 3)]


def test_a_step_that_fails_leaves_the_file_as_it_was(file: Path) -> None:
    """A migration is done whole or not at all."""
    with closing(sqlite3.connect(":memory:")) as connection:
        with pytest.raises(sqlite3.Error):
            migrate(connection, ("CREATE TABLE one (x)", "CREATE TABLE one (y)"))
        assert connection.execute("PRAGMA user_version").fetchone() == (1,)
        assert not connection.in_transaction


@pytest.mark.parametrize("opens", [UsageStore, lambda path: read_usage(path, ALL)])
def test_a_newer_or_foreign_file_is_refused(tmp_path: Path, opens: Any) -> None:
    """A file of a later version, or of something else, is not touched."""
    newer, foreign = tmp_path / "newer.db", tmp_path / "foreign.db"
    UsageStore(newer).close()
    with closing(sqlite3.connect(newer)) as connection:
        connection.execute("PRAGMA user_version = 99")
    foreign.write_bytes(b"no database at all, " * 10)
    with pytest.raises(UsageError, match=r"newer\.db .*version 99"):
        opens(newer)
    with pytest.raises(UsageError, match=r"foreign\.db"):
        opens(foreign)
    assert foreign.read_bytes().startswith(b"no database")


def test_reading_makes_no_file(file: Path) -> None:
    """To look for usage where there is none is an error that names the place."""
    with pytest.raises(UsageError, match=r"no usage file .*usage\.db"):
        read_usage(file, ALL)
    assert not file.exists()


def test_usage_of_tenants(file: Path) -> None:
    """Requests, tokens, aborts and refusals are kept by day, tenant, model and class."""
    clock, backend = FakeClock(NOON), FakeBackend(Script(num_cached_tokens=1))
    with client_of(
        *TENANTS, backend=backend, clock=clock, usage_store=UsageStore(file), admin_key=ADMIN
    ) as client:

        def ask(key: str, **fields: Any) -> int:
            return client.post(CHAT, json=BODY | fields, headers=bearer(key)).status_code

        assert [ask("a"), ask("a", stream=True, n=2), ask("a", service_tier="flex")] == [200] * 3
        assert [ask("b"), ask("b"), ask("b", n=0), ask("b", model="gpt-9")] == [200, 429, 400, 404]
        clock.advance(DAY_S / 2)
        backend.script = Script(error=EngineFailed("Down."), error_at=2)
        assert ask("a") == 503
        backend.script = Script(error_at_start=Overloaded("Full."))
        assert ask("a") == 429

        def rows(key: str, query: str = "") -> list[dict[str, Any]]:
            response = client.get(USAGE + query, headers=bearer(key))
            assert response.status_code == 200
            data: list[dict[str, Any]] = response.json()["data"]
            return data

        first = {"day": "2026-01-31", "model": "fake", "aborted": 0, "refused": 0}
        assert rows("admin") == [
            first | counts("a", "batch", 1, 2, 1, 4),
            first | counts("a", "standard", 2, 4, 2, 12),
            first | counts("b", "standard", 1, 2, 1, 4) | {"refused": 1},
            first | counts("a", "standard", 1, 2, 0, 2) | {"day": "2026-02-01", "aborted": 1, "refused": 1},
        ]
        assert [row["tenant"] for row in rows("a")] == ["a"] * 3
        assert [row["tenant"] for row in rows("b")] == ["b"]
        assert len(rows("a", "?since=2026-02-01")) == 1
        assert len(rows("a", "?until=2026-01-31&since=2026-01-31")) == 2
        whole = rows("admin")
    assert [row.tenant for row in read_usage(file, ALL)] == [row["tenant"] for row in whole]


def counts(tenant: str, sla_class: str, *numbers: int) -> dict[str, Any]:
    """A row's part that differs: requests, prompt, cached and output tokens."""
    names = ("requests", "prompt_tokens", "cached_tokens", "output_tokens")
    return {"tenant": tenant, "class": sla_class} | dict(zip(names, numbers, strict=True))


@pytest.mark.parametrize(
    ("query", "key", "status", "code"),
    [
        ("", "wrong", 401, "invalid_api_key"),
        ("?since=yesterday", "a", 400, "invalid_value"),
        ("?until=2026-02-30", "admin", 400, "invalid_value"),
        ("?since=2026-02-01&until=2026-01-31", "a", 400, "invalid_value"),
        ("?untill=2026-02-01", "a", 400, "unknown_parameter"),
        ("?tenant=b", "a", 400, "unknown_parameter"),
    ],
)
def test_wrong_questions(file: Path, query: str, key: str, status: int, code: str) -> None:
    """A wrong key, a day that is none and an unknown parameter are refused, and the error says which."""
    with client_of(*TENANTS, usage_store=UsageStore(file), admin_key=ADMIN) as client:
        response = client.get(USAGE + query, headers=bearer(key))
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)


def test_usage_that_is_not_kept(http: Any) -> None:
    """A server without a file says so, instead of showing nothing."""
    response = http.get(USAGE)
    assert (response.status_code, response.json()["error"]["code"]) == (404, "not_enabled")
    assert "usage_db" in response.json()["error"]["message"]


def test_without_tenants_usage_is_open(file: Path) -> None:
    """Where nobody has a key, the one local tenant sees its usage."""
    with client_of(usage_store=UsageStore(file)) as client:
        client.post(CHAT, json=BODY)
        assert [row["tenant"] for row in client.get(USAGE).json()["data"]] == ["local"]


@pytest.mark.anyio
@pytest.mark.parametrize("stream", [False, True])
async def test_aborted_requests_are_kept(serve: Serve, file: Path, stream: bool) -> None:
    """A client that goes away leaves a row with what was sent, written when the server ends."""
    gate = asyncio.Event()
    backend = FakeBackend(Script(gates={2: gate}))
    async with serve(backend, usage_store=UsageStore(file)) as gateway:
        asking = asyncio.create_task(gateway.client.post(CHAT, json=BODY | {"stream": stream}))
        async with asyncio.timeout(60):
            await backend.asked(1)
        asking.cancel()
        await asyncio.wait([asking])
        async with asyncio.timeout(60):
            await backend.idle()
    (row,) = read_usage(file, ALL)
    assert (row.requests, row.aborted, row.refused, row.prompt_tokens) == (1, 1, 0, 2)
    assert row.output_tokens <= 2


@pytest.mark.anyio
async def test_what_cannot_be_written_is_kept(file: Path) -> None:
    """A file that fails for a while loses nothing: it is logged, and written later."""
    store = UsageStore(file)
    fails = True
    add = store.add

    def fail_first(rows: Any) -> None:
        if fails:
            raise sqlite3.OperationalError("disk is full")
        add(rows)

    store.add = fail_first  # type: ignore[method-assign]  # as a full disk would
    book = UsageBook(store, FakeClock(), write_period_s=3600)
    async with book.running():
        book.add(ROW)
        with capture_logs() as logs:
            await book.write()
        assert [each["event"] for each in logs] == ["usage.write_failed"]
        fails = False
        book.add(ROW)
        assert await book.read(ALL) == [replace(ROW, requests=2, prompt_tokens=10)]


def test_usage_survives_a_kill(file: Path) -> None:
    """What ended a second ago is in the file when the process is killed."""
    with subprocess.Popen([sys.executable, "-P", "-c", KILLED, str(file)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"counted\n"
        until = time.monotonic() + 60
        while not read_usage(file, ALL) and time.monotonic() < until:
            time.sleep(0.05)
        process.kill()
    assert read_usage(file, ALL) == [ROW]


KILLED = """
import asyncio, sys
from pathlib import Path
from surefoot.gateway.clock import SystemClock
from surefoot.gateway.usage import UsageBook
from surefoot.gateway.usage_store import UsageRow, UsageStore

async def main():
    book = UsageBook(UsageStore(Path(sys.argv[1])), SystemClock())
    async with book.running():
        row = dict(day="2026-01-31", tenant="a", model="m", sla_class="batch", requests=1, prompt_tokens=5)
        book.add(UsageRow(**row))
        print("counted", flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


def test_a_table_for_people() -> None:
    """The table has a line for each row, right-aligned counts, and a line of sums."""
    lines = usage_table([ROW, replace(ROW, tenant="acme", requests=12)]).splitlines()
    assert lines[0].split() == list(COLUMNS)
    assert lines[1].split() == ["2026-01-31", "a", "m", "batch", "1", "5", "0", "0", "0", "0"]
    assert lines[-1].split() == ["total", "13", "10", "0", "0", "0", "0"]
    assert len({len(line) for line in lines}) == 1
    assert usage_table([]) == "No usage.\n"
