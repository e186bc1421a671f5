"""`effective` shows the quotas that decisions apply."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any
from urllib.parse import quote

import pytest
from httpx import ASGITransport, AsyncClient
from hypothesis import given
from hypothesis import strategies as st

from app.catalog.catalog import Catalog
from app.catalog.snapshot import Snapshot
from app.domain.entity import ANY, Entity
from app.domain.ladder import MatchingRules
from app.domain.oracle import Oracle
from app.domain.quota import KEYS, Defaults
from app.domain.quota_value import resolve
from app.http.wire import encode_decision
from tests.http.application import KEY, app_of, fields
from tests.steps import decode_ask

Who = Mapping[str, str]
Limits = Mapping[tuple[str, Entity], Mapping[str, object]]
EVERYTHING: dict[str, Any] = {key.usage: [] if key.usage == "producer_ids" else 0 for key in KEYS.values()}
EIGHT = [
    "user=alice,client-id=etl",
    "user=alice,client-id=*",
    "user=alice",
    "user=*,client-id=etl",
    "user=*,client-id=*",
    "user=*",
    "client-id=etl",
    "client-id=*",
]


class Node:
    """The route over a catalog that is never opened: quotas are put directly into its snapshot."""

    def __init__(self, rules: MatchingRules, *, timed: bool = False) -> None:
        self.rules = rules
        self.catalog = Catalog("sqlite://", Defaults())
        self.http = AsyncClient(
            transport=ASGITransport(app_of(self.catalog, rules, timed=timed)),
            base_url="http://quotagate",
            headers={"authorization": f"Bearer {KEY}"},
        )
        self.run = asyncio.Runner()

    def holds(self, limits: Limits) -> None:
        changes = [(key, at, resolve(key, said, at, Defaults(), 0)) for (key, at), said in limits.items()]
        self.catalog.snapshot = Snapshot().apply(1, changes)

    def get(self, query: str) -> Any:
        return self.run.run(self.http.get(f"/v1/quotas:effective?{query}"))

    def effective(self, who: Who) -> list[dict[str, Any]]:
        answer = self.get("&".join(f"{name}={quote(said, safe='')}" for name, said in who.items()))
        assert answer.status_code == 200, answer.text
        found: list[dict[str, Any]] = answer.json()["quotas"]
        return found

    def decided(self, who: Who) -> list[tuple[object, ...]]:
        """The quotas that a decision applies, from request bytes to response bytes, by the oracle."""
        ask = json.dumps({**who, "usage": EVERYTHING, "detail": True}).encode()
        decision = Oracle(b"s" * 32).decide(
            decode_ask(ask, "store"), self.catalog.snapshot.quotas, self.rules, 0
        )
        return [said(each) for each in json.loads(encode_decision(decision))["quotas"]]

    def check(self, who: Who) -> None:
        effective = self.effective(who)
        assert [said(each) for each in effective] == self.decided(who)
        for each in effective:
            assert each["limit_now"] == each["limit"]
            first = next(rung for rung in each["ladder"] if rung["limit"] is not None)
            assert first == {"entity": each["entity"], "limit": each["limit"]}


def said(quota: Mapping[str, Any]) -> tuple[object, ...]:
    return quota["quota"], quota["entity"], quota["bucket"], quota["limit"]


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    found = Node(MatchingRules(inter_broker_listener="INTERNAL"))
    yield found
    found.run.run(found.http.aclose())
    found.run.close()


CALLERS = [
    {"principal": "alice", "client_id": "etl"},
    {"principal": "alice", "client_id": ""},
    {"principal": "alice"},
    {"principal": "bob", "client_id": "etl"},
    {"client_id": "etl"},
    {"client_id": ""},
    {},
]


def test_all_eight_levels_in_all_combinations(node: Node):
    for levels in product((False, True), repeat=8):
        chosen = [Entity.parse(level) for level, there in zip(EIGHT, levels, strict=True) if there]
        node.holds({("request_rate", at): {"limit": number} for number, at in enumerate(chosen)})
        for who in CALLERS:
            node.check(who)


names = st.sampled_from(["alice", "*", "a,b", "ü", "INTERNAL", "1"])
spelled = st.sampled_from(["alice", "a,b", "ü", "INTERNAL", "1", "*", "other"])
addresses = st.sampled_from(["10.0.0.7", "10.0.0.8", "2001:db8::7", "2001:db8::8", "::ffff:10.0.0.7"])
EXTRAS: list[dict[str, object]] = [
    {},
    {"scope": "broker"},
    {"shadow": True},
    {"algorithm": "token_bucket"},
    {"enforcement": "deny"},
]


@st.composite
def entities(draw: st.DrawFn, types: tuple[str, ...]) -> Entity:
    def name(type_: str) -> Any:
        if types != ("broker", "listener") and draw(st.booleans()):
            return ANY
        return Entity.parse(f"ip={draw(addresses)}").parts[0][1] if type_ == "ip" else draw(names)

    return Entity(tuple((type_, name(type_)) for type_ in types))


@st.composite
def catalogs(draw: st.DrawFn) -> Limits:
    found: dict[tuple[str, Entity], Mapping[str, object]] = {}
    for key in KEYS.values():
        for _ in range(draw(st.integers(0, 6))):
            entity = draw(entities(draw(st.sampled_from(key.entities))))
            extra = draw(st.sampled_from(EXTRAS))
            if key.algorithm == "producer_ids":
                extra = {name: said for name, said in extra.items() if name in ("scope", "shadow")}
            found[key.name, entity] = {"limit": draw(st.sampled_from([0, 1, 2.5, 7])), **extra}
    return found


callers = st.fixed_dictionaries(
    {},
    optional={
        "principal": spelled,
        "client_id": spelled | st.just(""),
        "ip": addresses,
        "broker": spelled,
        "listener": spelled,
    },
)


@given(catalogs(), st.lists(callers, min_size=1, max_size=4))
def test_effective_limits_match_decisions(node: Node, limits: Limits, askers: list[Who]):
    node.holds(limits)
    for who in askers:
        node.check(who)


def test_the_whole_ladder_is_shown(node: Node):
    node.holds(
        {
            ("request_rate", Entity.parse("user=alice")): {"limit": 100},
            ("request_rate", Entity.parse("user=*")): {"limit": 50.5},
            ("request_rate", Entity.parse("ip=*")): {"limit": 9},
            ("max_connection_creation_rate", Entity.parse("listener=*")): {"limit": 8},
            ("max_connection_creation_rate", Entity.parse("broker=1")): {"limit": 7},
        }
    )
    who = {"principal": "alice", "client_id": "etl", "ip": "2001:DB8::7", "broker": "1", "listener": "L"}
    found = node.effective(who)
    limits = {"user=alice": 100, "user=*": 50.5}
    assert found[0] == {
        "quota": "request_rate",
        "entity": "user=alice",
        "bucket": "user=alice",
        "limit": 100,
        "limit_now": 100,
        "ladder": [{"entity": level, "limit": limits.get(level)} for level in EIGHT],
    }
    address = "ip=2001%3Adb8%3A%3A"
    assert found[1]["bucket"] == f"{address}%2F64"
    assert found[1]["ladder"] == [{"entity": f"{address}7", "limit": None}, {"entity": "ip=*", "limit": 9}]
    assert (found[2]["entity"], found[2]["bucket"]) == ("listener=*", "listener=L;broker=1")
    assert [rung["entity"] for rung in found[2]["ladder"]] == [
        "broker=1,listener=L",
        "listener=L",
        "listener=*",
    ]
    assert (found[3]["entity"], found[3]["bucket"]) == ("broker=1", "broker=1")
    assert [rung["entity"] for rung in found[3]["ladder"]] == ["broker=1", "broker=*"]
    assert len(found) == 4
    assert node.effective({}) == []


def test_empty_client_id_differs_from_no_client_id(node: Node):
    node.holds({("request_rate", Entity.parse("client-id=*")): {"limit": 5}})
    assert node.get("client_id=").json()["quotas"][0]["bucket"] == "client-id="
    assert node.get("principal=alice").json()["quotas"] == []
    assert node.get("principal=alice&ip=&broker=&listener=").json()["quotas"] == []


def test_invalid_caller_is_refused(node: Node):
    for query, field in [
        ("principal=", "/principal"),
        ("ip=localhost", "/ip"),
        ("ip=fe80::1%25eth0", "/ip"),
        ("principal=%00", "/principal"),
        ("client_id=a%C2%80", "/client_id"),
        (f"principal={'a' * 513}", "/principal"),
        ("principal=a&principal=a", "/principal"),
        ("principal=%", "/principal"),
        ("user=alice", "/user"),
        ("client-id=etl", "/client-id"),
        ("at_ms=5", "/at_ms"),
    ]:
        assert fields(node.get(query)) == [field], query
    assert sorted(fields(node.get("principal=&ip=x&colour=red"))) == ["/colour", "/ip", "/principal"]


def test_it_needs_a_key_and_takes_get(node: Node):
    unknown = {"authorization": "Bearer wrong"}
    assert fields(node.run.run(node.http.get("/v1/quotas:effective?x=y", headers=unknown)), 401) == []
    refused = node.run.run(node.http.post("/v1/quotas:effective"))
    assert (refused.status_code, refused.headers["allow"]) == (405, "GET")


def test_effective_limits_take_at_ms_under_the_callers_clock():
    node = Node(MatchingRules(), timed=True)
    assert node.get("principal=alice&at_ms=5").status_code == 200
    assert node.get("principal=alice").status_code == 200
    assert fields(node.get("at_ms=-5")) == ["/at_ms"]
    assert fields(node.get("at_ms=x")) == ["/at_ms"]
    node.run.run(node.http.aclose())
    node.run.close()
