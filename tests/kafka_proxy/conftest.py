"""A broker, a node of Quotagate and proxies between them, which the tests of this folder share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import count
from typing import Any

import pytest
from kafka import KafkaAdminClient
from kafka.admin import NewTopic

from tests import service
from tests.kafka import brokers
from tests.kafka.brokers import Cluster
from tests.kafka_proxy import proxy
from tests.kafka_proxy.proxy import Proxy, settings_for
from tests.service import Service

_numbers = count()


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    with brokers.running(2) as started:
        yield started


@pytest.fixture(scope="session")
def quotagate() -> Iterator[Service]:
    # While the throttle factor is 0, producers wait until the disks are looked at again.
    with service.running(environment={"QUOTAGATE_VOLUME_CHECK_INTERVAL": "PT3S"}) as node:
        yield node


@pytest.fixture(scope="session")
def start_proxy(cluster, quotagate, tmp_path_factory) -> Iterator[Callable[..., Proxy]]:
    """Starts one more proxy that lasts as long as the session."""
    with ExitStack() as stack:

        def start(protocol: str = "PLAINTEXT", **config: object) -> Proxy:
            folder = tmp_path_factory.mktemp("proxy")
            settings = {**settings_for(folder, quotagate), **config}
            upstream = cluster.bootstrap_of(protocol)
            return stack.enter_context(proxy.running(folder, upstream, settings))

        yield start


@pytest.fixture(scope="session")
def plain(start_proxy: Callable[..., Proxy]) -> Proxy:
    """A proxy whose clients are anonymous."""
    return start_proxy()


@pytest.fixture(scope="session")
def other(start_proxy: Callable[..., Proxy]) -> Proxy:
    """A second proxy before the same cluster."""
    return start_proxy()


@pytest.fixture(scope="session")
def sasl(start_proxy: Callable[..., Proxy]) -> Proxy:
    """A proxy whose clients have to authenticate."""
    return start_proxy("SASL_PLAINTEXT")


@pytest.fixture
def admin(cluster) -> Iterator[Any]:
    """Kafka's administration, past the proxies."""
    client = KafkaAdminClient(**cluster.properties)
    yield client
    client.close()


@pytest.fixture
def topic(admin) -> str:
    """A topic of this test with one partition."""
    name = f"topic-{next(_numbers)}"
    admin.create_topics([NewTopic(name, num_partitions=1, replication_factor=1)])
    return name


@pytest.fixture(autouse=True)
def clean(request) -> Iterator[None]:
    """No quotas are left behind, and no counts of the users that tests share."""
    yield
    if "quotagate" in request.fixturenames:
        node: Service = request.getfixturevalue("quotagate")
        quotas = node.http.get("/v1/quotas?limit=1000").json()["quotas"]
        for user in ("ANONYMOUS", "alice", "bob", "carol"):
            reset = node.http.post("/v1/buckets:reset", json={"bucket": f"user={user}"})
            assert reset.status_code == 204, reset.text
        for each in quotas:
            node.http.delete(f"/v1/quotas/{each['entity']}")
