"""Fixtures of the clients' tests: the two kinds, a scripted server, and a real node."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.clients.both import Caller, callers
from tests.clients.scripted import Script, serving
from tests.service import Service, running

collect_ignore = ["preloaded.py", "forked_leases.py", "operations"]
"""Programs of the tests: importing them asks a node, or needs `make clients`."""


@pytest.fixture(params=["sync", "async"])
def make(request: pytest.FixtureRequest) -> Iterator[Callable[..., Caller]]:
    with callers(request.param) as made:
        yield made


@pytest.fixture
def script() -> Iterator[Script]:
    with serving() as played:
        yield played


@pytest.fixture(scope="package")
def node() -> Iterator[Service]:
    with running() as service:
        yield service
