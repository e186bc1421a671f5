"""Importing the quotas of a real Kafka cluster: afterwards Quotagate has the limits that Kafka enforces."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import Iterator
from itertools import product
from typing import Any, Final

import pytest
from kafka import KafkaAdminClient

from app.kafka import quotas as kafka_quotas
from app.kafka.errors import KafkaError
from tests.commands import Command, Ran, ask, quotagate
from tests.kafka import brokers, odd_broker, tool
from tests.kafka.brokers import Cluster
from tests.kafka.quotas import (
    DEFAULT,
    Level,
    alter,
    described,
    kafkas_bucket,
    kafkas_level,
    produced_limit,
)
from tests.report import say
from tests.service import Service, eventually, running

__all__ = ["ask", "quotagate"]

RATE: Final = "max.connection.creation.rate"
OWN_RATE: Final = "max_connection_creation_rate"
BYTES: Final = 400_000

# Each level has a different limit, so a limit shows its level.
LEVELS: Final[dict[Level, int]] = {
    ("alice", "etl"): 8_000,
    ("alice", DEFAULT): 7_000,
    ("alice", None): 6_000,
    (DEFAULT, "etl"): 5_000,
    (DEFAULT, DEFAULT): 4_000,
    (DEFAULT, None): 3_000,
    (None, "etl"): 2_000,
    (None, DEFAULT): 1_000,
}
# Levels are found for each key on its own, so the others are set on some of them only.
ALSO: Final[dict[Level, dict[str, float]]] = {
    ("alice", "etl"): {"request_percentage": 12.5},
    (DEFAULT, None): {"consumer_byte_rate": 3_333, "controller_mutation_rate": 0.75},
    (None, "etl"): {"consumer_byte_rate": 2_222, "controller_mutation_rate": 2},
    (None, DEFAULT): {"request_percentage": 150},
}
USERS: Final = ("alice", "bob", None)
CLIENTS: Final = ("etl", "other", None)


@pytest.fixture(scope="module")
def running_node() -> Iterator[Service]:
    with running() as node:
        yield node


@pytest.fixture
def node(running_node: Service) -> Service:
    """A node with an empty catalog."""
    forget(running_node)
    return running_node


@pytest.fixture
def admin(cluster: Cluster) -> Iterator[KafkaAdminClient]:
    """Kafka's admin client; quotas that a test set are removed afterwards."""
    client = KafkaAdminClient(**cluster.properties)
    try:
        yield client
        leave_nothing(cluster, client)
    finally:
        client.close()


@pytest.fixture(scope="module")
def strict() -> Iterator[Cluster]:
    """A separate cluster, with limits in files, longer windows, and an authorizer."""
    with brokers.running(
        properties={
            RATE: 70,
            f"listener.name.ssl.{RATE}": 30,
            "quota.window.num": 21,
            "controller.quota.window.size.seconds": 2,
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "super.users": "User:ANONYMOUS;User:admin",
        },
    ) as started:
        yield started


def listed(node: Service) -> dict[str, Any]:
    found = node.http.get("/v1/quotas", params={"limit": 1000}).json()["quotas"]
    return {one["entity"]: one["quotas"] for one in found}


def forget(node: Service) -> None:
    gone = [{"entity": entity, "quotas": dict.fromkeys(quotas)} for entity, quotas in listed(node).items()]
    assert node.http.post("/v1/quotas:apply", json={"alterations": gone}).is_success


def leave_nothing(cluster: Cluster, admin: KafkaAdminClient) -> None:
    for entity, values in described(admin).items():
        names = dict(entity)
        if "ip" in names:
            name = ("--ip-defaults",) if names["ip"] is None else ("--ip", names["ip"])
            configure(cluster, *name, "--delete-config", ",".join(values))
        else:
            level = tuple(
                (DEFAULT if names[type_] is None else names[type_]) if type_ in names else None
                for type_ in ("user", "client-id")
            )
            alter(admin, {(level[0], level[1]): dict.fromkeys(values)})
    eventually(lambda: not described(admin))


def configure(cluster: Cluster, *arguments: str) -> None:
    """Change something with Kafka's own tool."""
    tool.run("kafka.admin.ConfigCommand", "--bootstrap-server", cluster.bootstrap, "--alter", *arguments)


def named(level: Level) -> list[str]:
    """A level as options of Kafka's tool."""
    user, client = level
    found = []
    for name, one, default in (
        (user, "--user", "--user-defaults"),
        (client, "--client", "--client-defaults"),
    ):
        if name is not None:
            found += [default] if name == DEFAULT else [one, name]
    return found


def effective(node: Service, **who: str | None) -> dict[str, tuple[float, str]]:
    """The limit and the bucket of every quota that applies to a caller."""
    asked = {name: value for name, value in who.items() if value is not None}
    found = node.http.get("/v1/quotas:effective", params=asked).json()["quotas"]
    return {one["quota"]: (one["limit"], one["bucket"]) for one in found}


def expected(levels: dict[str, dict[Level, float]], user: str | None, client: str | None) -> dict[str, Any]:
    """The limits that Kafka enforces on broker 2 by its rule, for each key separately."""
    found = {}
    for key, limits in levels.items():
        if level := kafkas_level(limits, user, client):
            # The one active controller counts mutations; each broker counts everything else by itself.
            scope = "" if key == "controller_mutation_rate" else ";broker=2"
            found[key] = (limits[level], kafkas_bucket(level, user, client) + scope)
    return found


def imported(ask: Command, cluster: Cluster, *options: str) -> dict[str, Any]:
    ran = ask("quotas", "import", "--from-kafka", cluster.bootstrap, "-o", "json", *options)
    assert (ran.code, ran.err) == (0, "")
    report: dict[str, Any] = json.loads(ran.out)
    return report


def test_every_level_applies_as_in_kafka(
    ask: Command, node: Service, cluster: Cluster, admin: KafkaAdminClient
):
    for level, limit in LEVELS.items():
        said = {"producer_byte_rate": limit, **ALSO.get(level, {})}
        configure(
            cluster, *named(level), "--add-config", ",".join(f"{key}={value}" for key, value in said.items())
        )
    levels: dict[str, dict[Level, float]] = {"producer_byte_rate": dict(LEVELS)}
    for level, values in ALSO.items():
        for key, value in values.items():
            levels.setdefault(key, {})[level] = value
    report = imported(ask, cluster)
    assert {change["change"] for change in report["changes"]} == {"added"}
    assert (len(report["changes"]), report["left_out"], report["multiplied_by"]) == (14, [], 1)
    # First all eight, then one fewer at a time, so that each applies once.
    while levels["producer_byte_rate"]:
        for user, client in product(USERS, CLIENTS):
            found = effective(node, principal=user, client_id=client, broker="2")
            assert found == expected(levels, user, client), (levels, user, client)
        top = next(iter(levels["producer_byte_rate"]))
        alter(admin, {top: dict.fromkeys(key for key, limits in levels.items() if top in limits)})
        for limits in levels.values():
            limits.pop(top, None)
        forget(node)
        imported(ask, cluster)


def test_imported_limit_equals_what_the_broker_enforces(
    ask: Command, node: Service, cluster: Cluster, admin: KafkaAdminClient
):
    admin.create_topics({"limits": {"assignments": {0: [2]}}})

    def compare(user: str, client: str) -> int:
        configuration = {**cluster.properties_of("SASL_PLAINTEXT", user), "client_id": client}
        server = f"127.0.0.1:{cluster.brokers[2].ports['SASL_PLAINTEXT']}"
        by_kafka = produced_limit(configuration, server, "limits", BYTES)
        # Kafka takes an empty client-id for none.
        here, _ = effective(node, principal=user, client_id=client or None, broker="2")["producer_byte_rate"]
        assert by_kafka == pytest.approx(here, rel=0.02), (user, client)
        say(f"{user} {client!r}: Kafka holds to {by_kafka:.0f} bytes a second, Quotagate to {here}")
        return int(here)

    alter(admin, {level: {"producer_byte_rate": limit} for level, limit in LEVELS.items()})
    imported(ask, cluster)
    seen = [compare(user, client) for user, client in product(("alice", "bob"), ("etl", "other", ""))]
    users = [level for level in LEVELS if level[0] is not None]
    alter(admin, {level: {"producer_byte_rate": None} for level in users})
    forget(node)
    imported(ask, cluster)
    seen += [compare("carol", client) for client in ("etl", "other")]
    assert seen == list(LEVELS.values())


def test_second_import_changes_nothing_and_removes_nothing(
    ask: Command, node: Service, cluster: Cluster, admin: KafkaAdminClient
):
    node.put("user=alice", producer_ids_rate=5, producer_byte_rate={"limit": 1, "shadow": True})
    node.put("user=zoe", producer_byte_rate=9)
    alter(admin, {("alice", None): {"producer_byte_rate": 6_000}, (None, "etl"): {"request_percentage": 5}})
    planned = imported(ask, cluster, "--dry-run")
    assert set(listed(node)) == {"user=alice", "user=zoe"}
    done = imported(ask, cluster, "--reason", "the move")
    assert (done["changes"], done["version"] > planned["version"]) == (planned["changes"], True)
    assert listed(node) == {
        "client-id=etl": {"request_percentage": {"limit": 5, "scope": "broker"}},
        "user=alice": {
            "producer_ids_rate": {"limit": 5},
            "producer_byte_rate": {"limit": 6_000, "shadow": True, "scope": "broker"},
        },
        "user=zoe": {"producer_byte_rate": {"limit": 9}},
    }
    newest = node.http.get("/v1/quotas:history").json()["changes"][0]
    assert newest["reason"] == "the move"
    again = imported(ask, cluster)
    assert (again["changes"], again["version"]) == ([], done["version"])
    alter(
        admin, {("alice", None): {"producer_byte_rate": 7_000}, (None, "etl"): {"request_percentage": None}}
    )
    changed = imported(ask, cluster)["changes"]
    assert [(one["entity"], one["change"], one["after"]["limit"]) for one in changed] == [
        ("user=alice", "changed", 7_000)
    ]
    assert "client-id=etl" in listed(node)


def test_multiplied_limits_hold_for_the_whole_cluster(
    ask: Command, node: Service, cluster: Cluster, admin: KafkaAdminClient
):
    alter(admin, {("alice", None): {"producer_byte_rate": 6_000, "controller_mutation_rate": 3}})
    ran = ask("quotas", "import", "--from-kafka", cluster.bootstrap, "--multiply-by-brokers")
    assert ran.code == 0, ran.err
    assert f"Kafka at {cluster.bootstrap}: 2 brokers (1, 2)." in ran.out
    assert "Limits are multiplied by 2, the number of brokers" in ran.out
    assert (
        "controller_mutation_rate is enforced by the one active controller: it is not multiplied" in ran.out
    )
    assert ran.out.splitlines()[-1].startswith("Applied. The catalog is at version ")
    assert effective(node, principal="alice", broker="2") == {
        "producer_byte_rate": (12_000, "user=alice"),
        "controller_mutation_rate": (3, "user=alice"),
    }


def test_quotas_that_cannot_be_imported_are_named(
    ask: Command, node: Service, cluster: Cluster, admin: KafkaAdminClient
):
    configure(cluster, "--ip", "localhost", "--add-config", "connection_creation_rate=5")
    configure(cluster, "--ip", "2001:0db8::0001", "--add-config", "connection_creation_rate=6")
    odd = {"producer_byte_rate": float("nan"), "consumer_byte_rate": float(2**63 - 1)}
    alter(admin, {("a b", None): odd, (None, "etl"): {"producer_byte_rate": 7}})
    ran = ask("quotas", "import", "--from-kafka", cluster.bootstrap)
    assert ran.code == 0, ran.err
    report = [" ".join(line.split()) for line in ran.out.splitlines()]
    assert (
        "ip=localhost connection_creation_rate 5 ip must be an IPv4 or IPv6 address, not a host name"
        in report
    )
    assert "user=a%20b producer_byte_rate nan it is not a number" in report
    assert listed(node) == {
        "client-id=etl": {"producer_byte_rate": {"limit": 7, "scope": "broker"}},
        "ip=2001%3Adb8%3A%3A1": {"connection_creation_rate": {"limit": 6, "scope": "broker"}},
        "user=a%20b": {"consumer_byte_rate": {"limit": 2**53 - 1, "scope": "broker"}},
    }
    left_out = imported(ask, cluster)["left_out"]
    assert [(one["entity"], one["value"]) for one in left_out] == [
        ("ip=localhost", "5"),
        ("user=a%20b", "nan"),
    ]


def test_rates_of_brokers_and_listeners_are_imported(ask: Command, node: Service, cluster: Cluster):
    ssl, sasl = f"listener.name.ssl.{RATE}", f"listener.name.sasl_ssl.{RATE}"
    everywhere, one = ("--broker-defaults",), ("--broker", "1")
    try:
        configure(cluster, *everywhere, "--add-config", f"{RATE}=900,{ssl}=55")
        configure(cluster, *one, "--add-config", f"{RATE}=700,{sasl}=30")
        eventually(lambda: len(imported(ask, cluster, "--dry-run")["changes"]) == 6)
        report = imported(ask, cluster)
        assert any("QUOTAGATE_INTER_BROKER_LISTENER=PLAINTEXT" in note for note in report["notes"])
    finally:
        configure(cluster, *one, "--delete-config", f"{RATE},{sasl}")
        configure(cluster, *everywhere, "--delete-config", f"{RATE},{ssl}")
    assert {entity: quotas[OWN_RATE] for entity, quotas in listed(node).items()} == {
        "broker=*": {"limit": 900},
        "broker=1": {"limit": 700},
        "listener=SSL": {"limit": 55, "scope": "broker"},
        "broker=1,listener=SASL_SSL": {"limit": 30},
        # Kafka gives the inter-broker listener the broker's rate.
        "broker=1,listener=PLAINTEXT": {"limit": 700},
        "broker=2,listener=PLAINTEXT": {"limit": 900},
    }


def test_rates_in_a_brokers_file_are_imported_with_their_windows(
    ask: Command, node: Service, strict: Cluster
):
    report = imported(ask, strict)
    assert report["left_out"] == []
    longer = {"samples": 21, "sample_ms": 1000}
    assert {entity: quotas[OWN_RATE] for entity, quotas in listed(node).items()} == {
        entity: {"limit": limit, **longer}
        for broker in ("broker=1", "broker=2")
        for entity, limit in (
            (broker, 70),
            (f"{broker},listener=SSL", 30),
            (f"{broker},listener=PLAINTEXT", 70),
        )
    }


def test_nothing_is_imported_if_one_broker_does_not_answer(ask: Command, node: Service, strict: Cluster):
    one, two = strict.brokers.values()
    two.hold()
    try:
        ran = ask("quotas", "import", "--from-kafka", one.address, "--timeout", "3")
    finally:
        two.go_on()
    assert (ran.code, ran.out) == (1, "")
    assert re.fullmatch(f"quotagate: {two.address}: no answer within [0-3].\\d s\n", ran.err), ran.err
    assert listed(node) == {}


async def test_kafka_without_client_quotas_is_reported_as_too_old():
    async with odd_broker.running(1) as odd:
        with pytest.raises(KafkaError, match="too old: it does not support DescribeClientQuotasRequest"):
            await asyncio.to_thread(kafka_quotas.read, [odd[1].address], {}, 20.0)


def test_login_without_permission_gets_a_hint(
    ask: Command, node: Service, strict: Cluster, monkeypatch: pytest.MonkeyPatch
):
    def as_(user: str, *options: str) -> Ran:
        said = strict.properties_of("SASL_SSL", user)
        bootstrap = said.pop("bootstrap_servers")
        monkeypatch.setenv("QUOTAGATE_KAFKA_SASL_PLAIN_PASSWORD", said.pop("sasl_plain_password"))
        given = [word for name, value in said.items() for word in ("--kafka-property", f"{name}={value}")]
        return ask("quotas", "import", "--from-kafka", bootstrap, *given, *options)

    assert as_("admin", "--dry-run").code == 0
    refused = as_("alice")
    assert (refused.code, refused.out) == (1, "")
    assert refused.err.endswith(
        "CLUSTER_AUTHORIZATION_FAILED\n  The login needs DescribeConfigs on the cluster.\n"
    )
    wrong = as_("admin", "--kafka-property", "sasl_plain_password=none")
    assert (wrong.code, wrong.out, "refuses the login" in wrong.err) == (1, "", True)
    assert "none" not in wrong.err
    assert listed(node) == {}


def test_unreachable_kafka_is_reported_in_time(ask: Command, node: Service):
    with socket.create_server(("127.0.0.1", 0)) as mute, socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        nobody, silent = (f"127.0.0.1:{one.getsockname()[1]}" for one in (unused, mute))
        away = ask("quotas", "import", "--from-kafka", nobody)
        assert (away.code, away.out) == (1, "")
        assert away.err == f"quotagate: {nobody}: no connection: Connection refused\n"
        hung = ask("quotas", "import", "--from-kafka", f"{nobody},{silent}", "--timeout", "1")
        assert (hung.code, hung.out) == (1, "")
        assert f"{silent}: no answer within 0.5 s" in hung.err
    assert listed(node) == {}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--from-kafka", "127.0.0.1:x"), "--from-kafka: must be host:port"),
        (("--from-kafka", ""), "--from-kafka: names no broker"),
        (("--from-kafka", "a:1", "--kafka-property", "ssl_cafile"), "ssl_cafile: write NAME=VALUE"),
        (("--from-kafka", "a:1", "--kafka-property", "password=x"), "password: is not a property"),
        (("--from-kafka", "a:1", "--timeout", "0"), "--timeout"),
        ((), "--from-kafka"),
    ],
)
def test_wrong_use_is_2(quotagate: Command, options: tuple[str, ...], message: str):
    ran = quotagate("quotas", "import", *options)
    assert (ran.code, ran.out, message in " ".join(ran.err.split())) == (2, "", True), ran.err
