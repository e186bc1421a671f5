"""Quotas over HTTP: statuses, ETags, every refusal, and the promises of the OpenAPI document."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import quote

import pytest
from httpx import ASGITransport, AsyncClient, Response
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import select

from app.catalog.catalog import Catalog
from app.catalog.errors import CatalogUnavailableError
from app.catalog.tables import CHANGES
from app.domain.entity import Entity
from app.http import strict
from app.http.openapi.quotas import ENTITY_PATTERN
from app.http.openapi.quotas_lists import COMPONENTS
from app.http.problems import ProblemError
from tests.http.application import KEY, app_of, fields

PATCH = "application/merge-patch+json"
MEBIBYTE = 1024 * 1024


@pytest.fixture
def catalog(one_catalog: Catalog) -> Catalog:
    return one_catalog


class Quotas:
    """A client that adds the admin key and a content type, so that a test writes only the rest."""

    def __init__(self, client: AsyncClient) -> None:
        self.client = client

    async def send(self, method: str, entity: str, body: Any = None, **headers: str) -> Response:
        content = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        sent = {"authorization": f"Bearer {KEY}"}
        if body is not None:
            sent["content-type"] = "application/json"
        sent |= {name.replace("_", "-"): value for name, value in headers.items()}
        sent = {name: value for name, value in sent.items() if value}
        return await self.client.request(method, f"/v1/quotas/{entity}", content=content, headers=sent)

    async def put(self, entity: str, body: Any, **headers: str) -> Response:
        return await self.send("PUT", entity, body, **headers)

    async def patch(self, entity: str, body: Any, **headers: str) -> Response:
        return await self.send("PATCH", entity, body, **headers)

    async def get(self, entity: str, **headers: str) -> Response:
        return await self.send("GET", entity, **headers)

    async def delete(self, entity: str, **headers: str) -> Response:
        return await self.send("DELETE", entity, **headers)


@pytest.fixture
async def quotas(catalog: Catalog) -> AsyncIterator[Quotas]:
    transport = ASGITransport(app_of(catalog))
    async with AsyncClient(transport=transport, base_url="http://quotagate") as client:
        yield Quotas(client)


# Writing and reading back


async def test_put_creates_then_replaces_and_answers_like_get(quotas: Quotas):
    made = await quotas.put("user=alice", {"request_rate": {"limit": 100}, "producer_ids_rate": 5})
    assert made.status_code == 201
    assert made.headers["location"] == "user=alice"
    assert made.url.join(made.headers["location"]) == made.url
    assert made.json() == {
        "entity": "user=alice",
        "quotas": {"producer_ids_rate": {"limit": 5}, "request_rate": {"limit": 100}},
        "bounds": {
            "producer_ids_rate": {
                "ratio": 1.0,
                "window_ms": 3_600_000,
                "text": "never more than 5 in any 3600 s",
            },
            "request_rate": {
                "ratio": None,
                "window_ms": 11_000,
                "text": "none by itself: delayed work is done all the same, only later work waits",
            },
        },
        "version": 1,
    }
    assert made.headers["etag"] == '"1"'
    replaced = await quotas.put("user=alice", {"request_rate": 5.0})
    assert replaced.status_code == 200
    assert replaced.json()["quotas"] == {"request_rate": {"limit": 5}}
    read = await quotas.get("user=alice")
    assert (read.status_code, read.json(), read.headers["etag"]) == (200, replaced.json(), '"2"')


async def test_patch_merges_creates_and_removes(quotas: Quotas):
    assert (await quotas.patch("user=alice", {"request_rate": None})).status_code == 404
    assert (await quotas.patch("user=alice", {})).status_code == 404
    made = await quotas.patch("user=alice", {"request_rate": {"limit": 5, "shadow": True}})
    assert made.status_code == 201
    merged = await quotas.patch("user=alice", {"request_rate": 6, "producer_ids_rate": 7}, content_type=PATCH)
    assert merged.status_code == 200
    assert merged.json()["quotas"] == {
        "producer_ids_rate": {"limit": 7},
        "request_rate": {"limit": 6, "shadow": True},
    }
    inside = await quotas.patch("user=alice", {"request_rate": {"shadow": None}, "producer_ids_rate": None})
    assert inside.json()["quotas"] == {"request_rate": {"limit": 6}}
    same = await quotas.patch("user=alice", {})
    assert (same.status_code, same.headers["etag"]) == (200, inside.headers["etag"])
    gone = await quotas.patch("user=alice", {"request_rate": None})
    assert (gone.status_code, gone.content) == (204, b"")
    assert (await quotas.get("user=alice")).status_code == 404


async def test_delete_removes_once(quotas: Quotas):
    assert fields(await quotas.delete("user=alice"), 404) == []
    await quotas.put("user=alice", {"request_rate": 5})
    gone = await quotas.delete("user=alice")
    assert (gone.status_code, gone.content) == (204, b"")
    assert (await quotas.delete("user=alice")).status_code == 404
    assert (await quotas.get("user=alice")).status_code == 404


@pytest.mark.parametrize(
    ("path", "canonical"),
    [
        ("user=*", "user=*"),
        ("user=%2A", "user=%2A"),
        ("user=a%2Fb", "user=a%2Fb"),
        ("user=%C3%BC", "user=%C3%BC"),
        ("user=a%252F", "user=a%252F"),
        ("user=a+b", "user=a%2Bb"),
        ("client-id=etl,user=alice", "user=alice,client-id=etl"),
        ("ip=::ffff:10.0.0.7", "ip=10.0.0.7"),
        ("ip=2001%3ADB8%3A%3A1", "ip=2001%3Adb8%3A%3A1"),
        (quote("user=alice,client-id=*", safe=""), "user=alice,client-id=*"),
        (quote("user=%2A", safe=""), "user=%2A"),
    ],
)
async def test_an_entity_is_read_from_the_raw_path_and_spelled_canonically(
    quotas: Quotas, path: str, canonical: str
):
    assert (await quotas.put(path, {"request_rate": 5})).json()["entity"] == canonical
    assert (await quotas.get(canonical)).json()["entity"] == canonical


async def test_the_default_and_a_user_named_star_are_two(quotas: Quotas):
    await quotas.put("user=*", {"request_rate": 5})
    assert (await quotas.get("user=%2A")).status_code == 404


# Conditions


async def test_a_stale_if_match_is_refused_everywhere(quotas: Quotas):
    old = (await quotas.put("user=alice", {"request_rate": 5})).headers["etag"]
    new = (await quotas.put("user=alice", {"request_rate": 6}, if_match=old)).headers["etag"]
    assert new != old
    for method, body in (
        ("PUT", {"request_rate": 7}),
        ("PATCH", {"request_rate": 7}),
        ("DELETE", None),
        ("GET", None),
    ):
        for stale in (old, f"W/{new}", '"x"', '""', f"{old}, {old}"):
            assert fields(await quotas.send(method, "user=alice", body, if_match=stale), 412) == []
    assert (await quotas.get("user=alice")).json()["quotas"] == {"request_rate": {"limit": 6}}
    assert (
        await quotas.patch("user=alice", {"request_rate": 7}, if_match=f"{old}, {new}")
    ).status_code == 200
    assert (await quotas.put("user=alice", {"request_rate": 7}, if_match="*")).status_code == 200
    assert (await quotas.delete("user=alice", if_match="*")).status_code == 204
    assert (await quotas.put("user=alice", {"request_rate": 7}, if_match="*")).status_code == 412
    assert (await quotas.patch("user=alice", {"request_rate": 7}, if_match=new)).status_code == 412
    assert (await quotas.delete("user=alice", if_match=new)).status_code == 404


async def test_if_none_match_star_creates_only(quotas: Quotas):
    assert (await quotas.put("user=alice", {"request_rate": 5}, if_none_match="*")).status_code == 201
    for method, body in (("PUT", {"request_rate": 7}), ("PATCH", {"request_rate": 7}), ("DELETE", None)):
        assert (await quotas.send(method, "user=alice", body, if_none_match="*")).status_code == 412
    assert (await quotas.patch("user=bob", {"request_rate": 5}, if_none_match="*")).status_code == 201


async def test_get_answers_304_to_what_the_caller_has(quotas: Quotas):
    etag = (await quotas.put("user=alice", {"request_rate": 5})).headers["etag"]
    for known in (etag, f"W/{etag}", "*", f'"x", {etag}'):
        same = await quotas.get("user=alice", if_none_match=known)
        assert (same.status_code, same.content, same.headers["etag"]) == (304, b"", etag)
    assert (await quotas.get("user=alice", if_none_match='"99"')).status_code == 200


async def test_invalid_etag_matches_nothing(quotas: Quotas):
    await quotas.put("user=alice", {"request_rate": 5})
    for text in ("1", '"1', '"01"', '"*"', ","):
        assert (await quotas.get("user=alice", if_none_match=text)).status_code == 200
        assert fields(await quotas.put("user=alice", {"request_rate": 6}, if_match=text), 412) == []


async def test_one_of_many_writers_at_one_etag_wins(quotas: Quotas):
    etag = (await quotas.put("user=alice", {"request_rate": 5})).headers["etag"]
    answers = await asyncio.gather(
        *(quotas.put("user=alice", {"request_rate": n}, if_match=etag) for n in range(20))
    )
    assert sorted(answer.status_code for answer in answers) == [200, *[412] * 19]


async def test_an_etag_never_repeats(quotas: Quotas):
    seen = set()
    for _ in range(3):
        seen.add((await quotas.put("user=alice", {"request_rate": 5})).headers["etag"])
        seen.add((await quotas.put("user=alice", {"request_rate": 5})).headers["etag"])
        await quotas.delete("user=alice")
    assert len(seen) == 6


# Refusals


@pytest.mark.parametrize(
    "entity",
    [
        "foo=bar",  # as in vector F03
        "user=user-1,foo=bar",
        "foo=bar,ip=1.2.3.4",
        "user=user-1,ip=1.2.3.4",
        "client-id=user-1,ip=1.2.3.4",
        "user=",
        "user",
        "user=a,user=b",
        "ip=localhost",
        "ip=fe80::1%25eth0",
        "ip=10.0.0.256",
        "user=%",
        "user=%FF",
        "user=%00",
        "user=%ED%A0%80",
        "user=" + "a" * 513,
        "broker=1,listener=*",
        "%FF",
    ],
)
async def test_invalid_entity_is_422_and_stores_nothing(quotas: Quotas, catalog: Catalog, entity: str):
    for method, body in (
        ("PUT", {"producer_byte_rate": 10_000}),
        ("PATCH", {"producer_byte_rate": 10_000}),
        ("GET", None),
        ("DELETE", None),
    ):
        assert fields(await quotas.send(method, entity, body)) == ["/entity"]
    assert not any(catalog.snapshot.quotas.values())


@pytest.mark.parametrize(
    ("key", "value", "taken"),
    [
        ("foobar", 1.0, False),  # F04
        ("producer_byte_rate", 0.0, True),
        ("consumer_byte_rate", -2.0, False),
        ("consumer_byte_rate", 1234.0, True),
        ("consumer_byte_rate", 3.6893488147419103e19, False),
        ("consumer_byte_rate", 2.245, False),
        ("consumer_byte_rate", 1235.0000001, False),
        ("request_percentage", 56.62367, True),
        ("connection_creation_rate", 5, False),
        ("producer_ids_rate", 5, False),
    ],
)
async def test_kafkas_values(quotas: Quotas, key: str, value: float, *, taken: bool):
    for send in (quotas.put, quotas.patch):
        answer = await send("client-id=etl", {key: value})
        if taken:
            assert answer.status_code in (200, 201)
        else:
            assert fields(answer) == [f"/{key}"]
            assert (await quotas.get("client-id=etl")).status_code == 404


async def test_kafkas_alterations(quotas: Quotas):
    async def after(change: dict[str, Any]) -> dict[str, Any] | int:
        answer = await quotas.patch("user=user-1", change)
        if answer.status_code in (200, 201):
            return {key: value["limit"] for key, value in answer.json()["quotas"].items()}
        return answer.status_code

    assert await after({"producer_byte_rate": 10_000}) == {"producer_byte_rate": 10_000}  # F08
    assert await after({"producer_byte_rate": 10_001, "consumer_byte_rate": 20_000}) == {
        "producer_byte_rate": 10_001,
        "consumer_byte_rate": 20_000,
    }
    assert await after({"producer_byte_rate": None}) == {"consumer_byte_rate": 20_000}
    assert await after({"request_percentage": None}) == {"consumer_byte_rate": 20_000}
    assert await after({"consumer_byte_rate": None}) == 204
    assert await after({"consumer_byte_rate": None}) == 404, "the entity is gone"
    assert await after(
        {
            "request_percentage": 99,
            "controller_mutation_rate": None,
            "producer_byte_rate": 10_002,
            "consumer_byte_rate": 20_001,
        }
    ) == {"request_percentage": 99, "producer_byte_rate": 10_002, "consumer_byte_rate": 20_001}


@pytest.mark.parametrize(
    ("body", "where"),
    [
        (b"{}", [""]),
        (b"[]", [""]),
        (b"5", [""]),
        (b"null", [""]),
        (b'{"request_rate": 1e999}', ["/request_rate"]),
        (b'{"request_rate": {"limit": 1e999}}', ["/request_rate/limit"]),
        (b'{"request_rate": ' + b"9" * 5_000 + b"}", ["/request_rate"]),
        (b'{"request_rate": -1}', ["/request_rate"]),
        (b'{"request_rate": true}', ["/request_rate"]),
        (b'{"request_rate": "5"}', ["/request_rate"]),
        (b'{"request_rate": null}', ["/request_rate"]),
        (b'{"request_rate": {"limit": 5, "colour": 1}}', ["/request_rate/colour"]),
        (b'{"a/b~c": 5, "request_rate": 5}', ["/a~1b~0c"]),
        (b'{"request_rate": 5, "request_rate": 5}', ["/request_rate"]),
        (b'{"request_rate": {"limit": 5, "limit": 6}}', ["/request_rate/limit"]),
        (b'{"request_rate": -1, "producer_ids_rate": 0.5}', ["/producer_ids_rate", "/request_rate"]),
        (b'{"max_connection_creation_rate": 5}', ["/max_connection_creation_rate"]),
    ],
)
async def test_wrong_content_is_422_and_names_the_field(quotas: Quotas, body: bytes, where: list[str]):
    assert fields(await quotas.put("user=alice", body)) == where
    assert (await quotas.get("user=alice")).status_code == 404


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b" \n", 400),
        (b"{", 400),
        (b"nonsense", 400),
        (b'{"request_rate": NaN}', 400),
        (b'{"request_rate": -Infinity}', 400),
        (b'{"request_rate": 05}', 400),
        (b'{"request_rate": 5} x', 400),
        (b'{"\xff": 5}', 400),
        (b'\xef\xbb\xbf{"request_rate": 5}', 400),
        (b'{"\\ud800": 5}', 400),
        (b'{"request_rate": {"limit": 5, "scope": "\\udfff"}}', 400),
        (b'{"request_rate": "\xed\xa0\x80"}', 400),
        (b"[" * 200_000, 400),
        (b" " * (MEBIBYTE + 1), 413),
        (b'{"request_rate": 5}' + b" " * 2 * MEBIBYTE, 413),
    ],
)
async def test_invalid_json_is_400_and_a_body_that_is_too_large_413(quotas: Quotas, body: bytes, status: int):
    for method in ("PUT", "PATCH"):
        assert fields(await quotas.send(method, "user=alice", body), status) == []


async def test_exactly_a_mebibyte_is_taken(quotas: Quotas):
    body = b'{"request_rate": 5}'
    assert (await quotas.put("user=alice", body + b" " * (MEBIBYTE - len(body)))).status_code == 201


async def test_a_body_in_chunks_is_bounded_too(quotas: Quotas):
    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b" " * 65_536

    headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
    answer = await quotas.client.put("/v1/quotas/user=alice", content=endless(), headers=headers)
    assert answer.status_code == 413


@pytest.mark.parametrize(
    ("method", "sent", "taken"),
    [
        ("PUT", "application/json", True),
        ("PUT", "Application/JSON; charset=utf-8", True),
        ("PUT", PATCH, False),
        ("PUT", "text/plain", False),
        ("PUT", "", False),
        ("PATCH", PATCH, True),
        ("PATCH", "application/json", True),
        ("PATCH", "application/json-patch+json", False),
    ],
)
async def test_content_types(quotas: Quotas, method: str, sent: str, *, taken: bool):
    answer = await quotas.send(method, "user=alice", {"request_rate": 5}, content_type=sent)
    assert answer.status_code == (201 if taken else 415)


async def test_access_comes_before_everything_else_then_type_then_syntax_then_content(quotas: Quotas):
    for method in ("GET", "PUT", "PATCH", "DELETE"):
        for key in ("", "Bearer wrong", "Basic b3Blbg=="):
            answer = await quotas.send(method, "foo=bar", b"{", content_type="x/y", authorization=key)
            assert fields(answer, 401) == []
            assert answer.headers["www-authenticate"].startswith("Bearer")
    assert fields(await quotas.put("foo=bar", b"{", content_type="x/y"), 415) == []
    assert fields(await quotas.put("foo=bar", b"{"), 400) == []
    assert fields(await quotas.put("foo=bar", {"foobar": 1})) == ["/entity"]
    assert fields(await quotas.put("user=alice", {"foobar": 1}, if_match='"9"')) == ["/foobar"]


async def test_unsupported_method_is_405_with_the_allowed_ones(quotas: Quotas):
    for method in ("POST", "OPTIONS", "BREW"):
        answer = await quotas.send(method, "user=alice")
        assert (answer.status_code, answer.headers["allow"]) == (405, "DELETE, GET, PATCH, PUT")


async def test_a_slash_in_a_path_is_another_path(quotas: Quotas):
    assert (await quotas.put("user=a/b", {"request_rate": 5})).status_code == 404
    assert (await quotas.get("user=alice/")).status_code == 404


# History and outages


async def test_a_reason_is_kept(quotas: Quotas, catalog: Catalog):
    await quotas.put("user=alice", {"request_rate": 5}, x_reason="launch week")
    reason = "Größe".encode().decode("latin-1").encode("latin-1")
    await quotas.client.delete(
        "/v1/quotas/user=alice", headers=[(b"authorization", f"Bearer {KEY}".encode()), (b"x-reason", reason)]
    )
    async with catalog.database.engine.connect() as connection:
        kept = list(await connection.execute(select(CHANGES.c.who, CHANGES.c.reason, CHANGES.c.at_ms)))
    assert [(who, reason) for who, reason, _ in kept] == [("admin", "launch week"), ("admin", "Größe")]
    assert all(at_ms > 1_700_000_000_000 for *_, at_ms in kept)


@pytest.mark.parametrize(
    "reason",
    [b"x" * 1_025, "ü".encode() * 513, "a\x9bb".encode(), b"a\tb", b"a\x7fb", b"\xff"],
    ids=["long", "long in bytes", "C1", "C0", "DEL", "not UTF-8"],
)
async def test_a_reason_is_short_text(quotas: Quotas, reason: bytes):
    headers = [(b"authorization", f"Bearer {KEY}".encode()), (b"x-reason", reason)]
    refused = await quotas.client.put("/v1/quotas/user=alice", json={"request_rate": 5}, headers=headers)
    assert fields(refused) == ["X-Reason"]
    assert (await quotas.get("user=alice")).status_code == 404
    longest = await quotas.put("user=alice", {"request_rate": 5}, x_reason="x" * 1_024)
    assert longest.status_code == 201


async def test_unreachable_catalog_is_503(quotas: Quotas, catalog: Catalog, monkeypatch: pytest.MonkeyPatch):
    await quotas.put("user=alice", {"request_rate": 5})

    async def away(*_: object) -> None:
        raise CatalogUnavailableError("the catalog at postgresql://secret-host is out of reach")

    monkeypatch.setattr(catalog.database, "write", away)
    monkeypatch.setattr(catalog.database, "of_entity", away)
    for method, body in (
        ("PUT", {"request_rate": 7}),
        ("PATCH", {"request_rate": 7}),
        ("DELETE", None),
        ("GET", None),
    ):
        answer = await quotas.send(method, "user=alice", body)
        assert fields(answer, 503) == []
        assert answer.headers["retry-after"] == "1"
        assert "secret-host" not in answer.text
    assert fields(await quotas.put("user=alice", {"foobar": 7})) == ["/foobar"]
    assert catalog.snapshot.quotas["request_rate"][Entity.of(user="alice")].limit == 5


# The document


async def test_every_status_that_can_be_is_documented(catalog: Catalog):
    document = app_of(catalog).openapi()
    routes = document["paths"]["/v1/quotas/{entity}"]
    assert set(routes) == {"get", "put", "patch", "delete"}
    common = {"400", "401", "403", "404", "412", "422", "503"}
    assert set(routes["get"]["responses"]) == common | {"200", "304"}
    assert set(routes["put"]["responses"]) == common | {"200", "201", "413", "415"}
    assert set(routes["patch"]["responses"]) == common | {"200", "201", "204", "413", "415"}
    assert set(routes["delete"]["responses"]) == common | {"204"}
    references = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps([document, COMPONENTS])))
    assert references == set(COMPONENTS) | {"Drill"}  # which the history refers to, and the volumes define


@pytest.mark.parametrize(
    "spelled",
    [
        "user=alice",
        "user=*",
        "user=alice,client-id=etl",
        "client-id=*,user=*",
        "ip=*",
        "ip=10.0.0.7",
        "ip=::1",
        "ip=2001%3Adb8%3A%3A1",
        "ip=1:2:3:4:5:6:7:8",
        "ip=1::",
        "ip=::",
        "broker=1,listener=EXTERNAL",
        "listener=*",
        "user=a%2Fb",
    ],
)
def test_the_documented_pattern_knows_every_kind_of_entity(spelled: str):
    assert re.search(ENTITY_PATTERN, spelled)
    assert Entity.parse(spelled)


@given(st.from_regex(ENTITY_PATTERN, fullmatch=True))
def test_whatever_the_pattern_allows_is_an_entity(spelled: str):
    assert Entity.parse(Entity.parse(spelled).__str__())


@given(st.binary(max_size=40) | st.text(max_size=40).map(str.encode))
def test_reading_json_raises_problems_only(body: bytes):
    try:
        document = strict.parse(body)
    except ProblemError as problem:
        assert problem.status in (400, 422)  # noqa: PT017
        return
    assert json.dumps(document)
