"""Shortages of a node while its store answers: no decision by policy, and the node recovers by itself."""

from __future__ import annotations

import asyncio
import resource
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, cast

import pytest
import redis

from tests import clusters, disks, shifted_clock, short
from tests.clusters import Cluster
from tests.line import line
from tests.load.attacked import ATTACKER
from tests.load.holding import counted, has_quotas_everywhere
from tests.report import say
from tests.service import Service, eventually, running
from tests.waiting import until

CALLERS: Final = 8
LIMIT: Final = 20
"""The limit that the limited callers share; they ask for much more."""
RATE: Final = {"limit": 1e-9, "algorithm": "token_bucket", "burst": LIMIT, "enforcement": "deny"}
ANSWERS: Final = 400
"""How many answers a phase waits for, over all callers."""
TAKEN: Final = 400
"""How many connections a flood opens, which then send nothing."""
CONNECTIONS: Final = 2
"""One for calls, and one for examinations."""
DISK: Final = 4 * 1024 * 1024


@dataclass
class Site:
    """A node, and the means by which faults reach it."""

    node: Service
    stores: list[redis.Redis]
    flag: Path
    ahead: Path
    disk: Path | None = None

    def lose_connections(self) -> None:
        """Close all connections of the node to its store, from the store's side."""
        for store in self.stores:
            cast("Any", store).execute_command("CLIENT KILL", "TYPE", "normal", "SKIPME", "yes")

    def connections(self) -> int:
        """How many connections the node has to its store."""
        return sum(len(store.client_list()) - 1 for store in self.stores)

    def set_clock(self, ahead_s: int) -> None:
        """Move the node's wall clock."""
        shifted_clock.set_ahead(self.ahead, ahead_s)
        assert ahead_s * 1_000 in self.node.clock_ahead_ms()

    def shortages(self, of: str = "") -> float:
        labels = {"resource": of} if of else {}
        return counted(self.node, "quotagate_shortages_total", **labels)


Fault = Callable[[Site], AbstractContextManager[None]]


@dataclass
class Callers:
    """Callers on open connections that ask one after the other, and can be paused."""

    answers: Counter[tuple[int, str, str]] = field(default_factory=Counter)
    going: asyncio.Event = field(default_factory=asyncio.Event)
    asking: int = 0

    async def pause(self) -> None:
        """Let nobody ask, and wait until nobody waits for an answer."""
        self.going.clear()
        await until(lambda: self.asking == 0)

    async def get(self, answers: int, status: int = 200) -> None:
        """Go on until there are so many more answers of a status."""
        self.going.set()
        wanted = self.of(status) + answers
        await until(lambda: self.of(status) >= wanted)

    def of(self, status: int) -> int:
        """How many answers had a status."""
        return sum(count for (answer_status, *_), count in self.answers.items() if answer_status == status)


@asynccontextmanager
async def asking(node: Service) -> AsyncIterator[Callers]:
    """Callers of a node; a quarter of them have a limit, which is spent at once."""
    callers = Callers()
    node.put("user=*", request_rate={"limit": 1e9})
    node.put("user=limited", request_rate=RATE)
    eventually(lambda: has_quotas_everywhere(node))

    async def caller(n: int) -> None:
        name = "limited" if n % 4 == 0 else f"free-{n}"
        ask = {"principal": name, "usage": {"requests": 1}}
        async with line(node.address) as connection:
            while True:
                await callers.going.wait()
                callers.asking += 1
                try:
                    status, answer = await connection.ask(ask)
                finally:
                    callers.asking -= 1
                decision, source = answer.get("decision", ""), answer.get("source", "")
                callers.answers[status, f"{name[:4]} {decision}", source] += 1

    async with AsyncExitStack() as stack:
        tasks = [asyncio.create_task(caller(n)) for n in range(CALLERS)]

        async def stop() -> None:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        stack.push_async_callback(stop)
        await callers.get(ANSWERS)
        yield callers


@contextmanager
def site(
    tmp_path: Path, *, on_disk: bool = False, shifted: bool = False, cluster: Cluster | None = None
) -> Iterator[Site]:
    """A node with a store of its own or a cluster; its clock can be shifted, or else it can be made short."""
    with ExitStack() as stack:
        flag, ahead = tmp_path / "flag", tmp_path / "ahead"
        flag.write_bytes(b"\0")
        shifted_clock.set_ahead(ahead, 0)
        environment = {short.FILE: str(flag), shifted_clock.FILE: str(ahead)}
        disk = stack.enter_context(disks.mounted(tmp_path / "disk", DISK)) if on_disk else None
        if disk is not None:
            environment["TMPDIR"] = str(disk)
        node = stack.enter_context(
            running(
                environment=environment,
                program="tests.shifted_clock" if shifted else "tests.short",
                processes=2 if on_disk else 1,
                store_url=cluster.url if cluster else None,
                database_url=f"sqlite:///{disk / 'catalog.db'}" if disk else None,
            )
        )
        clients = [each.client() for each in cluster.primaries] if cluster else None
        stores = [stack.enter_context(each) for each in clients or [redis.Redis.from_url(node.store_url)]]
        yield Site(node, stores, flag, ahead, disk)


@contextmanager
def no_descriptors(target: Site) -> Iterator[None]:
    """Set a limit below the open descriptors, so that no other can be opened."""
    before = resource.prlimit(target.node.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(target.node.pid, resource.RLIMIT_NOFILE, (3, before[1]))
    try:
        yield
    finally:
        resource.prlimit(target.node.pid, resource.RLIMIT_NOFILE, before)


@contextmanager
def silent_connections(target: Site) -> Iterator[None]:
    """Connections that take each descriptor that becomes free."""
    before = resource.prlimit(target.node.pid, resource.RLIMIT_NOFILE)
    open_files = len(list(Path(f"/proc/{target.node.pid}/fd").iterdir()))
    resource.prlimit(target.node.pid, resource.RLIMIT_NOFILE, (open_files + TAKEN // 2, before[1]))
    with ExitStack() as stack:
        for _ in range(TAKEN):
            stack.enter_context(socket.create_connection(target.node.address, source_address=(ATTACKER, 0)))
        yield
    resource.prlimit(target.node.pid, resource.RLIMIT_NOFILE, before)


@contextmanager
def flagged(kind: int, target: Site) -> Iterator[None]:
    with target.flag.open("r+b") as flag:
        flag.write(bytes([kind]))
        flag.flush()
        try:
            yield
        finally:
            flag.seek(0)
            flag.write(b"\0")
            flag.flush()


@contextmanager
def no_threads(target: Site) -> Iterator[None]:
    with flagged(short.THREADS, target):
        yield


@contextmanager
def no_memory(target: Site) -> Iterator[None]:
    with flagged(short.MEMORY, target):
        yield


@contextmanager
def full_disk(target: Site) -> Iterator[None]:
    """Not one byte is left."""
    assert target.disk is not None
    filling = target.disk / "filling"
    try:
        with filling.open("wb", buffering=0) as file:
            for size in (65_536, 1):
                try:
                    while True:
                        file.write(bytes(size))
                except OSError:
                    pass
        yield
    finally:
        filling.unlink()


@contextmanager
def clock_ahead(target: Site) -> Iterator[None]:
    target.set_clock(3600)
    yield
    target.set_clock(0)


@contextmanager
def clock_behind(target: Site) -> Iterator[None]:
    target.set_clock(-3600)
    yield
    target.set_clock(0)


FAULTS: Final = (
    no_descriptors,
    silent_connections,
    no_threads,
    no_memory,
    full_disk,
    clock_ahead,
    clock_behind,
)


@pytest.mark.parametrize("fault", FAULTS)
async def test_node_decides_by_its_store_during_a_shortage(fault: Fault, tmp_path: Path):
    """The store closes all connections meanwhile, so that the node must connect again."""
    clocks = fault in {clock_ahead, clock_behind}
    with site(tmp_path, on_disk=fault is full_disk, shifted=clocks) as target:
        await decide_during(fault, target)


@pytest.mark.parametrize("fault", [no_descriptors, silent_connections, no_threads, no_memory])
async def test_node_decides_by_its_cluster_during_a_shortage(fault: Fault, tmp_path: Path):
    with clusters.running(replicas=False) as cluster, site(tmp_path, cluster=cluster) as target:
        await decide_during(fault, target)


@pytest.mark.parametrize("kind", [short.ENCODING, short.READING], ids=["to encode", "to read"])
async def test_calls_without_memory_are_shed(kind: int, tmp_path: Path):
    with site(tmp_path) as target:
        async with asking(target.node) as callers:
            await callers.pause()
            with flagged(kind, target):
                await callers.get(CALLERS, status=503)
                await callers.pause()
            assert target.shortages("memory") > 0
            await callers.get(ANSWERS)
            await callers.pause()
        check(target, callers)


async def test_asks_wait_and_are_shed_once_the_reserve_is_used_up(tmp_path: Path):
    """Each time that the store closes the connections, the node needs two sockets of its reserve."""
    with site(tmp_path) as target:
        async with asking(target.node) as callers:
            await callers.pause()
            # This opens the connection for the metrics, since none can be opened during the fault.
            assert target.shortages("descriptors") == 0
            with no_descriptors(target):
                while not target.shortages("descriptors"):
                    target.lose_connections()
                    await until(
                        lambda: target.connections() >= CONNECTIONS or target.shortages("descriptors")
                    )
                await callers.get(CALLERS, status=503)
                await callers.pause()
            await callers.get(ANSWERS)
            await callers.pause()
        check(target, callers)


async def decide_during(fault: Fault, target: Site) -> None:
    """Let callers ask before, during and after a fault; as it begins, the store closes all connections."""
    async with asking(target.node) as callers:
        await callers.pause()
        with fault(target):
            target.lose_connections()
            await callers.get(ANSWERS)
        await callers.get(ANSWERS)
        await callers.pause()
    check(target, callers)


def check(target: Site, callers: Callers) -> None:
    """Nothing was decided by policy, and the limited callers got their limit."""
    say(dict(callers.answers), f"{target.shortages():.0f} shortages counted")
    assert {status for status, *_ in callers.answers} <= {200, 503}  # a crowded machine may shed
    assert {source for status, _, source in callers.answers if status == 200} == {"store"}, (
        target.node.logged()
    )
    assert counted(target.node, "quotagate_decisions_total", source="fallback") == 0
    assert counted(target.node, "quotagate_store_circuit_open") == 0
    assert callers.answers[200, "limi admit", "store"] == LIMIT
