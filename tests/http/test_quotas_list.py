"""Lists over HTTP: filters as Kafka's, pages that stay good, and the history."""

from __future__ import annotations

import asyncio
from pathlib import Path
from urllib.parse import quote

import pytest
from httpx import AsyncClient, Response

from app.catalog import schema
from app.catalog.catalog import Catalog
from app.catalog.errors import CatalogUnavailableError
from app.catalog.sql import Origin
from app.domain.entity import ANY, Entity
from app.domain.matching import Filter
from app.domain.quota import Defaults
from tests.http.application import fields

ENTITIES = [
    "broker=1",
    "broker=1,listener=L",
    "client-id=*",
    "client-id=etl",
    "ip=*",
    "ip=10.0.0.7",
    "listener=*",
    "user=%2A",
    "user=*",
    "user=*,client-id=*",
    "user=*,client-id=etl",
    "user=alice",
    "user=alice,client-id=*",
    "user=alice,client-id=etl",
    "user=alice,client-id=etl2",
    "user=alice2",
    "user=ALICE",
]
KEY_OF = {"broker": "max_connection_creation_rate", "listener": "max_connection_creation_rate"}
BY = Origin("admin", 1)


async def fill(catalog: Catalog, entities: list[str] = ENTITIES) -> None:
    for entity in entities:
        key = KEY_OF.get(entity.partition("=")[0], "request_rate")
        await catalog.put(Entity.parse(entity), {key: 5}, BY)


def listed(answer: Response) -> list[str]:
    assert answer.status_code == 200, answer.text
    return [found["entity"] for found in answer.json()["quotas"]]


async def test_a_list_shows_each_entity_as_its_own_route_does(catalog: Catalog, http: AsyncClient):
    empty = await http.get("/v1/quotas")
    assert (empty.json(), empty.headers["etag"]) == ({"quotas": [], "next_cursor": None}, '"0"')
    await fill(catalog)
    await catalog.patch(Entity.of(user="alice"), {"request_rate": None, "producer_ids_rate": 7}, BY)
    await catalog.delete(Entity.of(user="alice2"), BY)
    found = await http.get("/v1/quotas")
    assert listed(found) == sorted(set(ENTITIES) - {"user=alice2"})
    assert found.headers["etag"] == f'"{len(ENTITIES) + 2}"', "the version of the whole catalog"
    for each in found.json()["quotas"]:
        assert each == (await http.get(f"/v1/quotas/{each['entity']}")).json()


async def test_a_list_that_did_not_change_is_not_sent_again(catalog: Catalog, http: AsyncClient):
    await fill(catalog, ["user=alice"])
    known = (await http.get("/v1/quotas")).headers["etag"]
    same = await http.get("/v1/quotas", headers={"if-none-match": known})
    assert (same.status_code, same.content, same.headers["etag"]) == (304, b"", known)
    await fill(catalog, ["user=bob"])
    assert (await http.get("/v1/quotas", headers={"if-none-match": known})).status_code == 200
    assert fields(await http.get("/v1/quotas", headers={"if-match": known}), 412) == []


FILTERS: list[tuple[str, list[str]]] = [
    ("match=user=alice", ENTITIES[11:15]),
    ("match=user=alice&strict=true", ["user=alice"]),
    ("match=user=alice&strict=false", ENTITIES[11:15]),
    ("match=user=*", ENTITIES[8:11]),
    ("match=user=*&strict=true", ["user=*"]),
    ("match=user=%252A", ["user=%2A"]),
    ("match=user%3D%252A", ["user=%2A"]),
    ("match=user", ENTITIES[7:]),
    ("match=user&strict=true", ["user=%2A", "user=*", "user=ALICE", "user=alice", "user=alice2"]),
    ("match=client-id=etl", ["client-id=etl", "user=*,client-id=etl", "user=alice,client-id=etl"]),
    ("match=client-id=*", ["client-id=*", "user=*,client-id=*", "user=alice,client-id=*"]),
    ("match=client-id&strict=true", ["client-id=*", "client-id=etl"]),
    ("match=client-id=etl&match=user=alice", ["user=alice,client-id=etl"]),
    ("match=user&match=client-id", [*ENTITIES[9:11], *ENTITIES[12:15]]),
    ("match=user=*&match=client-id&strict=true", ENTITIES[9:11]),
    ("match=user&match=client-id=etl", ["user=*,client-id=etl", "user=alice,client-id=etl"]),
    ("match=ip=::ffff:10.0.0.7", ["ip=10.0.0.7"]),
    ("match=ip", ["ip=*", "ip=10.0.0.7"]),
    ("match=ip=10.0.0.8", []),
    ("match=broker", ["broker=1", "broker=1,listener=L"]),
    ("match=broker&strict=true", ["broker=1"]),
    ("match=listener", ["broker=1,listener=L", "listener=*"]),
    ("match=user=nobody", []),
    ("", ENTITIES),
    ("strict=false", ENTITIES),
    ("strict=true", []),
]


async def test_filters(catalog: Catalog, http: AsyncClient):
    await fill(catalog)
    for query, wanted in FILTERS:
        assert listed(await http.get(f"/v1/quotas?{query}")) == sorted(wanted), query


REFUSED = [
    ("match=user&match=user", "/match"),
    ("match=user=alice&match=user=bob", "/match"),
    ("match=ip=10.0.0.7&match=user=alice", "/match"),
    ("match=ip&match=client-id", "/match"),
    ("match=broker&match=user", "/match"),
    ("match=user=alice,client-id=etl", "/match"),
    ("match=group=a", "/match"),
    ("match=group", "/match"),
    ("match=", "/match"),
    ("match=user=", "/match"),
    ("match=user=%25", "/match"),
    ("match=user=%2500", "/match"),
    ("match=ip=localhost", "/match"),
    ("match=user=%", "/match"),
    ("match=user=%FF", "/match"),
    ("strict=yes", "/strict"),
    ("strict=", "/strict"),
    ("strict=true&strict=true", "/strict"),
    ("limit=0", "/limit"),
    ("limit=1001", "/limit"),
    ("limit=1.0", "/limit"),
    ("limit=-1", "/limit"),
    ("limit=", "/limit"),
    ("limit=5&limit=5", "/limit"),
    ("cursor=nonsense", "/cursor"),
    ("cursor=%C3%BC", "/cursor"),
    ("cursor=Y2hhbmdlIDU", "/cursor"),  # a cursor of the history
    ("cursor=ZW50aXR5IHVzZXI9", "/cursor"),  # of an impossible entity
    ("filter=user", "/filter"),
    ("a/b=user", "/a~1b"),
    ("at_ms=5", "/at_ms"),
]


async def test_invalid_query_is_refused(http: AsyncClient):
    for query, field in REFUSED:
        assert fields(await http.get(f"/v1/quotas?{query}")) == [field], query


async def test_every_fault_of_a_query_is_named(http: AsyncClient):
    answer = await http.get("/v1/quotas?match=x&limit=x&strict=x&cursor=x&colour=x")
    assert sorted(fields(answer)) == ["/colour", "/cursor", "/limit", "/match", "/strict"]


async def test_pages_join_to_the_whole_while_quotas_come_and_go(catalog: Catalog, http: AsyncClient):
    users = [f"user=u{number:03}" for number in range(25)]
    await fill(catalog, users)
    seen: list[str] = []
    cursor = ""
    for _ in range(20):
        page = await http.get(f"/v1/quotas?limit=4&match=user{cursor}")
        seen += listed(page)
        if page.json()["next_cursor"] is None:
            break
        cursor = f"&cursor={page.json()['next_cursor']}"
        if len(seen) == 8:  # later entities appear, earlier ones do not, and the last one seen may be deleted
            await catalog.delete(Entity.parse(seen[-1]), BY)
            await fill(catalog, ["user=u000a", "user=u020a"])
    assert seen == sorted([*users, "user=u020a"])


async def test_a_full_last_page_says_that_it_is_the_last(catalog: Catalog, http: AsyncClient):
    await fill(catalog, ["user=a", "user=b"])
    for limit, more in ((1, True), (2, False), (3, False)):
        answer = (await http.get(f"/v1/quotas?limit={limit}")).json()
        assert (answer["next_cursor"] is not None) == more


async def test_longest_names_are_distinguished(catalog: Catalog, http: AsyncClient):
    name = "ü" * 256
    clients = [Entity.of(user=name, client_id=str(number)) for number in range(5)]
    for entity in clients:
        await catalog.put(entity, {"request_rate": 5}, BY)
    seen, cursor = [], ""
    while True:
        page = await http.get(f"/v1/quotas?limit=1{cursor}")
        seen += listed(page)
        if (after := page.json()["next_cursor"]) is None:
            break
        cursor = f"&cursor={after}"
    assert sorted(seen) == [str(entity) for entity in clients]
    assert len(listed(await http.get(f"/v1/quotas?match=user={quote(quote(name))}"))) == 5


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_the_database_filters_as_the_rule_says(kind: str, tmp_path: Path, request: pytest.FixtureRequest):
    """The filter is written twice, in Python and in SQL; this test compares the two."""
    url = (
        f"sqlite:///{tmp_path / 'c.db'}"
        if kind == "sqlite"
        else request.getfixturevalue("postgres").database()
    )
    schema.upgrade(url)
    every = [Entity.of(user=u) for u in ("a", "b", ANY, "*", "a,b", "ü", "A", "_", "%", "~~~")]
    every += [Entity.of(client_id=e.parts[0][1]) for e in every]
    every += [
        Entity.of(user=u, client_id=c) for u in ("a", ANY, "_", "A") for c in ("a", "*", ANY, "a,b", "%")
    ]

    async def compare(sought: list[Filter]) -> None:
        catalog = Catalog(url, Defaults())
        await catalog.open()
        for entity in every:
            await catalog.put(entity, {"request_rate": 5}, BY)
        for one in sought:
            page = await catalog.page(one, None, 1_000)
            found = {str(each.entity) for each in page.sets}
            assert found == {str(entity) for entity in every if one.covers(entity)}, one
        await catalog.close()

    said: list[str | None] = [None, "a", "*", "a,b", "ü", "_", "A", "%"]
    sought = [
        Filter(tuple((t, n) for t, n in (("user", u), ("client-id", c)) if n != "absent"), strict)
        for u in (*said, ANY, "absent")
        for c in (*said, ANY, "absent")
        for strict in (False, True)
    ]
    asyncio.run(compare(sought))


# History


async def test_history_is_newest_first(catalog: Catalog, http: AsyncClient):
    alice = Entity.of(user="alice")
    await catalog.put(alice, {"request_rate": 5}, Origin("ann", 1, "launch"))
    await catalog.put(Entity.of(user="bob"), {"request_rate": 5}, Origin("ann", 2))
    await catalog.patch(alice, {"request_rate": {"limit": 6, "shadow": True}}, Origin("bob", 3, "ü"))
    await catalog.delete(alice, Origin("ann", 4, "over"))
    history = (await http.get("/v1/quotas:history?entity=user%3Dalice")).json()
    five, six = {"request_rate": {"limit": 5}}, {"request_rate": {"limit": 6, "shadow": True}}
    assert history == {
        "changes": [
            {
                "at_ms": 4,
                "who": "ann",
                "entity": "user=alice",
                "before": six,
                "after": None,
                "reason": "over",
            },
            {"at_ms": 3, "who": "bob", "entity": "user=alice", "before": five, "after": six, "reason": "ü"},
            {
                "at_ms": 1,
                "who": "ann",
                "entity": "user=alice",
                "before": None,
                "after": five,
                "reason": "launch",
            },
        ],
        "next_cursor": None,
    }
    everyone = (await http.get("/v1/quotas:history")).json()["changes"]
    assert [change["at_ms"] for change in everyone] == [4, 3, 2, 1]
    assert (await http.get("/v1/quotas:history?entity=user=nobody")).json()["changes"] == []


async def test_history_cursors_stay_valid_while_it_grows(catalog: Catalog, http: AsyncClient):
    for number in range(5):
        await catalog.put(Entity.of(user="alice"), {"request_rate": number}, Origin("admin", number))
    first = (await http.get("/v1/quotas:history?limit=2")).json()
    await catalog.put(Entity.of(user="alice"), {"request_rate": 9}, Origin("admin", 9))
    second = (await http.get(f"/v1/quotas:history?limit=2&cursor={first['next_cursor']}")).json()
    third = (await http.get(f"/v1/quotas:history?limit=2&cursor={second['next_cursor']}")).json()
    times = [change["at_ms"] for page in (first, second, third) for change in page["changes"]]
    assert (times, third["next_cursor"]) == ([4, 3, 2, 1, 0], None)


REFUSED_OF_HISTORY = [
    ("entity=user", "/entity"),
    ("entity=user=a,ip=10.0.0.1", "/entity"),
    ("entity=user=a&entity=user=a", "/entity"),
    ("limit=0", "/limit"),
    ("cursor=ZW50aXR5IHVzZXI9YWxpY2U", "/cursor"),  # a cursor of the list
    ("cursor=Y2hhbmdlIHg", "/cursor"),
    ("who=admin", "/who"),
]


async def test_invalid_history_query_is_refused(http: AsyncClient):
    for query, field in REFUSED_OF_HISTORY:
        assert fields(await http.get(f"/v1/quotas:history?{query}")) == [field], query


# Refusals of both


@pytest.mark.parametrize("path", ["/v1/quotas", "/v1/quotas:history"])
async def test_lists_need_a_key_take_get_and_say_when_the_catalog_is_away(
    http: AsyncClient, catalog: Catalog, path: str, monkeypatch: pytest.MonkeyPatch
):
    assert fields(await http.get(f"{path}?x=y", headers={"authorization": "Bearer wrong"}), 401) == []
    refused = await http.post(path)
    assert (refused.status_code, refused.headers["allow"]) == (405, "GET")

    async def away(*_: object) -> None:
        raise CatalogUnavailableError("the catalog at postgresql://secret-host is out of reach")

    monkeypatch.setattr(catalog.database, "page", away)
    monkeypatch.setattr(catalog.database, "history", away)
    answer = await http.get(path)
    assert fields(answer, 503) == []
    assert "secret-host" not in answer.text


async def test_empty_parameters_count_as_absent(http: AsyncClient):
    """Some clients send None as an empty value, so that a loop over pages can start with an empty cursor."""
    for question in ("/v1/quotas?cursor=", "/v1/quotas:history?entity=&cursor="):
        assert (await http.get(question)).status_code == 200
