"""An unreachable Kafka: nodes and observers start anyway, and observations fail."""

from __future__ import annotations

from contextlib import ExitStack

from tests.kafka import observing
from tests.kafka.observing import volumes
from tests.service import eventually


def test_unreachable_kafka_fails_the_observation():
    given = observing.settings(
        "127.0.0.1:1",
        VOLUME_MIN_AVAILABLE_RATIO="0.05",
        VOLUME_VALIDITY="PT4S",
        VOLUME_FALLBACK_FACTOR="0.5",
    )
    with ExitStack() as stack:
        (service,) = stack.enter_context(observing.nodes(1, given))
        stack.enter_context(observing.observer(service, given))
        why = "the observation failed: 127.0.0.1:1: no connection: Connection refused"
        eventually(lambda: volumes(service)["reason"] == f"fallback: {why}", within_s=60)
        assert volumes(service)["factor"] == 0.5
