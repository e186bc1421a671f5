"""Kafka's quotas mapped to ours, and the skipped ones; the inputs have the form that real brokers gave."""

from __future__ import annotations

import doctest
import math

import pytest

from app.domain.errors import QuotaValueError
from app.kafka import import_plan, mapping
from app.kafka.import_plan import with_unchanged
from app.kafka.mapping import QuotaMapping, map_quotas
from app.kafka.quotas import Broker, EntityQuotas, KafkaQuotas, Setting
from app.run.commands.quotas import plans

RATE = "max.connection.creation.rate"
EXTERNAL = f"listener.name.external.{RATE}"
OWN_RATE = "max_connection_creation_rate"
LARGEST = 2**53 - 1
EntityAndValues = tuple[dict[str, str | None], dict[str, float]]


def broker(number: int, **settings: tuple[str | None, bool]) -> Broker:
    """A broker as Kafka 4.1.1 describes it; a setting is its value, and whether it is the broker's own."""
    listeners = "INTERNAL://127.0.0.1:19301,EXTERNAL://127.0.0.1:19304,CONTROLLER://127.0.0.1:19302"
    described = {
        RATE: ("2147483647", False),
        "quota.window.num": ("11", False),
        "quota.window.size.seconds": ("1", False),
        "controller.quota.window.num": ("11", False),
        "controller.quota.window.size.seconds": ("1", False),
        "controller.listener.names": ("CONTROLLER", True),
        "listeners": (listeners, True),
        "inter.broker.listener.name": ("INTERNAL", True),
        **{name.replace("_", "."): value for name, value in settings.items()},
    }
    return Broker(str(number), {name: Setting(*value) for name, value in described.items()})


def of(
    *entries: EntityAndValues,
    brokers: tuple[Broker, ...] = (broker(1), broker(2)),
    defaults: dict[str, str | None] | None = None,
    multiply: bool = False,
) -> QuotaMapping:
    quotas = tuple(EntityQuotas(tuple(entity.items()), values) for entity, values in entries)
    return map_quotas(KafkaQuotas(quotas, brokers, defaults or {}), multiply=multiply)


def skipped(found: QuotaMapping) -> list[tuple[str, str, str]]:
    return [(one.entity, one.quota, one.value) for one in found.skipped]


@pytest.mark.parametrize("module", [mapping, import_plan, plans])
def test_doctests_pass(module):
    ran = doctest.testmod(module)
    assert (ran.failed, ran.attempted > 0) == (0, True)


def test_every_level_is_mapped_in_canonical_spelling():
    one = {"producer_byte_rate": 1024.0}
    found = of(
        ({"client-id": "etl", "user": "CN=a b,O=x"}, one),
        ({"user": "alice", "client-id": None}, one),
        ({"user": "<default>"}, one),
        ({"user": None, "client-id": "*"}, one),
        ({"client-id": None, "user": None}, one),
        ({"user": None}, one),
        ({"client-id": "etl"}, one),
        ({"client-id": None}, one),
        ({"ip": None}, {"connection_creation_rate": 5.0}),
        ({"ip": "2001:0db8::0001"}, {"connection_creation_rate": 9.0}),
    )
    assert set(found.quotas) == {
        "user=CN%3Da%20b%2CO%3Dx,client-id=etl",
        "user=alice,client-id=*",
        "user=%3Cdefault%3E",
        "user=*,client-id=%2A",
        "user=*,client-id=*",
        "user=*",
        "client-id=etl",
        "client-id=*",
        "ip=*",
        "ip=2001%3Adb8%3A%3A1",
    }
    assert found.quotas["user=*"] == {"producer_byte_rate": {"limit": 1024, "scope": "broker"}}
    assert found.skipped == []


def test_limits_hold_on_each_broker_except_controller_mutations():
    found = of(({"user": "a"}, {"request_percentage": 12.5, "controller_mutation_rate": 0.5}))
    assert (found.scope, found.times) == ("broker", 1)
    assert found.quotas["user=a"] == {
        "request_percentage": {"limit": 12.5, "scope": "broker"},
        "controller_mutation_rate": {"limit": 0.5, "scope": "cluster"},
    }


def test_multiplied_limits_hold_for_the_cluster():
    found = of(
        ({"user": "a"}, {"request_percentage": 12.5, "controller_mutation_rate": 0.5}),
        ({"ip": None}, {"connection_creation_rate": 5.0}),
        brokers=(broker(1, **{RATE: ("70", True)}), broker(2), broker(3)),
        defaults={EXTERNAL: "20", RATE: "90"},
        multiply=True,
    )
    assert (found.scope, found.times) == ("cluster", 3)
    assert found.quotas == {
        "user=a": {
            "request_percentage": {"limit": 37.5, "scope": "cluster"},
            "controller_mutation_rate": {"limit": 0.5, "scope": "cluster"},
        },
        "ip=*": {"connection_creation_rate": {"limit": 15, "scope": "cluster"}},
        "listener=EXTERNAL": {OWN_RATE: {"limit": 60, "scope": "cluster"}},
        "broker=*": {OWN_RATE: {"limit": 90}},
        "broker=1": {OWN_RATE: {"limit": 70}},
        "broker=1,listener=INTERNAL": {OWN_RATE: {"limit": 70}},
    }


def test_invalid_quotas_are_skipped_with_a_reason_and_the_rest_is_mapped():
    found = of(
        ({"user": "a"}, {"producer_byte_rate": math.nan, "consumer_byte_rate": 0.0, "request_rate": 5.0}),
        ({"user": "b"}, {"producer_byte_rate": 7.5, "consumer_byte_rate": -1.0, "producer_ids_rate": 5.0}),
        ({"client-id-prefix": "etl-"}, {"producer_byte_rate": 5.0}),
        ({"ip": "localhost"}, {"connection_creation_rate": 9.0}),
        ({"ip": "10.0.0.1", "user": "a"}, {"connection_creation_rate": 9.0}),
        ({"user": "a\n"}, {"producer_byte_rate": 5.0}),
        ({"user": ""}, {"producer_byte_rate": 5.0}),
        ({"user": "u" * 600}, {"producer_byte_rate": 5.0}),
        ({"user": "c"}, {"connection_creation_rate": 5.0, "producer_byte_rate": 1235.0000001}),
        brokers=(broker(1, **{RATE: ("0", True)}), broker(2, **{EXTERNAL: (None, True)})),
    )
    assert found.quotas == {"user=c": {"producer_byte_rate": {"limit": 1235, "scope": "broker"}}}
    reasons = {(entity, quota): reason for entity, quota, _, reason in found.skipped}
    for where, why in {
        ("user=a", "producer_byte_rate"): "it is not a number",
        ("user=a", "consumer_byte_rate"): "a limit of 0 would reject all usage",
        ("user=a", "request_rate"): "not supported",
        ("user=b", "producer_byte_rate"): "must be a whole number",
        ("user=b", "consumer_byte_rate"): "below 0",
        ("user=b", "producer_ids_rate"): "not supported",
        ("client-id-prefix=etl-", "producer_byte_rate"): "unknown entity type 'client-id-prefix'",
        ("ip=localhost", "connection_creation_rate"): "not a host name",
        ("ip=10.0.0.1,user=a", "connection_creation_rate"): "do not go together",
        ("user=a%0A", "producer_byte_rate"): "control characters",
        ("user=", "producer_byte_rate"): "empty name",
        (f"user={'u' * 600}", "producer_byte_rate"): "at most 512 bytes",
        ("user=c", "connection_creation_rate"): "cannot be set on user",
        ("broker=1", OWN_RATE): "a limit of 0",
        ("broker=2,listener=EXTERNAL", EXTERNAL): "Kafka does not show it",
    }.items():
        assert why in reasons.pop(where)
    assert reasons == {}


def test_address_in_two_spellings_with_different_limits_is_skipped():
    nine = {"connection_creation_rate": 9.0}
    spellings: list[EntityAndValues] = [({"ip": spelled}, nine) for spelled in ("::1", "0:0:0:0:0:0:0:1")]
    assert of(*spellings).quotas == {
        "ip=%3A%3A1": {"connection_creation_rate": {"limit": 9, "scope": "broker"}}
    }
    found = of(*spellings, ({"ip": "0::1"}, {"connection_creation_rate": 5.0}))
    assert (found.quotas, len(found.skipped)) == ({}, 3)
    assert all("several limits" in one.reason for one in found.skipped)


@pytest.mark.parametrize(
    ("key", "value", "multiply", "limit"),
    [
        ("producer_byte_rate", 9.223372036854776e18, False, LARGEST),
        ("request_percentage", math.inf, False, LARGEST),
        ("producer_byte_rate", float(LARGEST - 1), True, LARGEST),
    ],
)
def test_limit_above_the_largest_becomes_the_largest(key, value, multiply, limit):
    # If this limit were left out, a broader one would apply.
    found = of(({"user": "a"}, {key: value}), multiply=multiply)
    assert found.quotas["user=a"][key]["limit"] == limit
    assert found.skipped == []
    assert found.notes == ["Limits above the largest possible limit, imported as that: 1."]


def test_unlimited_address_stays_unlimited():
    found = of(({"ip": "10.0.0.1"}, {"connection_creation_rate": 2147483647.0}), multiply=True)
    assert found.quotas["ip=10.0.0.1"]["connection_creation_rate"]["limit"] == 2147483647


def test_connection_rates_of_brokers_and_listeners_are_mapped():
    found = of(
        brokers=(
            broker(1, **{RATE: ("70", True), EXTERNAL: ("30", True)}),
            # Its file says 44, but the dynamic default for all brokers overrides the file.
            broker(2, **{RATE: ("100", False), EXTERNAL: ("55", False)}),
        ),
        defaults={RATE: "100", EXTERNAL: "55"},
    )
    assert found.quotas == {
        "broker=*": {OWN_RATE: {"limit": 100}},
        "listener=EXTERNAL": {OWN_RATE: {"limit": 55, "scope": "broker"}},
        "broker=1": {OWN_RATE: {"limit": 70}},
        "broker=1,listener=EXTERNAL": {OWN_RATE: {"limit": 30}},
        # Not counted towards the broker's rate, but with the same limit of its own.
        "broker=1,listener=INTERNAL": {OWN_RATE: {"limit": 70}},
        "broker=2,listener=INTERNAL": {OWN_RATE: {"limit": 100}},
    }
    assert any("QUOTAGATE_INTER_BROKER_LISTENER=INTERNAL" in note for note in found.notes)


def test_single_listener_gets_no_rate_of_its_own():
    alone = {"listeners": ("PLAINTEXT://:9092", False), "inter.broker.listener.name": (None, False)}
    found = of(brokers=(broker(1, **{RATE: ("70", True), **alone}),))
    assert found.quotas == {"broker=1": {OWN_RATE: {"limit": 70}}}
    assert found.notes == []


def test_cluster_without_quotas_maps_to_nothing():
    assert of().quotas == {}


def test_samples_other_than_the_default_are_set():
    window = {"quota.window.num": ("21", True), "quota.window.size.seconds": ("2", True)}
    both = {"producer_byte_rate": 5.0, "controller_mutation_rate": 5.0}
    found = of(({"user": "a"}, both), brokers=(broker(1, **window), broker(2, **window)))
    samples = {"samples": 21, "sample_ms": 2000}
    assert found.quotas["user=a"] == {
        "producer_byte_rate": {"limit": 5, "scope": "broker", **samples},
        "controller_mutation_rate": {"limit": 5, "scope": "cluster"},
    }
    assert found.notes == []


def test_brokers_with_different_samples_are_named_in_a_note():
    differing = broker(2, **{"quota.window.num": ("21", True), RATE: ("7", True)})
    found = of(({"user": "a"}, {"producer_byte_rate": 5.0}), brokers=(broker(1), differing, broker(3)))
    assert found.quotas["user=a"]["producer_byte_rate"] == {"limit": 5, "scope": "broker"}
    assert found.quotas["broker=2"][OWN_RATE] == {"limit": 7, "samples": 21, "sample_ms": 1000}
    assert "quota.window.num" in found.notes[0]
    assert found.notes[0].endswith("not those of broker 2.")


@pytest.mark.parametrize(
    ("window", "message"),
    [({"quota.window.num": ("101", True)}, "samples must be from 1 to 100"),
     ({"quota.window.num": ("1", True)}, "samples must be at least 2 under deny")],
)  # fmt: skip
def test_invalid_samples_are_skipped_with_a_reason(window, message):
    found = of(({"user": "a"}, {"consumer_byte_rate": 5.0}), brokers=(broker(1, **window),))
    assert found.quotas == {}
    assert message in found.skipped[0].reason


def test_fields_that_kafka_does_not_have_stay_unchanged():
    current = {"limit": 9, "enforcement": "deny", "shadow": True, "scope": "cluster", "samples": 21}
    assert with_unchanged("user=a", "producer_byte_rate", {"limit": 5, "scope": "broker"}, current) == {
        "limit": 5,
        "enforcement": "deny",
        "shadow": True,
        "scope": "broker",
    }
    one_sample = {"limit": 5, "scope": "broker", "samples": 1, "sample_ms": 1000}
    with pytest.raises(QuotaValueError, match="at least 2 under deny"):
        with_unchanged("user=a", "producer_byte_rate", one_sample, current)
