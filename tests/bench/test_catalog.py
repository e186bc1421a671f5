"""The cost of 100,000 quotas: to load them, to change one, to look one up, and to list them."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from statistics import median
from time import perf_counter, process_time

import pytest
from sqlalchemy import insert, update

from app.admission.compiled import Tables
from app.catalog import schema
from app.catalog.catalog import Catalog
from app.catalog.port import QuotaRow
from app.catalog.sql import Origin, _columns
from app.catalog.tables import QUOTAS, STATE
from app.domain.ask import Ask
from app.domain.entity import ANY, Entity
from app.domain.ladder import MatchingRules
from app.domain.matching import Filter
from app.domain.quota import Defaults
from tests.postgres import Postgres, started

MANY, FEW = 100_000, 1_000
BY = Origin("admin", 1)


def filled(url: str, count: int) -> str:
    """A catalog of users, clients of users, and addresses, in random order."""
    schema.upgrade(url)
    identity = json.dumps(["sampled_rate", 11, 1000, "cluster"])
    entities = [_entity(number) for number in range(count)]
    random.Random(936).shuffle(entities)
    rows = [
        _columns(QuotaRow(str(entity), "request_rate", {"limit": number % 1_000}, 0, identity, 1))
        for number, entity in enumerate(entities)
    ]
    with schema.connect(url) as connection:
        for start in range(0, count, 5_000):
            connection.execute(insert(QUOTAS), rows[start : start + 5_000])
        connection.execute(update(STATE).values(version=1))
    return url


def _entity(number: int) -> Entity:
    if number % 10 == 0:
        return Entity.of(ip=f"10.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}")
    if number % 10 < 4:
        return Entity.of(user=f"tenant-{number:06}", client_id=f"app-{number % 100:02}")
    return Entity.of(user=f"tenant-{number:06}")


@pytest.fixture(scope="module")
def postgres() -> Iterator[Postgres]:
    server = started()
    yield server
    server.remove()


@pytest.fixture(params=["sqlite", "postgresql"])
def many(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of a catalog of 100,000 quotas."""
    if request.param == "sqlite":
        return filled(f"sqlite:///{tmp_path / 'many.db'}", MANY)
    server: Postgres = request.getfixturevalue("postgres")
    return filled(server.database(), MANY)


async def opened(url: str) -> tuple[Catalog, float]:
    """A catalog, and the processor time of opening it, in seconds."""
    catalog = Catalog(url, Defaults())
    began = process_time()
    await catalog.open()
    return catalog, process_time() - began


async def took(work: Callable[[], Awaitable[object]], times: int = 5) -> float:
    """The median duration of some work, in milliseconds."""
    spent = []
    for _ in range(times):
        began = perf_counter()
        await work()
        spent.append((perf_counter() - began) * 1_000)
    return median(spent)


@pytest.mark.bench
def test_many_quotas_load_and_change(many: str) -> None:
    async def measure() -> tuple[float, float, float]:
        loads = []
        for _ in range(3):
            catalog, load_s = await opened(many)
            loads.append(load_s)
            assert len(catalog.snapshot.quotas["request_rate"]) == MANY
            await catalog.close()
        catalog, load_s = await opened(many)
        numbers = iter(range(100))
        alice = Entity.of(user="alice")
        write_ms = await took(lambda: catalog.put(alice, {"request_rate": next(numbers)}, BY), 9)
        row = QuotaRow("user=alice", "request_rate", {"limit": 5}, 0, "[]", 99)
        applied = []
        for _ in range(9):
            began = process_time()
            await catalog._take([row], catalog.snapshot, 99)
            applied.append((process_time() - began) * 1_000)
        await catalog.close()
        return min(loads), median(applied), write_ms

    load_s, apply_ms, write_ms = asyncio.run(measure())
    print(f"load {load_s:.2f} s; one change in the snapshot {apply_ms:.2f} ms; written too {write_ms:.1f} ms")
    assert load_s < 2
    assert apply_ms < 10


@pytest.mark.bench
def test_many_quotas_list_and_filter(many: str) -> None:
    async def measure() -> dict[str, float]:
        catalog, _ = await opened(many)
        user, middle = Entity.of(user="tenant-050005"), Entity.of(user="tenant-050000")

        def page(
            *matches: str, after: Entity | None = None, limit: int = 100
        ) -> Callable[[], Awaitable[object]]:
            return lambda: catalog.page(Filter.parse(matches), after, limit)

        assert len((await catalog.page(Filter.parse(["user=tenant-050005"]), None, 100)).sets) == 1
        found = {
            "first page": await took(page()),
            "a page in the middle": await took(page(after=middle)),
            "1,000 at once": await took(page(limit=1_000)),
            "one user's": await took(page(str(user))),
            "all with a client": await took(page("user", "client-id", after=middle)),
            "one client of all users": await took(page("client-id=app-03")),
            "addresses": await took(page("ip")),
            "nothing": await took(page("user=nobody")),
        }
        await catalog.close()
        return found

    found = asyncio.run(measure())
    print("; ".join(f"{name} {ms:.1f} ms" for name, ms in found.items()))
    assert max(found.values()) < 1_000


@pytest.mark.bench
def test_a_lookup_costs_the_same_among_many_as_among_few(tmp_path: Path) -> None:
    asks = [
        Ask({"requests": 1}, principal=f"tenant-{number:06}", client_id=f"app-{number % 100:02}")
        for number in range(FEW)
    ]

    async def microseconds(count: int) -> float:
        catalog, _ = await opened(filled(f"sqlite:///{tmp_path / f'{count}.db'}", count))
        await catalog.put(Entity.of(user=ANY), {"request_rate": 5}, BY)
        tables = Tables(catalog.snapshot, MatchingRules())
        spent = []
        for _ in range(9):
            began = process_time()
            for ask in asks:
                assert tables.charges(ask)
            spent.append((process_time() - began) / len(asks) * 1e6)
        await catalog.close()
        return min(spent)

    few, many = asyncio.run(microseconds(FEW)), asyncio.run(microseconds(MANY))
    print(
        f"the whole ladder among {FEW:,}: {few:.1f} us, among {MANY:,}: {many:.1f} us, ratio {many / few:.2f}"
    )
    assert many / few < 2
