"""Real databases for contract tests, and connections to stores that are not given up."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from redis.asyncio import Redis

from app.store import redis as redis_module
from app.store.client import client_of
from tests.postgres import Postgres, started

PATIENCE_S = 60.0


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """One PostgreSQL for the whole run; each test makes its own database in it."""
    server = started()
    yield server
    server.remove()


@pytest.fixture
def patient_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let connections take long, which is a failure to a service but no difference in what scripts decide."""

    def patient_client_of(url: str, timeout_s: float, *, connect_within_s: float = 0.0) -> Redis:
        return client_of(url, max(timeout_s, PATIENCE_S), connect_within_s=max(connect_within_s, PATIENCE_S))

    monkeypatch.setattr(redis_module, "client_of", patient_client_of)
