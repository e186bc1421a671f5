"""Real databases for contract tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.postgres import Postgres, started


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """One PostgreSQL for the whole run; each test makes its own database in it."""
    server = started()
    yield server
    server.remove()
