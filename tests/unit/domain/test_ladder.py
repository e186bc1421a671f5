"""Which quota applies and which bucket it charges: the ladder, addresses, listeners, scope."""

from __future__ import annotations

from dataclasses import replace

import pytest

from app.domain.ask import Ask
from app.domain.entity import ANY, COMBINATIONS, TYPES, Entity
from app.domain.ladder import AppliedQuota, MatchingRules, applied_quotas
from app.domain.quota import KEYS, Quota, QuotaKey, Scope

USER, CLIENT = "alice", "etl"
LEVELS = (
    (Entity.of(user=USER, client_id=CLIENT), "user=alice,client-id=etl"),
    (Entity.of(user=USER, client_id=ANY), "user=alice,client-id=etl"),
    (Entity.of(user=USER), "user=alice"),
    (Entity.of(user=ANY, client_id=CLIENT), "user=alice,client-id=etl"),
    (Entity.of(user=ANY, client_id=ANY), "user=alice,client-id=etl"),
    (Entity.of(user=ANY), "user=alice"),
    (Entity.of(client_id=CLIENT), "client-id=etl"),
    (Entity.of(client_id=ANY), "client-id=etl"),
)


def quota(key: str, scope: Scope = "cluster") -> Quota:
    row = KEYS[key]
    return Quota(key, 5, row.algorithm, row.enforcement, scope=scope)


def found(
    key: str, entities: list[Entity], ask: Ask, rules: MatchingRules | None = None
) -> list[AppliedQuota]:
    return applied_quotas(ask, {key: dict.fromkeys(entities, quota(key))}, rules or MatchingRules())


def buckets(
    key: str, entities: list[Entity], ask: Ask, rules: MatchingRules | None = None
) -> list[tuple[str, str]]:
    return [(one.entity, one.bucket) for one in found(key, entities, ask, rules)]


ASK = Ask({"requests": 1, "connections": 1}, principal=USER, client_id=CLIENT)


@pytest.mark.parametrize("level", range(8))
def test_first_matching_rung_decides(level: int):
    entities = [entity for entity, _ in LEVELS[level:]]
    strangers = [Entity.of(user="bob"), Entity.of(client_id="b"), Entity.of(user="bob", client_id=CLIENT)]
    entity, bucket = LEVELS[level]
    assert buckets("request_rate", [*reversed(entities), *strangers], ASK) == [(str(entity), bucket)]


def test_each_quota_key_has_its_own_ladder():
    quotas = {
        "request_rate": {Entity.of(user=USER): quota("request_rate")},
        "producer_byte_rate": {Entity.of(client_id=ANY): quota("producer_byte_rate")},
    }
    ask = replace(ASK, usage={"requests": 1, "produce_bytes": 1})
    assert [(a.quota.key, a.bucket) for a in applied_quotas(ask, quotas, MatchingRules())] == [
        ("request_rate", "user=alice"),
        ("producer_byte_rate", "client-id=etl"),
    ]


ALL = [entity for entity, _ in LEVELS]


def test_ask_without_client_or_principal_skips_rungs_that_need_one():
    assert buckets("request_rate", ALL, replace(ASK, client_id=None)) == [("user=alice", "user=alice")]
    assert buckets("request_rate", ALL, replace(ASK, principal=None)) == [("client-id=etl", "client-id=etl")]
    assert buckets("request_rate", ALL, replace(ASK, principal=None, client_id=None)) == []


def test_empty_client_id_falls_under_the_defaults():
    ask = replace(ASK, client_id="")
    assert buckets("request_rate", [Entity.of(client_id=ANY)], ask) == [("client-id=*", "client-id=")]
    assert buckets("request_rate", [Entity.of(user=ANY, client_id=ANY)], ask) == [
        ("user=*,client-id=*", "user=alice,client-id=")
    ]


def test_quota_without_its_usage_field_does_not_apply():
    assert found("producer_byte_rate", ALL, ASK) == []
    assert found("producer_ids_rate", [Entity.of(user=ANY)], ASK) == []
    assert len(found("producer_ids_rate", [Entity.of(user=ANY)], replace(ASK, producer_ids=()))) == 1


def test_request_rate_may_match_by_client_and_by_address():
    ask = replace(ASK, ip="10.0.0.7")
    entities = [Entity.of(ip=ANY), Entity.of(user=ANY)]
    assert [a.entity for a in found("request_rate", entities, ask)] == ["user=*", "ip=*"]


def test_address_goes_before_the_default_and_its_network_bucket():
    by_default, own = Entity.of(ip=ANY), Entity.of(ip="2001:db8::7")
    ask = replace(ASK, ip="2001:db8::7")
    assert buckets("connection_creation_rate", [by_default], ask) == [("ip=*", "ip=2001%3Adb8%3A%3A%2F64")]
    assert buckets("connection_creation_rate", [by_default], ask, MatchingRules(ipv6_prefix=48)) == [
        ("ip=*", "ip=2001%3Adb8%3A%3A%2F48")
    ]
    assert buckets("connection_creation_rate", [by_default, own], ask) == [(str(own), str(own))]
    ask = replace(ASK, ip="10.0.0.7")
    assert buckets("connection_creation_rate", [by_default, own], ask) == [("ip=*", "ip=10.0.0.7")]


LISTENERS = [
    Entity.of(broker="1", listener="L"),
    Entity.of(listener="L"),
    Entity.of(listener=ANY),
    Entity.of(broker="1"),
    Entity.of(broker=ANY),
]
AT_BROKER = Ask({"connections": 1}, broker="1", listener="L")


def test_listener_on_a_broker_goes_first_and_the_broker_applies_too():
    key = "max_connection_creation_rate"
    assert [a.entity for a in found(key, LISTENERS, AT_BROKER)] == ["broker=1,listener=L", "broker=1"]
    assert buckets(key, LISTENERS[1:3] + LISTENERS[4:], AT_BROKER) == [
        ("listener=L", "listener=L"),
        ("broker=*", "broker=1"),
    ]
    assert buckets(key, LISTENERS[2:3], AT_BROKER) == [("listener=*", "listener=L")]
    assert buckets(key, LISTENERS, replace(AT_BROKER, broker=None)) == [("listener=L", "listener=L")]
    assert buckets(key, LISTENERS, replace(AT_BROKER, listener=None)) == [("broker=1", "broker=1")]


def test_inter_broker_listener_is_exempt_from_the_broker_limit():
    rules = MatchingRules(inter_broker_listener="L")
    key = "max_connection_creation_rate"
    assert [a.entity for a in found(key, LISTENERS, AT_BROKER, rules)] == ["broker=1,listener=L"]
    other = replace(AT_BROKER, listener="M")
    assert [a.entity for a in found(key, LISTENERS, other, rules)] == ["listener=*", "broker=1"]


@pytest.mark.parametrize("key", ["request_rate", "request_percentage"])
def test_cluster_actions_are_exempt_from_request_quotas(key: str):
    ask = replace(ASK, usage={KEYS[key].usage: 1, "fetch_bytes": 1}, cluster_action=True)
    assert found(key, ALL, ask) == []
    assert len(found("consumer_byte_rate", ALL, ask)) == 1


@pytest.mark.parametrize(
    ("key", "entity", "ask", "bucket"),
    [
        ("request_rate", Entity.of(user=ANY), replace(ASK, broker="1"), "user=alice;broker=1"),
        ("request_rate", Entity.of(user=ANY), ASK, "user=alice"),
        ("max_connection_creation_rate", Entity.of(listener=ANY), AT_BROKER, "listener=L;broker=1"),
        ("max_connection_creation_rate", LISTENERS[0], AT_BROKER, "broker=1,listener=L"),
        ("max_connection_creation_rate", Entity.of(broker=ANY), AT_BROKER, "broker=1"),
    ],
)
def test_scope_broker_gives_each_broker_its_own_bucket(key: str, entity: Entity, ask: Ask, bucket: str):
    (one,) = applied_quotas(ask, {key: {entity: quota(key, "broker")}}, MatchingRules())
    assert one.bucket == bucket


@pytest.mark.parametrize(
    ("entity", "ask", "owner"),
    [
        (LEVELS[0][0], ASK, "user=alice"),
        (LEVELS[2][0], ASK, "user=alice"),
        (LEVELS[6][0], ASK, "client-id=etl"),
        (Entity.of(ip=ANY), replace(ASK, ip="10.0.0.7"), "ip=10.0.0.7"),
    ],
)
def test_bucket_owner_is_its_user_or_itself(entity: Entity, ask: Ask, owner: str):
    (one,) = found("request_rate", [entity], ask)
    assert one.owner == owner


NAMED = {"user": USER, "client-id": CLIENT, "ip": "10.0.0.7", "broker": "1", "listener": "L"}


def entities_that_apply(key: str, types: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """The entities of these types, by name and by default, and those that apply to an ask that names them."""
    names = {type_: NAMED[type_] for type_ in types}
    user, client, ip, broker, listener = map(names.get, TYPES)
    ask = Ask({KEYS[key].usage: 1}, (1,), user, client, ip, broker, listener)
    entities = [Entity(tuple(names.items()))]
    if types != ("broker", "listener"):  # a pair of these has no default
        entities.append(Entity(tuple((type_, ANY) for type_ in types)))
    applied = [one.entity for entity in entities for one in found(key, [entity], ask)]
    return [str(entity) for entity in entities], applied


@pytest.mark.parametrize(
    ("key", "types"), [(key.name, types) for key in KEYS.values() for types in key.entities]
)
def test_quota_applies_wherever_it_can_be_set(key: str, types: tuple[str, ...]):
    entities, applied = entities_that_apply(key, types)
    assert applied == entities


@pytest.mark.parametrize("types", sorted(COMBINATIONS))
def test_quota_of_a_new_key_applies_wherever_it_can_be_set(
    monkeypatch: pytest.MonkeyPatch, types: tuple[str, ...]
):
    new = QuotaKey("new_rate", "requests", (types,), "deny", "sampled_rate", False, 5)
    monkeypatch.setitem(KEYS, "new_rate", new)
    entities, applied = entities_that_apply("new_rate", types)
    assert applied == entities


def test_applied_quotas_are_in_tie_breaking_order():
    usage: dict[str, float] = {row.usage: 1 for row in KEYS.values() if row.usage != "producer_ids"}
    ask = Ask(usage, (1,), USER, CLIENT, "10.0.0.7", "1", "L")
    entities = [Entity.of(user=ANY), Entity.of(ip=ANY), Entity.of(listener=ANY), Entity.of(broker=ANY)]
    quotas = {
        key: {e: quota(key) for e in entities if e.types in KEYS[key].entities}
        for key in reversed(list(KEYS))
    }
    found = [(a.quota.key, a.entity) for a in applied_quotas(ask, quotas, MatchingRules())]
    assert list(dict.fromkeys(key for key, _ in found)) == list(KEYS)
    assert found[1:3] == [("request_rate", "user=*"), ("request_rate", "ip=*")]
    assert [entity for key, entity in found if key == "max_connection_creation_rate"] == [
        "listener=*",
        "broker=*",
    ]
