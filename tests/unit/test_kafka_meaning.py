"""What Kafka's quotas become here, and what is left out; the shapes are those that real brokers gave."""

from __future__ import annotations

import doctest
import math

import pytest

from app.domain.quota_value import ValueErrors
from app.run.commands import kafka_meaning, plans
from app.run.commands.kafka_meaning import Meaning, beside, meaning
from app.run.kafka_quotas import Broker, Entry, KafkaQuotas, Setting

RATE = "max.connection.creation.rate"
EXTERNAL = f"listener.name.external.{RATE}"
OWN_RATE = "max_connection_creation_rate"
LARGEST = 2**53 - 1
Said = tuple[dict[str, str | None], dict[str, float]]


def broker(number: int, **settings: tuple[str | None, bool]) -> Broker:
    """As a broker of Kafka 4.1.1 describes itself; a setting is its value and whether it is that broker's."""
    listeners = "INTERNAL://127.0.0.1:19301,EXTERNAL://127.0.0.1:19304,CONTROLLER://127.0.0.1:19302"
    said = {
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
    return Broker(str(number), {name: Setting(*value) for name, value in said.items()})


def of(
    *entries: Said,
    brokers: tuple[Broker, ...] = (broker(1), broker(2)),
    defaults: dict[str, str | None] | None = None,
    multiply: bool = False,
) -> Meaning:
    said = tuple(Entry(tuple(entity.items()), values) for entity, values in entries)
    return meaning(KafkaQuotas(said, brokers, defaults or {}), multiply=multiply)


def left(found: Meaning) -> list[tuple[str, str, str]]:
    return [(one.entity, one.quota, one.value) for one in found.left_out]


@pytest.mark.parametrize("module", [kafka_meaning, plans])
def test_the_examples_in_the_code_hold(module):
    ran = doctest.testmod(module)
    assert (ran.failed, ran.attempted > 0) == (0, True)


def test_every_level_is_spelled_canonically():
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
    assert found.left_out == []


def test_limits_hold_on_each_broker_but_for_those_of_the_controller():
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


def test_what_the_service_would_refuse_is_named_and_the_rest_is_taken():
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
    reasons = {(entity, quota): reason for entity, quota, _, reason in found.left_out}
    for where, why in {
        ("user=a", "producer_byte_rate"): "it is no number",
        ("user=a", "consumer_byte_rate"): "a limit of 0 would reject all usage",
        ("user=a", "request_rate"): "not known here",
        ("user=b", "producer_byte_rate"): "must be a whole number",
        ("user=b", "consumer_byte_rate"): "below 0",
        ("user=b", "producer_ids_rate"): "not known here",
        ("client-id-prefix=etl-", "producer_byte_rate"): "unknown entity type 'client-id-prefix'",
        ("ip=localhost", "connection_creation_rate"): "not a host name",
        ("ip=10.0.0.1,user=a", "connection_creation_rate"): "do not go together",
        ("user=a%0A", "producer_byte_rate"): "control characters",
        ("user=", "producer_byte_rate"): "empty name",
        (f"user={'u' * 600}", "producer_byte_rate"): "at most 512 bytes",
        ("user=c", "connection_creation_rate"): "cannot be set on user",
        ("broker=1", OWN_RATE): "a limit of 0",
        ("broker=2,listener=EXTERNAL", EXTERNAL): "Kafka does not tell it",
    }.items():
        assert why in reasons.pop(where)
    assert reasons == {}


def test_an_address_in_two_spellings_needs_one_limit():
    nine = {"connection_creation_rate": 9.0}
    spellings: list[Said] = [({"ip": spelled}, nine) for spelled in ("::1", "0:0:0:0:0:0:0:1")]
    assert of(*spellings).quotas == {
        "ip=%3A%3A1": {"connection_creation_rate": {"limit": 9, "scope": "broker"}}
    }
    found = of(*spellings, ({"ip": "0::1"}, {"connection_creation_rate": 5.0}))
    assert (found.quotas, len(found.left_out)) == ({}, 3)
    assert all("several limits" in one.reason for one in found.left_out)


@pytest.mark.parametrize(
    ("key", "value", "multiply", "limit"),
    [
        ("producer_byte_rate", 9.223372036854776e18, False, LARGEST),
        ("request_percentage", math.inf, False, LARGEST),
        ("producer_byte_rate", float(LARGEST - 1), True, LARGEST),
    ],
)
def test_a_limit_beyond_the_largest_stands_for_no_limit(key, value, multiply, limit):
    # Left out, a broader limit would hold in its place.
    found = of(({"user": "a"}, {key: value}), multiply=multiply)
    assert found.quotas["user=a"][key]["limit"] == limit
    assert found.left_out == []
    assert found.notes == ["Larger than any limit here, and taken as the largest there is: 1."]


def test_addresses_without_a_limit_keep_having_none():
    found = of(({"ip": "10.0.0.1"}, {"connection_creation_rate": 2147483647.0}), multiply=True)
    assert found.quotas["ip=10.0.0.1"]["connection_creation_rate"]["limit"] == 2147483647


def test_rates_of_brokers_and_listeners():
    found = of(
        brokers=(
            broker(1, **{RATE: ("70", True), EXTERNAL: ("30", True)}),
            # Its file says 44, but what all brokers were given goes before that.
            broker(2, **{RATE: ("100", False), EXTERNAL: ("55", False)}),
        ),
        defaults={RATE: "100", EXTERNAL: "55"},
    )
    assert found.quotas == {
        "broker=*": {OWN_RATE: {"limit": 100}},
        "listener=EXTERNAL": {OWN_RATE: {"limit": 55, "scope": "broker"}},
        "broker=1": {OWN_RATE: {"limit": 70}},
        "broker=1,listener=EXTERNAL": {OWN_RATE: {"limit": 30}},
        # Not counted in the broker's rate, and held to the same number by itself.
        "broker=1,listener=INTERNAL": {OWN_RATE: {"limit": 70}},
        "broker=2,listener=INTERNAL": {OWN_RATE: {"limit": 100}},
    }
    assert any("QUOTAGATE_INTER_BROKER_LISTENER=INTERNAL" in note for note in found.notes)


def test_with_one_listener_nothing_is_left_out_of_a_brokers_rate():
    alone = {"listeners": ("PLAINTEXT://:9092", False), "inter.broker.listener.name": (None, False)}
    found = of(brokers=(broker(1, **{RATE: ("70", True), **alone}),))
    assert found.quotas == {"broker=1": {OWN_RATE: {"limit": 70}}}
    assert found.notes == []


def test_without_any_rate_nothing_is_set():
    assert of().quotas == {}


def test_other_samples_than_usual_are_set():
    window = {"quota.window.num": ("21", True), "quota.window.size.seconds": ("2", True)}
    both = {"producer_byte_rate": 5.0, "controller_mutation_rate": 5.0}
    found = of(({"user": "a"}, both), brokers=(broker(1, **window), broker(2, **window)))
    samples = {"samples": 21, "sample_ms": 2000}
    assert found.quotas["user=a"] == {
        "producer_byte_rate": {"limit": 5, "scope": "broker", **samples},
        "controller_mutation_rate": {"limit": 5, "scope": "cluster"},
    }
    assert found.notes == []


def test_brokers_that_differ_in_their_samples_are_named():
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
def test_samples_that_cannot_be_are_named(window, message):
    found = of(({"user": "a"}, {"consumer_byte_rate": 5.0}), brokers=(broker(1, **window),))
    assert found.quotas == {}
    assert message in found.left_out[0].reason


def test_what_kafka_has_no_word_for_stays():
    standing = {"limit": 9, "enforcement": "deny", "shadow": True, "scope": "cluster", "samples": 21}
    assert beside("user=a", "producer_byte_rate", {"limit": 5, "scope": "broker"}, standing) == {
        "limit": 5,
        "enforcement": "deny",
        "shadow": True,
        "scope": "broker",
    }
    one_sample = {"limit": 5, "scope": "broker", "samples": 1, "sample_ms": 1000}
    with pytest.raises(ValueErrors, match="at least 2 under deny"):
        beside("user=a", "producer_byte_rate", one_sample, standing)
