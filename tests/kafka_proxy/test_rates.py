"""Rates hold over all proxies: bytes, requests, fetches, changes of topics, and the throttle factor."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

import confluent_kafka
import pytest
from kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer, TopicPartition
from kafka.admin import NewTopic
from kafka.errors import KafkaError

from tests.kafka import quotas
from tests.kafka.brokers import Cluster
from tests.kafka_proxy import java_client, producing
from tests.kafka_proxy.producing import Worker
from tests.report import say
from tests.service import eventually

RECORD = b"x" * 5_000
SETTLE_S = 15.0
"""The time in which producers first keep to the limit. Without it, the first burst into an unused bucket
would recur in each window, and the result would depend on the beginning of the measurement."""
MEASURE_S = 30.0
LIMIT = 100_000
"""Bytes a second: twenty records."""
AHEAD = 16
"""How many records a producer has under way."""


class Pusher:
    """A producer that sends at a pace and then as fast as it is let, and counts the acknowledged bytes."""

    def __init__(self, bootstrap: str, client_id: str, topic: str, partition: int, pace: float) -> None:
        self._producer = KafkaProducer(
            bootstrap_servers=bootstrap,
            client_id=client_id,
            acks=1,
            enable_idempotence=False,
            batch_size=2 * len(RECORD),
            max_block_ms=producing.PATIENT_MS,
            delivery_timeout_ms=producing.PATIENT_MS,
        )
        self._where = (topic, partition)
        self._pace = pace
        self._ended = threading.Event()
        self._room = threading.Semaphore(AHEAD)
        self.bytes = 0
        self.errors: list[Exception] = []
        self._thread = threading.Thread(target=self._push, daemon=True)
        self._thread.start()

    def _push(self) -> None:
        topic, partition = self._where
        began, count = time.monotonic(), 0
        while not self._ended.is_set():
            if time.monotonic() < began + SETTLE_S:
                self._ended.wait(began + count * len(RECORD) / self._pace - time.monotonic())
            count += 1
            self._room.acquire()  # a client without a bound of its own would take all memory
            future = self._producer.send(topic, RECORD, partition=partition)
            future.add_callback(self._acknowledged)
            future.add_errback(self._failed)

    def _acknowledged(self, _metadata: object) -> None:
        self.bytes += len(RECORD)
        self._room.release()

    def _failed(self, error: Exception) -> None:
        self.errors.append(error)
        self._room.release()

    def close(self) -> None:
        self._ended.set()
        self._room.release()
        self._thread.join()
        # Its own `close` would wait for records under way, fail, and do so again when it is collected.
        self._producer._sender.force_close()
        with suppress(KafkaError):
            self._producer.close(timeout=1)


@contextmanager
def pushing(*pushers: Pusher) -> Iterator[None]:
    with ExitStack() as stack:
        for pusher in pushers:
            stack.callback(pusher.close)
        yield


def rate(pushers: Sequence[Pusher]) -> list[float]:
    """Bytes a second of all of them, over the time of the measurement, once they have settled."""
    # Both are times of the measurement itself, not waits for something to happen.
    time.sleep(SETTLE_S)
    began, before = time.monotonic(), [pusher.bytes for pusher in pushers]
    time.sleep(MEASURE_S)
    after, ended = [pusher.bytes for pusher in pushers], time.monotonic()
    return [(late - early) / (ended - began) for early, late in zip(before, after, strict=True)]


@pytest.mark.prove
def test_two_proxies_hold_one_byte_rate_where_two_brokers_let_twice_as_much(
    cluster, plain, other, quotagate, admin
):
    admin.create_topics([NewTopic("pushed", replica_assignments={0: [1], 1: [2]})])
    quotagate.put("client-id=through-proxies", producer_byte_rate=LIMIT)
    quotas.alter(admin, {(None, "past-proxies"): {"producer_byte_rate": LIMIT}})
    through = [
        Pusher(proxy.bootstrap, "through-proxies", "pushed", partition, LIMIT / 2)
        for partition, proxy in enumerate((plain, other))
    ]
    past = [Pusher(cluster.bootstrap, "past-proxies", "pushed", partition, LIMIT) for partition in (0, 1)]
    with pushing(*through, *past):
        found = rate([*through, *past])
        errors = [[*pusher.errors] for pusher in through]  # before they are closed with records under way
    ours, kafkas = sum(found[:2]), sum(found[2:])
    say(f"a limit of {LIMIT:,} bytes/s: {ours:,.0f} through two proxies, {kafkas:,.0f} at two brokers")
    assert ours == pytest.approx(LIMIT, rel=0.1)
    assert kafkas > 1.5 * LIMIT
    assert errors == [[], []]


class Requester(Worker):
    """A worker that keeps a pace at first, and then sends as fast as it is let."""

    def __init__(self, bootstrap: str, topic: str, partition: int, pace: float) -> None:
        self._pace = pace
        self._began = time.monotonic()
        super().__init__("requester", bootstrap, topic, partition)

    def pause(self) -> None:
        if time.monotonic() < self._began + SETTLE_S:
            self.ended.wait(self._began + self.sent / self._pace - time.monotonic())


@pytest.mark.prove
def test_two_proxies_hold_one_request_rate(cluster, plain, other, quotagate, admin):
    limit = 20
    admin.create_topics([NewTopic("requested", replica_assignments={0: [1], 1: [2]})])
    quotagate.put("client-id=requester", request_rate=limit)
    with ExitStack() as stack:
        requesters = []
        for partition, proxy in enumerate((plain, other)):
            requesters.append(Requester(proxy.bootstrap, "requested", partition, limit / 2))
            stack.callback(requesters[-1].close)
        time.sleep(SETTLE_S)
        began, before = time.monotonic(), sum(each.sent for each in requesters)
        time.sleep(MEASURE_S)
        found = (sum(each.sent for each in requesters) - before) / (time.monotonic() - began)
    say(f"a limit of {limit} requests/s: {found:.1f} through two proxies")
    assert [each.error for each in requesters] == [None, None]
    assert found == pytest.approx(limit, rel=0.1)


def test_request_rate_is_held_by_the_clients_themselves(plain, quotagate, topic):
    limit = 10
    quotagate.put("client-id=chatty", request_rate={"limit": limit, "samples": 6, "sample_ms": 1_000})
    producer = KafkaProducer(bootstrap_servers=plain.bootstrap, client_id="chatty", acks=1)
    try:
        for _ in range(9 * limit):  # the bucket lets 5 times the limit pass at once
            producer.send(topic, b"x").get(60)
        assert throttle_time(producer) > 0
        (bucket,) = quotagate.http.get(
            "/v1/buckets", params={"bucket": "client-id=chatty", "quota": "request_rate"}
        ).json()["buckets"]
        assert bucket["observed"] <= 1.1 * limit
    finally:
        producer.close(timeout=1)


@pytest.mark.parametrize("client", producing.CLIENTS)
def test_factor_0_holds_producers_and_not_consumers(client, cluster, plain, quotagate, topic, tmp_path):
    with producing.running(client, tmp_path, plain.bootstrap) as producers, ExitStack() as stack:
        producers.send("early", topic, 3)
        producers.until_sent("early", 3)
        drill = {"factor": 0, "for_ms": 600_000}
        assert quotagate.http.post("/v1/volumes:drill", json=drill).is_success
        stack.callback(quotagate.http.delete, "/v1/volumes:drill")
        eventually(lambda: quotagate.ask(principal="x", usage={"produce_bytes": 1})["decision"] == "throttle")

        producers.send("early", topic, 4)
        eventually(lambda: producers.throttled_ms("early") > 0)
        consumer = KafkaConsumer(topic, bootstrap_servers=plain.bootstrap, auto_offset_reset="earliest")
        stack.callback(consumer.close)
        fetched = 0
        while fetched < 3:
            fetched += sum(map(len, consumer.poll(1000).values()))
        assert producers.sent("early") == 3

        assert quotagate.http.delete("/v1/volumes:drill").is_success
        producers.until_sent("early", 7)


def fill(cluster: Cluster, topic: str, count: int) -> None:
    producer = KafkaProducer(**cluster.properties)
    for _ in range(count):
        producer.send(topic, RECORD)
    producer.flush(60)
    producer.close()


FETCHED = 100
FETCH_LIMIT = 100_000
FETCH_RATE = {"limit": FETCH_LIMIT, "samples": 3, "sample_ms": 1_000}
"""Its window is shorter than Kafka's, so that several pass while a client fetches."""


def by_java(plain, topic, folder):
    with java_client.running(folder / "java", plain.bootstrap, client_id="fetcher-java") as java:
        java.say(f"fetch {topic} {FETCHED}")
        return float(java.until("fetched").split()[2])


def by_kafka_python(plain, topic, _folder):
    consumer = KafkaConsumer(bootstrap_servers=plain.bootstrap, client_id="fetcher-kafka-python")
    try:
        partition = TopicPartition(topic, 0)
        consumer.assign([partition])
        consumer.seek_to_beginning(partition)
        fetched = 0
        while fetched < FETCHED:
            fetched += sum(map(len, consumer.poll(1000).values()))
        return throttle_time(consumer)
    finally:
        consumer.close()


def by_librdkafka(plain, topic, _folder):
    throttled = [0.0]
    consumer = confluent_kafka.Consumer(
        {
            "bootstrap.servers": plain.bootstrap,
            "client.id": "fetcher-librdkafka",
            "group.id": "fetcher",
            "enable.auto.commit": False,
            "throttle_cb": lambda event: throttled.append(event.throttle_time * 1000),
        }
    )
    try:
        consumer.assign([confluent_kafka.TopicPartition(topic, 0, 0)])
        fetched = 0
        while fetched < FETCHED:
            for message in consumer.consume(100, timeout=1):
                assert message.error() is None
                fetched += 1
        return max(throttled)
    finally:
        consumer.close()


@pytest.mark.parametrize("fetch", [by_java, by_kafka_python, by_librdkafka])
def test_fetches_are_held_and_nothing_is_lost(fetch, cluster, plain, quotagate, topic, tmp_path):
    client_id = f"fetcher-{fetch.__name__.removeprefix('by_').replace('_', '-')}"
    fill(cluster, topic, FETCHED)
    # The bucket lets 200,000 bytes pass at once; there are 500,000.
    quotagate.put(f"client-id={client_id}", consumer_byte_rate=FETCH_RATE)
    throttled_ms = fetch(plain, topic, tmp_path)
    (bucket,) = quotagate.http.get(
        "/v1/buckets", params={"bucket": f"client-id={client_id}", "quota": "consumer_byte_rate"}
    ).json()["buckets"]
    say(f"{client_id}: asked to wait {throttled_ms:,.0f} ms; at last {bucket['observed']:,.0f} bytes/s")
    assert throttled_ms > 0
    # A batch passes whole, so the last fetch may exceed it by one.
    assert bucket["observed"] <= FETCH_LIMIT + len(RECORD) * 4


def test_batch_that_is_larger_than_the_quota_passes_whole_and_is_recorded(cluster, plain, quotagate, topic):
    producer = KafkaProducer(**cluster.properties)
    producer.send(topic, b"x" * 50_000).get(60)
    producer.close()
    # The bucket lets 10,000 bytes pass at once.
    quotagate.put("client-id=large", consumer_byte_rate=1_000)
    consumer = KafkaConsumer(
        topic, bootstrap_servers=plain.bootstrap, client_id="large", auto_offset_reset="earliest"
    )
    try:
        while not consumer.poll(1000):
            pass
        bucket = {"bucket": "client-id=large", "quota": "consumer_byte_rate"}

        def observed():
            (found,) = quotagate.http.get("/v1/buckets", params=bucket).json()["buckets"]
            return found["observed"] > 1_000

        eventually(observed)
        eventually(lambda: consumer.poll(100) or throttle_time(consumer) > 0)
    finally:
        consumer.close()


def throttle_time(client: KafkaConsumer | KafkaProducer) -> float:
    """The longest throttle time that a client reports, in ms."""
    found = [
        value
        for group in client.metrics().values()
        for key, value in group.items()
        if key.endswith("throttle-time-max")
    ]
    return max(found, default=0.0)


def test_changes_of_topics_are_counted_by_their_partitions(plain, quotagate, admin):
    quotagate.put("client-id=counted", controller_mutation_rate={"limit": 0.001, "burst": 100})
    bucket = {"bucket": "client-id=counted", "quota": "controller_mutation_rate"}
    left = [100.0]

    def counted() -> int:
        """How many partitions were charged since it was last asked; next to nothing is refilled."""
        (found,) = quotagate.http.get("/v1/buckets", params=bucket).json()["buckets"]
        left.append(found["tokens"])
        return round(left[-2] - left[-1])

    for name, partitions in (("by-name", 4), ("grows", 3)):
        admin.create_topics([NewTopic(name, num_partitions=partitions, replication_factor=1)])
    client = KafkaAdminClient(bootstrap_servers=plain.bootstrap, client_id="counted")
    try:
        client.create_topics([NewTopic("made", num_partitions=7, replication_factor=1)])
        assert counted() == 7
        client.create_partitions({"grows": 8})
        assert counted() == 5
        client.delete_topics(["by-name"])
        assert counted() == 4
    finally:
        client.close()


def test_changes_of_topics_wait_and_then_go_through(plain, quotagate, admin, tmp_path):
    quotagate.put("client-id=changer", controller_mutation_rate={"limit": 1, "burst": 5})
    with java_client.running(tmp_path / "java", plain.bootstrap, client_id="changer") as java:
        java.say("create five 5")
        assert java.heard() == "created five"
        bucket = {"bucket": "client-id=changer", "quota": "controller_mutation_rate"}
        (found,) = quotagate.http.get("/v1/buckets", params=bucket).json()["buckets"]
        assert found["tokens"] < 5
        java.say("create four 4")
        assert java.heard() == "created four"
    assert len(admin.describe_topics(["four"])[0]["partitions"]) == 4


def test_change_of_topics_that_is_never_admitted_is_refused(plain, quotagate, tmp_path):
    quotagate.put("client-id=changer", controller_mutation_rate={"limit": 0.5, "burst": 5})
    with java_client.running(tmp_path / "java", plain.bootstrap, client_id="changer") as java:
        java.say("create six 6")
        assert "PolicyViolationException" in java.heard()
