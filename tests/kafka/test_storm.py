"""The same storm of connections at real brokers and at Quotagate: as many get through, on each broker."""

from __future__ import annotations

import asyncio
import struct
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from contextlib import suppress
from itertools import product
from typing import Any, Final

import httpx
import pytest

from tests.commands import Command, quotagate
from tests.kafka import tool
from tests.kafka.brokers import Cluster
from tests.report import say
from tests.service import Service, running

__all__ = ["quotagate"]

STORMING: Final = "127.0.0.77"
"""An address of its own, so that nobody else's connections count."""
LIMIT: Final = 10
EVERY_S: Final = 0.04
A_SAMPLE: Final = int(1 / EVERY_S)
"""How many connections arrive within one sample, which is a second long."""
BURST: Final = 10 * LIMIT
"""The number of connections that an empty bucket admits at once."""
ADDRESS_S: Final = 14.0
"""Long enough for the first samples to leave the window of 11 s."""
LISTENER_S: Final = 8.0
Attempt = Callable[[int], Coroutine[None, None, None]]
API_VERSIONS: Final = struct.pack(">ihhih", 10, 18, 0, 7, -1)
"""The first question of every client; no login goes before it."""


@pytest.fixture(scope="module")
def node() -> Iterator[Service]:
    with running() as started:
        yield started


@pytest.fixture
async def http(node: Service) -> AsyncIterator[httpx.AsyncClient]:
    headers = {"Authorization": f"Bearer {node.admin_key}"}
    async with httpx.AsyncClient(base_url=node.url, headers=headers, timeout=60, trust_env=False) as client:
        yield client


def configure(cluster: Cluster, *arguments: str) -> None:
    tool.run("kafka.admin.ConfigCommand", "--bootstrap-server", cluster.bootstrap, "--alter", *arguments)


def take_over(quotagate: Command, node: Service, cluster: Cluster) -> None:
    ran = quotagate(
        *("quotas", "import", "--from-kafka", cluster.bootstrap),
        *("--url", node.url, "--key", node.admin_key),
    )
    assert ran.code == 0, ran.err


async def serves(port: int, address: str) -> bool:
    """Whether a broker answers on a new connection from an address, or hangs up on it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0))
    try:
        writer.write(API_VERSIONS)
        return bool(await reader.read(1))
    except ConnectionError:
        return False
    finally:
        writer.transport.abort()


async def decided(http: httpx.AsyncClient, **ask: object) -> dict[str, Any]:
    answer = await http.post("/v1/decisions", json={"usage": {"connections": 1}, **ask})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def storm(seconds: float, brokers: Iterable[int], *attempts: Attempt) -> None:
    """Make attempts of each kind at each broker again and again, all at the same moments."""
    began = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for number in range(int(seconds / EVERY_S)):
            await asyncio.sleep(began + number * EVERY_S - time.monotonic())  # the pace of the storm
            for broker, attempt in product(brokers, attempts):
                group.create_task(attempt(broker))


async def test_address_gets_its_connections_from_each_broker(
    quotagate: Command, node: Service, http: httpx.AsyncClient, cluster: Cluster
):
    configure(cluster, "--ip", STORMING, "--add-config", f"connection_creation_rate={LIMIT}")
    take_over(quotagate, node, cluster)
    try:
        kafka, here, slowest_s = await storm_from(STORMING, http, cluster)
    finally:
        configure(cluster, "--ip", STORMING, "--delete-config", "connection_creation_rate")
    compare(kafka, here, slowest_s)


async def storm_from(
    address: str, http: httpx.AsyncClient, cluster: Cluster
) -> tuple[Counter[int], Counter[int], float]:
    """Count the connections that Kafka and Quotagate let through, by broker; also return the longest wait.

    The time of Kafka's refusals is left out, because Kafka hangs up late by design.
    """
    kafka: Counter[int] = Counter()
    here: Counter[int] = Counter()
    waits: list[float] = []

    async def by_kafka(number: int) -> None:
        began = time.monotonic()
        if await serves(cluster.brokers[number].ports["PLAINTEXT"], address):
            kafka[number] += 1
            waits.append(time.monotonic() - began)

    async def by_quotagate(number: int) -> None:
        began = time.monotonic()
        decision = await decided(http, ip=address, broker=str(number))
        here[number] += decision["decision"] == "admit"
        waits.append(time.monotonic() - began)

    await storm(ADDRESS_S, cluster.brokers, by_kafka, by_quotagate)
    return kafka, here, max(waits)


async def test_listener_takes_its_connections_on_each_broker(
    quotagate: Command, node: Service, http: httpx.AsyncClient, cluster: Cluster
):
    rate = "listener.name.sasl_plaintext.max.connection.creation.rate"
    configure(cluster, "--broker-defaults", "--add-config", f"{rate}={LIMIT}")
    take_over(quotagate, node, cluster)
    kafka: Counter[int] = Counter()
    here: Counter[int] = Counter()
    waiting: dict[int, asyncio.Queue[None]] = {number: asyncio.Queue() for number in cluster.brokers}
    waits: list[float] = []
    over = time.monotonic() + LISTENER_S

    async def by_kafka(number: int) -> None:
        with suppress(TimeoutError):  # it waits in line still
            async with asyncio.timeout(over - time.monotonic()):
                served = await serves(cluster.brokers[number].ports["SASL_PLAINTEXT"], STORMING)
                kafka[number] += served

    async def by_quotagate(number: int) -> None:
        waiting[number].put_nowait(None)

    async def acceptor(number: int) -> None:
        """A broker with Quotagate: it takes one connection after another, each after its delay."""
        while True:
            await waiting[number].get()
            began = time.monotonic()
            decision = await decided(http, listener="SASL_PLAINTEXT", broker=str(number))
            waits.append(time.monotonic() - began)
            assert decision["decision"] in {"admit", "delay"}
            await asyncio.sleep(int(decision["throttle_ms"]) / 1000)  # as long as Kafka's acceptor waits
            here[number] += time.monotonic() < over

    accepting = [asyncio.create_task(acceptor(number)) for number in cluster.brokers]
    try:
        await storm(LISTENER_S, cluster.brokers, by_kafka, by_quotagate)
    finally:
        for task in accepting:
            task.cancel()
        configure(cluster, "--broker-defaults", "--delete-config", rate)
    compare(kafka, here, max(waits))


def compare(kafka: Counter[int], here: Counter[int], slowest_s: float) -> None:
    """Compare the counts of each broker: they may differ by the arrivals in one sample plus the longest wait.

    Both count the same arrivals, some milliseconds apart. An arrival on the other side of a sample's edge
    shifts the sum that the next ones find. Observed differences were up to 2, also between two brokers, and
    16 on a stalled machine. A late answer is counted later by up to its wait.
    """
    between = A_SAMPLE + slowest_s / EVERY_S
    say(f"the slowest answer after {slowest_s:.2f} s, so {between:.0f} connections may lie between")
    say(f"let through: by Kafka's brokers {dict(kafka)}, by Quotagate {dict(here)}")
    for number, served in kafka.items():
        assert served > BURST
        assert abs(served - here[number]) <= between, (kafka, here)
