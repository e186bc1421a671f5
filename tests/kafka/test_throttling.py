"""Real disks fill and empty; all producers of the cluster are held; brokers and observers fail."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import redis
from kafka import KafkaAdminClient, KafkaProducer, TopicPartition
from kafka.admin import NewTopic

from app.domain.volumes import VolumeRules
from app.store.leader_election import leadership_keys
from app.store.volumes import LEASE, RECORD_KEY, VolumeRecord
from tests.kafka import brokers, observing
from tests.kafka.brokers import Broker, Cluster
from tests.kafka.observing import Observer, until_observed, volume, volumes
from tests.report import say
from tests.service import Service, eventually
from workers.volumes.leader import BEATS_PER_LEASE, OBSERVE_FRACTION, lease_s

MIB = 1024 * 1024
MIN_AVAILABLE = 48 * MIB
TAKE_OVER_INTERVAL_S = 5
RECORD = os.urandom(512 * 1024)  # which nothing can compress
PRODUCE = {"principal": "alice", "broker": "1", "usage": {"produce_bytes": 1000}}


@pytest.fixture(scope="module")
def own() -> Iterator[Cluster]:
    """A cluster whose brokers tests fill, kill and suspend; it waits long before it gives up a hung one."""
    with brokers.running(properties={"broker.session.timeout.ms": 45_000}) as started:
        yield started


@pytest.fixture
def admin(own) -> Iterator[KafkaAdminClient]:
    client = KafkaAdminClient(**own.properties)
    yield client
    client.close()


def available(broker: Broker) -> int:
    disk = os.statvfs(broker.log_dir)
    return disk.f_bavail * disk.f_frsize


def show(own: Cluster, what: str, factor: float) -> None:
    disks = "; ".join(
        f"broker {number} (process {broker.pid}): {broker.used_bytes():,} bytes used, "
        f"{available(broker):,} available"
        for number, broker in own.brokers.items()
    )
    say(f"{what}: factor {factor}; {disks}")


def test_full_disk_throttles_producers_of_every_broker(own, admin):
    limits = observing.settings(own.bootstrap, VOLUME_MIN_AVAILABLE_BYTES=str(MIN_AVAILABLE))
    with ExitStack() as stack:
        (service,) = stack.enter_context(observing.nodes(1, limits))
        stack.enter_context(observing.observer(service, limits))
        until_observed(service, 1.0)
        show(own, "before", volumes(service)["factor"])
        assert service.ask(**PRODUCE)["decision"] == "admit"

        admin.create_topics([NewTopic("filling", replica_assignments={0: [2]})])
        producer = KafkaProducer(**own.properties, max_request_size=MIB, batch_size=MIB, acks=1)
        stack.callback(producer.close)
        while available(own.brokers[2]) > MIN_AVAILABLE:
            producer.send("filling", RECORD).get(30)
        full_ms = time.time_ns() // 1_000_000
        # The first check of broker 2 after that is enough.
        eventually(lambda: volume(service, "2")["observed_ms"] > full_ms)
        now = volumes(service)
        show(own, "full", now["factor"])
        assert now["factor"] == 0.0
        assert now["reason"].startswith("violation: ")
        assert [found["state"] for found in now["volumes"]] == ["ok", "violating"]
        assert now["volumes"][1]["available_bytes"] <= MIN_AVAILABLE < available(own.brokers[1])
        held = service.ask(**PRODUCE)
        assert held["decision"] == "throttle"
        assert held["limited_by"]["quota"] == "throttle_factor"
        assert (held["source"], held["charged"]) == ("local", False)
        assert held["throttle_ms"] >= 1000
        assert service.ask(principal="alice", usage={"fetch_bytes": 1000})["decision"] == "admit"

        admin.delete_records({TopicPartition("filling", 0): -1})
        admin.delete_topics(["filling"])
        eventually(lambda: available(own.brokers[2]) > MIN_AVAILABLE, within_s=60)
        empty_ms = time.time_ns() // 1_000_000
        eventually(lambda: volume(service, "2")["observed_ms"] > empty_ms)
        show(own, "emptied", volumes(service)["factor"])
        until_observed(service, 1.0)
        assert service.ask(**PRODUCE)["decision"] == "admit"


def test_another_observer_takes_over_and_the_factor_stays(own):
    """Every volume violates the limit; only a leader without a past, or no leader, would make it 1."""
    given = observing.settings(
        own.bootstrap,
        VOLUME_MIN_AVAILABLE_RATIO="0.999999",
        VOLUME_CHECK_INTERVAL=f"PT{TAKE_OVER_INTERVAL_S}S",
        VOLUME_VALIDITY="PT30S",
        VOLUME_FALLBACK_FACTOR="1.0",
    )
    with ExitStack() as stack:
        services = stack.enter_context(observing.nodes(2, given))
        store = stack.enter_context(redis.Redis.from_url(services[0].store_url))
        observers = [stack.enter_context(observing.observer(services[0], given)) for _ in range(2)]
        for service in services:
            until_observed(service, 0.0)
        with observing.sampling(services) as samples:
            first = leader(store, observers)
            first.kill()
            second = successor(store, observers)
            say(f"killed {first.pid}: {second.pid} observed")

            observers.append(stack.enter_context(observing.observer(services[0], given)))
            token = int(store.get(leadership_keys(LEASE)[1]) or 0)
            second.hold()
            third = successor(store, observers)
            say(f"held {second.pid}: {third.pid} observed")
            assert int(store.get(leadership_keys(LEASE)[1]) or 0) == token + 1
            assert asyncio.run(late_write(services[0].store_url, token)) == "fenced"
            second.go_on()
            eventually(lambda: "volume observer lost the lease to another" in second.logged())
            before = volume(services[0], "1")["observed_ms"]
            eventually(lambda: volume(services[0], "1")["observed_ms"] > before)
            assert leader(store, observers) is third
        assert samples.found == [{0.0}, {0.0}]
        say(f"{samples.looks} looks at two nodes: {samples.found}")


def test_nodes_use_the_fallback_when_validity_ends_without_observers(own):
    given = observing.settings(
        own.bootstrap,
        VOLUME_MIN_AVAILABLE_RATIO="0.01",
        VOLUME_VALIDITY="PT4S",
        VOLUME_FALLBACK_FACTOR="0.25",
    )
    with ExitStack() as stack:
        services = stack.enter_context(observing.nodes(2, given))
        observers = [stack.enter_context(observing.observer(services[0], given)) for _ in range(2)]
        for service in services:
            until_observed(service, 1.0)
        with observing.sampling(services) as samples:
            for one in observers:
                one.kill()
            for service in services:
                fallen = until_factor(service, 0.25)
                assert fallen["since_ms"] == fallen["valid_until_ms"] + 1
            eventually(lambda: samples.found == [{1.0, 0.25}, {1.0, 0.25}])
        stack.enter_context(observing.observer(services[0], given))
        for service in services:
            until_observed(service, 1.0)


def test_hung_or_dead_broker_is_unknown_and_the_valid_factor_stays(own):
    given = observing.settings(
        own.bootstrap,
        VOLUME_MIN_AVAILABLE_RATIO="0.01",
        VOLUME_VALIDITY="PT10S",
        VOLUME_FALLBACK_FACTOR="0.5",
    )
    broker = own.brokers[2]
    with ExitStack() as stack:
        (service,) = stack.enter_context(observing.nodes(1, given))
        polling = stack.enter_context(observing.observer(service, given))
        stack.callback(broker.go_on)
        until_observed(service, 1.0)
        with observing.sampling([service]) as samples:
            broker.hold()
            eventually(lambda: volume(service, "2")["state"] == "unknown")
            before = volume(service, "1")["observed_ms"]
            eventually(lambda: volume(service, "1")["observed_ms"] > before)
            assert volume(service, "2")["total_bytes"] == brokers.DISK_BYTES
            broker.go_on()
            eventually(lambda: volume(service, "2")["state"] == "ok")
        assert samples.found == [{1.0}]
        assert "broker 2 is unknown: no answer within" in polling.logged()

        broker.hold()  # and now for longer than anything stays valid
        fallen = until_factor(service, 0.5)
        assert fallen["reason"].startswith("fallback: broker 2 is unknown: ")
        assert volume(service, "1")["state"] == "ok"
        broker.go_on()
        until_observed(service, 1.0)

        broker.kill()
        eventually(lambda: "broker 2 is unknown: no connection: Connection refused" in polling.logged())
        fallen = until_factor(service, 0.5)
        assert fallen["reason"].startswith("fallback: broker 2 is unknown: no connection")


def until_factor(service: Service, factor: float) -> dict[str, Any]:
    """The volumes of a node, once it has this factor."""
    eventually(lambda: volumes(service)["factor"] == factor)
    return volumes(service)


async def late_write(store_url: str, token: int) -> str:
    """The store's answer to a write with the fencing token of an earlier leader."""
    record = VolumeRecord.at(store_url)
    try:
        reading = await record.read()
        assert reading.state is not None
        return await record.replace(reading.raw, reading.state, token)
    finally:
        await record.close()


def leader(store: redis.Redis, observers: list[Observer]) -> Observer:
    """The observer that holds the lease."""

    def look() -> Observer | None:
        pid = observing.pid_of(store.get(leadership_keys(LEASE)[0]))
        return next((one for one in observers if one.pid == pid and one.running.poll() is None), None)

    found = eventually(look)
    assert found is not None
    return found


def successor(store: redis.Redis, observers: list[Observer]) -> Observer:
    """The observer that leads after another ended, once it has written; within two intervals.

    Two intervals cover the rest of the lease, the pause until the next try to take it, and an observation.
    """
    lasts_s = lease_s(VolumeRules(interval_ms=1_000 * TAKE_OVER_INTERVAL_S))
    assert store.pttl(leadership_keys(LEASE)[0]) <= 1_000 * lasts_s
    assert lasts_s + lasts_s / BEATS_PER_LEASE + OBSERVE_FRACTION * TAKE_OVER_INTERVAL_S <= (
        2 * TAKE_OVER_INTERVAL_S
    )
    old = leader_pid = observing.pid_of(store.get(leadership_keys(LEASE)[0]))
    seen = store.get(RECORD_KEY)

    def taken() -> bool:
        nonlocal leader_pid
        leader_pid = observing.pid_of(store.get(leadership_keys(LEASE)[0]))
        return leader_pid not in {None, old} and store.get(RECORD_KEY) != seen

    eventually(taken)
    return leader(store, observers)
