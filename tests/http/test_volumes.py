"""Volumes over HTTP: each refusal and each status, a store or catalog that is away, drills in the history."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import text
from structlog.testing import capture_logs

from app.admission.throttle_factor import throttling
from app.admission.throttle_factor.caller_clock import CallerTime
from app.admission.throttle_factor.throttling import Throttling
from app.catalog.catalog import Catalog
from app.catalog.errors import CatalogUnavailableError
from app.domain.volumes import Drill, FactorState, Source, VolumeLimit, VolumeRules
from app.http.access.access import Access
from app.http.routes import volumes
from app.store.port import StoreError
from app.store.volumes import Reading, VolumeRecord
from tests.http.application import KEY, app_of, fields

FILE = Path(__file__).parents[2] / "openapi" / "openapi.json"
MINUTE = 60_000
T0 = 1_000_000
FULL = {"broker": "1", "dir": "/data", "total_bytes": 1000, "available_bytes": 5}
WELL = {"broker": "2", "dir": "/data", "total_bytes": 1000, "available_bytes": 500}
SHAPE = {
    "factor",
    "since_ms",
    "valid_until_ms",
    "reason",
    "source",
    "next_check_ms",
    "volumes",
    "min_available_bytes",
    "min_available_ratio",
    "drill",
}


class Record(VolumeRecord):
    """A fake record of volumes; a test sets its time, and can make it unreachable."""

    def __init__(self) -> None:
        self.now_ms = T0
        self.state: FactorState | None = None
        self.drill: Drill | None = None
        self.away: set[str] = set()
        self._version = 0

    async def read(self) -> Reading:
        self._asked("read")
        return Reading(self.now_ms, self.state, self.drill, b"%d" % self._version)

    async def replace(self, seen: bytes, state: FactorState, token: int | None = None) -> str:
        self._asked("replace")
        if seen != b"%d" % self._version:
            return "changed"
        self.state, self._version = state, self._version + 1
        return "written"

    async def begin_drill(self, drill: Drill, now_ms: int) -> None:
        self._asked("begin_drill")
        assert drill.since_ms <= now_ms
        self.drill = drill

    async def end_drill(self) -> None:
        self._asked("end_drill")
        self.drill = None

    def _asked(self, what: str) -> None:
        if what in self.away:
            raise StoreError("connection", "nobody there")


@pytest.fixture(autouse=True)
def still(monkeypatch: pytest.MonkeyPatch) -> None:
    """Freeze the time of the process too."""
    monkeypatch.setattr(throttling, "_monotonic_ms", lambda: 0)


class Client:
    """Calls the volume routes of one node, with the admin key."""

    def __init__(self, http: httpx.AsyncClient, record: Record, catalog: Catalog, time: CallerTime | None):
        self.http = http
        self.record = record
        self.catalog = catalog
        self.time = time

    async def show(self, query: str = "") -> dict[str, Any]:
        answer = await self.http.get(f"/v1/volumes{query}")
        assert answer.status_code == 200, answer.text
        assert answer.headers["cache-control"] == "no-store"
        found: dict[str, Any] = answer.json()
        assert found.keys() == SHAPE
        return found

    async def push(self, *volumes: Any, query: str = "", **more: Any) -> httpx.Response:
        return await self.http.post(f"/v1/volumes{query}", json={"volumes": [*volumes], **more})

    async def forget(self, broker: str, **query: int) -> httpx.Response:
        return await self.http.delete("/v1/volumes", params={"broker": broker, **query})

    async def drill(self, factor: Any = 0.2, for_ms: Any = 10_000, reason: str = "") -> httpx.Response:
        headers = {"x-reason": reason} if reason else {}
        body = {"factor": factor, "for_ms": for_ms}
        return await self.http.post("/v1/volumes:drill", json=body, headers=headers)

    async def history(self) -> list[dict[str, Any]]:
        answer = await self.http.get("/v1/quotas:history?entity=throttle_factor")
        assert answer.status_code == 200, answer.text
        found: list[dict[str, Any]] = answer.json()["changes"]
        return found


@asynccontextmanager
async def asking(
    catalog: Catalog, source: Source | None = "push", *, callers: bool = False
) -> AsyncIterator[Client]:
    record, time = Record(), CallerTime() if callers else None
    rules = VolumeRules(source, VolumeLimit(min_available_bytes=100), MINUTE, 5 * MINUTE, 0.5)
    app = app_of(catalog)
    app.include_router(volumes.router(Throttling(record, rules, time), catalog, Access(KEY, ()), time))
    headers = {"authorization": f"Bearer {KEY}"}
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://qg", headers=headers) as http:
        yield Client(http, record, catalog, time)


@pytest.fixture
async def client(one_catalog: Catalog) -> AsyncIterator[Client]:
    async with asking(one_catalog) as client:
        yield client


@pytest.fixture
async def telling(catalog: Catalog) -> AsyncIterator[Client]:
    """With a history in each kind of database."""
    async with asking(catalog) as client:
        yield client


async def test_without_a_source_the_factor_is_1_and_nothing_ends(one_catalog: Catalog):
    async with asking(one_catalog, None) as client:
        assert await client.show() == {
            "factor": 1.0,
            "since_ms": 0,
            "valid_until_ms": None,
            "reason": "off: nothing is observed",
            "source": None,
            "next_check_ms": None,
            "volumes": [],
            "min_available_bytes": 100,
            "min_available_ratio": None,
            "drill": None,
        }


async def test_observation_is_answered_with_the_new_state(client: Client):
    unknown = {"broker": "3", "dir": "/gone", "total_bytes": None, "available_bytes": None}
    answer = await client.push(FULL, WELL, unknown)
    assert answer.status_code == 200
    pushed = answer.json()
    assert pushed == await client.show()
    assert pushed["volumes"] == [
        {**FULL, "state": "violating", "observed_ms": T0},
        {**WELL, "state": "ok", "observed_ms": T0},
        {**unknown, "state": "unknown", "observed_ms": None},
    ]
    rest = {name: value for name, value in pushed.items() if name not in ("volumes", "reason")}
    assert rest == {
        "factor": 0.0,
        "since_ms": T0,
        "valid_until_ms": T0 + 5 * MINUTE,
        "source": "push",
        "next_check_ms": T0 + MINUTE,
        "min_available_bytes": 100,
        "min_available_ratio": None,
        "drill": None,
    }
    assert pushed["reason"].startswith("violation: /data of broker 1 has 5 of 1,000 bytes left")


async def test_partial_observation_keeps_other_volumes_and_complete_one_forgets_them(client: Client):
    await client.push(FULL, WELL)
    part = (await client.push({**FULL, "available_bytes": 500}, complete=False)).json()
    assert [(v["broker"], v["state"]) for v in part["volumes"]] == [("1", "ok"), ("2", "ok")]
    assert part["factor"] == 1.0
    whole = (await client.push(WELL, complete=True)).json()
    assert [v["broker"] for v in whole["volumes"]] == ["2"]
    assert (await client.push(complete=True)).json()["volumes"] == []


async def test_without_observations_volumes_become_unknown_and_then_the_fallback_applies(client: Client):
    await client.push(WELL)
    client.record.now_ms += MINUTE
    late = await client.show()
    assert (late["factor"], late["volumes"][0]["state"]) == (1.0, "unknown")
    assert late["reason"].startswith("held: nothing was pushed within an interval")
    client.record.now_ms += 4 * MINUTE
    assert (await client.show())["factor"] == 1.0, "the end of the validity is part of it"
    client.record.now_ms += 1
    over = await client.show()
    assert (over["factor"], over["since_ms"]) == (0.5, T0 + 5 * MINUTE + 1)
    assert over["reason"].startswith("fallback: ")


async def test_push_that_does_not_say_complete_keeps_the_other_volumes(client: Client):
    """One agent for each broker must not make the full disk of another broker forgotten."""
    await client.push(FULL)
    for _ in range(4):
        client.record.now_ms += MINUTE
        assert (await client.push(WELL)).json()["factor"] == 0.0
    shown = await client.show()
    assert [(v["broker"], v["state"]) for v in shown["volumes"]] == [("1", "violating"), ("2", "ok")]
    assert (await client.push(WELL, complete=True)).json()["factor"] == 1.0
    assert (await client.push(complete=True)).json()["volumes"] == [], "a cluster of no volumes"


async def test_broker_whose_agent_is_silent_leads_to_the_fallback_until_it_is_forgotten(client: Client):
    await client.push({**FULL, "available_bytes": 500}, WELL)
    for passed_s in range(50, 651, 50):
        client.record.now_ms = T0 + passed_s * 1_000
        shown = (await client.push(WELL)).json()
        assert shown["factor"] == (1.0 if passed_s <= 600 else 0.5), passed_s
        assert shown["volumes"][0]["state"] == ("ok" if passed_s <= 300 else "unknown"), passed_s
        held = shown["reason"].startswith("held: not renewed within the validity: /data of broker 1")
        assert held == (300 < passed_s <= 600), passed_s
    assert shown["reason"] == "fallback: not renewed within the validity: /data of broker 1"
    forgotten = await client.forget("1")
    assert (forgotten.status_code, forgotten.content) == (204, b"")
    after = await client.show()
    assert (after["factor"], after["since_ms"]) == (1.0, client.record.now_ms)
    assert after["reason"] == "observed: 1 volumes, all within the limit"
    assert [v["broker"] for v in after["volumes"]] == ["2"]


async def test_agent_that_pushes_again_ends_the_fallback(client: Client):
    await client.push({**FULL, "available_bytes": 500}, WELL)
    client.record.now_ms += 6 * MINUTE
    assert (await client.push(WELL)).json()["factor"] == 0.5, "and nothing at all was pushed before"
    assert (await client.push({**FULL, "available_bytes": 500})).json()["factor"] == 1.0


async def test_full_broker_that_leaves_is_forgotten_at_once_and_no_validity_is_renewed(client: Client):
    await client.push(FULL, WELL)
    client.record.now_ms += 2 * MINUTE
    assert (await client.show())["valid_until_ms"] == T0 + 7 * MINUTE, "a known violation renews it"
    assert (await client.forget("1")).status_code == 204
    after = await client.show()
    assert (after["factor"], after["since_ms"]) == (1.0, client.record.now_ms)
    assert after["valid_until_ms"] == T0 + 5 * MINUTE, "of the last observation"
    assert after["reason"].startswith("held: nothing was pushed within an interval")
    assert (await client.forget("2")).status_code == 204
    assert (await client.show())["volumes"] == []
    assert fields(await client.forget("2"), 404) == []


async def test_forgetting_names_one_known_broker(client: Client):
    await client.push(FULL, {**FULL, "dir": "/other"}, {**WELL, "broker": "11"})
    for query in ("", "?broker=", "?broker=1&broker=2", "?broker=%00", "?broker=" + "x" * 513):
        assert fields(await client.http.delete(f"/v1/volumes{query}")) == ["/broker"], query
    assert fields(await client.http.delete("/v1/volumes?broker=1&dir=/data")) == ["/dir"]
    for absent in ("2", "/data", "1 ", "*"):
        missing = await client.forget(absent)
        assert fields(missing, 404) == []
        assert absent in missing.json()["detail"]
    assert len((await client.show())["volumes"]) == 3
    assert (await client.forget("1")).status_code == 204
    assert [v["broker"] for v in (await client.show())["volumes"]] == ["11"]


@pytest.mark.parametrize("away", ["read", "replace"])
async def test_forgetting_without_the_store_is_503(client: Client, away: str):
    await client.push(FULL)
    client.record.away = {away}
    assert fields(await client.forget("1"), 503) == []
    client.record.away = set()
    assert (await client.show())["factor"] == 0.0


async def test_forgetting_by_the_callers_clock(one_catalog: Catalog):
    async with asking(one_catalog, callers=True) as client:
        await client.push(FULL, query="?at_ms=5000")
        await client.push(WELL, query="?at_ms=6000")
        assert (await client.forget("1", at_ms=7000)).status_code == 204
        assert client.time is not None
        assert client.time.newest_ms == 7000
        after = await client.show()
        assert (after["factor"], after["since_ms"], after["valid_until_ms"]) == (1.0, 7000, 6000 + 5 * MINUTE)
        assert fields(await client.forget("2", at_ms=-1)) == ["/at_ms"]


async def test_only_a_push_that_does_not_say_complete_is_warned_about_and_once(client: Client):
    with capture_logs() as logged:
        await client.push(WELL, complete=False)
        await client.push(WELL, complete=True)
        assert fields(await client.push()) == ["/volumes"]
        assert [each for each in logged if each["log_level"] == "warning"] == []
        for _ in range(3):
            await client.push(WELL)
    (warning,) = (each for each in logged if each["log_level"] == "warning")
    assert '"complete": true' in warning["event"]
    assert warning["who"] == "admin"


async def test_volumes_without_the_store_are_those_the_node_decides_by(client: Client):
    before = (await client.push(FULL)).json()
    client.record.away = {"read"}
    assert await client.show() == before


async def test_write_without_the_store_is_503(client: Client):
    for away in ("read", "replace"):
        client.record.away = {away}
        answer = await client.push(FULL)
        assert fields(answer, 503) == []
        assert answer.headers["retry-after"] == "1"
    client.record.away = set()
    assert (await client.show())["factor"] == 1.0


@pytest.mark.parametrize(
    ("body", "wrong"),
    [
        ([], [""]),
        ({}, ["/volumes"]),
        ({"volumes": None}, ["/volumes"]),
        ({"volumes": {}}, ["/volumes"]),
        ({"volumes": []}, ["/volumes"]),
        ({"volumes": [], "complete": False}, ["/volumes"]),
        ({"volumes": [], "complete": 1}, ["/complete"]),
        ({"volumes": [], "complete": None}, ["/complete"]),
        ({"volumes": [], "all": True}, ["/all"]),
        ({"volumes": [WELL, 5]}, ["/volumes/1"]),
        ({"volumes": [WELL, WELL]}, ["/volumes/1"]),
        ({"volumes": [WELL, FULL, {**WELL, "available_bytes": None}]}, ["/volumes/2"]),
        ({"volumes": [{}]}, [f"/volumes/0/{field}" for field in WELL]),
        ({"volumes": [{**WELL, "broker": 1}]}, ["/volumes/0/broker"]),
        ({"volumes": [{**WELL, "broker": ""}]}, ["/volumes/0/broker"]),
        ({"volumes": [{**WELL, "broker": "b\n"}]}, ["/volumes/0/broker"]),
        ({"volumes": [{**WELL, "dir": None}]}, ["/volumes/0/dir"]),
        ({"volumes": [{**WELL, "dir": "ä" * 257}]}, ["/volumes/0/dir"]),
        ({"volumes": [{**WELL, "total_bytes": -1}]}, ["/volumes/0/total_bytes"]),
        ({"volumes": [{**WELL, "total_bytes": 2**63}]}, ["/volumes/0/total_bytes"]),
        ({"volumes": [{**WELL, "available_bytes": 1.0}]}, ["/volumes/0/available_bytes"]),
        ({"volumes": [{**WELL, "available_bytes": True}]}, ["/volumes/0/available_bytes"]),
        ({"volumes": [{**WELL, "available_bytes": "5"}]}, ["/volumes/0/available_bytes"]),
        ({"volumes": [{**WELL, "free/bytes": 5}]}, ["/volumes/0/free~1bytes"]),
        ({"volumes": [{**WELL, "available_bytes": 1001}]}, ["/volumes/0/available_bytes"]),
        ({"volumes": [FULL, {**WELL, "total_bytes": 499}]}, ["/volumes/1/available_bytes"]),
        ({"volumes": [{**WELL, "total_bytes": 0, "available_bytes": 1}]}, ["/volumes/0/available_bytes"]),
    ],
)
async def test_every_fault_of_an_observation_is_named_and_none_of_it_taken(
    client: Client, body: Any, wrong: list[str]
):
    assert fields(await client.http.post("/v1/volumes", json=body)) == wrong
    assert client.record.state is None


async def test_names_and_sizes_up_to_their_ends_are_taken(client: Client):
    large = {"broker": "ä" * 256, "dir": " ", "total_bytes": 2**63 - 1, "available_bytes": 0}
    assert (await client.push(large)).json()["volumes"] == [
        {**large, "state": "violating", "observed_ms": T0}
    ]
    many = [{**WELL, "dir": f"/{n}"} for n in range(10_000)]
    assert len((await client.push(*many, complete=True)).json()["volumes"]) == 10_000
    one_more = {"broker": "9", "dir": "/", "total_bytes": 1, "available_bytes": 1}
    assert fields(await client.push(*many, one_more)) == ["/volumes"]
    assert len((await client.push(*many)).json()["volumes"]) == 10_000
    refused = await client.push(one_more)
    assert fields(refused) == ["/volumes"], "incomplete pushes make no more volumes known than complete ones"
    assert "10001" in refused.json()["errors"][0]["message"]
    assert len((await client.show())["volumes"]) == 10_000
    assert (await client.forget("2")).status_code == 204
    assert len((await client.push(one_more)).json()["volumes"]) == 1


@pytest.mark.parametrize("path", ["/v1/volumes", "/v1/volumes:drill"])
async def test_a_body_that_cannot_be_read(client: Client, path: str):
    json_ = {"content-type": "application/json"}
    for content, headers, status in (
        (b"{}", {"content-type": "text/plain"}, 415),
        (b"", json_, 400),
        (b"{", json_, 400),
        (b'{"factor": NaN}', json_, 400),
        (b" " * (1024 * 1024 + 1), json_, 413),
        (b'{"volumes": [], "volumes": [], "factor": 1, "factor": 1}', json_, 422),
    ):
        answer = await client.http.post(path, content=content, headers=headers)
        assert answer.status_code == status, (content[:20], answer.text)
        assert answer.headers["content-type"] == "application/problem+json"


@pytest.mark.parametrize(("source", "said"), [(None, "QUOTAGATE_VOLUME_SOURCE"), ("kafka", "source kafka")])
async def test_observation_is_409_unless_the_source_is_push(one_catalog: Catalog, source: Source, said: str):
    async with asking(one_catalog, source) as client:
        answer = await client.push(FULL)
        assert fields(answer, 409) == []
        assert said in answer.json()["detail"]
        assert fields(await client.push(5)) == ["/volumes/0"], "errors come first"
        forgotten = await client.forget("1")
        assert fields(forgotten, 409) == []
        assert said in forgotten.json()["detail"]
        assert client.record.state is None


async def test_volumes_take_at_ms_only_under_the_callers_clock(client: Client):
    assert fields(await client.http.get("/v1/volumes?at_ms=5")) == ["/at_ms"]
    assert fields(await client.push(FULL, query="?at_ms=5")) == ["/at_ms"]
    assert fields(await client.forget("1", at_ms=5)) == ["/at_ms"]
    for method, path in (("GET", "/v1/volumes"), ("DELETE", "/v1/volumes:drill")):
        assert fields(await client.http.request(method, f"{path}?when=5")) == ["/when"]
    drill = {"factor": 0, "for_ms": 1}
    assert fields(await client.http.post("/v1/volumes:drill?at_ms=5", json=drill)) == ["/at_ms"]


async def test_callers_clock_begins_with_the_first_time_and_keeps_the_newest(one_catalog: Catalog):
    async with asking(one_catalog, callers=True) as client:
        assert (await client.show())["valid_until_ms"] is None, "nobody has said yet when it is"
        pushed = (await client.push(WELL, query="?at_ms=5000")).json()
        assert (pushed["since_ms"], pushed["valid_until_ms"]) == (5000, 5000 + 5 * MINUTE)
        assert client.time is not None
        assert (client.time.first_ms, client.time.newest_ms) == (5000, 5000)
        assert (await client.show(f"?at_ms={5001 + 5 * MINUTE}"))["factor"] == 0.5
        assert (await client.show())["factor"] == 1.0
        again = (await client.push(WELL)).json()
        assert (again["since_ms"], again["volumes"][0]["observed_ms"]) == (5000, 5000)
        for wrong in ("-1", "1.0", "x", str(2**53), ""):
            assert fields(await client.http.get(f"/v1/volumes?at_ms={wrong}")) == ["/at_ms"]
            assert fields(await client.push(WELL, query=f"?at_ms={wrong}")) == ["/at_ms"]


async def test_drill_overrides_the_volumes_and_ends_by_itself(client: Client):
    await client.push(FULL)
    begun = await client.drill(1, 10_000)
    assert begun.status_code == 200
    drill = {"factor": 1.0, "since_ms": T0, "until_ms": T0 + 10_000, "who": "admin"}
    assert begun.json()["drill"] == drill
    assert (begun.json()["factor"], begun.json()["since_ms"]) == (1.0, T0)
    assert begun.json()["reason"] == f"drill: by admin, until {T0 + 10_000}"
    client.record.now_ms += 9_999
    assert (await client.show())["factor"] == 1.0
    client.record.now_ms += 1
    after = await client.show()
    assert (after["factor"], after["drill"]) == (0.0, None)
    assert fields(await client.http.delete("/v1/volumes:drill"), 404) == []


async def test_history_records_drills_with_who_and_why(telling: Client):
    await telling.http.put("/v1/quotas/user=alice", json={"request_rate": 5})
    await telling.drill(0.2, 10_000, reason="fire drill")
    telling.record.now_ms += 1
    await telling.drill(0, 5_000)
    ended = await telling.http.delete("/v1/volumes:drill", headers={"x-reason": "enough"})
    assert (ended.status_code, ended.content) == (204, b"")
    assert telling.record.drill is None

    first = {"factor": 0.2, "since_ms": T0, "until_ms": T0 + 10_000, "who": "admin"}
    second = {"factor": 0.0, "since_ms": T0 + 1, "until_ms": T0 + 5_001, "who": "admin"}
    changes = await telling.history()
    assert [(c["before"], c["after"], c["reason"]) for c in changes] == [
        (second, None, "enough"),
        (first, second, None),
        (None, first, "fire drill"),
    ]
    assert {(c["who"], c["entity"]) for c in changes} == {("admin", "throttle_factor")}
    everything = (await telling.http.get("/v1/quotas:history")).json()["changes"]
    assert everything == [*changes, everything[-1]]
    assert everything[-1]["entity"] == "user=alice"
    page = (await telling.http.get("/v1/quotas:history?entity=throttle_factor&limit=2")).json()
    rest = await telling.http.get(
        f"/v1/quotas:history?entity=throttle_factor&limit=2&cursor={page['next_cursor']}"
    )
    assert page["changes"] + rest.json()["changes"] == changes
    of_alice = (await telling.http.get("/v1/quotas:history?entity=user=alice")).json()["changes"]
    assert [c["entity"] for c in of_alice] == ["user=alice"]
    assert fields(await telling.http.get("/v1/quotas:history?entity=throttle")) == ["/entity"]


async def test_a_drill_changes_no_quota_and_no_version(telling: Client):
    await telling.http.put("/v1/quotas/user=alice", json={"request_rate": 5})
    before = await telling.http.get("/v1/quotas")
    await telling.drill()
    after = await telling.http.get("/v1/quotas")
    assert (after.json(), after.headers["etag"]) == (before.json(), before.headers["etag"])


async def test_failed_drill_is_503_and_recorded_in_the_history(telling: Client):
    telling.record.away = {"read", "begin_drill"}
    answer = await telling.drill(0, 10_000, reason="fire drill")
    assert fields(answer, 503) == []
    assert answer.headers["retry-after"] == "1"
    undone, intended = await telling.history()
    assert (intended["before"], intended["reason"]) == (None, "fire drill")
    assert (undone["before"], undone["after"]) == (intended["after"], None)
    assert undone["reason"].startswith("the drill did not begin: ")

    telling.record.away = set()
    await telling.drill(0, 10_000)
    telling.record.away = {"end_drill"}
    assert fields(await telling.http.delete("/v1/volumes:drill"), 503) == []
    undone, intended, begun, *_ = await telling.history()
    assert (intended["after"], undone["after"]) == (None, begun["after"])
    assert undone["reason"].startswith("the drill did not end: ")
    telling.record.away = {"read"}
    assert fields(await telling.http.delete("/v1/volumes:drill"), 503) == []
    assert len(await telling.history()) == 5, "what was not even tried is not recorded"


async def test_without_the_catalog_no_drill_begins_or_ends(client: Client, monkeypatch: pytest.MonkeyPatch):
    await client.drill(0.2)
    drilled = client.record.drill
    monkeypatch.setattr(client.catalog, "note", _away)
    for answer in (await client.drill(0), await client.http.delete("/v1/volumes:drill")):
        assert fields(answer, 503) == []
        assert "history" in answer.json()["detail"]
    assert client.record.drill == drilled


async def _away(*_: object) -> None:
    raise CatalogUnavailableError("it is gone")


async def test_drill_is_refused_when_the_history_cannot_be_written(telling: Client):
    """With a real database: if it refuses the record, the answer is 503, and no drill begins."""
    async with telling.catalog.database.engine.begin() as connection:
        await connection.execute(text("ALTER TABLE changes RENAME TO changes_away"))
    assert fields(await telling.drill(), 503) == []
    assert telling.record.drill is None


@pytest.mark.parametrize(
    ("body", "wrong"),
    [
        (5, [""]),
        ({}, ["/factor", "/for_ms"]),
        ({"factor": 0.5, "for_ms": 1, "until": 5}, ["/until"]),
        ({"factor": 1.01, "for_ms": 1}, ["/factor"]),
        ({"factor": -0.1, "for_ms": 1}, ["/factor"]),
        ({"factor": True, "for_ms": 1}, ["/factor"]),
        ({"factor": None, "for_ms": 1}, ["/factor"]),
        ({"factor": "0", "for_ms": 1}, ["/factor"]),
        ({"factor": 0, "for_ms": 0}, ["/for_ms"]),
        ({"factor": 0, "for_ms": 1.0}, ["/for_ms"]),
        ({"factor": 0, "for_ms": 366 * 86_400_000 + 1}, ["/for_ms"]),
        ({"factor": 0, "for_ms": "PT1M"}, ["/for_ms"]),
        (b'{"factor": 1e999, "for_ms": 1e999}', ["/factor", "/for_ms"]),
    ],
)
async def test_every_fault_of_a_drill_is_named(client: Client, body: Any, wrong: list[str]):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"content-type": "application/json"}
    assert fields(await client.http.post("/v1/volumes:drill", content=content, headers=headers)) == wrong
    assert client.record.drill is None
    assert await client.history() == []


async def test_the_document_has_an_example_of_every_status(client: Client):
    document = json.loads(FILE.read_text(encoding="utf-8"))
    path, drill = document["paths"]["/v1/volumes"], document["paths"]["/v1/volumes:drill"]
    common = {"400", "401", "403", "413", "415", "422", "503"}
    assert set(path["get"]["responses"]) == {"200", "401", "403", "422"}
    assert set(path["post"]["responses"]) == {"200", "409"} | common
    assert set(path["delete"]["responses"]) == {"204", "401", "403", "404", "409", "414", "422", "503"}
    assert set(drill["post"]["responses"]) == {"200"} | common
    assert set(drill["delete"]["responses"]) == {"204", "401", "403", "404", "422", "503"}
    for operation in (path["get"], path["post"], drill["post"]):
        assert operation["responses"]["200"]["content"]["application/json"]["example"].keys() == SHAPE
    assert "whatever the volumes say" in drill["post"]["description"]
    pushed = path["post"]["requestBody"]["content"]["application/json"]["example"]
    assert (await client.http.post("/v1/volumes", json=pushed)).status_code == 200
    begun = drill["post"]["requestBody"]["content"]["application/json"]["example"]
    assert (await client.http.post("/v1/volumes:drill", json=begun)).status_code == 200


async def test_a_method_that_a_path_does_not_take_is_405_with_all_that_it_takes(client: Client):
    for path, allowed in (("/v1/volumes", "DELETE, GET, POST"), ("/v1/volumes:drill", "DELETE, POST")):
        answer = await client.http.put(path, json={})
        assert (answer.status_code, answer.headers["allow"]) == (405, allowed)
