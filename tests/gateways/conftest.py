"""A site, a node and the three gateways between them, started once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import redis

from tests.gateways import gateway as gateways
from tests.gateways.gateway import KINDS, Gateway, Kind
from tests.service import Service, running

Limit = Callable[[str, object], None]


@pytest.fixture(scope="session")
def site() -> Iterator[int]:
    with gateways.running_site() as port:
        yield port


@pytest.fixture(scope="session")
def node() -> Iterator[Service]:
    with running() as one:
        yield one


@pytest.fixture
def limit(node: Service) -> Iterator[Limit]:
    """Sets the request rate of an entity for one test, which begins without quotas and counts."""
    with limiting(node) as setting:
        yield setting


@contextmanager
def limiting(node: Service) -> Iterator[Limit]:
    entities = []

    def setting(entity: str, request_rate: object) -> None:
        node.put(entity, request_rate=request_rate)
        entities.append(entity)

    with redis.Redis.from_url(node.store_url) as store:
        store.flushall()
    yield setting
    for entity in entities:
        node.http.delete(f"/v1/quotas/{entity}").raise_for_status()


@pytest.fixture(scope="session", params=KINDS, ids=[kind.name for kind in KINDS])
def kind(request: pytest.FixtureRequest) -> Kind:
    found: Kind = request.param
    return found


@pytest.fixture(scope="session")
def gateway(kind: Kind, node: Service, site: int) -> Iterator[Gateway]:
    """A gateway as in its example, except for the timeout of its check."""
    with gateways.running(kind, node.address[1], site, kind.patience) as running_gateway:
        yield running_gateway
