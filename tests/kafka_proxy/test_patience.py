"""Clients that give up after a number of errors, before a proxy and a real broker.

They are held first, so that no error reaches the application, and each record arrives once.
"""

from __future__ import annotations

import subprocess
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from math import inf
from pathlib import Path
from time import monotonic, sleep
from typing import Any, Final

import pytest
from kafka import KafkaAdminClient, KafkaConsumer, TopicPartition
from kafka.admin import NewTopic

from tests.kafka import tool
from tests.kafka.brokers import GUESTS, PASSWORDS, Cluster
from tests.kafka_proxy import drivers
from tests.kafka_proxy.driven import DrivenClient
from tests.kafka_proxy.proxy import Proxy
from tests.kafka_proxy.test_producer_ids import known
from tests.report import say
from tests.service import eventually

pytestmark = pytest.mark.timeout(1200)

SECONDS: Final = 40
"""How long each case sends."""
WITHIN_S: Final = 600.0
"""Held records arrive late, but they arrive."""
LIMIT: Final = 3
WINDOW_MS: Final = 20_000
"""Longer than a proxy may hold a request."""
CROWD: Final = 24
SHORT_WINDOW_MS: Final = 5_000
"""So short that the ids of a crowd take 40 s."""
BYTES_A_S: Final = 120_000
RECORD_BYTES: Final = 2_000
# sarama and franz-go batch waiting records up to 1 MB. An empty bucket has to hold that; this holds 1.2 MB.
RATE: Final = {"producer_byte_rate": {"limit": BYTES_A_S, "enforcement": "deny"}}

BURST_BYTES: Final = 50_000
BURST_RATE: Final = {"producer_byte_rate": {"limit": 20_000, "enforcement": "deny"}}


class Pushing:
    """A client whose producers send at a steady rate or in one burst, and the outcomes of their records."""

    def __init__(self, client: DrivenClient, topic: str) -> None:
        self._client = client
        self._topic = topic
        self.errors: list[str] = []
        self.pushed: dict[str, int] = {}

    def push(self, name: str, rate: int, size: int = 500, seconds: int = SECONDS) -> None:
        self._client.say(f"push {name} {self._topic} {size} {rate} {seconds}")

    def burst(self, name: str, count: int, size: int) -> None:
        self._client.say(f"burst {name} {self._topic} {size} {count}")

    def sent(self, name: str) -> int:
        """How many of its records the broker acknowledged."""
        for line in self._client.said():
            said, who, *rest = line.split()
            if said == "error":
                self.errors.append(line)
            elif said == "pushed":
                self.pushed[who] = int(rest[0])
        return self._client.seen[f"sent {name}"]

    def until_sent(self, name: str, count: int) -> None:
        eventually(lambda: self.sent(name) >= count or self.errors, within_s=WITHIN_S)
        assert self.errors == []

    def until_all_is_sent(self, *names: str) -> None:
        def is_sent() -> bool:
            return all(self.sent(name) >= self.pushed.get(name, inf) for name in names)

        eventually(lambda: is_sent() or self.errors, within_s=WITHIN_S)
        assert self.errors == [], f"{len(self.errors)} records; pushed: {self.pushed}"


def push_by_a_fourth(pushing: Pushing) -> None:
    """The fourth id waits for its window; meanwhile the other three go on."""
    may_be_known_s = monotonic() + WINDOW_MS / 1000  # the first id leaves the window no sooner
    others = ("one", "two", "three")
    for name in others:
        pushing.push(name, 5)
    for name in others:
        pushing.until_sent(name, 1)
    pushing.push("four", 5, seconds=SECONDS - 10)
    for name in others:
        pushing.until_sent(name, pushing.sent(name) + 10)
    assert pushing.sent("four") == 0 or monotonic() >= may_be_known_s, "it went through too early"
    pushing.until_all_is_sent(*others, "four")


def push_by_a_crowd(pushing: Pushing) -> None:
    names = [f"one-of-many-{number}" for number in range(CROWD)]
    for name in names:
        pushing.push(name, 1)
    pushing.until_all_is_sent(*names)


def push_too_much(pushing: Pushing) -> None:
    """Push at twice the rate of the quota; a producer without a quota goes on."""
    pushing.push("greedy", 2 * BYTES_A_S // RECORD_BYTES, RECORD_BYTES)
    pushing.push("modest", 5)
    pushing.until_all_is_sent("modest", "greedy")


def push_at_once(pushing: Pushing) -> None:
    """Send requests that all wait in one connection: six times as much as an empty bucket holds."""
    pushing.burst("greedy", CROWD, BURST_BYTES)
    pushing.until_all_is_sent("greedy")


@dataclass(frozen=True, slots=True)
class Case:
    """The actions of a client, its quota, and the rest of the quota's entity after the user."""

    run: Callable[[Pushing], None]
    quota: Mapping[str, Any]
    entity: str = ""
    clients: Sequence[str] = drivers.IDEMPOTENT


CASES: Final = {
    "fourth": Case(push_by_a_fourth, {"producer_ids_rate": {"limit": LIMIT, "window_ms": WINDOW_MS}}),
    "crowd": Case(push_by_a_crowd, {"producer_ids_rate": {"limit": LIMIT, "window_ms": SHORT_WINDOW_MS}}),
    "bytes": Case(push_too_much, RATE, ",client-id=greedy", tuple(drivers.CLIENTS)),
    "burst": Case(push_at_once, BURST_RATE, ",client-id=greedy", ("kafkajs",)),
}
WAYS: Final = [(client, case) for case, what in CASES.items() for client in what.clients]
CONSOLE: Final = ("console", "bytes")


@dataclass(frozen=True, slots=True)
class Found:
    """The state of the broker at the end.

    Attributes:
        pushed: how many records each producer handed over.
        values: how often the broker has each record.
        ids: the producer ids that the broker knows, with their epochs.
    """

    pushed: Mapping[str, int]
    values: Counter[str]
    ids: Sequence[tuple[int, int]]


@pytest.fixture(scope="module")
def outcomes(cluster, sasl, quotagate, tmp_path_factory) -> dict[tuple[str, str], Future[Found]]:
    """The outcome of each case of each client. They run in parallel, because they mostly wait."""
    for command in drivers.CLIENTS.values():
        command()  # so that nothing is built while a case runs
    ways = [*WAYS, CONSOLE]
    topics = [NewTopic(topic_of(*way), num_partitions=1, replication_factor=1) for way in ways]
    admin = KafkaAdminClient(**cluster.properties)
    admin.create_topics(topics)
    admin.close()
    folder = tmp_path_factory.mktemp("patience")
    with ThreadPoolExecutor(len(ways)) as pool:
        began: dict[tuple[str, str], Future[Found]] = {}
        for (client, case), user in zip(ways, GUESTS, strict=False):
            quotagate.put(f"user={user}{CASES[case].entity}", **CASES[case].quota)
            began[client, case] = pool.submit(outcome, client, case, user, cluster, sasl, folder)
    return began


def topic_of(client: str, case: str) -> str:
    return f"patience-{client}-{case}"


def outcome(client: str, case: str, user: str, cluster: Cluster, sasl: Proxy, folder: Path) -> Found:
    topic = topic_of(client, case)
    admin, consumer = KafkaAdminClient(**cluster.properties), KafkaConsumer(**cluster.properties)
    try:
        if (client, case) == CONSOLE:
            pushed = push_by_console(folder / topic, sasl.bootstrap, user, topic)
        else:
            with drivers.running(client, folder / topic, sasl.bootstrap, user) as driven:
                pushing = Pushing(driven, topic)
                CASES[case].run(pushing)
                pushed = pushing.pushed
        return Found(pushed, values(consumer, topic), known(admin, topic))
    finally:
        admin.delete_topics([topic])  # because the brokers' disks are small
        admin.close()
        consumer.close()


def push_by_console(folder: Path, bootstrap: str, user: str, topic: str) -> dict[str, int]:
    """Kafka's console producer, which tries three times, and waits for an answer for 1.5 s."""
    folder.mkdir()
    login = f'required username="{user}" password="{PASSWORDS[user]}";'
    properties = {
        "client.id": "greedy",
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": "PLAIN",
        "sasl.jaas.config": f"org.apache.kafka.common.security.plain.PlainLoginModule {login}",
    }
    file, logged = folder / "client.properties", folder / "client.log"
    file.write_text("".join(f"{name}={value}\n" for name, value in properties.items()))
    arguments = ("--bootstrap-server", bootstrap, "--topic", topic, "--producer.config", str(file))
    with logged.open("wb") as log:
        program = subprocess.Popen(
            tool.command("org.apache.kafka.tools.ConsoleProducer", *arguments, log_level="warn"),
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    rate = 2 * BYTES_A_S // RECORD_BYTES
    count, began = 0, monotonic()
    assert program.stdin is not None
    with program.stdin as lines:
        while (elapsed := monotonic() - began) < SECONDS:
            if count < rate * elapsed:
                lines.write(f"greedy:{count}".ljust(RECORD_BYTES).encode() + b"\n")
                count += 1
            else:
                sleep(1 / rate)  # the pace at which it is given lines
    assert program.wait(WITHIN_S) == 0
    assert "Error when sending" not in logged.read_text()
    return {"greedy": count}


def values(consumer: KafkaConsumer, topic: str) -> Counter[str]:
    """How often a topic has each record."""
    partition = TopicPartition(topic, 0)
    consumer.assign([partition])
    consumer.seek_to_beginning(partition)
    end = consumer.end_offsets([partition])[partition]
    found: Counter[str] = Counter()
    while consumer.position(partition) < end:
        for records in consumer.poll(1000).values():
            found.update(record.value.decode().strip() for record in records)
    return found


@pytest.mark.parametrize(("client", "case"), [*WAYS, CONSOLE])
def test_no_error_reaches_the_application_and_each_record_arrives_once(client, case, outcomes):
    found = outcomes[client, case].result()
    say(f"{client}, {case}: {found.values.total():,} records, {len(found.ids)} ids")
    sent = Counter(f"{name}:{number}" for name, count in found.pushed.items() for number in range(count))
    assert found.values == sent
    has_ids = client != "kafka-go" and case != "burst"
    assert [epoch for _, epoch in found.ids] == [0] * len(found.pushed) * has_ids
