"""Clients before a proxy and brokers of other versions than the proxy knows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import pytest
from kafka import KafkaAdminClient, KafkaConsumer
from kafka.admin import NewTopic

from tests.kafka import brokers
from tests.kafka.brokers import PASSWORDS, Cluster
from tests.kafka_proxy import drivers, producing, proxy
from tests.kafka_proxy.proxy import Proxy

pytestmark = pytest.mark.timeout(900)

VERSIONS: Final = ("4.0.2", "4.4.0")
"""All other tests use the version in `tests/kafka/pom.xml`, which is between these."""
USER: Final = "alice"


@pytest.fixture(scope="module", params=VERSIONS)
def newer(request) -> Iterator[Cluster]:
    with brokers.running(1, version=request.param) as started:
        admin = KafkaAdminClient(**started.properties)
        names = [f"by-{client}" for client in (*drivers.CLIENTS, *producing.CLIENTS)]
        admin.create_topics([NewTopic(name, num_partitions=1, replication_factor=1) for name in names])
        admin.close()
        yield started


@pytest.fixture(scope="module")
def between(newer, quotagate, tmp_path_factory) -> Iterator[Proxy]:
    folder = tmp_path_factory.mktemp("proxy")
    settings = proxy.settings_for(folder, quotagate)
    with proxy.running(folder, newer.bootstrap_of("SASL_PLAINTEXT"), settings) as started:
        yield started


def arrived(newer: Cluster, topic: str) -> int:
    consumer = KafkaConsumer(topic, **newer.properties, auto_offset_reset="earliest")
    try:
        count = 0
        while count < 3:
            count += sum(map(len, consumer.poll(1000).values()))
        return count
    finally:
        consumer.close()


@pytest.mark.parametrize("client", drivers.CLIENTS)
def test_driven_client_sends(client, newer, between, tmp_path):
    topic = f"by-{client}"
    with drivers.running(client, tmp_path / "client", between.bootstrap, USER) as driven:
        driven.say(f"send one {topic} 100 3")
        for _ in range(3):
            driven.until("sent one")
    assert arrived(newer, topic) == 3


@pytest.mark.parametrize("client", producing.CLIENTS)
def test_client_of_this_process_sends(client, newer, between, tmp_path):
    topic = f"by-{client}"
    with producing.running(client, tmp_path, between.bootstrap, (USER, PASSWORDS[USER])) as producers:
        producers.send("one", topic, 3)
        producers.until_sent("one", 3)
    assert arrived(newer, topic) == 3
