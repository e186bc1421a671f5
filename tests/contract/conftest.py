"""Real databases for contract tests, and connections to stores with a long timeout."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from app.catalog import schema
from app.store import redis as redis_module
from app.store.client import client_of
from tests.pgbouncer import PgBouncer
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
    """Give connections a long timeout, because a slow connection does not change the decisions of scripts."""

    def patient_client_of(url: str, timeout_s: float, *, connect_within_s: float = 0.0) -> Redis:
        return client_of(url, max(timeout_s, PATIENCE_S), connect_within_s=max(connect_within_s, PATIENCE_S))

    monkeypatch.setattr(redis_module, "client_of", patient_client_of)


@pytest.fixture(scope="session")
def pgbouncer(postgres: Postgres) -> Iterator[PgBouncer]:
    """One PgBouncer for the whole run; all clients of a database share two sessions of the server."""
    with PgBouncer(postgres, default_pool_size=2) as pooler:
        yield pooler


@pytest.fixture(params=["sqlite", "postgresql", "pgbouncer"])
def empty(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty database of each kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'catalog.db'}"
    server: Postgres = request.getfixturevalue("postgres")
    url = server.database()
    if request.param == "postgresql":
        return url
    pooler: PgBouncer = request.getfixturevalue("pgbouncer")
    return pooler.before(url)


@pytest.fixture
def database(empty: str) -> str:
    """The URL of a database with the newest schema."""
    schema.upgrade(empty)
    return empty
