"""API keys in the catalog, on SQLite and on a real PostgreSQL, also while PostgreSQL is away."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from hashlib import sha256

import pytest
from sqlalchemy import select, text

from app.catalog import schema
from app.catalog.catalog import Catalog
from app.catalog.errors import CatalogUnavailableError, KeyExistsError, KeyNotFoundError
from app.catalog.keys import Keys
from app.catalog.sql import Sql
from app.catalog.tables import KEYS
from app.domain.ask import Ask
from app.domain.quota import Defaults
from app.http.access.access import Access
from app.http.head import RequestHead
from app.http.problems import ProblemError
from tests.postgres import Postgres, started
from tests.waiting import until

Opener = Callable[[], Awaitable[Keys]]


@pytest.fixture
def mortal() -> Iterator[Postgres]:
    """A PostgreSQL server for one test, which may kill it."""
    server = started()
    yield server
    server.remove()


@pytest.fixture
async def opened(database: str) -> AsyncIterator[Opener]:
    """Opens the keys of several nodes, and closes them at the end."""
    async with AsyncExitStack() as stack:

        async def open_keys() -> Keys:
            keys = Keys(Sql(database))
            stack.push_async_callback(keys._sql.close)
            await keys.open()
            stack.push_async_callback(keys.close)
            return keys

        yield open_keys


def knows(keys: Keys, secret: str) -> bool:
    return sha256(secret.encode()).digest() in keys.ring


async def test_nodes_follow_each_other(opened: Opener):
    one, other = await opened(), await opened()
    _, first = await one.create("k", ["decide"], ["user=acme"], None, 1)
    assert knows(one, first), "the node that made it has it before it answers"
    await until(lambda: knows(other, first))
    grant = other.ring[sha256(first.encode()).digest()]
    assert grant.name == "k"
    assert grant.scopes == {"decide"}
    assert grant.covers(Ask(principal="acme"))
    assert not grant.covers(Ask(principal="other"))
    _, second = await other.rotate("k", 0, 2)
    assert not knows(other, first)
    await until(lambda: knows(one, second) and not knows(one, first))
    await one.revoke("k")
    await until(lambda: not other.ring)
    late = await opened()
    assert not late.ring


async def test_only_hashes_are_kept(opened: Opener):
    keys = await opened()
    _, secret = await keys.create("k", ["decide"], [], None, 1)
    _, renewed = await keys.rotate("k", 1_000, 2)
    async with keys._sql.reading() as connection:
        kept = str((await connection.execute(select(KEYS))).mappings().all())
    for key in (secret, renewed):
        assert key not in kept
        assert key.removeprefix("qg_") not in kept
        assert sha256(key.encode()).hexdigest() in kept


async def test_second_of_two_concurrent_keys_with_one_name_is_refused(opened: Opener):
    one, other = await opened(), await opened()
    made = await asyncio.gather(
        *(keys.create("k", ["decide"], [], None, 1) for keys in (one, other, one, other)),
        return_exceptions=True,
    )
    assert sorted(type(answer).__name__ for answer in made) == [
        "KeyExistsError",
        "KeyExistsError",
        "KeyExistsError",
        "tuple",
    ]
    with pytest.raises(KeyExistsError):
        await one.create("k", ["decide"], [], None, 1)
    with pytest.raises(KeyNotFoundError):
        await one.rotate("other", 0, 1)
    with pytest.raises(KeyNotFoundError):
        await one.revoke("other")
    assert [key.name for key in await other.all()] == ["k"]


async def test_refused_change_changes_nothing(opened: Opener):
    keys = await opened()
    _, secret = await keys.create("k", ["decide"], [], None, 1)
    version = keys._version
    with pytest.raises(KeyExistsError):
        await keys.create("k", ["admin"], [], None, 1)
    with pytest.raises(KeyNotFoundError):
        await keys.revoke("other")
    await keys._catch_up()
    assert keys._version == version
    assert knows(keys, secret)


async def test_key_with_bounds_of_a_newer_version_grants_nothing(opened: Opener):
    keys = await opened()
    _, good = await keys.create("good", ["decide"], [], None, 1)
    _, strange = await keys.create("strange", ["decide"], ["user=acme"], None, 1)
    _, stranger = await keys.create("stranger", ["decide"], [], None, 1)
    async with keys._sql.writing(asyncio.get_running_loop().time() + 60) as connection:
        await connection.execute(text("UPDATE keys SET bound_to = '[\"cluster=x\"]' WHERE name = 'strange'"))
        await connection.execute(
            text("UPDATE keys SET scopes = '[\"decide\", \"fly\"]' WHERE name = 'stranger'")
        )
        await connection.execute(text("UPDATE catalog_state SET keys_version = keys_version + 1"))
    await until(lambda: not knows(keys, strange))
    assert knows(keys, good)
    assert keys.ring[sha256(stranger.encode()).digest()].scopes == {"decide"}


async def test_quotas_and_keys_have_separate_versions(opened: Opener, database: str):
    keys = await opened()
    catalog = Catalog(database, Defaults())
    await catalog.open()
    version = catalog.snapshot.version
    await keys.create("k", ["decide"], [], None, 1)
    await catalog._catch_up()
    assert catalog.snapshot.version == version, "a change of keys is no change of quotas"
    await catalog.close()


async def test_last_keys_stay_in_force_while_the_database_is_away_except_expired_ones(mortal: Postgres):
    url = mortal.database()
    schema.upgrade(url)
    keys = Keys(Sql(url))
    await keys.open()
    now_ms = time.time_ns() // 1_000_000
    _, for_ever = await keys.create("for-ever", ["decide"], [], None, now_ms)
    _, for_a_while = await keys.create("for-a-while", ["decide"], [], now_ms + 60_000, now_ms)
    clock = now_ms
    access = Access("admin", (), lambda: keys.ring, now_ms=lambda: clock)

    def passes(key: str) -> bool:
        head = RequestHead(fields={b"authorization": [f"Bearer {key}".encode()]}, address="127.0.0.1")
        try:
            access.require(head, "decide")
        except ProblemError:
            return False
        return True

    mortal.kill()
    await until(lambda: not keys._reachable)
    assert passes(for_ever)
    assert passes(for_a_while)
    clock = now_ms + 60_000
    assert passes(for_ever)
    assert not passes(for_a_while)
    for refused in (keys.create("k", ["decide"], [], None, 1), keys.revoke("for-ever"), keys.all()):
        with pytest.raises(CatalogUnavailableError):
            await refused
    mortal.start()
    await until(lambda: keys._reachable)
    await keys.revoke("for-ever")
    assert not passes(for_ever)
    await keys.close()
    await keys._sql.close()
