"""The cluster that tests share; one that kills or holds brokers starts a cluster of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kafka import brokers
from tests.kafka.brokers import Cluster


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    with brokers.running() as started:
        yield started
