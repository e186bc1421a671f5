"""How long requests are held of clients that do not wait by themselves, and of producers with acks=0."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import pytest
from kafka import KafkaAdminClient, KafkaConsumer
from kafka.admin import NewTopic
from kafka.errors import KafkaError
from kafka.net.selector import NetworkSelector
from kafka.protocol.metadata import MetadataRequest
from kafka.protocol.producer import ProduceRequest
from kafka.record import MemoryRecordsBuilder

from app.kafka import call
from tests.kafka_proxy import proxy
from tests.kafka_proxy.proxy import HOST, Proxy
from tests.kafka_proxy.test_odd_work import end_offset
from tests.service import Service, eventually

LONGEST_HOLD_MS: Final = 15_000
"""As in the README of the proxy."""
HELD_MS: Final = 1
"""The throttle time in the answer to a request that was held and then went through."""
WITHIN_S: Final = 120.0
LAST_BEFORE_KIP_219: Final = 5
"""The last version of Produce whose clients do not pause by themselves."""
THROTTLING_QUOTA_EXCEEDED: Final = 89


class Connection:
    """One connection to a broker through the proxy, which ignores throttle times."""

    def __init__(self, proxy: Proxy, client_id: str) -> None:
        # The proxy closes the first connection to a broker's port if it has not seen the cluster yet.
        call.ask(proxy.bootstrap, {}, [MetadataRequest(topics=[])], WITHIN_S)
        self._net = NetworkSelector()
        server = f"{HOST}:{proxy.port + 1}"  # the port of the broker 1, which leads the topic's partition
        self._manager = call._Connections(self._net, bootstrap_servers=[server], client_id=client_id)
        self._connection: Any = None

    def ask(self, question: Any, within_s: float = WITHIN_S) -> Any:
        """The answer; None if the request wants none.

        Raises:
            KafkaError: the connection was closed, or there was no answer in time.
        """

        async def exchange() -> Any:
            if self._connection is None:
                (broker,) = self._manager.cluster.bootstrap_brokers()
                self._connection = self._manager.get_connection(
                    broker.node_id, timeout_ms=WITHIN_S * 1000, refresh_metadata_on_err=False
                )
            answered = await self._connection.send_request(question, request_timeout_ms=within_s * 1000)
            self._connection.unpause("throttle")  # kafka-python would wait by itself
            return answered

        answer = self._manager.call_soon(exchange)
        while not answer.is_done:
            self._net.poll(timeout_ms=1000, future=answer)
        if answer.exception is not None:
            raise answer.exception
        return answer.value

    def close(self) -> None:
        self._manager.close()
        self._net.close()


@contextmanager
def connected(proxy: Proxy, client_id: str) -> Iterator[Connection]:
    made = Connection(proxy, client_id)
    try:
        yield made
    finally:
        made.close()


@contextmanager
def full_disks(quotagate: Service) -> Iterator[None]:
    """The throttle factor is 0."""
    assert quotagate.http.post("/v1/volumes:drill", json={"factor": 0, "for_ms": 600_000}).is_success
    try:
        eventually(lambda: quotagate.ask(principal="x", usage={"produce_bytes": 1})["decision"] == "throttle")
        yield
    finally:
        assert quotagate.http.delete("/v1/volumes:drill").is_success


def produce(topic: str, version: int, acks: int = 1, size: int = 500) -> ProduceRequest:
    records = MemoryRecordsBuilder(magic=2, compression_type=0, batch_size=2 * size)
    records.append(timestamp=None, key=None, value=bytes(size))
    records.close()
    return ProduceRequest(
        transactional_id=None,
        acks=acks,
        timeout_ms=10_000,
        topic_data=[(topic, [(0, records.buffer())])],
        max_version=version,
    )


def outcome(answer: Any) -> tuple[int, int]:
    """The error and the throttle time of a produce response."""
    [[partition]] = [topic.partition_responses for topic in answer.responses]
    return partition.error_code, answer.throttle_time_ms


def throttled(proxy: Proxy) -> float:
    """How often Quotagate has answered the proxy with a throttle, by the proxy's own metric."""
    return proxy.counted("quotagate_proxy_decisions_total", decision="throttle", source="quotagate")


@dataclass(frozen=True, slots=True)
class Waits:
    """The outcomes of the cases whose request waits for as long as a proxy holds one."""

    old: Future[None]
    regardless: Future[None]
    deaf: Future[None]
    led_for_deaf: str
    """The topic whose record was lost."""


@pytest.fixture(scope="module")
def waits(cluster, start_proxy, plain, other, quotagate) -> Waits:
    """The cases wait in parallel, each behind a proxy of its own, whose metrics count that case alone."""
    topics = [f"waits-{case}" for case in ("old", "regardless", "deaf")]
    admin = KafkaAdminClient(**cluster.properties)
    admin.create_topics([NewTopic(name, replica_assignments={0: [1]}) for name in topics])
    admin.close()
    a_minute: Mapping[str, Any] = {"limit": 10, "samples": 2, "sample_ms": 60_000, "enforcement": "deny"}
    quotagate.put("client-id=regardless", producer_byte_rate=a_minute)
    third = start_proxy()
    with (
        connected(plain, "old") as old,
        connected(other, "regardless") as regardless,
        connected(third, "deaf") as deaf,
        ThreadPoolExecutor(len(topics)) as pool,
    ):
        asked_ms = regardless_is_asked_to_wait(regardless, topics[1])  # while there is room on the disks
        holds = pool.submit(hold_regardless_client, other, regardless, topics[1], asked_ms)
        with full_disks(quotagate):
            waiting = (
                pool.submit(hold_old_client, plain, old, topics[0]),
                holds,
                pool.submit(lose_record, deaf, topics[2]),
            )
            wait(waiting)
    return Waits(*waiting, topics[2])


def hold_old_client(proxy: Proxy, old: Connection, led: str) -> None:
    before = throttled(proxy)
    error, left_ms = outcome(old.ask(produce(led, LAST_BEFORE_KIP_219)))
    assert error == THROTTLING_QUOTA_EXCEEDED
    assert left_ms > 0
    assert throttled(proxy) - before >= 2, "it was not held, for then it is asked for again"
    before = throttled(proxy)
    error, left_ms = outcome(old.ask(produce(led, LAST_BEFORE_KIP_219 + 1)))
    assert (error, left_ms > 0) == (THROTTLING_QUOTA_EXCEEDED, True)
    assert throttled(proxy) - before <= 1, "one that pauses by itself is answered at once"


def test_old_client_is_held_and_then_gets_the_rest_of_its_throttle_time(waits):
    waits.old.result()


def regardless_is_asked_to_wait(client: Connection, led: str) -> int:
    """Use up the quota; return the throttle time in ms."""
    assert outcome(client.ask(produce(led, 9)))[0] == 0
    error, asked_ms = outcome(client.ask(produce(led, 9)))
    assert error == THROTTLING_QUOTA_EXCEEDED
    assert asked_ms > LONGEST_HOLD_MS
    return asked_ms


def hold_regardless_client(proxy: Proxy, client: Connection, led: str, asked_ms: int) -> None:
    before = throttled(proxy)
    # A request under way when the client was asked to wait is answered at once. Later requests are held.
    left_ms = asked_ms
    while left_ms > asked_ms - LONGEST_HOLD_MS:
        error, left_ms = outcome(client.ask(produce(led, 9)))
        assert error == THROTTLING_QUOTA_EXCEEDED
    assert left_ms > 0
    assert throttled(proxy) == before, "a connection that pauses is not asked for"


def test_who_sends_on_regardless_is_held_for_15_s_and_then_gets_the_rest(waits):
    waits.regardless.result()


def lose_record(deaf: Connection, led: str) -> None:
    assert deaf.ask(produce(led, 9, acks=0)) is None
    with pytest.raises(KafkaError):
        deaf.ask(MetadataRequest(topics=[]))  # it comes after the record, on the same connection


def test_record_without_acknowledgement_is_lost_with_its_connection_when_the_wait_is_too_long(
    waits, cluster, plain
):
    waits.deaf.result()
    consumer = KafkaConsumer(**cluster.properties)
    with connected(plain, "heard") as heard:
        eventually(lambda: outcome(heard.ask(produce(waits.led_for_deaf, 9)))[0] == 0)
    assert end_offset(consumer, waits.led_for_deaf) == 1
    consumer.close()


def test_what_was_held_and_then_goes_through_tells_so(plain, quotagate, admin):
    led = "held"
    admin.create_topics([NewTopic(led, replica_assignments={0: [1]})])
    with connected(plain, "held") as held, ThreadPoolExecutor(1) as pool:
        with full_disks(quotagate):
            before = throttled(plain)
            answer = pool.submit(held.ask, produce(led, LAST_BEFORE_KIP_219))
            eventually(lambda: throttled(plain) >= before + 2)
        assert outcome(answer.result()) == (0, HELD_MS)
        assert outcome(held.ask(produce(led, 9))) == (0, 0)


def test_proxy_stops_while_it_holds_a_request(cluster, quotagate, admin, tmp_path):
    led = "stopped"
    admin.create_topics([NewTopic(led, replica_assignments={0: [1]})])
    with (
        proxy.running(tmp_path, cluster.bootstrap, proxy.settings_for(tmp_path, quotagate)) as stopped,
        connected(stopped, "held") as held,
        full_disks(quotagate),
        ThreadPoolExecutor(1) as pool,
    ):
        answer = pool.submit(held.ask, produce(led, LAST_BEFORE_KIP_219))
        eventually(lambda: throttled(stopped) >= 1)
        stopped.running.terminate()
        assert isinstance(answer.exception(), KafkaError)
        stopped.running.wait(WITHIN_S)
