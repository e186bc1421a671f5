"""A real broker that has the plugin: its limits follow Quotagate's, and it works without Quotagate.

The tests run in this order. Quotagate is there from the second one on.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer, TopicPartition
from kafka.protocol.admin import CreateTopicsRequest
from kafka.protocol.metadata import MetadataRequest

from app.kafka import call
from tests import service, stores
from tests.kafka import brokers, quotas
from tests.kafka.brokers import HOST, Cluster
from tests.kafka_plugin import plugin
from tests.ports import free_port
from tests.programs import end
from tests.report import say
from tests.service import Service, eventually

TOPIC = "records"
SIZE = 100_000
"""Bytes of a measurement: far more than the limits below let pass in a window."""
DISK_BYTES = 256 * 1024 * 1024
"""Room for as many measurements as fit into the time that a test waits for one."""
ASK_WITHIN_S = 60.0
PATIENCE_S = 120.0
THROTTLING_QUOTA_EXCEEDED = 89
CHANGES = 5
FOLLOWED_WITHIN_S = 2.0

_numbers = count()


class Broker:
    """The first of the brokers with the plugin, and the place where it looks for Quotagate."""

    def __init__(self, cluster: Cluster, address: tuple[str, int], key_file: Path) -> None:
        self.cluster = cluster
        self.address = address
        self.key_file = key_file

    @property
    def _server(self) -> str:
        return f"{HOST}:{self.cluster.brokers[1].ports['SASL_PLAINTEXT']}"

    def configuration(self, user: str, client: str | None = None) -> dict[str, Any]:
        """A client's properties, by default of a client-id that nobody had before."""
        named = client or f"client-{next(_numbers)}"
        return {**self.cluster.properties_of("SASL_PLAINTEXT", user), "client_id": named}

    def ask(self, user: str, question: Any) -> Any:
        return call.ask(self._server, self.configuration(user), [question], ASK_WITHIN_S)

    def produced_limit(self, user: str, client: str | None = None) -> float | None:
        """The byte rate that the broker enforces, in a bucket that must be empty; None for none."""
        return quotas.produced_limit(self.configuration(user, client), self._server, TOPIC, SIZE)

    def enforces(self, limit: float | None, user: str) -> bool:
        """Whether the broker enforces this limit; a request is a little larger than its record."""
        found = self.produced_limit(user)
        return found == limit if limit is None or found is None else found == pytest.approx(limit, rel=0.01)

    def until_it_enforces(self, limit: float | None, user: str) -> None:
        """Wait for a limit; if it does not come, show the broker's log."""
        try:
            eventually(lambda: self.enforces(limit, user), within_s=PATIENCE_S)
        except AssertionError as error:
            said = [line for line in self.logged().splitlines() if "quotagate" in line]
            raise AssertionError("\n".join([f"{error}: {limit} for {user}", *said[-20:]])) from None

    def logged(self) -> str:
        return self.cluster.brokers[1].logged()


@pytest.fixture(scope="module")
def broker(tmp_path_factory) -> Iterator[Broker]:
    """A broker started while nothing listens at Quotagate's address."""
    port = free_port()
    key_file = tmp_path_factory.mktemp("keys") / "quotagate.key"
    key_file.write_text("unknown", encoding="utf-8")
    properties = plugin.properties(f"http://{HOST}:{port}", key_file)
    running = brokers.running(
        plugin.BROKERS, properties=properties, plugins=[plugin.jar()], disk_bytes=DISK_BYTES
    )
    with running as cluster:
        admin = KafkaAdminClient(**cluster.properties)
        admin.create_topics({TOPIC: {"assignments": {0: [1]}}})
        admin.close()
        yield Broker(cluster, (HOST, port), key_file)


class Node:
    """Quotagate, which can be killed and started again at its address, with its quotas."""

    def __init__(self, broker: Broker, store_url: str, database_url: str) -> None:
        self._broker = broker
        self._store_url = store_url
        self._database_url = database_url
        self._stack = ExitStack()
        self.service: Service

    def start(self) -> None:
        running = service.running(
            store_url=self._store_url, database_url=self._database_url, address=self._broker.address
        )
        self.service = self._stack.enter_context(running)

    def kill(self) -> None:
        self.service.process.kill()
        self.service.process.wait()

    def close(self) -> None:
        self._stack.close()


@pytest.fixture(scope="module")
def node(broker, tmp_path_factory) -> Iterator[Node]:
    catalog = tmp_path_factory.mktemp("catalog") / "catalog.db"
    with stores.running("valkey") as store_url:
        started = Node(broker, store_url, f"sqlite:///{catalog}")
        started.start()
        made = started.service.http.post("/v1/keys", json={"name": "brokers", "scopes": ["read"]})
        assert made.status_code == 201, made.text
        broker.key_file.write_text(made.json()["key"], encoding="utf-8")
        # Twice, as this process is broker and controller.
        eventually(lambda: broker.logged().count("answers again") >= 2)
        yield started
        started.close()


@pytest.fixture(autouse=True)
def clean(request) -> Iterator[None]:
    """No quotas are left behind."""
    yield
    if "node" in request.fixturenames:
        http = request.getfixturevalue("node").service.http
        for each in http.get("/v1/quotas").json()["quotas"]:
            http.delete(f"/v1/quotas/{each['entity']}")


@contextmanager
def drill(node: Node, factor: float) -> Iterator[None]:
    begun = node.service.http.post("/v1/volumes:drill", json={"factor": factor, "for_ms": 600_000})
    assert begun.is_success, begun.text
    try:
        yield
    finally:
        node.service.http.delete("/v1/volumes:drill")


def test_broker_works_where_quotagate_never_was(broker):
    eventually(lambda: "none have been read yet, so nothing is limited" in broker.logged())
    assert broker.produced_limit("alice") is None


def test_limits_follow_quotagate(broker, node):
    took_s = []
    for limit in range(2_000, 2_000 + 800 * CHANGES, 800):
        node.service.put("user=alice,client-id=*", producer_byte_rate=limit)
        began = time.monotonic()
        broker.until_it_enforces(limit / plugin.BROKERS, "alice")
        took_s.append(time.monotonic() - began)
    say("a changed limit was seen in force after", *(f"{each:.2f}" for each in took_s), "s")
    # On a crowded machine one of them may take longer, but not most.
    assert sorted(took_s)[CHANGES // 2] < FOLLOWED_WITHIN_S
    node.service.http.delete("/v1/quotas/user=alice,client-id=*")
    broker.until_it_enforces(None, "alice")


def test_limits_of_a_bucket_in_use_change(broker, node):
    node.service.put("user=bob", producer_byte_rate=10**12)
    assert broker.produced_limit("bob") is None
    node.service.put("user=bob", producer_byte_rate=2_000)
    eventually(lambda: broker.produced_limit("bob") is not None)
    node.service.put("user=bob", producer_byte_rate=10**12)
    eventually(lambda: broker.produced_limit("bob") is None)


def test_first_level_of_the_ladder_decides(broker, node):
    node.service.put("client-id=*", producer_byte_rate=8_000)
    node.service.put("user=*", producer_byte_rate=6_000)
    node.service.put("user=alice,client-id=*", producer_byte_rate=4_000)
    own = {"limit": 1_600, "scope": "broker"}
    node.service.put("user=alice,client-id=own", producer_byte_rate=own)
    broker.until_it_enforces(4_000 / plugin.BROKERS, "alice")
    assert broker.produced_limit("alice", "own") == pytest.approx(1_600, rel=0.01)  # not divided
    assert broker.produced_limit("carol") == pytest.approx(6_000 / plugin.BROKERS, rel=0.01)
    # All clients of a user share the user's limit: another client finds the bucket full.
    assert broker.produced_limit("carol") < 4_000 / plugin.BROKERS


def test_factor_scales_limits_and_zero_is_left_to_the_proxy(broker, node):
    for user in ("alice", plugin.EXCLUDED):
        node.service.put(f"user={user},client-id=*", producer_byte_rate=4_000)
    whole = 4_000 / plugin.BROKERS
    broker.until_it_enforces(whole, "alice")
    with drill(node, 0.5):
        broker.until_it_enforces(whole / 2, "alice")
        assert broker.enforces(whole, plugin.EXCLUDED)
    broker.until_it_enforces(whole, "alice")
    with drill(node, 0):
        eventually(lambda: "holding producers is left to the proxy" in broker.logged())
        assert broker.enforces(whole, "alice")
    node.service.put("user=alice,client-id=*", producer_byte_rate=0)
    eventually(lambda: "left to the proxy and limit nothing" in broker.logged())
    broker.until_it_enforces(None, "alice")


def test_consumers_are_throttled(broker, node):
    node.service.put("user=bob", consumer_byte_rate=2_000)
    producer = KafkaProducer(**broker.configuration("carol"))
    for _ in range(20):
        producer.send(TOPIC, bytes(10_000))
    producer.flush()
    producer.close()
    consumer = KafkaConsumer(**broker.configuration("bob"), auto_offset_reset="earliest", group_id=None)
    consumer.assign([TopicPartition(TOPIC, 0)])

    def throttled():
        consumer.seek_to_beginning()
        consumer.poll(timeout_ms=200)
        groups = consumer.metrics().values()
        found = [group[key] for group in groups for key in group if key.endswith("throttle-time-max")]
        return max(found) > 0

    eventually(throttled)
    consumer.close()


def test_request_time_is_limited(broker, node):
    node.service.put("user=bob", request_percentage=0.001)
    eventually(lambda: broker.ask("bob", MetadataRequest(topics=[])).throttle_time_ms > 0)


def test_changes_of_topics_are_limited_and_not_divided(broker, node):
    limit = 0.02
    node.service.put("user=carol", controller_mutation_rate=limit)

    def refused():
        topic = CreateTopicsRequest.CreatableTopic(
            name=f"new-{next(_numbers)}", num_partitions=1, replication_factor=1, assignments=[], configs=[]
        )
        question = CreateTopicsRequest(topics=[topic], timeout_ms=30_000, validate_only=False)
        answer = broker.ask("carol", question)
        return answer if answer.topics[0].error_code == THROTTLING_QUOTA_EXCEEDED else None

    # A full bucket holds 11 s of the limit, so the first topic leaves a debt; time only lessens it.
    longest_s = 1 / limit - 11
    assert 0 < eventually(refused).throttle_time_ms <= longest_s * 1000


def test_last_limits_stay_while_quotagate_is_away(broker, node):
    node.service.put("user=alice,client-id=*", producer_byte_rate=4_800)
    broker.until_it_enforces(2_400, "alice")
    node.kill()
    eventually(lambda: "the last ones stay in force" in broker.logged())
    assert broker.enforces(2_400, "alice")
    node.start()
    node.service.put("user=alice,client-id=*", producer_byte_rate=3_200)
    broker.until_it_enforces(1_600, "alice")


def test_quotas_of_kafka_itself_have_no_effect(broker, node):
    broker.until_it_enforces(None, "alice")
    admin = KafkaAdminClient(**broker.cluster.properties)
    quotas.alter(admin, {("alice", None): {"producer_byte_rate": 100.0}})
    admin.close()
    eventually(lambda: "Quotas that are set in Kafka have no effect" in broker.logged())
    assert broker.enforces(None, "alice")


def test_limits_are_divided_by_the_brokers_that_are_alive(broker, node):
    node.service.put("user=alice,client-id=*", producer_byte_rate=2_000)
    broker.until_it_enforces(1_000, "alice")
    end(broker.cluster.brokers[2].running)
    broker.until_it_enforces(2_000, "alice")
