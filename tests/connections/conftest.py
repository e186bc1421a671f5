"""A node and an echo target for the proxy's tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Final

import pytest

from tests.connections.proxies import Echo, listening
from tests.service import Service, running

PATIENT: Final = {"QUOTAGATE_STORE_BUDGET_MS": "20000"}
"""Past 50 ms, as on a busy machine, answers come without the store, and nothing is counted."""


@pytest.fixture(scope="session")
def node() -> Iterator[Service]:
    """One for all tests, each of which has addresses, brokers and listeners of its own."""
    with running(environment=PATIENT) as node:
        yield node


@pytest.fixture
async def target() -> AsyncIterator[int]:
    async with listening(Echo) as port:
        yield port
