"""New producer ids beyond the quota wait, by themselves, in every client, and then go through unchanged."""

from __future__ import annotations

import pytest
from kafka import KafkaAdminClient, TopicPartition

from tests.kafka_proxy import producing
from tests.report import say
from tests.service import eventually

LIMIT = 3
WINDOW_MS = 20_000
"""Longer than a proxy may hold a request."""


def known(admin: KafkaAdminClient, topic: str) -> list[tuple[int, int]]:
    """The producers that the broker knows of a topic, as ids with their epochs."""
    partition = TopicPartition(topic, 0)
    states = admin.describe_producers([partition])[partition].active_producers
    return sorted((state.producer_id, state.producer_epoch) for state in states)


@pytest.mark.parametrize("client", producing.CLIENTS)
def test_fourth_producer_is_held_and_goes_through_with_the_same_id(
    client, cluster, plain, quotagate, topic, admin, tmp_path
):
    quotagate.put("user=ANONYMOUS", producer_ids_rate={"limit": LIMIT, "window_ms": WINDOW_MS})
    with producing.running(client, tmp_path, plain.bootstrap) as producers:
        for name in ("one", "two", "three"):
            producers.send(name, topic)
            producers.until_sent(name, 1)
        first = known(admin, topic)
        assert len(first) == LIMIT

        producers.send("four", topic, 3)
        eventually(lambda: producers.throttled_ms("four") > 0 or producers.errors())
        told_ms = producers.throttled_ms("four")
        assert producers.sent("four") == 0

        # The others go on while it waits.
        for name in ("one", "two", "three"):
            producers.send(name, topic, 5)
            producers.until_sent(name, 6)
            assert producers.throttled_ms(name) == 0
        assert [id_ for id_ in known(admin, topic) if id_ not in first] == [], "it went through too early"

        producers.until_sent("four", 3)
        assert producers.errors() == []
        all_ = known(admin, topic)
    say(f"{client}: the fourth producer was asked to wait {told_ms:,.0f} ms; ids and epochs then: {all_}")
    assert len(all_) == LIMIT + 1
    assert all(epoch == 0 for _, epoch in all_), "a client changed the epoch of a producer"


def test_two_proxies_share_one_count(cluster, plain, other, quotagate, topic, tmp_path):
    quotagate.put("user=ANONYMOUS", producer_ids_rate={"limit": 2, "window_ms": WINDOW_MS})
    with (
        producing.running("kafka-python", tmp_path, plain.bootstrap) as here,
        producing.running("kafka-python", tmp_path, other.bootstrap) as there,
    ):
        here.send("one", topic)
        here.until_sent("one", 1)
        there.send("two", topic)
        there.until_sent("two", 1)
        there.send("three", topic)
        here.send("four", topic)
        eventually(lambda: there.throttled_ms("three") > 0 and here.throttled_ms("four") > 0)
        assert (there.sent("three"), here.sent("four")) == (0, 0)
        there.until_sent("three", 1)
        here.until_sent("four", 1)
