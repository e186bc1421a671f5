"""A node listens once it can answer; without a catalog it says so, and refuses to decide."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from app.catalog import schema
from tests import stores
from tests.ports import free_port
from tests.postgres import Postgres, started
from tests.programs import end
from tests.service import ADMIN_KEY, eventually

ASK = {"principal": "alice", "usage": {"requests": 1}}
ADMIN = {"Authorization": f"Bearer {ADMIN_KEY}"}


@pytest.fixture(scope="module")
def postgres() -> Iterator[Postgres]:
    server = started()
    yield server
    server.remove()


@contextmanager
def serving(
    home: Path, database_url: str, **settings: str
) -> Iterator[tuple[httpx.Client, subprocess.Popen[bytes]]]:
    """A node that need not be ready, nor listen."""
    port = free_port()
    with stores.running("valkey") as store_url, (home / "log").open("wb") as log:
        settings = {
            "HOME": str(home),
            "PORT": str(port),
            "REDIS_URL": store_url,
            "DATABASE_URL": database_url,
            "ADMIN_KEY": ADMIN_KEY,
            **settings,
        }
        node = subprocess.Popen(
            [sys.executable, "-P", "-m", "app.run.cli", "serve"],
            env=os.environ | {f"QUOTAGATE_{name}": value for name, value in settings.items()},
            stdout=log,
            stderr=log,
        )
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=60) as http:
                yield http, node
        finally:
            end(node)


def status(http: httpx.Client, path: str = "/health/ready") -> int:
    """The status of an answer; 0 if nothing listens."""
    try:
        return http.get(path).status_code
    except httpx.ConnectError:
        return 0


def test_node_without_a_catalog_listens_late_and_decides_nothing(postgres: Postgres, tmp_path: Path):
    url = postgres.database()
    schema.upgrade(url)
    postgres.stop()
    with serving(tmp_path, url) as (http, _):
        assert eventually(lambda: status(http)) == 503
        ready = http.get("/health/ready")
        assert ready.json()["status"] == "starting"
        assert http.get("/health/ready", headers=ADMIN).status_code == 503
        assert http.get("/health/live", headers=ADMIN).status_code == 200
        assert status(http, "/metrics") == 200
        for body, path in ((ASK, ""), ({"asks": [ASK]}, ":batch")):
            refused = http.post(f"/v1/decisions{path}", json=body)
            assert (refused.status_code, refused.json()["type"]) == (503, "urn:quotagate:overloaded")
            assert 1 <= int(refused.headers["retry-after"]) <= 3
        assert http.post("/v1/decisions", json=ASK, headers=ADMIN).status_code == 503
        assert http.get("/v1/check").status_code == 429
        assert http.get("/v1/check?deny_status=403", headers=ADMIN).status_code == 403
        assert http.get("/v1/quotas", headers=ADMIN).status_code == 503
        assert http.post("/v1/leases", json={"ask": ASK, "lease_ms": 1}, headers=ADMIN).status_code == 503
        postgres.start()
        eventually(lambda: status(http) == 200)
        assert http.post("/v1/decisions", json=ASK).json()["decision"] == "admit"
        assert http.get("/v1/quotas", headers=ADMIN).status_code == 200


def test_node_whose_catalog_turns_out_to_be_wrong_ends(postgres: Postgres, tmp_path: Path):
    url = postgres.database()
    postgres.stop()
    with serving(tmp_path, url) as (http, node):
        eventually(lambda: status(http) == 503)
        postgres.start()  # and it was never migrated
        node.wait(60)
        assert "migrate" in (tmp_path / "log").read_text(encoding="utf-8")


def test_node_listens_once_it_is_ready(tmp_path: Path):
    url = f"sqlite:///{tmp_path / 'catalog.db'}"
    schema.upgrade(url)
    with serving(tmp_path, url) as (http, _):
        assert eventually(lambda: status(http)) == 200, "its first answer is that it is ready"


def test_drained_node_is_not_ready_and_serves_on(tmp_path: Path):
    url = f"sqlite:///{tmp_path / 'catalog.db'}"
    schema.upgrade(url)
    with serving(tmp_path, url, DRAIN_MS="3000") as (http, node):
        eventually(lambda: status(http) == 200)
        node.terminate()
        eventually(lambda: status(http) == 503)
        assert http.get("/health/ready").json()["status"] == "stopping"
        answer = http.post("/v1/decisions", json=ASK)
        assert (answer.status_code, answer.headers["connection"]) == (200, "close")
        assert "quotagate_draining 1.0" in http.get("/metrics").text
        assert node.wait(60) == 0
        assert status(http) == 0
