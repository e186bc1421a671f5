"""A node that has counted something in every metric, and the expressions of dashboard and alerts."""

from __future__ import annotations

import json
import re
import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final

import yaml
from prometheus_client.parser import text_string_to_metric_families

from app.http.wire import MAX_BODY
from tests import stores
from tests.deploy.files import ROOT
from tests.envoy.calls import connected, serving
from tests.pushing import RULES, WELL, push
from tests.service import Service, eventually

DASHBOARD: Final = ROOT / "examples/grafana/quotagate.json"
ALERTS: Final = ROOT / "examples/prometheus/alerts.yml"

CROWD: Final = "127.0.0.14"
PER_ADDRESS: Final = 32
BOUND: Final = {"QUOTAGATE_MAX_CONNECTIONS_PER_ADDRESS": str(PER_ADDRESS)}

NO_COLLECTOR: Final = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_BSP_SCHEDULE_DELAY": "100"}
"""Decisions have spans, which nobody receives."""

NO_FILES: Final = 3
"""A limit of open files below the descriptors that a node has, so that it can open no more."""

ADDED_BY_PROMETHEUS: Final = {"job", "instance"}


@dataclass(frozen=True, slots=True)
class Watched:
    """A node and its store, which can be paused."""

    node: Service
    store: stores.Server

    def load(self) -> None:
        """Send all asks that change a metric while the store is available."""
        asks: list[dict[str, Any]] = [
            {"principal": "alice", "usage": {"requests": 50}},
            {"principal": "alice", "usage": {"mutations": 5}},
            {"principal": "alice", "usage": {"producer_ids": [1, 2, 3, 4]}},
            {"principal": "alice", "usage": {"producer_ids": [1, 2, 3]}},
            {"principal": "alice", "usage": {"produce_bytes": 10**6}},
            {"principal": "alice", "usage": {"requests": 1}, "cluster_action": True},
            {"usage": {"connections": 1}, "ip": "10.0.0.7"},
            {"usage": {"connections": 50}, "broker": "1", "listener": "EXTERNAL"},
            {"usage": {"requests": 1}},
        ]
        self.node.batch(asks)
        push(self.node, WELL)
        refused = self.node.http.get("/v1/keys", headers={"Authorization": "Bearer none"})
        assert refused.status_code == 401

    def lease(self) -> None:
        """Take a lease, and settle it."""
        wish = {"ask": {"principal": "bob", "usage": {"mutations": 1}}, "lease_ms": 1_000}
        taken = self.node.http.post("/v1/leases", json=wish)
        assert taken.json()["granted"] == {"mutations": 1}, taken.text
        assert self.node.http.delete(f"/v1/leases/{taken.json()['lease']}").json()["ok"] is True

    def crowd(self) -> None:
        """Open connections from one address until one is refused; some of their bodies are shed."""
        head = b"POST /v1/decisions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % MAX_BODY
        seen = {"quotagate_connections_refused_total", "quotagate_shed_total"}
        with ExitStack() as stack:
            for _ in range(PER_ADDRESS + 1):
                address = self.node.address
                one = stack.enter_context(socket.create_connection(address, source_address=(CROWD, 0)))
                with suppress(ConnectionError):
                    one.sendall(head + b" " * (MAX_BODY - 1))
            eventually(lambda: seen <= {s.name for s in samples(self.text())})

    def run_short(self) -> None:
        """Leave the node no descriptor for another connection, until it closes an idle one to make room."""
        kept = resource.prlimit(self.node.pid, resource.RLIMIT_NOFILE)
        with ExitStack() as stack:
            idle = stack.enter_context(socket.create_connection(self.node.address, timeout=60))
            idle.sendall(b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert idle.recv(65_536)
            resource.prlimit(self.node.pid, resource.RLIMIT_NOFILE, (NO_FILES, kept[1]))
            stack.callback(resource.prlimit, self.node.pid, resource.RLIMIT_NOFILE, kept)
            stack.enter_context(socket.create_connection(self.node.address))
            with suppress(ConnectionError):
                while idle.recv(65_536):
                    pass

    def load_without_the_store(self) -> None:
        """Ask while the store hangs, until the circuit opens; then resume the store."""
        self.store.hold()
        try:
            assert self.node.ask(principal="alice", usage={"requests": 1})["source"] == "fallback"
            eventually(lambda: self.circuit_is_open() == 1)
        finally:
            self.store.go_on()
        eventually(lambda: self.circuit_is_open() == 0)

    def text(self) -> str:
        """The text of a scrape."""
        answer = self.node.http.get("/metrics")
        assert answer.is_success, answer.text
        return answer.text

    def circuit_is_open(self) -> float:
        found: float = next(s.value for s in samples(self.text()) if s.name == "quotagate_store_circuit_open")
        return found


@contextmanager
def watched() -> Iterator[Watched]:
    """A node that has counted something in every metric; its store may evict, to show that fault too."""
    with (
        stores.server("valkey", "--maxmemory-policy", "allkeys-lru") as store,
        serving(store_url=store.url, environment=RULES | BOUND | NO_COLLECTOR) as (node, envoy_port),
    ):
        tokens = {"limit": 1, "algorithm": "token_bucket", "burst": 5}
        shadow = {"limit": 1, "shadow": True}
        node.put(
            "user=*",
            request_rate=1,
            controller_mutation_rate=tokens,
            producer_ids_rate=3,
            producer_byte_rate=shadow,
        )
        node.put("ip=*", connection_creation_rate=1)
        for type_ in ("broker", "listener"):
            node.put(f"{type_}=*", max_connection_creation_rate=1)
        found = Watched(node, store)
        found.load()
        found.load()
        found.lease()
        with connected(envoy_port) as envoy:
            assert envoy.code({"path": "/"}, {"remote_address": "none"}) == "OK"
        found.crowd()
        found.run_short()
        found.load_without_the_store()
        eventually(lambda: "quotagate_spans_dropped_total" in labels_of(found.text()))
        yield found


def samples(text: str) -> Iterator[Any]:
    """All samples of a scrape."""
    for family in text_string_to_metric_families(text):
        yield from family.samples


def labels_of(text: str) -> dict[str, set[str]]:
    """The label names of each series that a scrape shows."""
    found: dict[str, set[str]] = {}
    for sample in samples(text):
        found.setdefault(sample.name, set()).update(sample.labels)
    return found


def panels() -> list[dict[str, Any]]:
    """The dashboard's panels, without row headings."""
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def dashboard_expressions() -> dict[str, str]:
    """All expressions of the dashboard by place, with Grafana's variables filled in."""
    filled = {"$__rate_interval": "10s", "$instance": ".*", "$quota": ".*"}
    found = {}
    for panel in panels():
        for target in panel["targets"]:
            expression = target["expr"]
            for variable, value in filled.items():
                expression = expression.replace(variable, value)
            assert "$" not in expression, expression
            found[f"{panel['title']} {target['refId']}"] = expression
    return found


def alert_expressions() -> dict[str, str]:
    """All expressions of the alerts, by name."""
    groups = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]
    return {rule["alert"]: rule["expr"] for group in groups for rule in group["rules"]}


_SERIES: Final = re.compile(r"\b(quotagate_\w+)(?:\{([^}]*)\})?")
_GROUPING: Final = re.compile(r"\b(?:by|on|ignoring|without)\s*\(([^)]*)\)")


def strangers(expression: str, known: dict[str, set[str]]) -> list[str]:
    """The metrics and labels of an expression that are in no scrape."""
    found, allowed = [], {"le", *ADDED_BY_PROMETHEUS}
    for name, matchers in _SERIES.findall(expression):
        if name not in known:
            found.append(name)
            continue
        allowed |= known[name]
        named = re.findall(r"(\w+)\s*[=!]~?", matchers)
        found += [f"{name}{{{label}}}" for label in named if label not in known[name] | ADDED_BY_PROMETHEUS]
    groups = [label.strip() for labels in _GROUPING.findall(expression) for label in labels.split(",")]
    return found + [label for label in groups if label and label not in allowed]
