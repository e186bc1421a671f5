"""API keys over HTTP: secrets shown once, refusals, and the keys that a rotation leaves valid."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from httpx import ASGITransport, AsyncClient, Response

from app.catalog.catalog import Catalog
from app.catalog.keys import Keys
from app.http.access.access import Access
from app.http.head import RequestHead
from app.http.problems import ProblemError
from app.http.routes.keys import router
from tests.http.application import app_with

ADMIN = "open-sesame"
GATEWAY: dict[str, Any] = {"name": "gateway", "scopes": ["decide"]}
FOR_EVER: dict[str, Any] = {"expires_ms": None, "bound_to": [], "rotated_ms": None, "former_until_ms": None}


@pytest.fixture
async def keys(one_catalog: Catalog) -> AsyncIterator[Keys]:
    keys = Keys(one_catalog.database)
    await keys.open()
    yield keys
    await keys.close()


@pytest.fixture
def access(keys: Keys) -> Access:
    return Access(ADMIN, (), lambda: keys.ring)


@pytest.fixture
async def http(keys: Keys, access: Access) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(
        transport=ASGITransport(app_with(router(keys, access))), base_url="http://quotagate"
    ) as client:
        client.headers["authorization"] = f"Bearer {ADMIN}"
        yield client


def named(answer: Response) -> list[str]:
    assert answer.status_code == 422, answer.text
    return [error["field"] for error in answer.json()["errors"]]


def grants(access: Access, key: str) -> bool:
    head = RequestHead(fields={b"authorization": [f"Bearer {key}".encode()]}, address="127.0.0.1")
    try:
        access.require(head, "decide")
    except ProblemError as problem:
        return problem.status != 401
    return True


def now_ms() -> int:
    return time.time_ns() // 1_000_000


async def test_only_the_answer_to_creation_holds_the_key(http: AsyncClient, access: Access, keys: Keys):
    made = await http.post("/v1/keys", json=GATEWAY)
    assert made.status_code == 201
    assert made.headers["cache-control"] == "no-store"
    key = made.json().pop("key")
    assert key.startswith("qg_")
    assert len(key) == 3 + 43, "256 bits in base 64"
    assert grants(access, key)
    listed = await http.get("/v1/keys")
    (shown,) = listed.json()["keys"]
    assert shown == {name: value for name, value in made.json().items() if name != "key"}
    assert shown.items() >= (GATEWAY | FOR_EVER).items()
    assert abs(shown["created_ms"] - now_ms()) < 60_000
    (kept,) = await keys.all()
    assert key not in repr(kept), "only its hash is kept"
    assert kept.digest not in listed.text + made.text, "which nobody is shown"


async def test_two_keys_are_never_the_same(http: AsyncClient):
    made = [(await http.post("/v1/keys", json=GATEWAY | {"name": f"k{n}"})).json()["key"] for n in range(20)]
    assert len(set(made)) == 20
    assert [k["name"] for k in (await http.get("/v1/keys")).json()["keys"]] == sorted(
        f"k{n}" for n in range(20)
    )


async def test_a_name_is_taken_until_its_key_is_revoked(http: AsyncClient, access: Access):
    first = (await http.post("/v1/keys", json=GATEWAY)).json()["key"]
    again = await http.post("/v1/keys", json=GATEWAY)
    assert again.status_code == 409
    assert grants(access, first)
    assert (await http.delete("/v1/keys/gateway")).status_code == 204
    assert not grants(access, first)
    assert (await http.delete("/v1/keys/gateway")).status_code == 404
    assert (await http.get("/v1/keys")).json() == {"keys": []}
    second = (await http.post("/v1/keys", json=GATEWAY)).json()["key"]
    assert grants(access, second)
    assert not grants(access, first)


async def test_a_rotation_ends_the_old_key_at_once_or_after_its_grace(http: AsyncClient, access: Access):
    first = (await http.post("/v1/keys", json=GATEWAY)).json()["key"]
    rotated = await http.post("/v1/keys/gateway:rotate", json={"grace_ms": 3_600_000})
    assert rotated.status_code == 200
    second = rotated.json()["key"]
    assert rotated.json()["rotated_ms"] + 3_600_000 == rotated.json()["former_until_ms"]
    assert grants(access, first)
    assert grants(access, second)
    third = (await http.post("/v1/keys/gateway:rotate")).json()["key"]
    assert [grants(access, key) for key in (first, second, third)] == [False, False, True]
    assert (await http.post("/v1/keys/nobody:rotate", json={})).status_code == 404


async def test_a_grace_ends_by_the_nodes_clock(http: AsyncClient, keys: Keys):
    clock = now_ms()
    access = Access(ADMIN, (), lambda: keys.ring, now_ms=lambda: clock)
    first = (await http.post("/v1/keys", json=GATEWAY)).json()["key"]
    rotated = (await http.post("/v1/keys/gateway:rotate", json={"grace_ms": 5_000})).json()
    clock = rotated["former_until_ms"] - 1
    assert grants(access, first)
    clock += 1
    assert not grants(access, first)
    assert grants(access, rotated["key"])


async def test_a_key_expires_with_its_grace_and_is_not_rotated_any_more(http: AsyncClient, keys: Keys):
    clock = now_ms()
    access = Access(ADMIN, (), lambda: keys.ring, now_ms=lambda: clock)
    ends = clock + 3_600_000
    first = (await http.post("/v1/keys", json=GATEWAY | {"expires_ms": ends})).json()["key"]
    second = (await http.post("/v1/keys/gateway:rotate", json={"grace_ms": 86_400_000})).json()
    assert second["expires_ms"] == ends
    clock = ends - 1
    assert grants(access, first)
    assert grants(access, second["key"])
    clock = ends
    assert not grants(access, first)
    assert not grants(access, second["key"])
    await keys.create("old", ["decide"], [], expires_ms=5, now_ms=1)
    refused = await http.post("/v1/keys/old:rotate")
    assert refused.status_code == 409
    assert "expired" in refused.json()["detail"]


async def test_bounds_are_shown_as_they_are_spelled_canonically(http: AsyncClient):
    bound_to = ["client-id=x,user=acme", "user=a%2a*", "ip=::FFFF:10.0.0.7", "user=*", "user=%2A", "ip=10.*"]
    made = await http.post("/v1/keys", json=GATEWAY | {"bound_to": bound_to})
    assert made.json()["bound_to"] == [
        "user=acme,client-id=x",
        "user=a%2A*",
        "ip=10.0.0.7",
        "user=*",
        "user=%2A",
        "ip=10.*",
    ]
    for name, unbound in (("a", []), ("b", None)):
        made = await http.post("/v1/keys", json=GATEWAY | {"name": name, "bound_to": unbound})
        assert (made.status_code, made.json()["bound_to"]) == (201, [])


@pytest.mark.parametrize(
    ("body", "fields"),
    [
        ([], [""]),
        ({}, ["/name", "/scopes"]),
        (GATEWAY | {"name": ""}, ["/name"]),
        (GATEWAY | {"name": "a b"}, ["/name"]),
        (GATEWAY | {"name": "a:rotate"}, ["/name"]),
        (GATEWAY | {"name": "-a"}, ["/name"]),
        (GATEWAY | {"name": "a" * 65}, ["/name"]),
        (GATEWAY | {"name": "a\n"}, ["/name"]),
        (GATEWAY | {"name": 5}, ["/name"]),
        (GATEWAY | {"name": "admin"}, ["/name"]),
        (GATEWAY | {"scopes": []}, ["/scopes"]),
        (GATEWAY | {"scopes": "decide"}, ["/scopes"]),
        (GATEWAY | {"scopes": ["decide", "root", ["read"], None]}, ["/scopes/1", "/scopes/2", "/scopes/3"]),
        (GATEWAY | {"scopes": ["read", "decide", "read"]}, ["/scopes/2"]),
        (GATEWAY | {"expires_ms": -1}, ["/expires_ms"]),
        (GATEWAY | {"expires_ms": 2**53}, ["/expires_ms"]),
        (GATEWAY | {"expires_ms": 4e12}, ["/expires_ms"]),
        (GATEWAY | {"expires_ms": "tomorrow"}, ["/expires_ms"]),
        (GATEWAY | {"expires_ms": True}, ["/expires_ms"]),
        (GATEWAY | {"bound_to": "user=acme"}, ["/bound_to"]),
        (GATEWAY | {"bound_to": ["user=a"] * 101}, ["/bound_to"]),
        (GATEWAY | {"bound_to": ["acme", "user=a*b", "user=", 5, "ip=host", "ip=10.1,user=a"]},
         [f"/bound_to/{n}" for n in range(6)]),
        (GATEWAY | {"bound_to": ["user=a%", "user=%ff*", "user=%00*"]}, [f"/bound_to/{n}" for n in range(3)]),
        (GATEWAY | {"scopes": ["decide", "read"], "bound_to": ["user=acme"]}, ["/bound_to"]),
        (GATEWAY | {"scopes": ["admin"], "bound_to": ["user=acme"]}, ["/bound_to"]),
        (GATEWAY | {"key": "mine", "bound": 1}, ["/key", "/bound"]),
        ({"name": 5, "scopes": 5, "expires_ms": "x", "bound_to": 5, "a/b": 1},
         ["/a~1b", "/name", "/scopes", "/bound_to", "/expires_ms"]),
    ],
)  # fmt: skip
async def test_invalid_key_request_names_each_field(http: AsyncClient, body: Any, fields: list[str]):
    assert named(await http.post("/v1/keys", json=body)) == fields
    assert (await http.get("/v1/keys")).json() == {"keys": []}


@pytest.mark.parametrize(
    ("body", "fields"),
    [
        ([], [""]),
        ({"grace_ms": -1}, ["/grace_ms"]),
        ({"grace_ms": 1.5}, ["/grace_ms"]),
        ({"grace_ms": True}, ["/grace_ms"]),
        ({"grace_ms": None}, ["/grace_ms"]),
        ({"grace_ms": 30 * 86_400_000 + 1}, ["/grace_ms"]),
        ({"grace": 1}, ["/grace"]),
    ],
)
async def test_invalid_grace_is_refused(http: AsyncClient, access: Access, body: Any, fields: list[str]):
    key = (await http.post("/v1/keys", json=GATEWAY)).json()["key"]
    assert named(await http.post("/v1/keys/gateway:rotate", json=body)) == fields
    assert grants(access, key)


async def test_methods_types_and_keys_twice(http: AsyncClient):
    for method, path, allowed in (
        ("PUT", "/v1/keys", "GET, POST"),
        ("GET", "/v1/keys/gateway", "DELETE"),
        ("GET", "/v1/keys/gateway:rotate", "POST"),
    ):
        refused = await http.request(method, path)
        assert (refused.status_code, refused.headers["allow"]) == (405, allowed)
    assert (await http.post("/v1/keys", content=b"{}")).status_code == 415
    twice = b'{"name": "a", "name": "b", "scopes": ["decide"]}'
    assert named(
        await http.post("/v1/keys", content=twice, headers={"content-type": "application/json"})
    ) == ["/name"]


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/v1/keys", None),
        ("POST", "/v1/keys", GATEWAY | {"name": "other"}),
        ("POST", "/v1/keys/gateway:rotate", {}),
        ("DELETE", "/v1/keys/gateway", None),
    ],
)
async def test_query_parameters_are_refused_and_change_nothing(
    http: AsyncClient, method: str, path: str, body: Any
):
    await http.post("/v1/keys", json=GATEWAY)
    before = (await http.get("/v1/keys")).json()
    assert named(await http.request(method, f"{path}?limit=5", json=body)) == ["/limit"]
    assert (await http.get("/v1/keys")).json() == before


async def test_only_admins_see_and_change_keys(http: AsyncClient):
    made = await http.post("/v1/keys", json={"name": "b", "scopes": ["decide", "account", "read", "write"]})
    http.headers["authorization"] = f"Bearer {made.json()['key']}"
    for method, path in (
        ("GET", "/v1/keys"),
        ("POST", "/v1/keys"),
        ("POST", "/v1/keys/b:rotate"),
        ("DELETE", "/v1/keys/b"),
    ):
        refused = await http.request(method, path)
        assert refused.status_code == 403
        assert 'scope="admin"' in refused.headers["www-authenticate"]


async def test_a_key_with_the_scope_admin_may_all_of_it_and_revoke_itself(http: AsyncClient, access: Access):
    made = await http.post("/v1/keys", json={"name": "root", "scopes": ["admin"]})
    key = made.json()["key"]
    assert grants(access, key), "admin is all scopes"
    http.headers["authorization"] = f"Bearer {key}"
    assert (await http.post("/v1/keys", json=GATEWAY)).status_code == 201
    assert (await http.delete("/v1/keys/root")).status_code == 204
    assert (await http.get("/v1/keys")).status_code == 401


async def test_key_created_with_a_past_expiry_is_expired(http: AsyncClient):
    made = await http.post("/v1/keys", json={"name": "late", "scopes": ["admin"], "expires_ms": 1})
    assert made.status_code == 201
    late = {"Authorization": f"Bearer {made.json()['key']}"}
    assert (await http.get("/v1/keys", headers=late)).status_code == 401
