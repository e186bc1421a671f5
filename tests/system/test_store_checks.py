"""A node reports a wrong configuration of the store in the log, in readiness and in a metric."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import redis

from app.catalog import schema
from tests import stores
from tests.service import ADMIN_KEY, Service, eventually, running


def store_of(node: Service) -> str:
    state: str = node.http.get("/health/ready").json()["store"]
    return state


def exposed(node: Service, name: str) -> str:
    """The lines of a metric."""
    lines = node.http.get("/metrics").text.splitlines()
    return "".join(line.removeprefix(name) for line in lines if line.startswith(name))


def decides(node: Service) -> bool:
    """Whether answers come from the store, except while the machine stalls."""
    return bool(eventually(lambda: node.ask(principal="a", usage={"requests": 1})["source"] == "store"))


@pytest.mark.parametrize("kind", stores.KINDS)
def test_store_that_evicts_is_reported_until_it_is_fixed(kind):
    with (
        stores.server(kind, "--maxmemory-policy", "allkeys-lru") as server,
        running(store_url=server.url) as node,
        redis.Redis.from_url(server.url) as store,
    ):
        assert store_of(node) == "maxmemory_policy"
        assert exposed(node, "quotagate_store_faults") == '{fault="maxmemory_policy"} 1.0'
        assert "allkeys-lru evicts buckets" in node.logged()
        node.put("user=a", request_rate=10)
        assert decides(node)
        store.config_set("maxmemory-policy", "noeviction")
        eventually(lambda: store_of(node) == "ok")
        assert not exposed(node, "quotagate_store_faults")


def test_store_without_maxmemory_is_reported_until_it_has_one():
    with (
        stores.server("valkey", "--maxmemory", "0") as server,
        running(store_url=server.url) as node,
        redis.Redis.from_url(server.url) as store,
    ):
        assert store_of(node) == "maxmemory"
        assert exposed(node, "quotagate_store_faults") == '{fault="maxmemory"} 1.0'
        assert "it has no maxmemory" in node.logged()
        store.config_set("maxmemory", stores.MAXMEMORY)
        eventually(lambda: store_of(node) == "ok")


def test_store_that_forbids_info_decides_and_is_reported():
    with stores.server("valkey") as server, redis.Redis.from_url(server.url) as store:
        store.execute_command("ACL", "SETUSER", "node", "on", ">secret", "~*", "+@all", "-info")
        with running(store_url=f"unix://node:secret@{server.socket}") as node:
            assert store_of(node) == "unchecked"
            node.put("user=a", request_rate=10)
            assert decides(node)


@pytest.mark.parametrize("taken", ["-fcall", "-eval", "-@write"])
def test_store_that_forbids_scripts_or_writes_is_away(taken):
    with stores.server("valkey") as server, redis.Redis.from_url(server.url) as store:
        store.execute_command("ACL", "SETUSER", "node", "on", ">secret", "~*", "+@all", *taken.split())
        with running(store_url=f"unix://node:secret@{server.socket}") as node:
            assert store_of(node) == "permission"
            assert exposed(node, "quotagate_store_circuit_open") == " 1.0"
            node.put("user=a", request_rate=10)
            assert node.ask(principal="a", usage={"requests": 1})["source"] == "fallback"
            store.execute_command("ACL", "SETUSER", "node", "+@all")
            eventually(lambda: store_of(node) == "ok")
            assert decides(node)


def test_wrong_password_is_reported():
    with stores.server("valkey") as server, redis.Redis.from_url(server.url) as store:
        store.execute_command("ACL", "SETUSER", "node", "on", ">right", "~*", "+@all")
        with running(store_url=f"unix://node:wrong@{server.socket}") as node:
            assert store_of(node) == "authentication"
            assert "node:wrong" not in node.logged()


def test_cluster_whose_url_is_that_of_a_single_store_is_refused_at_start(tmp_path: Path):
    with stores.server("valkey", "--cluster-enabled", "yes") as server:
        catalog = f"sqlite:///{tmp_path / 'catalog.db'}"
        schema.upgrade(catalog)
        own = {
            "QUOTAGATE_HOME": str(tmp_path),
            "QUOTAGATE_REDIS_URL": server.url,
            "QUOTAGATE_DATABASE_URL": catalog,
            "QUOTAGATE_ADMIN_KEY": ADMIN_KEY,
            "QUOTAGATE_PORT": "1",
        }
        command = [sys.executable, "-P", "-m", "app.run.cli", "serve"]
        bare = {name: value for name, value in os.environ.items() if not name.startswith("QUOTAGATE_")}
        ended = subprocess.run(
            command, env={**bare, **own}, capture_output=True, text=True, timeout=60, check=False
        )
        assert ended.returncode == 1
        assert "this is a cluster: give its URL as redis+cluster://" in ended.stdout + ended.stderr
