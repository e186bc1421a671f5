"""A node reports a wrong configuration of the store in the log, in readiness and in a metric."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

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


@dataclass(frozen=True, slots=True)
class Wrong:
    """A store with a wrong setting."""

    kind: str
    setting: str
    value: str
    right: str
    fault: str
    logged: str


EVICTS: Final = Wrong(
    kind="valkey",
    setting="maxmemory-policy",
    value="allkeys-lru",
    right="noeviction",
    fault="maxmemory_policy",
    logged="allkeys-lru evicts buckets",
)
UNBOUNDED: Final = Wrong(
    kind="valkey",
    setting="maxmemory",
    value="0",
    right=str(stores.MAXMEMORY),
    fault="maxmemory",
    logged="it has no maxmemory",
)


def test_store_that_evicts_or_has_no_maxmemory_is_reported_until_it_is_fixed():
    """All are fixed before the first is waited for, as a node examines its store every few seconds."""
    wrong = [*(replace(EVICTS, kind=kind) for kind in stores.KINDS), UNBOUNDED]
    with ExitStack() as stack:
        nodes = []
        for each in wrong:
            server = stack.enter_context(stores.server(each.kind, f"--{each.setting}", each.value))
            nodes.append((node := stack.enter_context(running(store_url=server.url)), each))
            assert store_of(node) == each.fault
            assert exposed(node, "quotagate_store_faults") == f'{{fault="{each.fault}"}} 1.0'
            assert each.logged in node.logged()
            node.put("user=a", request_rate=10)
            assert decides(node)
        for node, each in nodes:
            with redis.Redis.from_url(node.store_url) as store:
                store.config_set(each.setting, each.right)
        for node, _ in nodes:
            eventually(lambda: store_of(node) == "ok")  # noqa: B023
            assert not exposed(node, "quotagate_store_faults")


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
            assert store_of(node) == "missing_right"
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
