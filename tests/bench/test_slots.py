"""The cost of an ask by the number of its buckets' slots: processor time and latency."""

from __future__ import annotations

import asyncio
import time
from statistics import median
from typing import Any

import pytest

from app.admission.admission import Admission
from app.domain.ask import Ask
from app.domain.entity import ANY, Entity
from app.domain.quota import Quota
from tests import clusters
from tests.clusters import Cluster
from tests.contract.clustered import nodes
from tests.proofs import print_table

pytestmark = pytest.mark.bench

ROUNDS, ASKS, CALLERS, ALONE = 5, 1_000, 50, 200
COMMAND = "make bench T=tests/bench/test_slots.py"
COLUMNS = ("slots", "node us", "servers us", "alone, p50 ms")
KEYS = {"request_rate": "user", "connection_creation_rate": "ip", "max_connection_creation_rate": "listener"}
QUOTAS = {
    key: {
        Entity.of(**{level: ANY if level != "listener" else "L"}): Quota(
            key, 1e9, "token_bucket", "deny", burst=1e9
        )
    }
    for key, level in KEYS.items()
}


def asks(slots: int) -> list[Ask]:
    """Asks of many users and addresses, each with its buckets in this many slots."""
    usage = {"requests": 1} if slots == 1 else {"requests": 1, "connections": 1}
    return [
        Ask(
            usage,
            principal=f"user-{number % 97}",
            ip=f"10.0.{slots}.{number % 101}" if slots > 1 else None,
            listener="L" if slots > 2 else None,
        )
        for number in range(ASKS)
    ]


def servers_us(cluster: Cluster) -> float:
    """The processor time of all primaries so far."""
    found: list[dict[str, Any]] = [node.client().info("cpu") for node in cluster.primaries]
    return 1e6 * sum(float(each["used_cpu_user"] + each["used_cpu_sys"]) for each in found)


async def _send(node: Admission, wanted: list[Ask]) -> None:
    work = iter(wanted)

    async def call() -> None:
        for ask in work:
            (planned,) = await node.decide([ask])
            assert planned.decision is not None
            assert planned.decision.source == "store"

    await asyncio.gather(*(call() for _ in range(CALLERS)))


async def _measure(cluster: Cluster) -> list[list[object]]:
    rows: list[list[object]] = []
    async with nodes(cluster, 1, QUOTAS) as (node,):
        for slots in (1, 2, 3):
            wanted, own, theirs, waits = asks(slots), [], [], []
            await _send(node, wanted)
            for _ in range(ROUNDS):
                began, before = time.process_time(), servers_us(cluster)
                await _send(node, wanted)
                own.append(1e6 * (time.process_time() - began) / ASKS)
                theirs.append((servers_us(cluster) - before) / ASKS)
            for ask in wanted[:ALONE]:
                began = time.perf_counter()
                await node.decide([ask])
                waits.append(1e3 * (time.perf_counter() - began))
            rows.append([slots, f"{min(own):.0f}", f"{min(theirs):.0f}", f"{median(waits):.2f}"])
    return rows


def test_ask_costs_more_in_each_slot() -> None:
    """On a busy machine the figures are two to four times larger than on a quiet one; the ratios hold."""
    with clusters.running(replicas=False) as cluster:
        rows = asyncio.run(_measure(cluster))
    print_table("An ask on a cluster, by its slots", COMMAND, COLUMNS, rows)
    assert float(str(rows[0][1])) < float(str(rows[2][1]))
