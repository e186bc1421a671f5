"""A node and an echo target for the proxy's tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from tests.connections.proxies import Echo, listening
from tests.service import Service, running


@pytest.fixture(scope="session")
def node() -> Iterator[Service]:
    """One node for all tests; each test uses its own addresses, brokers and listeners."""
    with running() as node:
        yield node


@pytest.fixture
async def target() -> AsyncIterator[int]:
    async with listening(Echo) as port:
        yield port
