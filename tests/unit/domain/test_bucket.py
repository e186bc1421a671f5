"""Bucket names: how they are parsed, and which quotas charge a bucket."""

from __future__ import annotations

import re

import pytest

from app.domain.ask import Ask
from app.domain.bucket import NOTHING, BucketName
from app.domain.entity import Entity
from app.domain.errors import EntityError
from app.domain.ladder import MatchingRules, Quotas, applied_quotas
from app.domain.quota import KEYS, Quota, Scope
from tests.contract.histories import entities_of

RULES = MatchingRules(inter_broker_listener="REPLICATION")


def quotas(key: str, *entities: str, scope: Scope = "cluster") -> Quotas:
    row = KEYS[key]
    quota = Quota(key, 5, row.algorithm, row.enforcement, scope=scope, burst=5)
    return {key: {Entity.parse(entity): quota for entity in entities}}


def charging(bucket: str, all_quotas: Quotas) -> list[str]:
    """The entities whose quotas charge a bucket."""
    return [found.entity for found in BucketName.parse(bucket, RULES).charged_by(all_quotas, RULES)]


@pytest.mark.parametrize(
    ("sent", "canonical"),
    [
        ("user=alice", "user=alice"),
        ("client-id=etl,user=a b", "user=a%20b,client-id=etl"),
        ("user=%2A", "user=%2A"),
        ("client-id=", "client-id="),
        ("user=alice,client-id=", "user=alice,client-id="),
        ("ip=::ffff:10.0.0.7", "ip=10.0.0.7"),
        ("ip=2001:DB8:0::7", "ip=2001%3Adb8%3A%3A7"),
        ("ip=2001:db8::/64", "ip=2001%3Adb8%3A%3A%2F64"),
        ("ip=2001%3Adb8%3A%3A7%2F64", "ip=2001%3Adb8%3A%3A%2F64"),
        ("listener=EXTERNAL,broker=1", "broker=1,listener=EXTERNAL"),
        ("listener=EXTERNAL;broker=1", "listener=EXTERNAL;broker=1"),
        ("user=alice;broker=a/b", "user=alice;broker=a%2Fb"),
    ],
)
def test_bucket_name_is_spelled_as_in_decisions(sent: str, canonical: str):
    assert str(BucketName.parse(sent, RULES)) == canonical
    assert str(BucketName.parse(canonical, RULES)) == canonical


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("", "unknown entity type"),
        ("alice", "unknown entity type"),
        ("user=", "empty name for user"),
        ("user=*", "is a default, which has no bucket"),
        ("user=alice,client-id=*", "is a default, which has no bucket"),
        ("ip=*", "is a default, which has no bucket"),
        ("user=alice;broker=*", "is a default, which has no bucket"),
        ("user=alice;broker=", "empty name for broker"),
        ("broker=1;broker=1", "already names its broker"),
        ("broker=1,listener=L;broker=1", "already names its broker"),
        ("ip=10.0.0.7,user=alice", "do not go together"),
        ("ip=localhost", "not a host name"),
        ("ip=fe80::1%25eth0", "without a zone"),
        ("ip=fe80::1%25eth0/64", "without a zone"),
        ("ip=2001:db8::/48", "IPv6 networks of /64"),
        ("ip=2001:db8::/", "IPv6 networks of /64"),
        ("ip=10.0.0.0/64", "IPv6 networks of /64"),
        ("user=%zz", "a percent sign is written %25"),
        ("user=" + "a" * 513, "at most 512 bytes"),
        ("user=a%00", "control characters"),
    ],
)
def test_invalid_bucket_name_is_refused_with_the_reason(name: str, why: str):
    with pytest.raises(EntityError, match=re.escape(why)):
        BucketName.parse(name, RULES)


@pytest.mark.parametrize(
    ("bucket", "entities", "charge"),
    [
        ("user=alice", ["user=alice", "user=*"], ["user=alice"]),
        ("user=alice", ["user=*"], ["user=*"]),
        ("user=alice", ["user=bob", "user=alice,client-id=etl", "client-id=*"], []),
        ("user=alice,client-id=etl", ["user=*,client-id=*"], ["user=*,client-id=*"]),
        # the user's own quota comes before those that have pairs under the default user
        ("user=alice,client-id=etl", ["user=*,client-id=etl", "user=alice"], []),
        ("user=alice,client-id=etl", ["user=alice,client-id=*", "user=alice"], ["user=alice,client-id=*"]),
        ("client-id=etl", ["client-id=*", "user=*"], ["client-id=*"]),
        ("client-id=", ["client-id=*"], ["client-id=*"]),
        ("ip=10.0.0.7", ["ip=10.0.0.7", "ip=*"], ["ip=10.0.0.7"]),
        ("ip=10.0.0.7", ["ip=*", "user=*"], ["ip=*"]),
        ("ip=2001:db8::/64", ["ip=*", "ip=2001:db8::"], ["ip=*"]),
        ("ip=2001:db8::", ["ip=*", "ip=2001:db8::"], ["ip=2001%3Adb8%3A%3A"]),
        ("ip=2001:db8::7", ["ip=*"], []),  # the address shares the bucket of its network
    ],
)
def test_ladder_decides_which_quota_charges_a_bucket(bucket: str, entities: list[str], charge: list[str]):
    assert charging(bucket, quotas("request_rate", *entities)) == charge


@pytest.mark.parametrize(
    ("bucket", "entities", "scope", "charge"),
    [
        ("broker=1", ["broker=*", "listener=*"], "cluster", ["broker=*"]),
        ("listener=L", ["listener=*", "broker=*"], "broker", ["listener=*"]),  # of asks without a broker
        ("listener=L", ["listener=L", "listener=*"], "cluster", ["listener=L"]),
        ("listener=L;broker=1", ["listener=L"], "broker", ["listener=L"]),
        ("listener=L;broker=1", ["listener=L"], "cluster", []),
        ("listener=L;broker=1", ["listener=L", "broker=1,listener=L"], "broker", []),
        ("broker=1,listener=L", ["listener=L", "broker=1,listener=L"], "broker", ["broker=1,listener=L"]),
        ("broker=1,listener=L", ["listener=L", "broker=1"], "broker", []),
        ("broker=1,listener=REPLICATION", ["broker=1,listener=REPLICATION"], "cluster", None),
    ],
)
def test_brokers_listeners_and_scopes(
    bucket: str, entities: list[str], scope: Scope, charge: list[str] | None
):
    all_quotas = quotas("max_connection_creation_rate", *entities, scope=scope)
    assert charging(bucket, all_quotas) == (charge if charge is not None else entities)


def test_bucket_is_charged_by_the_quota_that_the_ask_matched():
    """For every quota key, and every pair of entities that the machine of the contract tests uses."""
    asks = [
        Ask(NOTHING, (), principal, client, ip, broker, listener)
        for principal in (None, "a")
        for client in (None, "c", "")
        for ip in (None, "10.0.0.1", "2001:db8::1")
        for broker in (None, "1")
        for listener in (None, "L")
    ]
    looked = 0
    for key in KEYS:
        for one in entities_of(key):
            for other in entities_of(key):
                for scope in ("cluster", "broker"):
                    all_quotas = quotas(key, str(one), str(other), scope=scope)
                    for found in (each for ask in asks for each in applied_quotas(ask, all_quotas, RULES)):
                        assert found in BucketName.parse(found.bucket, RULES).charged_by(all_quotas, RULES)
                        looked += 1
    assert looked > 1_000
