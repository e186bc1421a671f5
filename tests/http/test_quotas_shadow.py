"""Shadow quotas over HTTP: their counts, and every refusal."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from ipaddress import ip_network

import pytest
from httpx import ASGITransport, AsyncClient

from app.catalog.catalog import Catalog
from app.catalog.sql import Origin
from app.domain.entity import ANY, Entity
from app.http.access.access import Access
from app.http.routes.quotas_shadow import router
from app.store.compiled_quota import ShadowPeriod
from app.store.port import StoreError
from tests.http.application import KEY, app_with, fields

EVERYBODY = Entity.of(user=ANY)
AT_MS, NOW_MS = 1_763_716_142_000, 1_763_719_742_123
URL = "/v1/quotas:shadow"


class Counts:
    """Has the same counts for every quota, and remembers for which it was asked."""

    def __init__(self) -> None:
        self.asked: list[ShadowPeriod] = []
        self.error: StoreError | None = None

    async def read(self, periods: Sequence[ShadowPeriod]) -> tuple[int, list[list[int]]]:
        if self.error:
            raise self.error
        self.asked += periods
        return NOW_MS, [[4, 3, 2, 1] for _ in periods]


@pytest.fixture
def counts() -> Counts:
    return Counts()


@pytest.fixture
async def http(one_catalog: Catalog, counts: Counts) -> AsyncIterator[AsyncClient]:
    app = app_with(router(one_catalog, Access(KEY, [ip_network("127.0.0.0/8")]), counts))
    async with AsyncClient(
        transport=ASGITransport(app),
        base_url="http://quotagate",
        headers={"authorization": f"Bearer {KEY}"},
    ) as client:
        yield client


async def test_shadow_quotas_are_shown_with_their_counts(
    one_catalog: Catalog, counts: Counts, http: AsyncClient
) -> None:
    values = {
        "producer_ids_rate": {"limit": 5, "shadow": True},
        "request_rate": {"limit": 100, "shadow": True},
        "producer_byte_rate": 5,
    }
    await one_catalog.put(EVERYBODY, values, Origin("admin", AT_MS))
    answer = await http.get(URL, params={"entity": "user=*"})
    assert (answer.status_code, answer.headers["cache-control"]) == (200, "no-store")
    common = {"since_ms": AT_MS, "admit": 4, "delay": 3, "throttle": 2, "reject": 1}
    assert answer.json() == {
        "entity": "user=*",
        "version": 1,
        "now_ms": NOW_MS,
        "shadows": [
            {
                "quota": "producer_ids_rate",
                "limit": 5,
                "enforcement": "deny",
                "window_ms": 3_600_000,
                **common,
            },
            {"quota": "request_rate", "limit": 100, "enforcement": "delay", "window_ms": 11_000, **common},
        ],
    }
    assert counts.asked == [
        ShadowPeriod(quota, "user=*", AT_MS) for quota in ("producer_ids_rate", "request_rate")
    ]


async def test_a_period_that_the_catalog_does_not_know_is_null(
    one_catalog: Catalog, http: AsyncClient
) -> None:
    await one_catalog.put(EVERYBODY, {"request_rate": {"limit": 5, "shadow": True}}, Origin("admin", 0))
    (shadow,) = (await http.get(URL, params={"entity": "user=*"})).json()["shadows"]
    assert shadow["since_ms"] is None


async def test_an_entity_without_shadow_quotas_has_none_and_one_without_quotas_is_not_found(
    one_catalog: Catalog, http: AsyncClient
) -> None:
    await one_catalog.put(EVERYBODY, {"request_rate": 5}, Origin("admin", AT_MS))
    assert (await http.get(URL, params={"entity": "user=*"})).json()["shadows"] == []
    assert fields(await http.get(URL, params={"entity": "user=%2A"}), 404) == []


REFUSED = [
    ("", ["/entity"]),
    ("entity=", ["/entity"]),
    ("entity=user", ["/entity"]),
    ("entity=user=", ["/entity"]),
    ("entity=user=%", ["/entity"]),
    ("entity=user=%2500", ["/entity"]),
    ("entity=user=%FF", ["/entity"]),
    ("entity=group=a", ["/entity"]),
    ("entity=ip=10.0.0.1,user=a", ["/entity"]),
    ("entity=user=a&entity=user=b", ["/entity"]),
    ("entity=user=a&quota=request_rate", ["/quota"]),
    ("a/b=1", ["/a~1b", "/entity"]),
]


async def test_invalid_query_is_refused(http: AsyncClient) -> None:
    for query, wrong in REFUSED:
        assert sorted({*fields(await http.get(f"{URL}?{query}"))}) == wrong, query


async def test_store_that_is_away_is_a_503(one_catalog: Catalog, counts: Counts, http: AsyncClient) -> None:
    await one_catalog.put(EVERYBODY, {"request_rate": {"limit": 5, "shadow": True}}, Origin("admin", AT_MS))
    counts.error = StoreError("timeout", "no reply")
    answer = await http.get(URL, params={"entity": "user=*"})
    assert fields(answer, 503) == []
    assert "(timeout)" in answer.json()["detail"]


async def test_other_methods_and_keys_are_refused(http: AsyncClient) -> None:
    answer = await http.post(URL, json={})
    assert (answer.status_code, answer.headers.get("allow")) == (405, "GET")
    wrong = await http.get(URL, params={"entity": "user=*"}, headers={"authorization": "Bearer wrong"})
    assert wrong.status_code == 401
