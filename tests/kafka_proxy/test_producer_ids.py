"""New producer ids beyond the quota wait, by themselves, in every client, and then go through unchanged."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any, Final

import pytest
from kafka import KafkaAdminClient, TopicPartition
from kafka.admin import NewTopic

from tests.kafka.brokers import PASSWORDS
from tests.kafka_proxy import producing
from tests.kafka_proxy.proxy import Proxy
from tests.report import say
from tests.service import eventually

LIMIT = 3
WINDOW_MS = 20_000
"""Longer than a proxy may hold a request."""
USERS: Final = dict(zip(producing.CLIENTS, ("alice", "bob", "carol"), strict=True))
"""The user of each client, so that each has a count of its own."""
SHARED: Final = "shared"


@dataclass(frozen=True, slots=True)
class Held:
    """The throttle time of a fourth producer, and all ids with their epochs once it went through."""

    told_ms: float
    all: list[tuple[int, int]]


@pytest.fixture(scope="module")
def outcomes(cluster, sasl, plain, other, quotagate, tmp_path_factory) -> dict[str, Future[Any]]:
    """The outcome of each case. They run in parallel, because each waits for its window to end."""
    topics = {case: f"ids-{case}" for case in (*producing.CLIENTS, SHARED)}
    admin = KafkaAdminClient(**cluster.properties)
    admin.create_topics([NewTopic(name, num_partitions=1, replication_factor=1) for name in topics.values()])
    admin.close()
    folder = tmp_path_factory.mktemp("producers")
    for user in USERS.values():
        quotagate.put(f"user={user}", producer_ids_rate={"limit": LIMIT, "window_ms": WINDOW_MS})
    quotagate.put("user=ANONYMOUS", producer_ids_rate={"limit": 2, "window_ms": WINDOW_MS})
    with ThreadPoolExecutor(len(topics)) as pool:
        began: dict[str, Future[Any]] = {
            client: pool.submit(hold_the_fourth, client, cluster, sasl, topics[client], folder / client)
            for client in producing.CLIENTS
        }
        began[SHARED] = pool.submit(share_one_count, plain, other, topics[SHARED], folder)
    return began


def known(admin: KafkaAdminClient, topic: str) -> list[tuple[int, int]]:
    """The producers that the broker knows of a topic, as ids with their epochs."""
    partition = TopicPartition(topic, 0)
    states = admin.describe_producers([partition])[partition].active_producers
    return sorted((state.producer_id, state.producer_epoch) for state in states)


def hold_the_fourth(client: str, cluster: Any, sasl: Proxy, topic: str, folder: Path) -> Held:
    folder.mkdir()
    user = USERS[client]
    admin = KafkaAdminClient(**cluster.properties)
    may_be_known_s = monotonic() + WINDOW_MS / 1000  # the first id leaves the window no sooner
    try:
        with producing.running(client, folder, sasl.bootstrap, (user, PASSWORDS[user])) as producers:
            for name in ("one", "two", "three"):
                producers.send(name, topic)
                producers.until_sent(name, 1)
            first = known(admin, topic)
            assert len(first) == LIMIT

            producers.send("four", topic, 3)
            eventually(lambda: producers.throttled_ms("four") > 0 or producers.errors())
            told_ms = producers.throttled_ms("four")
            assert producers.sent("four") == 0 or monotonic() >= may_be_known_s

            # The others go on while it waits.
            for name in ("one", "two", "three"):
                producers.send(name, topic, 5)
                producers.until_sent(name, 6)
                assert producers.throttled_ms(name) == 0
            more = [id_ for id_ in known(admin, topic) if id_ not in first]
            assert more == [] or monotonic() >= may_be_known_s, "it went through too early"

            producers.until_sent("four", 3)
            assert producers.errors() == []
            return Held(told_ms, known(admin, topic))
    finally:
        admin.close()


@pytest.mark.parametrize("client", producing.CLIENTS)
def test_fourth_producer_is_held_and_goes_through_with_the_same_id(client, outcomes):
    held = outcomes[client].result()
    say(
        f"{client}: the fourth producer was asked to wait {held.told_ms:,.0f} ms; "
        f"ids and epochs then: {held.all}"
    )
    assert len(held.all) == LIMIT + 1
    assert all(epoch == 0 for _, epoch in held.all), "a client changed the epoch of a producer"


def share_one_count(plain: Proxy, other: Proxy, topic: str, folder: Path) -> None:
    may_be_known_s = monotonic() + WINDOW_MS / 1000
    with (
        producing.running("kafka-python", folder, plain.bootstrap) as here,
        producing.running("kafka-python", folder, other.bootstrap) as there,
    ):
        here.send("one", topic)
        here.until_sent("one", 1)
        there.send("two", topic)
        there.until_sent("two", 1)
        there.send("three", topic)
        here.send("four", topic)
        eventually(lambda: there.throttled_ms("three") > 0 and here.throttled_ms("four") > 0)
        assert (there.sent("three"), here.sent("four")) == (0, 0) or monotonic() >= may_be_known_s
        there.until_sent("three", 1)
        here.until_sent("four", 1)


def test_two_proxies_share_one_count(outcomes):
    outcomes[SHARED].result()
