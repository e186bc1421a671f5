"""A real Kafka cluster: brokers that tests kill, suspend and restart, each with its own small disk."""

from __future__ import annotations

import base64
import os
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kafka import KafkaAdminClient
from kafka.errors import KafkaError

from app.node import tether
from tests import disks
from tests.authority import Authority
from tests.kafka import tool
from tests.ports import free_ports
from tests.programs import Program
from tests.service import eventually
from tests.tools import need

HOST: Final = "127.0.0.1"
DISK_BYTES: Final = 64 * 1024 * 1024
START_WITHIN_S: Final = 120.0
PROTOCOLS: Final = ("PLAINTEXT", "SASL_PLAINTEXT", "SSL", "SASL_SSL")
GUESTS: Final = tuple(f"guest-{number}" for number in range(16))
"""Users for tests that need many, each with counts of its own."""
PASSWORDS: Final = {name: f"{name}-secret" for name in ("alice", "bob", "carol", "admin", *GUESTS)}
"""The users of SASL/PLAIN, with their passwords."""
SCRAM: Final = "org.apache.kafka.common.security.scram.ScramLoginModule"
_STORE_PASSWORD: Final = "changeit"


class Broker(Program):
    """One broker; the first one is the controller too."""

    def __init__(
        self,
        number: int,
        folder: Path,
        log_dir: Path,
        ports: Mapping[str, int],
        plugins: Sequence[Path],
        version: str | None,
    ) -> None:
        self.number = number
        self.version = version
        self.log_dir = log_dir
        self.ports = ports
        self.plugins = plugins
        self.properties = folder / "broker.properties"
        self._log = folder / "log"

    @property
    def address(self) -> str:
        """The address where it listens without TLS and SASL."""
        return f"{HOST}:{self.ports['PLAINTEXT']}"

    def start(self) -> None:
        """Start it, with its data of earlier runs, and wait until it serves."""
        self.begin()
        self.until_it_serves()

    def begin(self) -> None:
        """Start it, and do not wait."""
        with self._log.open("wb") as log:
            self._running = subprocess.Popen(
                [
                    *(sys.executable, "-I", "-S", str(Path(tether.__file__)), str(os.getpid())),
                    *tool.command(
                        "kafka.Kafka", str(self.properties), plugins=self.plugins, version=self.version
                    ),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def until_it_serves(self) -> None:
        eventually(self._serves, within_s=START_WITHIN_S)

    def logged(self) -> str:
        """Everything it has logged since its last start."""
        return self._log.read_text(encoding="utf-8", errors="replace") if self._log.exists() else ""

    def used_bytes(self) -> int:
        """Bytes in use on its disk, according to the machine."""
        disk = os.statvfs(self.log_dir)
        return (disk.f_blocks - disk.f_bfree) * disk.f_frsize

    def _serves(self) -> bool:
        ended = self.running.poll()
        faults = [line for line in self.logged().splitlines() if " INFO " not in line]
        assert ended is None, f"broker {self.number} ended with {ended}:\n{faults[-100:]}"
        return "Kafka Server started" in self.logged()


@dataclass(frozen=True, slots=True)
class Cluster:
    """Running brokers by their ids, and the settings of their clients."""

    brokers: Mapping[int, Broker]
    authority: Authority

    @property
    def bootstrap(self) -> str:
        return self.bootstrap_of("PLAINTEXT")

    def bootstrap_of(self, protocol: str) -> str:
        """The bootstrap servers for a security protocol, such as `SASL_SSL`."""
        return ",".join(f"{HOST}:{broker.ports[protocol]}" for broker in self.brokers.values())

    @property
    def properties(self) -> dict[str, str]:
        """Properties for kafka-python's clients: `KafkaProducer(**cluster.properties)`."""
        return {"bootstrap_servers": self.bootstrap}

    def properties_of(self, protocol: str, user: str = "alice") -> dict[str, str]:
        """The properties for a security protocol and a user."""
        found = {"bootstrap_servers": self.bootstrap_of(protocol), "security_protocol": protocol}
        if "SASL" in protocol:
            found |= {
                "sasl_mechanism": "PLAIN",
                "sasl_plain_username": user,
                "sasl_plain_password": PASSWORDS[user],
            }
        if "SSL" in protocol.removeprefix("SASL_"):
            found["ssl_cafile"] = str(self.authority.ca)
        return found


@contextmanager
def running(
    count: int = 2,
    *,
    properties: Mapping[str, object] | None = None,
    disk_bytes: int = DISK_BYTES,
    plugins: Sequence[Path] = (),
    version: str | None = None,
) -> Iterator[Cluster]:
    """Run a cluster with this many brokers, perhaps with further properties and jars of plugins.

    `version` is a version of Kafka; by default the one in `pom.xml`.
    """
    disks.clear()
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="qg-kafka-")))
        ports = iter(free_ports(1 + count * len(PROTOCOLS)))
        controller = next(ports)
        authority = Authority(home)
        secured = _secured(home, authority)
        brokers = {}
        for number in range(1, count + 1):
            folder = home / str(number)
            folder.mkdir()
            disk = stack.enter_context(disks.mounted(folder / "disk", disk_bytes))
            own_ports = {protocol: next(ports) for protocol in PROTOCOLS}
            broker = Broker(number, folder, disk / "log", own_ports, plugins, version)
            stack.callback(broker.kill)  # before its disk goes
            written = {**_properties(broker, folder, controller), **secured, **(properties or {})}
            lines = [f"{name}={value}\n" for name, value in written.items()]
            broker.properties.write_text("".join(lines), encoding="utf-8")
            brokers[number] = broker
        _format(brokers)
        for broker in brokers.values():
            broker.begin()
        for broker in brokers.values():
            broker.until_it_serves()
        cluster = Cluster(brokers, authority)
        eventually(lambda: _known(cluster) == set(brokers), within_s=START_WITHIN_S)
        yield cluster


def _properties(broker: Broker, folder: Path, controller: int) -> dict[str, object]:
    listeners = [f"{protocol}://{HOST}:{port}" for protocol, port in broker.ports.items()]
    leads = broker.number == 1
    protocols = ["CONTROLLER:PLAINTEXT", *(f"{protocol}:{protocol}" for protocol in broker.ports)]
    return {
        "process.roles": "broker,controller" if leads else "broker",
        "node.id": broker.number,
        "listeners": ",".join([*listeners, f"CONTROLLER://{HOST}:{controller}"] if leads else listeners),
        "advertised.listeners": ",".join(listeners),
        "controller.listener.names": "CONTROLLER",
        "listener.security.protocol.map": ",".join(protocols),
        "inter.broker.listener.name": "PLAINTEXT",
        "controller.quorum.bootstrap.servers": f"{HOST}:{controller}",
        "log.dirs": broker.log_dir,
        # Not on the small disk, which a test may fill.
        "metadata.log.dir": folder / "metadata",
        # Deleted segments disappear soon, so that a disk can be seen to empty.
        "log.segment.bytes": 1024 * 1024,
        "log.segment.delete.delay.ms": 100,
        "log.initial.task.delay.ms": 100,
        "log.retention.check.interval.ms": 200,
        # Small, as there are several on one machine.
        "log.cleaner.dedupe.buffer.size": 4 * 1024 * 1024,
        "num.network.threads": 2,
        "num.io.threads": 2,
        "offsets.topic.num.partitions": 1,
        "offsets.topic.replication.factor": 1,
        "transaction.state.log.num.partitions": 1,
        "transaction.state.log.replication.factor": 1,
        "transaction.state.log.min.isr": 1,
        "share.coordinator.state.topic.num.partitions": 1,
        "share.coordinator.state.topic.replication.factor": 1,
        "share.coordinator.state.topic.min.isr": 1,
        "group.initial.rebalance.delay.ms": 0,
    }


def _secured(home: Path, authority: Authority) -> dict[str, object]:
    """TLS with a certificate for this address, and SASL/PLAIN with the passwords above."""
    shown = authority.certify("broker", san=f"IP:{HOST}")
    kept = home / "broker.p12"
    packing = ("pkcs12", "-export", "-in", shown.cert, "-inkey", shown.key, "-out", kept)
    subprocess.run(
        [need("openssl"), *packing, "-passout", f"pass:{_STORE_PASSWORD}"], check=True, capture_output=True
    )
    users = " ".join(f'user_{name}="{password}"' for name, password in PASSWORDS.items())
    login = f"org.apache.kafka.common.security.plain.PlainLoginModule required {users};"
    return {
        "ssl.keystore.type": "PKCS12",
        "ssl.keystore.location": kept,
        "ssl.keystore.password": _STORE_PASSWORD,
        "sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-512",
        "listener.name.sasl_plaintext.plain.sasl.jaas.config": login,
        "listener.name.sasl_ssl.plain.sasl.jaas.config": login,
        # Users who may log in this way are added while it runs, by Kafka's own ConfigCommand.
        "listener.name.sasl_plaintext.scram-sha-512.sasl.jaas.config": f"{SCRAM} required;",
        "listener.name.sasl_ssl.scram-sha-512.sasl.jaas.config": f"{SCRAM} required;",
    }


def _format(brokers: Mapping[int, Broker]) -> None:
    """Format every broker's folders with the cluster's id, in parallel: each takes a JVM."""
    cluster_id = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
    commands = []
    for broker in brokers.values():
        how = "--standalone" if broker.number == 1 else "--no-initial-controllers"
        # With "=", for one id in 64 begins with a dash, and would be taken for an option.
        arguments = ("format", how, f"--cluster-id={cluster_id}", "-c", str(broker.properties))
        storage = tool.command(
            "kafka.tools.StorageTool", *arguments, plugins=broker.plugins, version=broker.version
        )
        commands.append(storage)

    def run(command: Sequence[str]) -> None:
        ended = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=START_WITHIN_S, check=False
        )
        assert ended.returncode == 0, ended.stdout.decode()

    with ThreadPoolExecutor(len(commands)) as pool:
        list(pool.map(run, commands))


def _known(cluster: Cluster) -> set[int]:
    """The brokers that every broker knows of."""
    known = set(cluster.brokers)
    for broker in cluster.brokers.values():
        try:
            client = KafkaAdminClient(bootstrap_servers=broker.address)
        except KafkaError:
            return set()
        try:
            known &= {node["broker_id"] for node in client.describe_cluster()["brokers"]}
        finally:
            client.close()
    return known
