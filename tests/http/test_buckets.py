"""Buckets over HTTP: every refusal, a store that is away, and the promises of the OpenAPI document."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.admission.buckets import Buckets
from app.catalog.snapshot import Snapshot
from app.domain.entity import ANY, Entity
from app.domain.ladder import MatchingRules
from app.domain.quota import Quota
from app.http.access.access import Access
from app.http.routes.buckets import router
from app.store.port import (
    NONE_KNOWN,
    Answer,
    AnswersCallback,
    IdsResult,
    LiveLayer,
    Plan,
    StoreError,
    UnitsResult,
)
from tests.http.application import KEY, app_with, fields
from tests.packed import packed

FILE = Path(__file__).parents[2] / "openapi" / "openapi.json"
QUOTAS = {
    "request_rate": {Entity.of(user=ANY): Quota("request_rate", 10, "sampled_rate", "delay")},
    "producer_ids_rate": {Entity.of(user="alice"): Quota("producer_ids_rate", 5, "producer_ids", "deny")},
}


AT_MS = 5_000
"""The store's time."""


class Counters:
    """Remembers its calls, and returns the same for every bucket."""

    def __init__(self) -> None:
        self.plans: list[Plan] = []
        self.forgotten: list[Sequence[bytes]] = []
        self.looked: list[tuple[bytes, int, int]] = []
        self.error: StoreError | None = None
        self.unreadable: StoreError | None = None

    def ask(self, plans: Sequence[Any], done: AnswersCallback) -> None:
        self.plans += plans
        said = IdsResult("admit", observed=2.0, remaining=3.0, remembered=4, fill=0.5, layers=2)
        units = UnitsResult("admit", observed=2.0, remaining=3.0)
        results = [
            tuple(said if charge.compiled.counts_ids else units for charge in plan.charges) for plan in plans
        ]
        answers = [packed(Answer(each, error=self.unreadable, at_ms=AT_MS)) for each in results]
        asyncio.get_running_loop().call_soon(done, self.error or answers)

    async def forget(self, keys: Sequence[bytes], known_ms: Mapping[bytes, int] = NONE_KNOWN) -> int | None:
        if self.error:
            raise self.error
        self.forgotten.append(keys)
        return None

    async def live_layers(self, key: bytes, now_ms: int, ttl_ms: int) -> list[LiveLayer]:
        self.looked.append((key, now_ms, ttl_ms))
        return [LiveLayer(6, 1_000, 3), LiveLayer(7, 2_000, 1)]

    def silent_since(self) -> float | None:
        return None

    def give_up(self, error: StoreError) -> None:
        raise error


class Client:
    """Asks about buckets."""

    def __init__(self, now_ms: Callable[[], int] | None = None) -> None:
        self.counters = Counters()
        snapshot = Snapshot(1, QUOTAS)
        buckets = Buckets(self.counters, lambda: snapshot, MatchingRules())
        self._transport = httpx.ASGITransport(app_with(router(buckets, Access(KEY, ()), now_ms)))

    async def get(self, query: str) -> httpx.Response:
        return await self._send("GET", f"/v1/buckets{query}")

    async def reset(self, body: Any, type_: str = "application/json", key: str = KEY) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self._send("POST", "/v1/buckets:reset", content, type_, key)

    async def _send(
        self, method: str, path: str, content: bytes = b"", type_: str = "", key: str = KEY
    ) -> httpx.Response:
        headers = {"authorization": f"Bearer {key}", "content-type": type_}
        async with httpx.AsyncClient(transport=self._transport, base_url="http://qg") as http:
            return await http.request(method, path, content=content, headers=headers)


@pytest.fixture
def client() -> Client:
    return Client()


async def test_every_quota_that_charges_the_bucket_is_shown_in_order(client: Client):
    answer = await client.get("?bucket=user=alice")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["cache-control"] == "no-store"
    shown = {"bucket": "user=alice", "observed": 2.0, "remaining": 3.0, "tokens": None}
    ids = {
        "quota": "producer_ids_rate",
        "layers": 2,
        "live_layers": [
            {"number": 6, "began_ms": 1_000, "ids": 3},
            {"number": 7, "began_ms": 2_000, "ids": 1},
        ],
        "fill": 0.5,
        "remembered_ids": 4,
        "charged_ids": 2,
    }
    rate = {
        "quota": "request_rate",
        "layers": None,
        "live_layers": None,
        "fill": None,
        "remembered_ids": None,
        "charged_ids": None,
    }
    assert answer.json() == {"buckets": [shown | ids, shown | rate]}
    (plan,) = client.counters.plans
    assert plan.mode == "peek"
    assert {charge.usage for charge in plan.charges} == {0}
    assert plan.ids == 0
    (look,) = client.counters.looked
    assert look == (
        plan.charges[0].key,
        AT_MS,
        QUOTAS["producer_ids_rate"][Entity.of(user="alice")].layers.ttl_ms,
    )


@pytest.mark.parametrize(
    ("query", "bucket", "quotas"),
    [
        ("?bucket=user=bob", "user=bob", ["request_rate"]),
        ("?bucket=user%3Da%2520b", "user=a%20b", ["request_rate"]),
        ("?bucket=user=a+b", "user=a%20b", ["request_rate"]),
        ("?bucket=user=%252A", "user=%2A", ["request_rate"]),
        ("?quota=request_rate&bucket=user=alice", "user=alice", ["request_rate"]),
        ("?bucket=user=bob&quota=producer_ids_rate", "", []),
        ("?bucket=ip=10.0.0.7&quota=connection_creation_rate", "", []),
        ("?bucket=user=alice,client-id=etl", "", []),
    ],
)
async def test_names_are_read_once_from_the_query(client: Client, query: str, bucket: str, quotas: list[str]):
    answer = await client.get(query)
    assert answer.status_code == 200, answer.text
    shown = answer.json()["buckets"]
    assert [one["quota"] for one in shown] == quotas
    assert {one["bucket"] for one in shown} == ({bucket} if quotas else set())


@pytest.mark.parametrize(
    ("query", "wrong"),
    [
        ("", ["/bucket"]),
        ("?quota=request_rate", ["/bucket"]),
        ("?bucket=", ["/bucket"]),
        ("?bucket=user=*", ["/bucket"]),
        ("?bucket=user=%2A", ["/bucket"]),
        ("?bucket=alice", ["/bucket"]),
        ("?bucket=user=%ff", ["/bucket", "/bucket"]),
        ("?bucket=ip=10.0.0.0/24", ["/bucket"]),
        ("?bucket=user=alice&bucket=user=alice", ["/bucket"]),
        ("?bucket=user=alice&quota=requests", ["/quota"]),
        ("?bucket=user=alice&at_ms=5", ["/at_ms"]),
        ("?bucket=user=*&quota=x&colour=red", ["/colour", "/bucket", "/quota"]),
    ],
)
async def test_query_errors_are_named(client: Client, query: str, wrong: list[str]):
    assert fields(await client.get(query)) == wrong
    assert client.counters.plans == []


async def test_at_ms_is_the_callers_or_the_newest_time_seen():
    client = Client(lambda: 77)
    for query, at_ms in (("", 77), ("&at_ms=5", 5), ("&at_ms=0", 0)):
        assert (await client.get(f"?bucket=user=alice{query}")).status_code == 200
        assert client.counters.plans[-1].at_ms == at_ms
        assert client.counters.looked[-1][1] == at_ms
    for text in ("-1", "1.5", "x", "", str(2**53)):
        assert fields(await client.get(f"?bucket=user=alice&at_ms={text}")) == ["/at_ms"]


async def test_a_reset_forgets_every_bucket_of_the_name_in_one_call(client: Client):
    for body in ({"bucket": "user=alice"}, {"bucket": "user=alice", "quota": None}):
        answer = await client.reset(body)
        assert (answer.status_code, answer.content) == (204, b"")
        keys = client.counters.forgotten.pop()
        assert [key.split(b":")[2] for key in keys] == [b"producer_ids_rate", b"request_rate"]
    assert (await client.reset({"bucket": "user=alice", "quota": "request_rate"})).status_code == 204
    (key,) = client.counters.forgotten.pop()
    assert key == b"qg1:{user=alice}:request_rate:user=alice:sampled_rate.11.1000.cluster.0"


@pytest.mark.parametrize(
    ("body", "wrong"),
    [
        ([], [""]),
        ({}, ["/bucket"]),
        ({"bucket": None}, ["/bucket"]),
        ({"bucket": 5}, ["/bucket"]),
        ({"bucket": ""}, ["/bucket"]),
        ({"bucket": "user=*"}, ["/bucket"]),
        ({"bucket": "user=alice", "quota": "requests"}, ["/quota"]),
        ({"bucket": "user=alice", "quota": ["request_rate"]}, ["/quota"]),
        ({"bucket": 5, "quota": 1, "why/not": 2}, ["/why~1not", "/bucket", "/quota"]),
        ({"bucket": "*", "quota": "requests"}, ["/bucket", "/quota"]),
        (b'{"bucket": "user=a", "bucket": "user=b"}', ["/bucket"]),
    ],
)
async def test_reset_errors_are_named(client: Client, body: Any, wrong: list[str]):
    assert fields(await client.reset(body)) == wrong
    assert client.counters.forgotten == []


async def test_a_reset_is_json_and_needs_a_key(client: Client):
    body = {"bucket": "user=alice"}
    assert fields(await client.reset(body, type_="text/plain"), 415) == []
    assert fields(await client.reset(b"{"), 400) == []
    assert fields(await client.reset(b" " * (1024 * 1024 + 1)), 413) == []
    assert fields(await client.reset(body, key="another"), 401) == []
    assert client.counters.forgotten == []


async def test_unreachable_store_is_503(client: Client):
    client.counters.error = StoreError("timeout")
    for answer in (await client.get("?bucket=user=alice"), await client.reset({"bucket": "user=alice"})):
        assert fields(answer, 503) == []
        assert answer.headers["retry-after"] == "1"
        assert "The store does not answer (timeout)" in answer.json()["detail"]


async def test_unreadable_bucket_is_503(client: Client):
    client.counters.unreadable = StoreError("response", "WRONGTYPE")
    answer = await client.get("?bucket=user=alice")
    assert fields(answer, 503) == []
    assert "(response)" in answer.json()["detail"]


def test_every_operation_and_refusal_has_an_example():
    paths = json.loads(FILE.read_text(encoding="utf-8"))["paths"]
    show, reset = paths["/v1/buckets"]["get"], paths["/v1/buckets:reset"]["post"]
    assert set(show["responses"]) == {"200", "401", "403", "414", "422", "503"}
    assert set(reset["responses"]) == {"204", "400", "401", "403", "413", "415", "422", "503"}
    for operation in (show, reset):
        assert operation["tags"] == ["Buckets"]
        for status, response in operation["responses"].items():
            if int(status) >= 400:
                example = response["content"]["application/problem+json"]["example"]
                assert example["status"] == int(status)
                assert bool(example.get("errors")) == (status == "422")
    (shown,) = show["responses"]["200"]["content"].values()
    assert set(shown["example"]["buckets"][0]) == {
        *("bucket", "quota", "observed", "remaining", "tokens", "layers", "live_layers", "fill"),
        *("remembered_ids", "charged_ids"),
    }
    assert [parameter["name"] for parameter in show["parameters"]] == ["bucket", "quota"]


async def test_the_examples_of_the_document_are_good(client: Client):
    paths = json.loads(FILE.read_text(encoding="utf-8"))["paths"]
    for name in paths["/v1/buckets"]["get"]["parameters"][0]["examples"].values():
        answer = await client.get(f"?{httpx.QueryParams(bucket=name['value'])}")
        assert answer.status_code == 200, name
    (body,) = paths["/v1/buckets:reset"]["post"]["requestBody"]["content"].values()
    for example in body["examples"].values():
        assert (await client.reset(example["value"])).status_code == 204
