"""The retention of the history, on SQLite and on a real PostgreSQL, and by a real node."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
from sqlalchemy import func, insert, select, text

from app.catalog import history as retention
from app.catalog.catalog import Catalog
from app.catalog.history import HistoryRetention
from app.catalog.sql import Origin, Sql
from app.catalog.tables import CHANGES
from app.domain.entity import Entity
from app.domain.quota import Defaults
from tests.service import eventually, running

ALICE, BOB = Entity.of(user="alice"), Entity.of(user="bob")
DAY_MS = 86_400_000
NOW_MS = 100 * DAY_MS
HOUR_MS = 3_600_000


@pytest.fixture
async def catalog(database: str) -> AsyncIterator[Catalog]:
    async with AsyncExitStack() as stack:
        catalog = Catalog(database, Defaults())
        await catalog.open()
        stack.push_async_callback(catalog.close)
        yield catalog


def keeping(catalog: Catalog, kept_ms: int | None) -> HistoryRetention:
    return HistoryRetention(catalog.database, kept_ms, pause_s=0)


async def put(catalog: Catalog, entity: Entity, limit: int, at_ms: int) -> None:
    await catalog.put(entity, {"request_rate": limit}, Origin("admin", at_ms, f"limit {limit}"))


async def reasons(catalog: Catalog) -> list[str | None]:
    return [past.reason for past in await catalog.history(None, None, 1_000)]


async def test_old_changes_are_dropped_and_the_newest_of_each_entity_stays(catalog: Catalog):
    old, recent = NOW_MS - 31 * DAY_MS, NOW_MS - DAY_MS
    for limit, (entity, at_ms) in enumerate([(ALICE, old), (ALICE, old), (BOB, old), (BOB, recent)], 1):
        await put(catalog, entity, limit, at_ms)
    await catalog.note("throttle_factor", None, {"factor": 0.5}, Origin("admin", old, "drill"))
    await catalog.note("throttle_factor", None, {"factor": 0.1}, Origin("admin", old, "another drill"))
    assert await keeping(catalog, 30 * DAY_MS).drop_old(NOW_MS) == 3
    assert await reasons(catalog) == ["another drill", "limit 4", "limit 2"]
    assert await keeping(catalog, 30 * DAY_MS).drop_old(NOW_MS + HOUR_MS) == 0


async def test_history_without_retention_is_kept_for_ever(catalog: Catalog):
    for limit in (1, 2, 3):
        await put(catalog, ALICE, limit, 0)
    assert await keeping(catalog, None).drop_old(NOW_MS) is None
    assert len(await reasons(catalog)) == 3


async def test_change_exactly_as_old_as_the_retention_stays(catalog: Catalog):
    for limit, at_ms in enumerate((NOW_MS - DAY_MS - 1, NOW_MS - DAY_MS, NOW_MS), 1):
        await put(catalog, ALICE, limit, at_ms)
    assert await keeping(catalog, DAY_MS).drop_old(NOW_MS) == 1
    assert await reasons(catalog) == ["limit 3", "limit 2"]


async def test_nodes_take_turns(catalog: Catalog, database: str):
    for limit in (1, 2):
        await put(catalog, ALICE, limit, 0)
    other = Sql(database)
    try:
        one, two = keeping(catalog, DAY_MS), HistoryRetention(other, DAY_MS, pause_s=0)
        found = await asyncio.gather(one.drop_old(NOW_MS), two.drop_old(NOW_MS))
        assert sorted(found, key=str) == [1, None], "one of two that look at the same moment"
        await put(catalog, ALICE, 3, 0)
        assert await two.drop_old(NOW_MS + HOUR_MS - 1) is None
        assert await two.drop_old(NOW_MS + HOUR_MS) == 1
        assert await one.drop_old(NOW_MS) is None
        assert await one.drop_old(NOW_MS - 1) == 0, (
            "the clock went back by more than the time between two cleanups"
        )
    finally:
        await other.close()


async def test_cursor_goes_on_while_changes_vanish(catalog: Catalog):
    for limit in range(1, 11):
        await put(catalog, ALICE, limit, limit * DAY_MS)
    first = await catalog.history(None, None, 3)
    assert await keeping(catalog, 95 * DAY_MS).drop_old(NOW_MS) == 4
    rest = await catalog.history(None, first[-1].id, 1_000)
    assert [past.reason for past in (*first, *rest)] == [f"limit {limit}" for limit in range(10, 4, -1)]
    assert await keeping(catalog, 0).drop_old(NOW_MS + HOUR_MS) == 5
    assert await catalog.history(None, rest[0].id, 1_000) == []


async def fill(catalog: Catalog, count: int, entities: int) -> None:
    """Write old changes of many entities, in turn."""
    async with catalog.database.engine.begin() as connection:
        await connection.execute(
            insert(CHANGES),
            [
                {"at_ms": 0, "who": "admin", "entity_hash": f"{n:064}", "entity": f"user={n}"}
                for n in range(entities)
            ],
        )
        at = entities
        while at < count:
            await connection.execute(
                text(
                    "INSERT INTO changes (at_ms, who, entity_hash, entity) SELECT at_ms, who, entity_hash, "
                    "entity FROM changes ORDER BY id LIMIT :more"
                ),
                {"more": min(at, count - at)},
            )
            at += min(at, count - at)


@pytest.mark.parametrize(
    "count", [20_000, pytest.param(1_000_000, marks=[pytest.mark.prove, pytest.mark.timeout(1_800)])]
)
async def test_many_old_changes_are_dropped_in_small_transactions_while_others_write(
    catalog: Catalog, count: int, monkeypatch: pytest.MonkeyPatch
):
    entities = count // 10
    await fill(catalog, count, entities)
    parts = []
    drop = HistoryRetention._drop

    async def counted(self: HistoryRetention, before_ms: int, after: int, until: float):
        part = await drop(self, before_ms, after, until)
        parts.append(part.dropped if part else 0)
        return part

    monkeypatch.setattr(HistoryRetention, "_drop", counted)
    dropping = asyncio.create_task(keeping(catalog, DAY_MS).drop_old(NOW_MS))
    written = 0
    while not dropping.done():
        written += 1
        await put(catalog, ALICE, written, NOW_MS)
    assert await dropping == count - entities
    assert sum(parts) == count - entities
    assert max(parts) <= retention.PART
    assert written >= len(parts) / 20, "writers get their turns in between"
    async with catalog.database.engine.connect() as connection:
        kept = select(func.count()).select_from(CHANGES)
        assert await connection.scalar(kept.where(CHANGES.c.entity != "user=alice")) == entities
        assert await connection.scalar(kept.where(CHANGES.c.entity == "user=alice")) == written


def test_node_drops_what_is_older_than_its_setting():
    with running(environment={"QUOTAGATE_HISTORY_RETENTION": "PT1S"}) as service:
        for limit in (1, 2, 3):
            service.put("user=alice", request_rate=limit)

        def limits() -> list[int]:
            changes = service.http.get("/v1/quotas:history").json()["changes"]
            return [change["after"]["request_rate"]["limit"] for change in changes]

        assert limits()[0] == 3
        eventually(lambda: limits() == [3])
        eventually(lambda: "old changes dropped from the history" in service.logged())
        assert service.stop() == 0
