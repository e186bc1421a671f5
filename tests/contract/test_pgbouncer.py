"""The catalog behind a real PgBouncer whose clients share one session of a real PostgreSQL.

The other tests of this folder run behind it too, by their parameter ``pgbouncer``.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager

import psycopg
import pytest
from sqlalchemy import text

from app.catalog import schema, sql
from app.catalog.catalog import Catalog
from app.catalog.deployment import adopt_debt
from app.catalog.errors import CatalogUnavailableError
from app.catalog.keys import Keys
from app.catalog.sql import Origin
from app.domain.entity import Entity
from app.domain.quota import Defaults
from tests.pgbouncer import PgBouncer
from tests.postgres import Postgres
from tests.service import running
from tests.waiting import until

ALICE = Entity.of(user="alice")
WHO = Origin(who="admin", at_ms=1_000, reason="because")
STATE_OF_THE_SESSION = """
    SELECT current_setting('statement_timeout'), current_setting('lock_timeout'),
           (SELECT count(*) FROM pg_prepared_statements), (SELECT count(*) FROM pg_cursors),
           (SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()),
           (SELECT count(*) FROM pg_listening_channels())
"""
UNTOUCHED = ("0", "0", 0, 0, 0, 0)
"""The state of a session that no client has changed."""
POOLERS: dict[str, dict[str, object]] = {
    "plain": {},
    "reset after each transaction": {"server_reset_query_always": 1, "server_reset_query": "DISCARD ALL"},
    "no reset at all": {"server_reset_query": ""},
    "sessions are pooled": {"pool_mode": "session", "default_pool_size": 40},
    "strict about idle transactions": {"idle_transaction_timeout": 2, "query_wait_timeout": 30},
}


@pytest.fixture(params=POOLERS)
def pooler(request: pytest.FixtureRequest, postgres: Postgres) -> Iterator[PgBouncer]:
    with PgBouncer(postgres, **POOLERS[request.param]) as pooler:
        yield pooler


@pytest.fixture
def own_pooler(postgres: Postgres) -> Iterator[PgBouncer]:
    """A pooler for one test, which may stop it."""
    with PgBouncer(postgres) as pooler:
        yield pooler


@asynccontextmanager
async def nodes(url: str, count: int = 3) -> AsyncIterator[list[tuple[Catalog, Keys]]]:
    """Catalogs with their keys, each as a node has them."""
    async with AsyncExitStack() as stack:
        found = []
        for _ in range(count):
            catalog = Catalog(url, Defaults())
            await catalog.open()
            stack.push_async_callback(catalog.close)
            keys = Keys(catalog.database)
            await keys.open()
            stack.push_async_callback(keys.close)
            found.append((catalog, keys))
        yield found


def limits(catalog: Catalog) -> dict[str, float | None]:
    found = catalog.snapshot.quotas.get("request_rate", {})
    return {str(entity): quota.limit for entity, quota in found.items()}


def command(url: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    bare = {name: value for name, value in os.environ.items() if not name.startswith(("QUOTAGATE_", "PG"))}
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "app.run.cli", *arguments],
        env={**bare, "QUOTAGATE_DATABASE_URL": url, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


async def test_nodes_that_share_sessions_agree_and_leave_nothing_in_them(
    pooler: PgBouncer, postgres: Postgres
):
    url = pooler.before(postgres.database())
    schema.upgrade(url)
    async with nodes(url) as found:
        for number, (catalog, keys) in enumerate(found):
            await catalog.put(Entity.of(user=f"u{number}"), {"request_rate": number}, WHO)
            await keys.create(f"key-{number}", ["ask"], [], None, 1_000)
        await asyncio.gather(
            *(catalog.patch(ALICE, {"request_rate": 7}, WHO) for catalog, _ in found),
            *(keys.rotate("key-0", 1_000, 2_000) for _, keys in found),
        )
        await found[1][0].delete(Entity.of(user="u0"), WHO)
        await found[2][1].revoke("key-1")
        expected = {"user=u1": 1, "user=u2": 2, "user=alice": 7}
        await until(lambda: all(limits(catalog) == expected for catalog, _ in found))
        await until(lambda: len({frozenset(keys.ring) for _, keys in found}) == 1)
        assert len({catalog.hash_secret for catalog, _ in found}) == 1
        changes = await found[0][0].database.history(None, None, 100)
        assert len(changes) >= 5
    adopt_debt(url, 90_000)
    with psycopg.connect(url, prepare_threshold=None) as client:
        assert client.execute(STATE_OF_THE_SESSION).fetchone() == UNTOUCHED


async def test_all_clients_have_one_session(own_pooler: PgBouncer, postgres: Postgres):
    """Otherwise the tests of this file would show nothing."""
    direct = postgres.database()
    url = own_pooler.before(direct)
    schema.upgrade(url)
    async with nodes(url, 4) as found:
        await found[0][0].put(ALICE, {"request_rate": 5}, WHO)
        await until(lambda: all(limits(catalog) == {"user=alice": 5} for catalog, _ in found))
        with psycopg.connect(direct) as watching:
            (sessions,) = watching.execute(
                "SELECT count(*) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            ).fetchone() or (0,)
    assert sessions == 1


@pytest.mark.parametrize("by", ["pooler", "server"])
async def test_timeouts_hold_in_each_transaction_and_end_with_it(
    own_pooler: PgBouncer, postgres: Postgres, monkeypatch: pytest.MonkeyPatch, by: str
):
    direct = postgres.database()
    schema.upgrade(direct)
    url = own_pooler.before(direct) if by == "pooler" else direct
    monkeypatch.setattr(sql, "STATEMENT_TIMEOUT_MS", 300)
    monkeypatch.setattr(sql, "LOCK_TIMEOUT_MS", 100)
    async with nodes(url, 1) as [(catalog, _)]:
        for _ in range(3):
            with pytest.raises(CatalogUnavailableError, match="statement timeout"):
                async with catalog.database.reading() as connection:
                    await connection.execute(text("SELECT pg_sleep(60)"))
        with psycopg.connect(direct) as other:
            other.execute("UPDATE catalog_state SET version = version")
            with pytest.raises(CatalogUnavailableError, match="lock timeout"):
                await catalog.put(ALICE, {"request_rate": 5}, WHO)
            with pytest.raises(CatalogUnavailableError, match="lock timeout"):
                adopt_debt(url, 90_000)
        await catalog.put(ALICE, {"request_rate": 5}, WHO)
        assert limits(catalog) == {"user=alice": 5}
    if by == "pooler":
        with psycopg.connect(url, prepare_threshold=None) as client:
            assert client.execute(STATE_OF_THE_SESSION).fetchone() == UNTOUCHED


def test_migrations_at_the_same_time_take_turns(own_pooler: PgBouncer, postgres: Postgres):
    url = own_pooler.before(postgres.database())
    started = [command(url, "migrate", PGAPPNAME=f"quotagate-{number}") for number in range(4)]
    ended = [(process.communicate(timeout=120), process.returncode) for process in started]
    assert [code for _, code in ended] == [0] * 4, ended
    with schema.connect(url) as connection:
        assert connection.execute(text("SELECT version_num FROM alembic_version")).all() == [
            (schema.revisions()[-1],)
        ]


async def test_restarted_pooler_is_used_again(own_pooler: PgBouncer, postgres: Postgres):
    url = own_pooler.before(postgres.database())
    schema.upgrade(url)
    async with nodes(url, 2) as found:
        for round_ in range(3):
            own_pooler.stop()
            await until(lambda: not any(catalog.reachable for catalog, _ in found))
            with pytest.raises(CatalogUnavailableError, match="out of reach") as refused:
                await found[0][0].put(ALICE, {"request_rate": 99}, WHO)
            assert len(str(refused.value).splitlines()) == 1
            own_pooler.start()
            await until(lambda: all(catalog.reachable for catalog, _ in found))
            await found[0][0].put(ALICE, {"request_rate": round_}, WHO)
            await until(lambda round_=round_: limits(found[1][0]) == {"user=alice": round_})  # type: ignore[misc]


async def test_sessions_closed_by_the_server_are_replaced(own_pooler: PgBouncer, postgres: Postgres):
    direct = postgres.database()
    url = own_pooler.before(direct)
    schema.upgrade(url)
    async with nodes(url, 2) as found:
        await found[0][0].put(ALICE, {"request_rate": 1}, WHO)
        with psycopg.connect(direct, autocommit=True) as other:
            other.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
        await until(lambda: limits(found[1][0]) == {"user=alice": 1})
        await until(lambda: all(catalog.reachable for catalog, _ in found))
        await found[0][0].put(ALICE, {"request_rate": 2}, WHO)
        await until(lambda: limits(found[1][0]) == {"user=alice": 2})


REFUSALS: dict[str, tuple[dict[str, object], str, str]] = {
    "statements are pooled": ({"pool_mode": "statement"}, "", "transaction blocks not allowed"),
    "options in the URL": ({}, "&options=-csearch_path%3Dquotas", "unsupported startup parameter: options"),
    "no such database": ({}, "", "does not exist"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusal_of_the_pooler_is_one_line(postgres: Postgres, case: str):
    settings, more, why = REFUSALS[case]
    with PgBouncer(postgres, **settings) as pooler:
        database = postgres.url("nowhere") if case == "no such database" else postgres.database()
        process = command(pooler.before(database) + more, "migrate")
        out, error = process.communicate(timeout=120)
    assert (process.returncode, out) == (1, "")
    [line] = [line for line in error.splitlines() if not line.startswith("{")]
    assert line.startswith("quotagate: the catalog at postgresql+psycopg://")
    assert why in line


async def test_full_pooler_is_one_line_and_used_once_there_is_room(postgres: Postgres):
    with PgBouncer(postgres, max_client_conn=4) as pooler:
        url = pooler.before(postgres.database())
        schema.upgrade(url)
        async with AsyncExitStack() as others:
            for _ in range(4):
                client = await psycopg.AsyncConnection.connect(url)
                others.push_async_callback(client.close)
            process = command(url, "migrate")
            _, error = await asyncio.to_thread(process.communicate, timeout=120)
            assert process.returncode == 1
            assert error.startswith("quotagate: the catalog at")
            assert "no more connections allowed" in error
            assert len(error.splitlines()) == 1
            catalog = Catalog(url, Defaults())
            with pytest.raises(CatalogUnavailableError, match="no more connections allowed") as refused:
                await catalog.open()
            assert len(str(refused.value).splitlines()) == 1
            await catalog.close()
        async with nodes(url, 1) as [(node, _)]:
            await node.put(ALICE, {"request_rate": 5}, WHO)


def test_real_nodes_behind_the_pooler(own_pooler: PgBouncer, postgres: Postgres):
    url = own_pooler.before(postgres.database())
    with running(database_url=url) as one, running(database_url=url, store_url=one.store_url) as other:
        one.put("user=alice", request_rate={"limit": 5})
        made = other.http.post("/v1/keys", json={"name": "k", "scopes": ["decide"]})
        assert made.is_success, made.text
        altered = other.http.post(
            "/v1/quotas:alter",
            json={"alterations": [{"entity": "user=bob", "quotas": {"request_rate": 3}}]},
        )
        assert altered.is_success, altered.text
        for node in (one, other):
            listed = node.http.get("/v1/quotas")
            assert "user=alice" in listed.text, listed.text
            assert "user=bob" in listed.text
        assert one.http.get("/v1/quotas:history").is_success
        asked = other.ask(principal="alice", usage={"requests": 1})
        assert asked["decision"] == "admit"
        rotated = one.http.post("/v1/keys/k:rotate", json={})
        assert rotated.is_success, rotated.text
        assert rotated.json()["key"] != made.json()["key"]
        assert one.http.delete("/v1/keys/k").is_success
        for node in (one, other):
            assert "Traceback" not in node.logged()
            assert node.http.get("/health/ready").json()["catalog"] == "ok"
