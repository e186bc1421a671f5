"""Many quotas changed at once: each entity by itself, or all or nothing."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from httpx import AsyncClient, Response

from app.catalog import sql
from app.catalog.catalog import Catalog
from app.catalog.errors import CatalogUnavailableError
from app.catalog.sql import Origin
from app.domain.entity import ANY, Entity
from app.http.problems import MAX_ERRORS
from tests.http.application import fields

ALICE, BOB, EVERYBODY = Entity.of(user="alice"), Entity.of(user="bob"), Entity.of(user=ANY)
BY = Origin("admin", 1)
BOTH = pytest.mark.parametrize("path", ["/v1/quotas:alter", "/v1/quotas:apply"])


def alterations(*pairs: tuple[str, Any], **more: Any) -> dict[str, Any]:
    return {"alterations": [{"entity": entity, "quotas": quotas} for entity, quotas in pairs], **more}


async def alter(http: AsyncClient, *pairs: tuple[str, Any], **more: Any) -> list[dict[str, Any]]:
    answer = await http.post("/v1/quotas:alter", json=alterations(*pairs, **more))
    assert answer.status_code == 200, answer.text
    results: list[dict[str, Any]] = answer.json()["results"]
    return results


async def apply(http: AsyncClient, *pairs: tuple[str, Any], **more: Any) -> Response:
    headers = more.pop("headers", None)
    return await http.post("/v1/quotas:apply", json=alterations(*pairs, **more), headers=headers)


async def everything(catalog: Catalog) -> tuple[Any, ...]:
    """Everything that a change may affect, except the snapshot's version, which follows later."""
    page = await catalog.history(None, None, 1_000)
    return await catalog.database.changed(-1), page, catalog.snapshot.quotas


# alter


async def test_invalid_alteration_has_its_errors_and_the_others_are_applied(
    catalog: Catalog, http: AsyncClient
):
    results = await alter(
        http,
        ("client-id=etl,user=alice", {"request_rate": 5}),
        ("user=bob", {"request_rate": {"limit": -1, "colour": 1}, "producer_ids_rate": 5}),
        ("group=x", {"request_rate": 5}),
        ("user=*", {"request_rate": {"limit": 7, "shadow": True}, "producer_ids_rate": None}),
        ("ip=10.0.0.7", {"producer_ids_rate": None, "rate": None}),
    )
    assert [(each["entity"], each["ok"]) for each in results] == [
        ("user=alice,client-id=etl", True),
        ("user=bob", False),
        ("group=x", False),
        ("user=*", True),
        ("ip=10.0.0.7", False),
    ]
    assert [set(each) for each in results if each["ok"]] == [{"entity", "ok"}] * 2
    problems = [each["problem"] for each in results if not each["ok"]]
    for problem in problems:
        assert set(problem) == {"type", "title", "status", "detail", "errors"}
        assert problem["status"] == 422
    assert [[error["field"] for error in problem["errors"]] for problem in problems] == [
        ["/alterations/1/quotas/request_rate/limit", "/alterations/1/quotas/request_rate/colour"],
        ["/alterations/2/entity"],
        ["/alterations/4/quotas/producer_ids_rate", "/alterations/4/quotas/rate"],
    ]
    found = (await http.get("/v1/quotas")).json()["quotas"]
    assert {each["entity"]: each["quotas"] for each in found} == {
        "user=*": {"request_rate": {"limit": 7, "shadow": True}},
        "user=alice,client-id=etl": {"request_rate": {"limit": 5}},
    }
    assert catalog.snapshot.quotas["request_rate"][EVERYBODY].limit == 7, "before it answers"
    assert len(await catalog.history(None, None, 9)) == 2


async def test_an_entity_given_twice_fails_in_all_its_places(catalog: Catalog, http: AsyncClient):
    results = await alter(
        http,
        ("user=alice,client-id=etl", {"request_rate": 5}),
        ("user=bob", {"request_rate": 5}),
        ("client-id=%65tl,user=alice", {"producer_byte_rate": -5}),
    )
    assert [each["ok"] for each in results] == [False, True, False]
    assert [error["field"] for error in results[2]["problem"]["errors"]] == [
        "/alterations/2/entity",
        "/alterations/2/quotas/producer_byte_rate",
    ]
    assert [str(each.entity) for each in await catalog.history(None, None, 9)] == ["user=bob"]


async def test_a_value_replaces_the_whole_quota_and_null_removes_it(catalog: Catalog, http: AsyncClient):
    await catalog.put(ALICE, {"request_rate": {"limit": 5, "shadow": True}, "producer_ids_rate": 7}, BY)
    assert (await alter(http, ("user=alice", {"request_rate": 6})))[0]["ok"]
    now = await catalog.get(ALICE)
    assert now is not None
    assert now.definitions == {"producer_ids_rate": {"limit": 7}, "request_rate": {"limit": 6}}
    assert (await alter(http, ("user=alice", {"request_rate": None, "producer_ids_rate": None})))[0]["ok"]
    assert await catalog.get(ALICE) is None
    version = catalog.snapshot.version
    (gone,) = await alter(http, ("user=alice", {"request_rate": None}))
    assert gone["ok"], "as Kafka has it"
    assert catalog.snapshot.version == version


async def test_a_null_inside_a_quota_is_no_merge_patch(http: AsyncClient):
    (result,) = await alter(http, ("user=alice", {"request_rate": {"limit": 5, "shadow": None}}))
    assert result["problem"]["errors"][0]["field"] == "/alterations/0/quotas/request_rate/shadow"


async def test_no_op_alterations_are_omitted(catalog: Catalog, http: AsyncClient):
    await catalog.put(ALICE, {"request_rate": 5}, BY)
    before = await everything(catalog)
    assert [
        each["ok"] for each in await alter(http, ("user=alice", {"request_rate": 5.0}), ("user=b", {}))
    ] == [
        True,
        True,
    ]
    answer = await apply(http, ("user=alice", {"request_rate": {"limit": 5}, "producer_ids_rate": None}))
    assert answer.json() == {"version": 1, "changes": []}
    assert await everything(catalog) == before


async def test_alterations_are_bounded(http: AsyncClient):
    many = [(f"user=u{number}", {"request_rate": 1}) for number in range(1_001)]
    answer = await http.post("/v1/quotas:alter", json=alterations(*many))
    assert fields(answer) == ["/alterations"]
    assert (await http.get("/v1/quotas")).json()["quotas"] == []
    assert len(await alter(http, *many[:1_000])) == 1_000
    assert await alter(http) == []


# apply


async def test_apply_changes_all_and_says_what(catalog: Catalog, http: AsyncClient):
    await catalog.put(ALICE, {"request_rate": 5, "producer_ids_rate": 7}, BY)
    await catalog.put(EVERYBODY, {"request_rate": 5}, BY)
    answer = await apply(
        http,
        ("user=alice", {"request_rate": {"limit": 5, "samples": 3}, "producer_ids_rate": None}),
        ("user=*", {"request_rate": 6}),
        ("user=bob", {"request_rate": 9}),
        headers={"x-reason": "launch"},
    )
    five, six, nine = {"limit": 5}, {"limit": 6}, {"limit": 9}
    rate, ids = "request_rate", "producer_ids_rate"
    changes = [tuple(change.values()) for change in answer.json()["changes"]]
    assert list(answer.json()["changes"][0]) == ["entity", "quota", "change", "before", "after", "buckets"]
    assert changes == [
        ("user=alice", ids, "removed", {"limit": 7}, None, "kept"),
        ("user=alice", rate, "changed", five, {"limit": 5, "samples": 3}, "emptied"),
        ("user=*", rate, "changed", five, six, "kept"),
        ("user=bob", rate, "added", None, nine, "kept"),
    ]
    assert answer.json()["version"] == 3
    kept = await catalog.history(None, None, 9)
    assert [(each.entity, each.reason, each.who) for each in kept[:3]] == [
        ("user=bob", "launch", "admin"),
        ("user=*", "launch", "admin"),
        ("user=alice", "launch", "admin"),
    ]
    assert catalog.snapshot.quotas["request_rate"][BOB].limit == 9, "before it answers"


async def test_one_invalid_alteration_fails_all_and_every_error_is_named(catalog: Catalog, http: AsyncClient):
    await catalog.put(ALICE, {"request_rate": 5}, BY)
    before = await everything(catalog)
    answer = await apply(
        http,
        ("user=alice", {"request_rate": 6}),
        ("user=bob", {"request_rate": {"limit": -1}}),
        ("group=x", {}),
        ("user=alice", {"rate": 6}),
    )
    assert fields(answer) == [
        "/alterations/0/entity",
        "/alterations/1/quotas/request_rate/limit",
        "/alterations/2/entity",
        "/alterations/3/entity",
        "/alterations/3/quotas/rate",
    ]
    assert await everything(catalog) == before


async def test_a_plan_is_applied_to_the_catalog_that_it_was_made_for_or_not_at_all(
    catalog: Catalog, http: AsyncClient
):
    change = ("user=alice", {"request_rate": 6})
    plan = (await apply(http, change, validate_only=True)).json()
    assert plan["version"] == 0
    at = {"if-match": f'"{plan["version"]}"'}
    await catalog.put(BOB, {"request_rate": 5}, BY)
    before = await everything(catalog)
    assert fields(await apply(http, change, headers=at), 412) == []
    assert fields(await apply(http, change, headers=at, validate_only=True), 412) == []
    refused = await http.post("/v1/quotas:alter", json=alterations(change), headers=at)
    assert fields(refused, 412) == []
    assert await everything(catalog) == before
    listed = (await http.get("/v1/quotas")).headers["etag"]
    done = (await apply(http, change, headers={"if-match": listed})).json()
    assert done == {**plan, "version": 2}
    assert (await http.get("/v1/quotas")).headers["etag"] == '"2"'


async def test_one_of_many_applications_at_one_version_wins(catalog: Catalog, http: AsyncClient):
    answers = await asyncio.gather(
        *(apply(http, ("user=alice", {"request_rate": n}), headers={"if-match": '"0"'}) for n in range(10))
    )
    assert sorted(answer.status_code for answer in answers) == [200, *[412] * 9]


async def test_two_catalogs_of_one_change_have_the_same_buckets(catalog: Catalog, http: AsyncClient):
    """A new quota keeps the bucket of the default that applied before, even if one request sets both."""
    await catalog.put(EVERYBODY, {"request_rate": {"limit": 5, "samples": 5}}, BY)
    await catalog.put(EVERYBODY, {"request_rate": 5}, BY)
    await apply(http, ("user=bob", {"request_rate": 6}), ("user=*", {"request_rate": 7}))
    rates = catalog.snapshot.quotas["request_rate"]
    assert rates[BOB].epoch == rates[EVERYBODY].epoch == 2


async def test_as_many_as_a_body_holds_are_applied_at_once(
    catalog: Catalog, http: AsyncClient, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sql, "ANSWER_S", 60.0)  # how long a busy machine takes is no matter here
    many = [(f"user=u{number:05}", {"request_rate": number}) for number in range(10_000)]
    answer = await apply(http, *many)
    assert answer.status_code == 200, answer.text
    assert len(answer.json()["changes"]) == 10_000
    assert len(catalog.snapshot.quotas["request_rate"]) == 10_000
    assert fields(await apply(http, *many, ("user=one-more", {}))) == ["/alterations"]


# Both


@BOTH
async def test_validate_only_returns_the_result_without_writing(
    catalog: Catalog, http: AsyncClient, path: str
):
    await catalog.put(ALICE, {"request_rate": 5}, BY)
    before = await everything(catalog)
    change = (
        ("user=alice", {"request_rate": None}),
        ("user=bob", {"request_rate": {"limit": 5, "samples": 2}}),
    )
    if_so = await http.post(path, json=alterations(*change, validate_only=True))
    assert await everything(catalog) == before
    other = await http.get("/v1/quotas")
    assert other.headers["etag"] == '"1"'
    really = await http.post(path, json=alterations(*change, validate_only=False))
    planned, done = if_so.json(), really.json()
    assert (planned.pop("version", 1), done.pop("version", 2)) == (1, 2)
    assert planned == done
    assert await everything(catalog) != before


MISSHAPEN: list[tuple[Any, list[str]]] = [
    ([], [""]),
    (5, [""]),
    ({}, ["/alterations"]),
    ({"alterations": {}}, ["/alterations"]),
    ({"alterations": None}, ["/alterations"]),
    ({"alterations": [], "dry_run": True}, ["/dry_run"]),
    ({"alterations": [], "validate_only": "yes"}, ["/validate_only"]),
    ({"alterations": [], "validate_only": None}, ["/validate_only"]),
    ({"alterations": ["user=alice"]}, ["/alterations/0"]),
    ({"alterations": [{}]}, ["/alterations/0/entity", "/alterations/0/quotas"]),
    ({"alterations": [{"entity": 5, "quotas": []}]}, ["/alterations/0/entity", "/alterations/0/quotas"]),
    (alterations(("user=a", {"request_rate": 5}), ("user=b", None)), ["/alterations/1/quotas"]),
    ({"alterations": [{"entity": "user=a", "quotas": {}, "why": 1}]}, ["/alterations/0/why"]),
]


@BOTH
async def test_a_misshapen_body_changes_nothing(catalog: Catalog, http: AsyncClient, path: str):
    before = await everything(catalog)
    for body, wrong in MISSHAPEN:
        assert fields(await http.post(path, json=body)) == wrong, body
    twice = b'{"alterations": [], "alterations": []}'
    sent = {"content-type": "application/json"}
    assert fields(await http.post(path, content=twice, headers=sent)) == ["/alterations"]
    assert fields(await http.post(path, content=b"{", headers=sent), 400) == []
    assert fields(await http.post(path, content=b"{}", headers={"content-type": "text/plain"}), 415) == []
    assert fields(await http.post(path, content=b" " * 2**20 + b"{}", headers=sent), 413) == []
    assert await everything(catalog) == before


@BOTH
async def test_a_large_body_that_is_wrong_is_refused_like_a_small_one(http: AsyncClient, path: str):
    body = json.dumps(alterations(*[(f"user=u{n}", {"rate": 1}) for n in range(5_000)])).encode()
    sent = {"content-type": "application/json"}
    assert fields(await http.post(path, content=body[:-1], headers=sent), 400) == []


@BOTH
async def test_changes_need_a_key_take_post_and_say_when_the_catalog_is_away(
    http: AsyncClient, catalog: Catalog, path: str, monkeypatch: pytest.MonkeyPatch
):
    assert fields(await http.post(path, content=b"{", headers={"authorization": "Bearer wrong"}), 401) == []
    refused = await http.get(path)
    assert (refused.status_code, refused.headers["allow"]) == (405, "POST")

    async def away(*_: object) -> None:
        raise CatalogUnavailableError("the catalog at postgresql://secret-host is out of reach")

    monkeypatch.setattr(catalog.database, "write", away)
    answer = await http.post(path, json=alterations(("user=alice", {"request_rate": 5})))
    assert fields(answer, 503) == []
    assert "secret-host" not in answer.text


# Answers within bounds


async def test_an_answer_to_many_wrong_alterations_is_bounded(http: AsyncClient):
    wrong = [(f"user=u{n}", {f"k{m}": 1 for m in range(90)}) for n in range(1_000)]
    results = await alter(http, *wrong)
    assert all(each["problem"]["errors"] for each in results)
    assert sum(len(each["problem"]["errors"]) for each in results) <= MAX_ERRORS + len(wrong)
    assert len(json.dumps(results)) < 600_000
